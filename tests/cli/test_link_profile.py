"""Known links, by the numbers that were measured."""

import pytest

from kvferry import SpecError
from kvferry.cli.link_profile import (
    LINK_PROFILES,
    RDMA_400,
    SAME_GPU,
    SAME_GPU_DIRECT,
    Origin,
    Traffic,
    link_profile,
)

MIB = 1 << 20
# What docs/lab/performance.md has: traffic, seconds.
MEASURED = {
    SAME_GPU: [
        (Traffic(1, 32_768, 512 * MIB), 801e-6),
        (Traffic(1, 1_048_576, 512 * MIB), 954e-6),
        (Traffic(1, 2_097_152, 512 * MIB), 1040e-6),
        (Traffic(1, 131_072, 512 * MIB), 740e-6),
        (Traffic(1, 512, 512 * MIB), 707e-6),
        (Traffic(1, 8192, 128 * MIB), 221e-6),
        (Traffic(1, 524_288, 524_288_000, num_words=65_536_000), 1769e-6),
        (Traffic(1, 128, 2 * MIB), 105e-6),
    ],
    SAME_GPU_DIRECT: [
        (Traffic(1, 32_768, 512 * MIB), 108e-3),  # 92 to 124
        (Traffic(1, 131_072, 512 * MIB), 377e-3),
        (Traffic(1, 512, 512 * MIB), 3.5e-3),
        (Traffic(1, 8192, 128 * MIB), 29.6e-3),
        (Traffic(1, 128, 2 * MIB), 1.1e-3),
    ],
}


@pytest.mark.parametrize("profile", MEASURED, ids=lambda profile: profile.name)
def test_a_measured_profile_tells_what_was_measured(profile):
    """Within a quarter; 30 % is what people may count on."""
    for traffic, seconds in MEASURED[profile]:
        assert profile.cost.of(traffic).seconds == pytest.approx(seconds, rel=0.25)


def test_the_prediction_for_rdma_is_the_published_share_of_the_line_rate():
    runs = Traffic(1, 100_000, 100_000 * 16384)
    assert runs.num_bytes / RDMA_400.cost.of(runs).seconds / 50e9 == pytest.approx(0.18, abs=0.01)


def test_every_profile_says_where_its_numbers_come_from():
    assert {each.name for each in LINK_PROFILES if each.origin is Origin.PREDICTED} == {"nvlink", "400Gb"}
    for each in LINK_PROFILES:
        assert ("benchmarks/" in each.source) is (each.origin is Origin.MEASURED)
        assert each.source


def test_an_unknown_link_is_refused_with_the_known_ones():
    assert link_profile("same-gpu") is SAME_GPU
    with pytest.raises(
        SpecError, match="unknown link profile 'wifi'; known are host-cma, tcp-stream, same-gpu"
    ):
        link_profile("wifi")
