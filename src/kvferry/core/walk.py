"""One side's way through a request: which block a cell is in, and where in that block."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvferry.core.request import HOLE, BlockTable
from kvferry.core.span import Span, Spans, intersect, normal, show, subtract
from kvferry.core.state import Addressing, Group
from kvferry.core.view import Ints
from kvferry.errors import RequestError


class Walk:
    """One side's way through a request: which block a cell is in, and where in it."""

    def __init__(
        self, group: Group, tables: Mapping[str, BlockTable], tokens_per_cell: int, side: str
    ) -> None:
        self.group, self.side = group, side
        table = tables.get(group.name)
        if table is None:
            raise RequestError(f"{side}-table-missing", group.name, "the request has no block table")
        self.block_ids = table.block_ids
        self.is_ring = group.addressing is Addressing.RING
        self.first, rest = divmod(table.first_token, tokens_per_cell)
        self.num_cells = group.tokens_per_block // tokens_per_cell
        if rest:
            raise self._error("table-start", f"token {table.first_token} is inside a cell")

    def _error(self, code: str, detail: str) -> RequestError:
        return RequestError(f"{self.side}-{code}", self.group.name, detail)

    def check(self, need: Spans, period: int) -> None:
        """Refuse a table that cannot serve the need."""
        if self.first % period:
            raise self._error("table-start", f"cell {self.first} is no multiple of {period}")
        if self.group.addressing is not Addressing.TABLE and len(self.block_ids) != 1:
            raise self._error("table-length", f"one id expected, got {len(self.block_ids)}")
        if self.is_ring:
            if self.side == "src" and need[0].start < self.first:
                detail = f"{show(need)} begins before its first cell {self.first}: that is overwritten"
                raise self._error("ring-short", detail)
            if need[-1].stop - need[0].start > self.num_cells:
                raise self._error("ring-short", f"{show(need)} exceeds its {self.num_cells} cells")
            return
        has = Span(self.first, self.first + len(self.block_ids) * self.num_cells)
        if missing := subtract(need, (has,)):
            detail = f"cells {show(missing)} lie outside its {len(self.block_ids)} blocks {has}"
            raise self._error("table-short", detail)

    def block_start(self, cell: int) -> int:
        """The first cell of the block that ``cell`` is in."""
        return cell - (cell - self.first) % self.num_cells

    def cuts(self, span: Span) -> Ints:
        """The start of a span that is not empty, and every block edge inside it."""
        cuts = np.arange(self.block_start(span.start), span.stop, self.num_cells)
        cuts[0] = span.start
        return cuts

    def touched(self, need: Spans) -> Spans:
        """All cells of the blocks that the need touches."""
        if self.is_ring:
            return (Span(need[0].start, need[0].start + self.num_cells),)
        size = self.num_cells
        return normal(
            Span(max(0, self.block_start(s.start)), self.block_start(s.stop - 1) + size) for s in need
        )

    def kept(self, kept: Spans, need: Spans) -> Spans:
        """The kept cells; in a ring, as the cells that would come to sit in their place."""
        if not self.is_ring:
            return kept
        size, start, stop = self.num_cells, need[0].start, need[-1].stop
        if kept and kept[-1].stop - size > start:
            detail = f"cells {show(need)} are needed where newer ones are kept, up to {kept[-1].stop}"
            raise self._error("ring-short", f"{detail}: it has {size} cells")
        older = intersect(kept, (Span(max(0, stop - size), start),)) if stop - size < start else ()
        return (*kept, *(Span(span.start + size, span.stop + size) for span in older))

    def locate(self, cells: Ints) -> tuple[Ints, Ints]:
        """Block id and place in the block of each cell."""
        index, inside = np.divmod(cells - self.first, self.num_cells)
        if self.is_ring:
            index = np.zeros_like(index)
        ids = self.block_ids[index]
        if ids.min() == HOLE:
            raise self._error("hole", f"cell {int(cells[ids == HOLE][0])} lies in a hole")
        return ids, inside
