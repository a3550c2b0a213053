"""Slices: all of the runs, in order, none too big."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Runs, coalesce
from kvferry.transport.places import Limit, slices


@given(
    st.lists(st.integers(1, 40), max_size=30),
    st.builds(Limit, num_runs=st.integers(1, 7), num_bytes=st.integers(1, 50)),
)
def test_slices_are_the_runs_again(lengths, limit):
    ends = np.cumsum([0, *lengths])
    starts = ends[:-1] + 3 * np.arange(len(lengths))
    runs = Runs(starts + 1000, starts, np.array(lengths, np.int64))
    parts = list(slices(runs, limit))
    assert all(0 < len(part) <= limit.num_runs and part.total_bytes <= limit.num_bytes for part in parts)
    merged = coalesce(
        *(
            np.concatenate([getattr(part, name) for part in parts] or [np.zeros(0, np.int64)])
            for name in ("src", "dst", "num_bytes")
        )
    )
    assert list(merged) == list(runs)
