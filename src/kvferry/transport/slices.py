"""Slices: a read cut into parts that are short to post.

On one host a post copies before it returns, and everywhere it costs time per run. So a read is posted slice
by slice, and other peers get their turn in between. No slice has more than so many runs and so many bytes; a
run that is longer by itself is cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.core.runs import Runs


@dataclass(frozen=True, slots=True)
class Limit:
    """How much one slice may hold."""

    num_runs: int
    num_bytes: int


def slices(runs: Runs, limit: Limit) -> Iterator[Runs]:
    """The runs in order, as slices.

    >>> runs = Runs(np.array([0, 100, 200]), np.array([50, 10, 30]), np.array([4, 25, 4]))
    >>> [part.num_bytes.tolist() for part in slices(runs, Limit(num_runs=2, num_bytes=10))]
    [[4], [10], [10], [5, 4]]
    """
    runs = cut_long(runs, limit.num_bytes)
    stops = np.cumsum(runs.num_bytes)
    start, num_bytes = 0, 0
    while start < len(runs):
        stop = int(np.searchsorted(stops, num_bytes + limit.num_bytes, side="right"))
        stop = min(stop, start + limit.num_runs)
        yield runs.part(start, stop)
        start, num_bytes = stop, int(stops[stop - 1])


def cut_long(runs: Runs, max_bytes: int) -> Runs:
    """Runs of at most ``max_bytes``."""
    if not len(runs) or (runs.each_bytes or int(runs.num_bytes.max())) <= max_bytes:
        return runs
    num_parts = -(-runs.num_bytes // max_bytes)
    at = np.repeat(np.arange(len(runs)), num_parts)
    first = np.cumsum(num_parts) - num_parts
    offsets = (np.arange(len(at)) - first[at]) * max_bytes
    return Runs(
        runs.src[at] + offsets, runs.dst[at] + offsets, np.minimum(runs.num_bytes[at] - offsets, max_bytes)
    )
