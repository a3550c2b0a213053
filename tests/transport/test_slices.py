"""Slices: all of the runs, in order, none too big."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Runs, coalesce
from kvferry.transport.nixl_agent import slices


@given(
    st.lists(st.integers(1, 40), max_size=30),
    st.integers(1, 7),
    st.integers(1, 50),
)
def test_slices_are_the_runs_again(lengths, max_runs, max_bytes):
    ends = np.cumsum([0, *lengths])
    starts = ends[:-1] + 3 * np.arange(len(lengths))
    runs = Runs(starts + 1000, starts, np.array(lengths, np.int64))
    parts = list(slices(runs, max_runs, max_bytes))
    assert all(0 < len(part) <= max_runs and part.total_bytes <= max_bytes for part in parts)
    merged = coalesce(
        *(
            np.concatenate([getattr(part, name) for part in parts] or [np.zeros(0, np.int64)])
            for name in ("src", "dst", "num_bytes")
        )
    )
    assert list(merged) == list(runs)
