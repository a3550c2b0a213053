"""The slow, obvious oracle, which shares no code with lowering and selecting.

Every byte of every cell gets a unique number. The numbers are written into the source ranks' memory through
the source's views, cell by cell; the runs are applied one by one; and the destination is read back through
its own views, cell by cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from kvferry.core.manifest import Manifest, Rank
from kvferry.core.plan import Plan
from kvferry.core.request import HOLE, BlockTable, Request
from kvferry.core.select import Selection
from kvferry.core.span import Span
from kvferry.core.state import Addressing, Group, Kind, Tail
from kvferry.core.view import AxisMap, View

STALE = -1
"""The content of destination memory before the transfer."""
ZERO = 0

Cell = tuple[str, int, tuple[tuple[str, int], ...]]
"""State, token cell (0 for a recurrent state), and the other coordinates by name."""


def byte_offset(axis: AxisMap, coordinate: int) -> int | None:
    """The offset of a coordinate of an axis; None if this rank does not hold it.

    >>> from kvferry import Digit
    >>> byte_offset(AxisMap((Digit(2, 100), Digit(3, 10)), start=6), 10)
    110
    """
    rest = coordinate - axis.start
    if not 0 <= rest < axis.size:
        return None
    offset = 0
    for digit in reversed(axis.digits):
        rest, value = divmod(rest, digit.size)
        held = digit.held or Span(0, digit.size)
        if value not in held:
            return None
        offset += (value - held.start) * digit.stride
    return offset


def block_of(
    group: Group, table: BlockTable, cells_per_block: int, tokens_per_cell: int, cell: int
) -> tuple[int, int] | None:
    """Block id and cell inside the block; None if the table has no block there."""
    past = cell - table.first_token // tokens_per_cell
    index, inside = divmod(past, cells_per_block)
    if group.addressing is Addressing.RING:
        index = 0
    if not 0 <= index < len(table.block_ids) or table.block_ids[index] == HOLE:
        return None
    return int(table.block_ids[index]), inside


def cells_of(
    manifest: Manifest, view: View, tables: Mapping[str, BlockTable], cells: Iterable[int]
) -> Iterator[tuple[Cell, str, int]]:
    """Every cell of a view in ``cells``, with its region and byte offset."""
    state, group = manifest.state_by_name[view.state], manifest.group_by_name[view.group]
    axes = dict(view.axes)
    token = axes.pop("token", None)
    places = [
        [
            ((name, c), offset)
            for c in range(axis.start, axis.start + axis.size)
            if (offset := byte_offset(axis, c)) is not None
        ]
        for name, axis in axes.items()
    ]
    coordinates = [
        (tuple(at for at, _ in place), sum(offset for _, offset in place)) for place in product(*places)
    ]
    per_block = group.tokens_per_block // state.tokens_per_cell
    for cell in cells:
        found = block_of(group, tables[group.name], per_block, state.tokens_per_cell, cell)
        if found is None:
            continue
        block_id, inside = found
        at_token = 0 if token is None else byte_offset(token, inside)
        if at_token is None:
            continue
        start = view.offset + block_id * view.block_stride + at_token
        for at, offset in coordinates:
            yield (view.state, cell, at), view.region, start + offset


def memory_of(rank: Rank, value: int) -> dict[str, np.ndarray]:
    """One number per byte of a rank's regions."""
    return {region.name: np.full(region.num_bytes, value, np.int64) for region in rank.regions}


@dataclass
class Numbers:
    """Assigns a unique number to every byte of every cell."""

    given: dict[Cell, int] = field(default_factory=dict)
    next_number: int = 1

    def of(self, cell: Cell, item_bytes: int) -> np.ndarray:
        if cell not in self.given:
            self.given[cell] = self.next_number
            self.next_number += item_bytes
        return np.arange(self.given[cell], self.given[cell] + item_bytes)


def check(plan: Plan, request: Request, selection: Selection, *, cleared: bool = True) -> list[str]:
    """Apply the runs to numbers and return all errors.

    With ``cleared``, slack must hold zeros or the source's cells; otherwise it may be unchanged.
    """
    numbers = Numbers()
    sources = {src_rank: _filled(plan, src_rank, request, numbers) for src_rank in selection.reads}
    dst_rank = plan.dst.rank(plan.dst_rank)
    memory, writes = memory_of(dst_rank, STALE), memory_of(dst_rank, 0)
    for src_rank, runs in selection.reads.items():
        for src_region, src_at, dst_region, dst_at, size in runs:
            source = sources[src_rank][plan.src.rank(src_rank).regions[src_region].name]
            target = dst_rank.regions[dst_region].name
            memory[target][dst_at : dst_at + size] = source[src_at : src_at + size]
            writes[target][dst_at : dst_at + size] += 1
    for _, _, dst_region, dst_at, size in selection.zeros:
        target = dst_rank.regions[dst_region].name
        memory[target][dst_at : dst_at + size] = ZERO
        writes[target][dst_at : dst_at + size] += 1
    return list(_problems(plan, request, numbers, memory, writes, cleared))


def _filled(plan: Plan, src_rank: int, request: Request, numbers: Numbers) -> dict[str, np.ndarray]:
    rank = plan.src.rank(src_rank)
    memory = memory_of(rank, -2)
    wanted = {plan.src_name(state): state for state in reversed(plan.states)}
    for view in rank.views:
        if view.state not in wanted or view.group not in request.src:
            continue
        state = plan.src.state_by_name[view.state]
        for (_, cell, at), region, offset in cells_of(
            plan.src, view, request.src, _all_cells(plan, view, wanted[view.state], request)
        ):
            number = numbers.of((state.name, cell, at), state.item_bytes)
            memory[region][offset : offset + state.item_bytes] = number
    return memory


def _all_cells(plan: Plan, view: View, dst_state: str, request: Request) -> range:
    """Every cell of a source table (of a ring, those that the destination needs)."""
    state, group = plan.src.state_by_name[view.state], plan.src.group_by_name[view.group]
    table, size = request.src[group.name], state.tokens_per_cell
    if group.addressing is Addressing.RING:
        dst_group = plan.dst.rank(plan.dst_rank).by_state[dst_state].group
        first = min((span.start for span in request.need[dst_group]), default=0) // size
        return range(first, first + group.tokens_per_block // size)
    first = table.first_token // size
    return range(first, first + len(table.block_ids) * group.tokens_per_block // size)


def _problems(
    plan: Plan,
    request: Request,
    numbers: Numbers,
    memory: Mapping[str, np.ndarray],
    writes: Mapping[str, np.ndarray],
    cleared: bool,
) -> Iterator[str]:
    explained = {name: np.zeros(len(values), bool) for name, values in memory.items()}
    dst = plan.dst
    for name in plan.states:
        view = dst.rank(plan.dst_rank).by_state[name]
        state = dst.state_by_name[name]
        source = plan.src_name(name)
        need, touched = wanted_cells(dst, view, request)
        if not need:
            continue
        for (_, cell, at), region, offset in cells_of(dst, view, request.dst, touched):
            where = slice(offset, offset + state.item_bytes)
            got, times = memory[region][where], writes[region][where]
            number = numbers.of((source, cell, at), state.item_bytes)
            kept = cell not in need and _is_kept(dst, view, request, cell, max(need))
            problem = _problem(got, times, number, needed=cell in need, kept=kept, cleared=cleared)
            if problem:
                yield f"{name} cell {cell} {dict(at)}: {problem.replace(GOT, _name(numbers, got))}"
            explained[region][where] = not kept
    for region, values in writes.items():
        stray = np.flatnonzero((values > 0) & ~explained[region])
        if len(stray):
            yield f"region {region}: byte {int(stray[0])} is not the request's, and was written"


GOT = "{got}"


def _problem(
    got: np.ndarray, times: np.ndarray, number: np.ndarray, *, needed: bool, kept: bool, cleared: bool
) -> str:
    """The error of one cell; empty if it is right."""
    is_right = (got == number).all()
    if needed and not is_right:
        return f"holds {GOT} instead of its own number"
    if kept and times.any():
        return "was kept, and was written"
    if cleared and not needed and not kept and not (is_right or (got == ZERO).all()):
        return f"slack holds {GOT}"
    if (times > 1).any():
        return f"was written {int(times.max())} times"
    return ""


def wanted_cells(dst: Manifest, view: View, request: Request) -> tuple[set[int], Sequence[int]]:
    """The needed cells of a view, and all cells of the blocks that they touch."""
    state, group = dst.state_by_name[view.state], dst.group_by_name[view.group]
    if state.kind is Kind.RECURRENT:
        wanted = {0} if request.need.get(group.name, (Span(0, 1),)) else set()
        return wanted, range(len(wanted))
    size = state.tokens_per_cell
    need: set[int] = set()
    for span in request.need[group.name]:
        for token in range(span.start, span.stop):
            cell = token // size
            if state.tail is Tail.PARTIAL or (cell + 1) * size <= span.stop:
                need.add(cell)
    if not need:
        return need, range(0)
    per_block = group.tokens_per_block // size
    if group.addressing is Addressing.RING:
        return need, range(min(need), min(need) + per_block)
    first = request.dst[group.name].first_token // size
    blocks = sorted({(cell - first) // per_block for cell in need})
    return need, [first + block * per_block + i for block in blocks for i in range(per_block)]


def _is_kept(dst: Manifest, view: View, request: Request, cell: int, newest: int) -> bool:
    state, group = dst.state_by_name[view.state], dst.group_by_name[view.group]
    size = state.tokens_per_cell
    cells = [cell]
    if group.addressing is Addressing.RING and cell > newest:
        # No newer cell was written: this place holds the cell of the previous round.
        cells.append(cell - group.tokens_per_block // size)
    return any(
        span.start < (at + 1) * size
        and ((at + 1) * size <= span.stop if state.tail is Tail.COMPLETE else at * size < span.stop)
        for span in request.kept.get(view.group, ())
        for at in cells
    )


def _name(numbers: Numbers, got: np.ndarray) -> str:
    value = int(got[0])
    if value == STALE:
        return "stale bytes"
    for cell, first in numbers.given.items():
        if first <= value < first + len(got):
            return f"{cell[0]} cell {cell[1]} {dict(cell[2])}"
    return f"bytes of no cell ({value})"
