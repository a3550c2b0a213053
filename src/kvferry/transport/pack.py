"""Gather scattered runs into a chunk of host memory, and scatter them back.

A chunk holds its terms one after another; a term, run by run of its pattern, each for all its blocks. Both
sides know the terms, so a chunk needs no description.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.core.view import Ints
from kvferry.errors import TransportError
from kvferry.transport.places import Places, cut_long, one_length, sum_of, told_once

LONG_BYTES = 16384
"""From this length on, a call per run is cheap."""
FEW_ROWS = 8
"""Fewer rows of one length are copied one by one."""
MAX_ROWS = 1 << 16
"""Runs of a pattern, or blocks, in one request: a limit of its message."""


@dataclass(frozen=True, eq=False)
class TermSide:
    """One side of a term."""

    places: Ints
    """Of the runs of its pattern in block 0."""
    num_bytes: Ints
    """Equal lengths are best given as ``one_length``, whose sum is quick."""
    steps: Ints
    """Distances of its blocks from block 0."""

    @cached_property
    def total_bytes(self) -> int:
        return sum_of(self.num_bytes) * len(self.steps)

    @cached_property
    def lowest(self) -> int:
        """Distance of its lowest block from block 0."""
        return int(self.steps.min())

    @property
    def lowest_places(self) -> Ints:
        return self.places + self.lowest if self.lowest else self.places

    def check(self, memory: Places) -> None:
        """Raise TransportError if a run is outside of the memory, or its blocks are not in one region."""
        found = memory.only_region(self.lowest_places, self.num_bytes)
        if not found or int(self.steps.max()) - self.lowest > found.room:
            self.rows(memory)

    def rows(self, memory: Places) -> Ints:
        """The address of each run of the pattern in block 0; raises TransportError like ``check``."""
        lowest, highest = self.lowest, int(self.steps.max())
        addresses, room = memory.located(self.lowest_places, self.num_bytes)
        if highest - lowest > room:
            memory.check(self.places + highest, self.num_bytes)  # raises if a run leaves its region
            detail = f"its blocks, up to {highest - lowest} bytes apart, are not in one region"
            raise TransportError("out-of-bounds", f"{memory.whose}: {detail}")
        rows = addresses.view(np.int64)
        return rows - lowest if lowest else rows


def src_of(term: Term) -> TermSide:
    return TermSide(term.pattern.src, _lengths(term.pattern), term.steps[0])


def dst_of(term: Term) -> TermSide:
    return TermSide(term.pattern.dst, _lengths(term.pattern), term.steps[1])


def _lengths(pattern: Runs) -> Ints:
    return one_length(pattern.each_bytes, len(pattern)) if pattern.each_bytes else pattern.num_bytes


def pieces(product: Product, chunk_bytes: int) -> Iterator[tuple[Term, ...]]:
    """A product in parts that fit into a chunk and a short message.

    >>> runs = Runs(np.array([0, 64]), np.array([0, 64]), np.array([8, 8]))
    >>> term = Term(runs, np.array([[0, 1000, 2000], [0, 5000, 6000]]))
    >>> [[part.total_bytes for part in piece] for piece in pieces(Product((term,)), 32)]
    [[32], [16]]
    >>> [[part.total_bytes for part in piece] for piece in pieces(Product((term,)), 12)]
    [[8], [8], [8], [8], [8], [8]]
    """
    piece: list[Term] = []
    room = chunk_bytes
    for term in _short_terms(product, chunk_bytes):
        each, done = term.pattern.total_bytes, 0
        while done < term.num_pairs:
            fitting = min(room // each, term.num_pairs - done, MAX_ROWS)
            if fitting:
                piece.append(Term(term.pattern, term.steps[:, done : done + fitting]))
                room -= fitting * each
                done += fitting
            if done < term.num_pairs:
                yield tuple(piece)
                piece, room = [], chunk_bytes
    if piece:
        yield tuple(piece)


def _short_terms(product: Product, chunk_bytes: int) -> Iterator[Term]:
    """Terms with bytes, whose patterns fit into a chunk."""
    for term in product.terms:
        pattern = term.pattern
        if not pattern.each_bytes:
            pattern = pattern.where(pattern.num_bytes > 0)
        pattern = cut_long(pattern, chunk_bytes)
        if term.num_pairs:
            for start, stop in _fitting(pattern, chunk_bytes):
                yield Term(pattern.part(start, stop), term.steps)


def _fitting(pattern: Runs, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a pattern into parts that fit into a chunk."""
    if each := pattern.each_bytes:
        num_rows = min(chunk_bytes // each, MAX_ROWS)
        yield from ((start, start + num_rows) for start in range(0, len(pattern), num_rows))
        return
    ends, start = np.cumsum(pattern.num_bytes), 0
    while start < len(pattern):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + chunk_bytes, side="right"))
        stop = min(stop, start + MAX_ROWS)
        yield start, stop
        start = stop


def check_term(term: Term, src: Places, dst: Places) -> None:
    """Raise TransportError if a term leaves a region on either side."""
    if term.num_pairs and len(term.pattern):
        src_of(term).check(src)
        dst_of(term).check(dst)


def check_room(sides: Sequence[TermSide], chunk_bytes: int) -> None:
    # First the longest run alone: sums might overflow.
    longest = max((int(told_once(side.num_bytes).max()) for side in sides), default=0)
    if (num_bytes := max(longest, sum(side.total_bytes for side in sides))) > chunk_bytes:
        raise TransportError("too-much", f"{num_bytes} bytes requested, a chunk has {chunk_bytes}")


def _places_in_chunk(side: TermSide, chunk: int) -> Ints:
    ends = np.cumsum(side.num_bytes * len(side.steps))
    starts = chunk + ends - side.num_bytes * len(side.steps)
    return starts[:, None] + np.multiply.outer(side.num_bytes, np.arange(len(side.steps)))


def _copy(dst: Ints, src: Ints, num_bytes: Ints) -> None:
    """Copy runs between addresses; a row of addresses has one length."""
    if (num_bytes == num_bytes[0]).all():
        _copy_alike(dst.ravel(), src.ravel(), int(num_bytes[0]))
        return
    for length in np.unique(num_bytes).tolist():
        rows = num_bytes == length
        _copy_alike(dst[rows].ravel(), src[rows].ravel(), length)


def _copy_alike(dst: Ints, src: Ints, num_bytes: int) -> None:
    if num_bytes >= LONG_BYTES or len(dst) < FEW_ROWS:
        for to, at in zip(dst.tolist(), src.tolist(), strict=True):
            ctypes.memmove(to, at, num_bytes)
        return
    to, to_rows = _rows(dst, num_bytes)
    if isinstance(to_rows, slice) and _gather_alike(to, src, num_bytes):
        return
    at, at_rows = _rows(src, num_bytes)
    to[to_rows] = at[at_rows]


def _gather_alike(to: NDArray[np.void], src: Ints, num_bytes: int) -> bool:
    """Copy rows that are multiples of their length apart, the fastest case; returns False for others."""
    lowest = int(src.min())
    rows, rest = np.divmod(src - lowest, num_bytes)
    if rest.any():
        return False
    at = np.asarray(_Memory(lowest, int(rows.max()) + 1, num_bytes, num_bytes))
    # With another mode, numpy would first gather into a buffer of its own.
    np.take(at, rows, out=to, mode="clip")
    return True


class _Memory:
    def __init__(self, address: int, num_rows: int, num_bytes: int, step: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (num_rows,),
            "strides": (step,),
            "typestr": f"|V{num_bytes}",
        }


def _rows(addresses: Ints, num_bytes: int) -> tuple[NDArray[np.void], Ints | slice]:
    """Memory as rows of so many bytes, perhaps one at every byte, and the indices of these addresses."""
    if (np.diff(addresses) == num_bytes).all():
        return np.asarray(_Memory(int(addresses[0]), len(addresses), num_bytes, num_bytes)), slice(None)
    lowest = int(addresses.min())
    num_rows = int(addresses.max()) - lowest + 1
    return np.asarray(_Memory(lowest, num_rows, num_bytes, 1)), addresses - lowest


IN_PLACE_BYTES = 8 << 10
"""From this average length on, runs are sent and received in place, without a copy into a chunk."""


def are_long(sides: Sequence[TermSide]) -> bool:
    num_runs = sum(len(side.places) * len(side.steps) for side in sides)
    return num_runs > 0 and sum(side.total_bytes for side in sides) >= IN_PLACE_BYTES * num_runs


HostBytes = NDArray[np.uint8]


class ChunkCopier:
    """Copies by numpy, for one thread. A copy is over when its call returns, also if it raises."""

    def __init__(self, memory: Places, chunk_bytes: int) -> None:
        """``memory``: the rank's own. ``chunk_bytes``: the limit of one copy."""
        self.memory, self.chunk_bytes = memory, chunk_bytes

    def gather(self, sides: Sequence[TermSide], chunk: int) -> None:
        """Copy to the address of a chunk; raises TransportError, having copied nothing."""
        check_room(sides, self.chunk_bytes)
        for side, rows in self._rows_of(sides):
            _copy(_places_in_chunk(side, chunk), np.add.outer(rows, side.steps), side.num_bytes)
            chunk += side.total_bytes

    def scatter(self, sides: Sequence[TermSide], chunk: int) -> None:
        """Copy from the address of a chunk; raises TransportError, having copied nothing."""
        for side, rows in self._rows_of(sides):
            _copy(np.add.outer(rows, side.steps), _places_in_chunk(side, chunk), side.num_bytes)
            chunk += side.total_bytes

    def _rows_of(self, sides: Sequence[TermSide]) -> list[tuple[TermSide, Ints]]:
        return [(side, side.rows(self.memory)) for side in sides]

    def views(self, sides: Sequence[TermSide]) -> list[memoryview]:
        """Long runs, which were checked, in place and in the order of a chunk; empty if a chunk is better."""
        views: list[memoryview] = []
        for side in sides if are_long(sides) else ():
            index, offset = Places.split(np.add.outer(side.places, side.steps).ravel())
            lengths = np.repeat(side.num_bytes, len(side.steps))
            for i, at, num_bytes in zip(index.tolist(), offset.tolist(), lengths.tolist(), strict=True):
                views.append(self._regions[i][at : at + num_bytes])
        return views

    @cached_property
    def _regions(self) -> list[memoryview]:
        return [
            memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")
            for region in self.memory.regions
        ]

    def new_chunk(self) -> HostBytes:
        return np.empty(self.chunk_bytes, np.uint8)

    def free_chunk(self, chunk: HostBytes) -> None:
        """Nothing may be under way."""

    def close(self) -> None:
        """Nothing may be under way."""
