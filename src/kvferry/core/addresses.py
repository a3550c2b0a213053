"""Cell addresses, computed independently of planning, lowering and selection.

The checker and the digest use this arithmetic, so that a bug in either implementation shows up as a
difference. This module reads plain fields of manifests, tables and spans, and calls none of the methods that
the other implementation uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.core.request import HOLE, BlockTable
from kvferry.core.span import Span
from kvferry.core.state import Addressing, Group, Kind, State, Tail
from kvferry.core.view import AxisMap
from kvferry.errors import RequestError

Ints = NDArray[np.int64]
MAX_INDEX = 1 << 16
"""Up to this many blocks, an array indexed by block id is faster than sorting a table."""

Intervals = list[tuple[int, int]]
"""Half-open intervals: sorted, not touching, none empty."""


def held_offsets(axis: AxisMap) -> tuple[Ints, Ints]:
    """The coordinates of an axis that a rank holds, in order, and their byte offsets.

    >>> from kvferry.core.view import Digit
    >>> turns = AxisMap((Digit(2, 128), Digit(2, 0, held=Span(1, 2)), Digit(2, 64)))
    >>> [each.tolist() for each in held_offsets(turns)]
    [[2, 3, 6, 7], [0, 64, 128, 192]]
    """
    size = 1
    for digit in axis.digits:
        size *= digit.size
    rest, offsets, is_held = np.arange(size), np.zeros(size, np.int64), np.ones(size, bool)
    for digit in reversed(axis.digits):
        rest, value = np.divmod(rest, digit.size)
        if digit.held is not None:
            is_held &= (digit.held.start <= value) & (value < digit.held.stop)
            value = value - digit.held.start
        offsets += value * digit.stride
    at = np.flatnonzero(is_held)
    return at + axis.start, offsets[at]


def intervals(spans: Iterable[Span]) -> Intervals:
    """The integers of some spans.

    >>> intervals([Span(4, 6), Span(0, 2), Span(2, 3), Span(9, 9)])
    [(0, 3), (4, 6)]
    """
    found: Intervals = []
    for start, stop in sorted((span.start, span.stop) for span in spans):
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def minus(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> Intervals:
    """The integers in ``some`` and not in ``others``.

    >>> minus([(0, 9)], [(2, 4), (8, 12)])
    [(0, 2), (4, 8)]
    """
    left: Intervals = []
    for first, stop in some:
        start = first
        for begin, end in others:
            if end <= start or stop <= begin:
                continue
            if start < begin:
                left.append((start, begin))
            start = max(start, end)
        if start < stop:
            left.append((start, stop))
    return left


def cells_of_tokens(tokens: Iterable[Span], state: State) -> Intervals:
    """The cells of a state that these tokens complete or touch, depending on its ``tail``."""
    size, found = state.tokens_per_cell, []
    for start, stop in intervals(tokens):
        # A complete cell belongs to its last token, a partial one to each of its tokens.
        end = stop // size if state.tail is Tail.COMPLETE else -(-stop // size)
        if start // size < end:
            found.append(Span(start // size, end))
    return intervals(found)


def needed_cells(need: Mapping[str, Iterable[Span]], group: str, state: State) -> Intervals:
    """The cells of a state that a request needs; a slot has one."""
    default = (Span(0, 1),) if state.kind is Kind.RECURRENT else ()
    return cells_of_tokens(need.get(group, default), state)


class BlockPlaces:
    """Maps the cells of a request to blocks, on one side (``src`` or ``dst``)."""

    def __init__(
        self, group: Group, tables: Mapping[str, BlockTable], tokens_per_cell: int, side: str
    ) -> None:
        self._side = side
        table = tables.get(group.name)
        if table is None:
            raise RequestError(f"{side}-table-missing", group.name, "the request has no block table")
        self.group, self.ids = group, table.block_ids
        self.num_cells = group.tokens_per_block // tokens_per_cell
        self.first, rest = divmod(table.first_token, tokens_per_cell)
        if rest:
            raise self._error("table-start", f"token {table.first_token} is inside a cell")
        self.is_ring = group.addressing is Addressing.RING

    def _error(self, code: str, detail: str) -> RequestError:
        return RequestError(f"{self._side}-{code}", self.group.name, detail)

    def check(self, cells: Intervals) -> None:
        """Raise if the table has no blocks for some cells; compares the outermost cells only."""
        if not cells:
            return
        start, stop = cells[0][0], cells[-1][1]
        if self.is_ring and stop - start > self.num_cells:
            raise self._error("ring-short", f"cells [{start}, {stop}) exceed its {self.num_cells} cells")
        if self.is_ring and self._side == "src" and start < self.first:
            raise self._error("ring-short", f"cell {start} is overwritten: its first cell is {self.first}")
        end = self.first + len(self.ids) * self.num_cells
        if not self.is_ring and (start < self.first or end < stop):
            has = f"its {len(self.ids)} blocks [{self.first}, {end})"
            raise self._error("table-short", f"cells [{start}, {stop}) are not all in {has}")
        if self.is_ring and len(self.ids) != 1:
            raise self._error("table-length", f"expected one block id, got {len(self.ids)}")

    def locate(self, cells: Ints) -> tuple[Ints, Ints]:
        """Block id and position in the block of each cell, after ``check``."""
        distance = cells - self.first
        inside = distance % self.num_cells
        ids = self.ids[np.zeros_like(distance) if self.is_ring else (distance - inside) // self.num_cells]
        if (ids == HOLE).any():
            raise self._error(
                "hole", f"cell {int(cells[ids == HOLE][0])} has no block: its table entry is a hole"
            )
        return ids, inside

    def has_room(self, cell: int, num_cells: int) -> bool:
        return num_cells > 0 and 0 <= cell <= self.num_cells - num_cells

    def cells_at(self, ids: Ints, cell: int, need: Intervals) -> Ints:
        """The cell at one position of each block; raises for a block that the request does not own."""
        at = self._index_of(ids)
        if ids.min() < 0 or (self.ids[at] != ids).any():
            raise RequestError("not-proved", self.group.name, "a block is not in the table of the request")
        if not self.is_ring:
            return at * self.num_cells + (self.first + cell)
        start = need[0][0]
        return np.full(len(ids), start + (self.first + cell - start) % self.num_cells)

    def _index_of(self, ids: Ints) -> Ints:
        """Each block's index in the table; arbitrary if it is not in the table."""
        if self._index is None:
            order = self._order
            found: Ints = order[np.searchsorted(self.ids, ids, sorter=order) % len(order)]
            return found
        return self._index.take(ids, mode="clip")

    @cached_property
    def _index(self) -> Ints | None:
        """Block id to index in the table; None if that array would be long."""
        highest = int(self.ids.max())
        if highest >= MAX_INDEX:
            return None
        index = np.zeros(highest + 2, np.int64)  # a hole, -1, writes the last entry
        index[self.ids] = np.arange(len(self.ids))
        return index

    @cached_property
    def _order(self) -> Ints:
        return np.argsort(self.ids, kind="stable")

    def touched(self, need: Intervals) -> Intervals:
        size = self.num_cells
        if self.is_ring:
            return [(need[0][0], need[0][0] + size)]
        return intervals(
            # A table's first block may begin before cell 0.
            Span(max(0, a - (a - self.first) % size), b - 1 - (b - 1 - self.first) % size + size)
            for a, b in need
        )

    def kept_cells(self, kept: Intervals, need: Intervals) -> Intervals:
        """The kept cells; in a ring, the cells from the need's first on that share their positions."""
        if not self.is_ring or not kept:
            return kept
        start, size = need[0][0], self.num_cells
        oldest = max(need[-1][1], kept[-1][1]) - size
        places = {start + (cell - start) % size for a, b in kept for cell in range(max(a, oldest), b)}
        return [(place, place + 1) for place in sorted(places)]


def both(some: Intervals, others: Intervals) -> Intervals:
    return [(max(a, c), min(b, d)) for a, b in some for c, d in others if max(a, c) < min(b, d)]
