"""Gather and scatter in host memory: runs that lie anywhere, side by side in a chunk, and back.

The bytes of a chunk are those of its terms, one after another; of a term, run by run of its pattern, each
with all its blocks. Both sides know the terms, so nothing else has to say what is where.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.core.view import Ints
from kvferry.errors import TransportError
from kvferry.transport.compiled_copies import host_copies
from kvferry.transport.places import Places
from kvferry.transport.slices import cut_long

LONG_BYTES = 4096
"""From this length on a call per run costs less than its bytes."""
FEW_ROWS = 8
"""Fewer rows of one length are copied one by one."""
MAX_ROWS = 1 << 16
"""Runs of a pattern, or blocks, in one ask: its message stays short."""


@dataclass(frozen=True, eq=False)
class TermSide:
    """One side of a term: where the runs of its pattern are in block 0, and how far its blocks are away."""

    places: Ints
    num_bytes: Ints
    steps: Ints

    @property
    def total_bytes(self) -> int:
        return int(self.num_bytes.sum()) * len(self.steps)

    def check(self, memory: Places) -> None:
        """Raise TransportError if a run is outside of the memory, or its blocks are not in one region."""
        self.rows(memory)

    def rows(self, memory: Places) -> Ints:
        """The address of each run of the pattern, in block 0; raises TransportError as ``check``."""
        lowest, highest = int(self.steps.min()), int(self.steps.max())
        addresses, room = memory.located(self.places + lowest, self.num_bytes)
        if highest - lowest > room:
            memory.check(self.places + highest, self.num_bytes)  # which says what is wrong, if it is that
            detail = f"its blocks, up to {highest - lowest} bytes apart, are not in one region"
            raise TransportError("out-of-bounds", f"{memory.whose}: {detail}")
        return addresses.view(np.int64) - lowest


def src_of(term: Term) -> TermSide:
    """Where a term is read from."""
    return TermSide(term.pattern.src, term.pattern.num_bytes, term.steps[0])


def dst_of(term: Term) -> TermSide:
    """Where a term is written to."""
    return TermSide(term.pattern.dst, term.pattern.num_bytes, term.steps[1])


def pack(memory: Places, sides: Sequence[TermSide], chunk: int, chunk_bytes: int) -> None:
    """Copy what these name to ``chunk``, an address; raises TransportError, having copied nothing."""
    check_room(sides, chunk_bytes)
    for side, rows in [(side, side.rows(memory)) for side in sides]:
        if by := host_copies().for_bytes(side.total_bytes):
            by.gather(rows, side.num_bytes, side.steps, chunk)
        else:
            _copy(_places_in_chunk(side, chunk), np.add.outer(rows, side.steps), side.num_bytes)
        chunk += side.total_bytes


def unpack(memory: Places, sides: Sequence[TermSide], chunk: int) -> None:
    """Copy the bytes from ``chunk``, an address, to where these name."""
    for side in sides:
        rows = side.rows(memory)
        if by := host_copies().for_bytes(side.total_bytes):
            by.scatter(rows, side.num_bytes, side.steps, chunk)
        else:
            _copy(np.add.outer(rows, side.steps), _places_in_chunk(side, chunk), side.num_bytes)
        chunk += side.total_bytes


def pieces(product: Product, chunk_bytes: int) -> Iterator[tuple[Term, ...]]:
    """A product in parts, each of which fits into a chunk and into a short message.

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
    """Terms whose patterns fit into a chunk; none without bytes."""
    for term in product.terms:
        pattern = cut_long(term.pattern.where(term.pattern.num_bytes > 0), chunk_bytes)
        ends, start = np.cumsum(pattern.num_bytes), 0
        while start < len(pattern) and term.num_pairs:
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + chunk_bytes, side="right"))
            stop = min(stop, start + MAX_ROWS)
            cut = Runs(*(getattr(pattern, name)[start:stop] for name in ("src", "dst", "num_bytes")))
            yield Term(cut, term.steps)
            start = stop


def check_term(term: Term, src: Places, dst: Places) -> None:
    """Refuse a term that leaves a region on either side."""
    if term.num_pairs and len(term.pattern):
        src_of(term).check(src)
        dst_of(term).check(dst)


def check_room(sides: Sequence[TermSide], chunk_bytes: int) -> None:
    """Refuse what does not fit into a chunk."""
    # The longest alone, first: sums of longer ones might overflow.
    longest = max((int(side.num_bytes.max()) for side in sides), default=0)
    if (num_bytes := max(longest, sum(side.total_bytes for side in sides))) > chunk_bytes:
        raise TransportError("too-much", f"{num_bytes} bytes are asked for, a chunk has {chunk_bytes}")


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
    """Copy rows that are whole multiples of their length apart, as numpy does it best; whether they are."""
    lowest = int(src.min())
    rows, rest = np.divmod(src - lowest, num_bytes)
    if rest.any():
        return False
    at = np.asarray(_Memory(lowest, int(rows.max()) + 1, num_bytes, num_bytes))
    # "clip": else numpy gathers into a buffer of its own first.
    np.take(at, rows, out=to, mode="clip")
    return True


class _Memory:
    """Memory as numpy is told of it."""

    def __init__(self, address: int, num_rows: int, num_bytes: int, step: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (num_rows,),
            "strides": (step,),
            "typestr": f"|V{num_bytes}",
        }


def _rows(addresses: Ints, num_bytes: int) -> tuple[NDArray[np.void], Ints | slice]:
    """Memory as rows of so many bytes, and which of them are at these addresses.

    Of scattered addresses, there is a row at every byte from the lowest to the highest; only those that are
    asked for are ever touched.
    """
    if (np.diff(addresses) == num_bytes).all():
        return np.asarray(_Memory(int(addresses[0]), len(addresses), num_bytes, num_bytes)), slice(None)
    lowest = int(addresses.min())
    num_rows = int(addresses.max()) - lowest + 1
    return np.asarray(_Memory(lowest, num_rows, num_bytes, 1)), addresses - lowest
