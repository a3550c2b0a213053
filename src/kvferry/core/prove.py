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
from math import lcm

from kvferry.core.box import Box
from kvferry.core.manifest import Manifest, Rank, compare
from kvferry.core.overlap import Blocks, Comb, Tangled, overlaps, overlaps_apart
from kvferry.core.plan import Piece, Plan
from kvferry.core.span import normal, show, subtract
from kvferry.core.view import View
from kvferry.errors import Code, Finding, Refused


@dataclass(frozen=True)
class Proof:
    """A plan that was proved. Only ``prove`` makes these; only these can be lowered.

    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> from kvferry import plan
    >>> prove(plan(src, dst, dst_rank=0)).plan.dst_rank
    0
    """

    plan: Plan


def prove(plan: Plan) -> Proof:
    """Check every law; raise ``Refused`` with all that is wrong, or return the proof.

    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> from dataclasses import replace
    >>> from kvferry import plan
    >>> good = plan(src, dst, dst_rank=0, states=["layers.3.attn/k"])
    >>> prove(replace(good, pieces=()))
    Traceback (most recent call last):
    kvferry.errors.Refused: gap: layers.3.attn/k: channel [0, 256)
    """
    Refused.unless_none(_broken_laws(plan))
    return Proof(plan)


def _broken_laws(plan: Plan) -> Iterator[Finding]:
    found = compare(plan.src, plan.dst, plan.states)
    yield from found or _tiling(plan)
    yield from _soundness(plan.dst, plan.dst.rank(plan.dst_rank), "destination")
    for src_rank in sorted({piece.src_rank for piece in plan.pieces}):
        yield from _soundness(plan.src, plan.src.rank(src_rank), "source")


def _tiling(plan: Plan) -> Iterator[Finding]:
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        pieces[piece.state].append(piece)
    for piece in plan.pieces:
        if piece.state not in plan.states or piece.dst_rank != plan.dst_rank:
            yield Finding(Code.NOT_NEEDED, state=piece.state, field=f"rank {piece.dst_rank}")
    views = plan.dst.rank(plan.dst_rank).by_state
    if unknown := set(plan.states) - views.keys():
        yield from (Finding(Code.MISSING_STATE, state=s, note="not on this rank") for s in sorted(unknown))
        return
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
    axes = [name for name, _ in need.axes]
    for _, box in parts:
        if [name for name, _ in box.axes] != axes or not box:
            yield Finding(Code.NOT_NEEDED, field=str(box), dst=str(need), note="not a box of this state")
            return
    period = lcm(need.period, *(box.period for _, box in parts))
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
    by_pool: dict[str, list[View]] = defaultdict(list)
    for view, comb in views:
        by_group[view.group].append((view, comb))
        by_pool[manifest.group_by_name[view.group].pool].append(view)
    try:
        for members in by_group.values():
            for i, j in overlaps([comb for _, comb in members]):
                yield _overlap(where, members[i][0], members[j][0], "one group")
        for pooled in by_pool.values():
            yield from _across_groups(manifest, where, pooled)
        pools = [manifest.group_by_name[view.group].pool for view, _ in views]
        for i, j in overlaps([comb for _, comb in views], pools):
            yield _overlap(where, views[i][0], views[j][0], "groups of two pools")
    except Tangled:
        yield Finding(Code.VIEWS_OVERLAP, field=where, note=_TANGLED)


def _across_groups(manifest: Manifest, where: str, views: Sequence[View]) -> Iterator[Finding]:
    """Groups of one pool share no byte of two different blocks."""
    groups = [view.group for view in views]
    if len(set(groups)) == 1:
        return
    blocks = [
        Blocks(
            Comb.of_view(view, manifest.state_by_name[view.state]),
            view.block_stride,
            manifest.group_by_name[view.group].num_blocks,
        )
        for view in views
    ]
    for i, j in overlaps_apart(blocks, groups):
        strides = {views[i].block_stride, views[j].block_stride}
        steps = f", {' and '.join(map(str, sorted(strides)))} bytes apart" * (len(strides) > 1)
        yield _overlap(where, views[i], views[j], f"two blocks of one pool{steps}")


def _overlap(where: str, a: View, b: View, note: str) -> Finding:
    shared = f"{b.state} sits on the same bytes ({note}); two names of one state are aliases"
    return Finding(Code.VIEWS_OVERLAP, state=a.state, field=where, note=shared)
