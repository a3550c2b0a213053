"""What moving costs, by the numbers that were measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Product, Runs, SpecError, Term
from kvferry.core.cost import NO_TRAFFIC, Cost, CostTerm, Traffic
from kvferry.core.link_profile import (
    LINK_PROFILES,
    RDMA_400,
    SAME_GPU,
    SAME_GPU_DIRECT,
    Origin,
    first_guess,
    link_profile,
)
from kvferry.core.way import Way

MIB = 1 << 20


def product(num_bytes, at=0, num_pairs=4):
    steps = np.arange(num_pairs) * 4096
    return Product(
        (Term(Runs(np.array([at]), np.array([0]), np.array([num_bytes])), np.stack([steps, steps])),)
    )


def test_traffic_of_products_needs_no_list():
    some = [product(512), product(64), Product(())]
    assert Traffic.of(some) == Traffic(num_reads=2, num_runs=8, num_bytes=4 * 576, num_words=4 * 36)
    assert all("runs" not in vars(each) for each in some)
    assert Traffic.of(some, num_runs=3).num_runs == 3


@pytest.mark.parametrize(("num_bytes", "at", "num_words"), [(1000, 0, 125), (96, 4, 24), (33, 16, 33)])
def test_words_are_as_wide_as_the_addresses_allow(num_bytes, at, num_words):
    assert Traffic.of([product(num_bytes, at)]).num_words == 4 * num_words


def test_merged_neighbours_are_counted_in_words_too():
    runs = Runs(np.array([0]), np.array([0]), np.array([64]))
    steps = np.array([0, 64, 128, 640, 704])
    term = Term(runs, np.stack([steps, steps]), block_bytes=64)
    assert Traffic.of([Product((term,))]) == Traffic(1, 2, 5 * 64, 5 * 4)


def test_traffic_adds_up():
    assert Traffic(1, 2, 64) + Traffic(2, 3, 16) == Traffic(3, 5, 80, 5)
    assert sum([Traffic(1, 2, 64)], NO_TRAFFIC) == Traffic(1, 2, 64)
    assert NO_TRAFFIC.average_run_bytes == 0


@pytest.mark.parametrize("bad", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_less_than_nothing_is_refused(bad):
    with pytest.raises(SpecError, match="counted from 0 up"):
        Traffic(*bad)


@pytest.mark.parametrize(
    "bad", [(-1, 0, 1), (0, -1, 1), (0, float("inf"), 1), (0, 0, 0), (0, float("nan"), 1)]
)
def test_a_cost_that_is_none_is_refused(bad):
    with pytest.raises(SpecError, match="a cost is in seconds"):
        Cost(*bad)


def test_an_estimate_says_what_takes_most_of_the_time():
    cost = Cost(1e-3, 1e-5, 1e9)
    few = cost.of(Traffic(2, 1, 1000))
    assert (few.mostly, few.reason) == (CostTerm.READS, "starting 2 reads")
    many = cost.of(Traffic(1, 32768, 32768 * 512))
    assert str(many) == "345.5 ms, 95 % of it for 32,768 runs of 512 bytes"
    assert cost.of(Traffic(1, 4, 10**9)).reason == "1,000,000,000 bytes"
    nothing = cost.of(NO_TRAFFIC)
    assert (nothing.seconds, nothing.share) == (0, 0)


def test_narrow_words_cost_more_where_words_are_moved():
    traffic = Traffic(1, 1, 1600, num_words=200)
    assert Cost(0, 0, 1e9).of(traffic).seconds == pytest.approx(1600e-9)
    assert Cost(0, 0, 1e9, is_by_words=True).of(traffic).seconds == pytest.approx(3200e-9)


PACKED_RUN_BYTES = (256, 512, 2048, 16384, 131_072, MIB)
# What docs/performance.md has: traffic, seconds.
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
    with pytest.raises(SpecError, match="no link profile 'wifi'; there are host-cma, tcp-stream, same-gpu"):
        link_profile("wifi")


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize("way", Way)
def test_there_is_a_first_guess_for_every_way(way, is_on_device):
    assert first_guess(way, is_on_device=is_on_device).way is way


# -- choosing


def test_on_one_device_the_kernel_is_always_cheaper():
    """As the way is chosen today, when two ranks meet: a choice per load would say the same."""
    for num_bytes in (4096, MIB, 1024 * MIB):
        for num_runs in (1, num_bytes // 512):
            traffic = Traffic(1, num_runs, num_bytes)
            assert SAME_GPU.cost.of(traffic).seconds < SAME_GPU_DIRECT.cost.of(traffic).seconds


costs = st.builds(Cost, st.floats(0, 1e-3), st.floats(0, 1e-4), st.floats(1e8, 1e13))
traffics = st.builds(Traffic, st.integers(0, 100), st.integers(0, 10**7), st.integers(0, 10**12))


@given(costs, traffics, traffics)
def test_more_traffic_never_takes_less_time(cost, some, more):
    assert cost.of(some + more).seconds >= cost.of(some).seconds
