"""The lengths of runs: where all are alike one number says them all, and nobody need look at each."""

from __future__ import annotations

import numpy as np

from kvferry.core.view import Ints


def one_length(num_bytes: int, num_runs: int) -> Ints:
    """The lengths of so many runs, all of which are alike; in no room."""
    return np.broadcast_to(np.array([num_bytes], np.int64), num_runs)


def told_once(lengths: Ints) -> Ints:
    """Lengths, or the first one where all are that one by making.

    >>> told_once(one_length(8, 1000)).tolist(), told_once(np.array([8, 8])).tolist()
    ([8], [8, 8])
    """
    return lengths[:1] if lengths.strides == (0,) else lengths


def sum_of(lengths: Ints) -> int:
    """Of all runs."""
    once = told_once(lengths)
    return int(once[0]) * len(lengths) if len(once) == 1 else int(lengths.sum())
