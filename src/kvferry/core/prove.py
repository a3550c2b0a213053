"""The laws that a plan must keep before a byte moves.

* **Tiling**: the pieces of each needed state cover its box, without a gap and without an overlap, and
  every piece lies inside what its source rank holds.
* **Soundness of views**: in bounds, one cell per byte, and no two states that can be live at once on a byte.

The proof looks at the plan and the two manifests only, never at how the plan was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from kvferry.core.box import Box, lcm
from kvferry.core.manifest import Manifest, Rank, compare
from kvferry.core.overlap import Comb, Tangled, meet, overlaps
from kvferry.core.plan import Piece, Plan
from kvferry.core.span import normal, show, subtract
from kvferry.core.view import View
from kvferry.errors import Code, Finding, Refused


@dataclass(frozen=True)
class Proof:
    """A plan that was proved. Only ``prove`` makes these; only these can be lowered."""

    plan: Plan


def prove(plan: Plan) -> Proof:
    """Check every law; raise ``Refused`` with all that is wrong, or return the proof."""
    found = list(compare(plan.src, plan.dst)) or list(_tiling(plan))
    found += _soundness(plan.dst, plan.dst.rank(plan.dst_rank), "destination")
    for src_rank in sorted({piece.src_rank for piece in plan.pieces}):
        found += _soundness(plan.src, plan.src.rank(src_rank), "source")
    if found:
        raise Refused(*found)
    return Proof(plan)


def _tiling(plan: Plan) -> Iterator[Finding]:
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        pieces[piece.state].append(piece)
    for state in sorted(pieces.keys() - set(plan.states)):
        yield Finding(Code.NOT_NEEDED, state=state, note="a piece of a state that is not needed")
    views = plan.dst.rank(plan.dst_rank).by_state
    seen: dict[object, list[Finding]] = {}
    for state in plan.states:
        parts = [(piece.src_rank, piece.box) for piece in pieces[state]]
        source = plan.src_name(state)
        held = [_held(plan.src, src_rank, source) for src_rank, _ in parts]
        key = (views[state].box(), tuple(parts), tuple(held))
        if key not in seen:
            seen[key] = list(_tiles(views[state].box(), parts, held))
        for finding in seen[key]:
            yield Finding(finding.code, state, finding.field, finding.src, finding.dst, finding.note)


def _held(src: Manifest, src_rank: int, state: str) -> Box | None:
    view = src.rank(src_rank).by_state.get(state)
    return view.box() if view else None


def _tiles(need: Box, parts: Sequence[tuple[int, Box]], held: Sequence[Box | None]) -> Iterator[Finding]:
    """Whether the parts tile the need: inside it, inside their sources, apart, and enough."""
    period = need.period
    for _, box in parts:
        period = lcm(period, box.period)
    for (src_rank, box), has in zip(parts, held, strict=True):
        if (box & need).over(period) != box.over(period):
            yield Finding(Code.NOT_NEEDED, field=str(box), dst=str(need))
        if has is None or (box & has) != box.over(lcm(box.period, has.period)):
            yield Finding(Code.WRONG_SOURCE, field=str(box), src=f"{has} on rank {src_rank}")
    for (_, a), (_, b) in combinations(parts, 2):
        if both := a & b:
            yield Finding(Code.WRITTEN_TWICE, field=str(both))
    covered = sum(box.over(period).num_cells() for _, box in parts)
    wanted = need.over(period).num_cells()
    if covered < wanted:
        yield Finding(Code.GAP, field=_missing(need.over(period), [b for _, b in parts], period))


def _missing(need: Box, parts: Sequence[Box], period: int) -> str:
    """The first axis on which something is missing throughout, or how much is."""
    covers = [dict(box.over(period).axes) for box in parts]
    for name, spans in need.axes:
        if gap := subtract(spans, normal(span for cover in covers for span in cover[name])):
            return f"{name} {show(gap)}"
    missing = need.num_cells() - sum(box.over(period).num_cells() for box in parts)
    return f"{missing} of {need.num_cells()} cells"


def _soundness(manifest: Manifest, rank: Rank, side: str) -> Iterator[Finding]:
    """Every view in bounds and one-to-one; no two that can be live at once on one byte."""
    regions = {region.name: region for region in rank.regions}
    by_region: dict[str, list[tuple[View, Comb]]] = defaultdict(list)
    for view in rank.views:
        state = manifest.state_by_name[view.state]
        comb = Comb.of_view(view, state, manifest.group_by_name[view.group].num_blocks)
        by_region[view.region].append((view, comb))
        where = f"{side} rank {rank.rank}, region {view.region}"
        size = regions[view.region].num_bytes
        if comb.stop > size:
            note = f"the view ends at byte {comb.stop} of {size}"
            yield Finding(Code.OUT_OF_BOUNDS, state=view.state, field=where, note=note)
        try:
            if comb.folds():
                note = "two cells sit on one byte: a stride is shorter than what it steps over"
                yield Finding(Code.CELLS_COLLIDE, state=view.state, field=where, note=note)
        except Tangled:
            yield Finding(Code.CELLS_COLLIDE, state=view.state, field=where, note=_TANGLED)
    for region, views in by_region.items():
        where = f"{side} rank {rank.rank}, region {region}"
        yield from _overlapping(manifest, where, views)


_TANGLED = "the strides are too tangled for a proof"


def _overlapping(manifest: Manifest, where: str, views: Sequence[tuple[View, Comb]]) -> Iterator[Finding]:
    by_group: dict[str, list[tuple[View, Comb]]] = defaultdict(list)
    for view, comb in views:
        by_group[view.group].append((view, comb))
    try:
        for members in by_group.values():
            for i, j in overlaps([comb for _, comb in members]):
                yield _overlap(where, members[i][0], members[j][0], "one group")
        for (name_a, a), (name_b, b) in combinations(by_group.items(), 2):
            pools = {manifest.group_by_name[name].pool for name in (name_a, name_b)}
            yield from _across(where, a, b, one_pool=len(pools) == 1)
    except Tangled:
        yield Finding(Code.VIEWS_OVERLAP, field=where, note=_TANGLED)


def _across(
    where: str,
    a: Sequence[tuple[View, Comb]],
    b: Sequence[tuple[View, Comb]],
    *,
    one_pool: bool,
) -> Iterator[Finding]:
    """Overlaps between two groups: none at all, or none between two blocks where they share a pool."""
    if one_pool and _pages_agree([view for view, _ in (*a, *b)], [comb for _, comb in (*a, *b)]):
        return
    for view_a, comb_a in a:
        for view_b, comb_b in b:
            if comb_a.base >= comb_b.stop or comb_b.base >= comb_a.stop:
                continue
            stride = view_a.block_stride if view_a.block_stride == view_b.block_stride else 0
            if meet(comb_a, comb_b, apart=stride if one_pool else 0):
                note = "one pool, blocks of two strides" if one_pool and not stride else "two groups"
                yield _overlap(where, view_a, view_b, note)


def _pages_agree(views: Sequence[View], combs: Sequence[Comb]) -> bool:
    """Whether each view keeps each block inside the same page of one size: the common case."""
    strides = {view.block_stride for view in views}
    stride = min(strides)
    pages = {view.offset // stride for view in views}
    return len(strides) == len(pages) == 1 and all(
        view.offset % stride + sum(s * (n - 1) for n, s in view.steps()) + comb.width <= stride
        for view, comb in zip(views, combs, strict=True)
    )


def _overlap(where: str, a: View, b: View, note: str) -> Finding:
    shared = f"{b.state} sits on the same bytes ({note}); two names of one state are aliases"
    return Finding(Code.VIEWS_OVERLAP, state=a.state, field=where, note=shared)
