"""The oracle's count: how many bytes and runs a request must take, told from the views alone.

Every needed row of items is located on both sides, coordinate by coordinate and digit by digit; what touches
on both sides is one run. Nothing here is shared with the code that lowers or selects; of a plan only its
pieces are believed, and the bytes are counted a second time without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.core.box import TOKEN
from kvferry.core.manifest import Manifest
from kvferry.core.plan import Piece, Plan
from kvferry.core.request import Request
from kvferry.core.span import Span, Spans
from kvferry.core.state import Kind
from kvferry.core.view import AxisMap, View
from kvferry.testing.oracle import block_of, byte_offset, wanted_cells

Places = NDArray[np.int64]

REGION = 1 << 48
"""Regions are this far apart, so that what lies in two of them never touches."""


@dataclass(frozen=True, slots=True)
class Count:
    """What one source rank sends."""

    num_bytes: int
    num_runs: int


@dataclass
class _Rows:
    """Rows of one source rank: where each starts on both sides, and how long it is."""

    src: list[Places] = field(default_factory=list)
    dst: list[Places] = field(default_factory=list)
    num_bytes: list[Places] = field(default_factory=list)

    def count(self) -> Count:
        src, dst, size = (np.concatenate(column) for column in (self.src, self.dst, self.num_bytes))
        order = np.argsort(dst)
        src, dst, size = src[order], dst[order], size[order]
        touches = (dst[:-1] + size[:-1] == dst[1:]) & (src[:-1] + size[:-1] == src[1:])
        return Count(int(size.sum()), len(dst) - int(touches.sum()))


class _Needed:
    """The needed cells of a view, looked up once for all layers of a group."""

    def __init__(self, dst: Manifest, request: Request) -> None:
        self._dst, self._request = dst, request
        self._cells: dict[tuple[object, ...], tuple[int, ...]] = {}

    def of(self, view: View, turns: Spans, period: int) -> tuple[int, ...]:
        """Those whose turn it is, in a period of so many cells."""
        state = self._dst.state_by_name[view.state]
        key = (view.group, state.kind, state.tokens_per_cell, state.tail, turns, period)
        if key not in self._cells:
            cells = sorted(wanted_cells(self._dst, view, self._request)[0])
            is_slot = state.kind is Kind.RECURRENT
            meant = (cell for cell in cells if is_slot or any(cell % period in span for span in turns))
            self._cells[key] = tuple(meant)
        return self._cells[key]


class _Counter:
    """Remembers what layers have in common: the places of an axis, and of the cells of a group."""

    def __init__(self, plan: Plan, request: Request) -> None:
        self._plan, self._request = plan, request
        self.needed = _Needed(plan.dst, request)
        self._axes: dict[tuple[AxisMap, Spans], Places] = {}
        self._cells: dict[tuple[int, str, AxisMap | None, int, tuple[int, ...]], Places] = {}

    def axis(self, axis: AxisMap, spans: Spans) -> Places:
        if (axis, spans) not in self._axes:
            at = [byte_offset(axis, i) for span in spans for i in range(span.start, span.stop)]
            self._axes[axis, spans] = np.array(at, np.int64)
        return self._axes[axis, spans]

    def cells(self, manifest: Manifest, view: View, cells: tuple[int, ...]) -> Places:
        """Where each cell starts in the view's region, but for the view's offset."""
        token = dict(view.axes).get(TOKEN)
        key = (id(manifest), view.group, token, view.block_stride, cells)
        if key not in self._cells:
            group, state = manifest.group_by_name[view.group], manifest.state_by_name[view.state]
            tables = self._request.src if manifest is self._plan.src else self._request.dst
            per_block = group.tokens_per_block // state.tokens_per_cell
            places = []
            for cell in cells:
                found = block_of(group, tables[group.name], per_block, state.tokens_per_cell, cell)
                if found is None:
                    raise ValueError(f"{view.state}: cell {cell} has no block in {manifest.engine}")
                inside = 0 if token is None else byte_offset(token, found[1])
                if inside is None:
                    raise ValueError(f"{view.state}: cell {cell} is not held in {manifest.engine}")
                places.append(found[0] * view.block_stride + inside)
            self._cells[key] = np.array(places, np.int64)
        return self._cells[key]

    def add(self, piece: Piece, rows: _Rows) -> None:
        plan = self._plan
        src_view, dst_view = plan.views(piece)
        state = plan.dst.state_by_name[piece.state]
        spans = dict(piece.box.axes)
        cells = self.needed.of(dst_view, spans.get(TOKEN, ()), piece.box.period)
        if not cells:
            return
        src = self.cells(plan.src, src_view, cells)
        dst = self.cells(plan.dst, dst_view, cells)
        row_bytes, axes = state.item_bytes, []
        for name, its_spans in spans.items():
            if name != TOKEN:
                axes.append([self.axis(dict(view.axes)[name], its_spans) for view in (src_view, dst_view)])
        # An axis that lies in a row on both sides is the row; of one axis at most.
        for at, (ours, theirs) in enumerate(axes):
            in_a_row = np.arange(len(ours)) * state.item_bytes
            if all((side - side[0] == in_a_row).all() for side in (ours, theirs)):
                row_bytes = len(ours) * state.item_bytes
                axes[at] = [ours[:1], theirs[:1]]
                break
        for ours, theirs in axes:
            src, dst = np.add.outer(src, ours).ravel(), np.add.outer(dst, theirs).ravel()
        src_rank, dst_rank = plan.src.rank(piece.src_rank), plan.dst.rank(piece.dst_rank)
        rows.src.append(src + src_view.offset + REGION * src_rank.region_index[src_view.region])
        rows.dst.append(dst + dst_view.offset + REGION * dst_rank.region_index[dst_view.region])
        rows.num_bytes.append(np.full(len(src), row_bytes))


def count_runs(plan: Plan, request: Request) -> dict[int, Count]:
    """What each source rank sends, if nothing but the need is copied."""
    counter = _Counter(plan, request)
    rows: dict[int, _Rows] = {}
    for piece in plan.pieces:
        counter.add(piece, rows.setdefault(piece.src_rank, _Rows()))
    return {src_rank: some.count() for src_rank, some in sorted(rows.items()) if some.dst}


def needed_bytes(dst: Manifest, dst_rank: int, request: Request) -> int:
    """The bytes that a destination rank needs, whoever sends them."""
    needed = _Needed(dst, request)
    held: dict[AxisMap, Spans] = {}
    total = 0
    for view in dst.rank(dst_rank).views:
        for _, axis in view.axes:
            if axis not in held:
                each = range(axis.start, axis.start + axis.size)
                held[axis] = tuple(Span(i, i + 1) for i in each if byte_offset(axis, i) is not None)
        cell_bytes = dst.state_by_name[view.state].item_bytes
        for name, axis in view.axes:
            cell_bytes *= 1 if name == TOKEN else len(held[axis])
        token = dict(view.axes).get(TOKEN)
        turns, period = (held[token], token.size) if token else ((), 1)
        total += cell_bytes * len(needed.of(view, turns, period))
    return total
