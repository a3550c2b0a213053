"""Runs: copies of contiguous bytes from a source place to a destination place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.core.view import Ints

REGION_SHIFT = 48
"""A *place* is one integer: the index of the region in its rank, then the byte offset in it (48 bits).
Regions are at most 2^47 bytes long, so places of two regions never touch."""


def place(region_index: int, offset: int) -> int:
    return (region_index << REGION_SHIFT) + offset


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs between one source rank and one destination rank, as three arrays of one length.

    >>> runs = Runs(np.array([0]), np.array([place(1, 64)]), np.array([32]))
    >>> list(runs), runs.total_bytes
    ([(0, 0, 1, 64, 32)], 32)
    """

    src: Ints
    dst: Ints
    num_bytes: Ints

    def __len__(self) -> int:
        return len(self.num_bytes)

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(source region, source offset, destination region, destination offset, bytes) of each."""
        mask = (1 << REGION_SHIFT) - 1
        src = (self.src >> REGION_SHIFT, self.src & mask)
        dst = (self.dst >> REGION_SHIFT, self.dst & mask)
        return zip(*(column.tolist() for column in (*src, *dst, self.num_bytes)), strict=True)

    @cached_property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum())

    @cached_property
    def each_bytes(self) -> int:
        """The length of each run if all are equal; otherwise 0."""
        first = int(self.num_bytes[0]) if len(self) else 0
        return first if (self.num_bytes == first).all() else 0

    @cached_property
    def bits(self) -> int:
        """The union of all bits of places and lengths: its lowest bit is the common alignment."""
        return int(np.bitwise_or.reduce(self.src | self.dst | self.num_bytes, initial=0))

    def part(self, start: int, stop: int) -> Runs:
        """A slice, as views of the arrays."""
        if start <= 0 and stop >= len(self):
            return self
        some = Runs(self.src[start:stop], self.dst[start:stop], self.num_bytes[start:stop])
        if self.each_bytes:
            some.__dict__.update(each_bytes=self.each_bytes, total_bytes=self.each_bytes * len(some))
        return some

    def where(self, which: NDArray[np.bool_]) -> Runs:
        return self if which.all() else Runs(self.src[which], self.dst[which], self.num_bytes[which])


NO_RUNS = Runs(*(np.zeros(0, np.int64) for _ in range(3)))


def coalesce(src: Ints, dst: Ints, num_bytes: Ints) -> Runs:
    """Merge runs that are adjacent on both sides; the input may be in any order.

    >>> list(coalesce(np.array([8, 0, 99]), np.array([108, 100, 50]), np.array([8, 8, 1])))
    [(0, 99, 0, 50, 1), (0, 0, 0, 100, 16)]
    """
    if len(dst) < 2:
        return Runs(src, dst, num_bytes)
    if not (dst[1:] >= dst[:-1]).all():
        order = np.argsort(dst, kind="stable")
        src, dst, num_bytes = src[order], dst[order], num_bytes[order]
    starts = np.empty(len(dst), bool)
    starts[0] = True
    np.not_equal(dst[:-1] + num_bytes[:-1], dst[1:], out=starts[1:])
    starts[1:] |= src[:-1] + num_bytes[:-1] != src[1:]
    if starts.all():
        return Runs(src, dst, num_bytes)
    at = np.flatnonzero(starts)
    return Runs(src[at], dst[at], np.add.reduceat(num_bytes, at))
