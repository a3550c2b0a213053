"""Which runs stay inside of a rank's regions: every one is looked at, by plain numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core.manifest import Region
from kvferry.core.runs import place
from kvferry.errors import TransportError
from kvferry.transport.places import Places, one_length, sum_of

LENGTHS = (64, 16)
RUN = st.tuples(st.integers(-1, 2), st.integers(0, 70), st.integers(-2, 70))
INSIDE = st.sampled_from([(0, 0, 64), (0, 60, 4), (0, 64, 0), (1, 0, 16), (1, 12, 4)])


@given(st.lists(INSIDE | RUN, max_size=4))
@example([(0, 0, (1 << 63) - 1)])
@example([(0, 0, 8), (0, 0, -1)])
@example([(1, 0, 16), (1, 1, 16)])
@example([(1, 3, 4), (1, 0, 8)])
@example([(0, 10, -1)])
@example([(0, 1, (1 << 63) - 1)])
@example([(0, 0, 8), (0, (1 << 63) - 1, 8)])
def test_a_run_outside_of_its_region_is_refused(runs: list[tuple[int, int, int]]) -> None:
    places = Places("ours", [Region(f"r{i}", n, address=4096 * (i + 1)) for i, n in enumerate(LENGTHS)])
    starts = np.array([place(index, 0) + offset for index, offset, _ in runs], np.int64)
    num_bytes = np.array([length for _, _, length in runs], np.int64)
    if all(0 <= i < 2 and n >= 0 and at + n <= LENGTHS[i] for i, at, n in runs):
        places.check(starts, num_bytes)
        if runs:
            addresses, room = places.located(starts, num_bytes)
            assert addresses.tolist() == [4096 * (index + 1) + offset for index, offset, _ in runs]
            assert room == min(LENGTHS[i] - at - n for i, at, n in runs)
        return
    for look in (places.check, places.located):
        with pytest.raises(TransportError, match="a run of"):
            look(starts, num_bytes)


@given(st.lists(INSIDE | RUN, min_size=1, max_size=4), st.sampled_from([-1, 0, 4, 16, 64, (1 << 63) - 1]))
@example([(0, 0, 0), (0, 61, 0)], 4)
@example([(0, 61, 0), (0, 0, 0)], 4)
@example([(0, 0, 0), (1, 0, 0)], 16)
def test_lengths_that_are_told_once_are_looked_at_as_those_that_are_listed(
    runs: list[tuple[int, int, int]], num_bytes: int
) -> None:
    places = Places("ours", [Region(f"r{i}", n, address=4096 * (i + 1)) for i, n in enumerate(LENGTHS)])
    starts = np.array([place(index, 0) + offset for index, offset, _ in runs], np.int64)
    once = one_length(num_bytes, len(runs))
    assert sum_of(once) == num_bytes * len(runs)
    if all(0 <= i < 2 and 0 <= num_bytes <= LENGTHS[i] - at for i, at, _ in runs):
        places.check(starts, once)
        addresses, room = places.located(starts, once)
        assert addresses.tolist() == [4096 * (index + 1) + offset for index, offset, _ in runs]
        assert room == min(LENGTHS[i] - at - num_bytes for i, at, _ in runs)
        return
    for look in (places.check, places.located):
        with pytest.raises(TransportError, match="a run of"):
            look(starts, once)


def test_the_last_of_all_regions_ends_where_it_ends() -> None:
    """Places there are so high that a sum with a length leaves the signed numbers."""
    last = (1 << 15) - 1
    places = Places("ours", [Region(f"r{i}", 64, address=4096 + 64 * i) for i in range(last + 1)])
    addresses, room = places.located(np.array([place(last, 56)]), np.array([8]))
    assert (addresses.tolist(), room) == ([4096 + 64 * last + 56], 0)
    for offset in (57, (1 << 48) - 64, (1 << 48) - 8, (1 << 48) - 1):
        for look in (places.check, places.located):
            with pytest.raises(TransportError, match="a run of"):
                look(np.array([place(last, 0) + offset]), np.array([8]))
