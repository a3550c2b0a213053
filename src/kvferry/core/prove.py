"""The laws of a plan, checked before a byte moves.

* **Tiling**: the pieces of each needed state cover its box without gaps and overlaps, and every piece is
  inside its source rank's box.
* **Soundness of views**: in bounds, one cell per byte, and no byte shared by two states that can be live at
  the same time.

The proof uses the plan and the two manifests only, not the planner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from itertools import combinations
from math import lcm
from typing import NamedTuple

from kvferry.core.box import Box
from kvferry.core.manifest import Manifest, Rank, compare
from kvferry.core.overlap import Blocks, Comb, Tangled, overlaps, overlaps_apart
from kvferry.core.plan import Piece, Plan
from kvferry.core.span import Spans, count, normal, show, subtract
from kvferry.core.view import BLOCK, View
from kvferry.errors import Code, Finding, Refused, SpecError, counted


@dataclass(frozen=True)
class Proof:
    """A proved plan. Only ``prove`` creates one; ``lower`` accepts nothing else.

    >>> Proof(None, ())
    Traceback (most recent call last):
    kvferry.errors.SpecError: only prove(plan) creates a Proof
    """

    plan: Plan
    states: tuple[str, ...] = field(repr=False)
    """The states that the destination rank needs, by its own names."""
    maker: InitVar[object] = None

    def __post_init__(self, maker: object) -> None:
        if maker is not _PROVE:
            raise SpecError("only prove(plan) creates a Proof")


_PROVE = object()


def prove(plan: Plan, *, states: Collection[str] | None = None) -> Proof:
    """Check every law; raise ``Refused`` with all findings, or return the proof.

    ``states``: the states that the destination rank needs; by default all that it holds.

    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> from dataclasses import replace
    >>> from kvferry import plan
    >>> good = plan(src, dst, dst_rank=0, states=["layers.3.attn/k"])
    >>> prove(replace(good, pieces=()), states=["layers.3.attn/k"])
    Traceback (most recent call last):
    kvferry.errors.Refused: gap: layers.3.attn/k: channel [0, 256)
    """
    held = plan.dst.rank(plan.dst_rank).by_state
    needed = tuple(held) if states is None else tuple(plan.dst.name_of(name) for name in states)
    Refused.raise_if_any(_broken_laws(plan, needed))
    return Proof(plan, needed, _PROVE)


def _broken_laws(plan: Plan, needed: Sequence[str]) -> Iterator[Finding]:
    for state in sorted(set(needed) ^ set(plan.states)):
        if state in needed:
            yield Finding(Code.GAP, state=state, note="the plan leaves it out")
        else:
            yield Finding(Code.NOT_NEEDED, state=state)
    found = compare(plan.src, plan.dst, plan.states)
    yield from found or _tiling(plan)
    yield from _soundness(plan.dst, plan.dst.rank(plan.dst_rank), "destination")
    for src_rank in sorted({piece.src_rank for piece in plan.pieces}):
        yield from _soundness(plan.src, plan.src.rank(src_rank), "source")


def _tiling(plan: Plan) -> Iterator[Finding]:
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in plan.pieces:
        pieces[piece.state].append(piece)
    needed = set(plan.states)
    for piece in plan.pieces:
        if piece.state not in needed or piece.dst_rank != plan.dst_rank:
            yield Finding(Code.NOT_NEEDED, state=piece.state, field=f"rank {piece.dst_rank}")
    if unknown := needed - plan.dst.rank(plan.dst_rank).by_state.keys():
        yield from (Finding(Code.MISSING_STATE, state=s, note="not on this rank") for s in sorted(unknown))
        return
    needs = plan.dst.rank(plan.dst_rank).boxes
    held_by = {piece.src_rank: plan.src.rank(piece.src_rank).boxes for piece in plan.pieces}
    seen: dict[object, list[Finding]] = {}
    for state in plan.states:
        parts = [(piece.src_rank, piece.box) for piece in pieces[state]]
        source = plan.src_name(state)
        held = [held_by[src_rank].get(source) for src_rank, _ in parts]
        # Layers with the same boxes are checked once.
        key = (id(needs[state]), *((src_rank, id(box)) for src_rank, box in parts), *map(id, held))
        if key not in seen:
            seen[key] = list(_tiles(needs[state], parts, held))
        for finding in seen[key]:
            yield replace(finding, state=state)


def _tiles(need: Box, parts: Sequence[tuple[int, Box]], held: Sequence[Box | None]) -> Iterator[Finding]:
    """Check that the parts are inside the need and their sources, disjoint, and complete."""
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
    boxes = [box.over(period) for _, box in parts]
    for a, b in _pairs_not_apart(boxes, range(len(axes))):
        if both := a & b:
            yield Finding(Code.WRITTEN_TWICE, field=str(both))
    covered = sum(box.num_cells() for box in boxes)
    wanted = need.over(period).num_cells()
    if covered < wanted:
        yield Finding(Code.GAP, field=_missing(need.over(period), [b for _, b in parts], period))


def _pairs_not_apart(boxes: Sequence[Box], axes: Sequence[int]) -> Iterator[tuple[Box, Box]]:
    """All pairs of boxes of one period that may overlap.

    Axes with disjoint spans separate the boxes first: a thousand ranks would be half a million pairs.
    """
    for axis in axes:
        alike: dict[Spans, list[Box]] = defaultdict(list)
        for box in boxes:
            alike[box.axes[axis][1]].append(box)
        spans = [span for each in alike for span in each]
        if len(alike) > 1 and count(normal(spans)) == sum(map(len, spans)):
            rest = [other for other in axes if other != axis]
            for some in alike.values():
                yield from _pairs_not_apart(some, rest)
            return
    yield from combinations(boxes, 2)


def _missing(need: Box, parts: Sequence[Box], period: int) -> str:
    """The first axis with uncovered coordinates, or the number of missing cells."""
    covers = [dict(box.over(period).axes) for box in parts]
    for name, spans in need.axes:
        if gap := subtract(spans, normal(span for cover in covers for span in cover[name])):
            return f"{name} {show(gap)}"
    missing = need.num_cells() - sum(box.over(period).num_cells() for box in parts)
    return f"{missing} of {need.num_cells()} cells"


class _Look(NamedTuple):
    """The shape of a view apart from its offset; shared by many layers."""

    group: str
    pool: str
    pages: Comb
    """Its bytes in all blocks, from 0 on."""
    page: Comb
    """Its bytes in block 0, from 0 on."""
    block_stride: int
    num_blocks: int
    folds: str
    """The reason why two cells may share a byte; empty if none do."""

    def blocks(self, offset: int) -> Blocks:
        return Blocks(replace(self.page, base=offset), self.block_stride, self.num_blocks)


def _look(manifest: Manifest, view: View) -> _Look:
    state, group = manifest.state_by_name[view.state], manifest.group_by_name[view.group]
    page = Comb.of(0, view.steps(), state.item_bytes)
    pages = Comb.of(0, (*view.steps(), (group.num_blocks, view.block_stride)), state.item_bytes)
    try:
        folds = _short_stride(view, group.num_blocks, state.item_bytes) if pages.folds() else ""
    except Tangled:
        folds = _TANGLED
    return _Look(group.name, group.pool, pages, page, view.block_stride, group.num_blocks, folds)


def _short_stride(view: View, num_blocks: int, item_bytes: int) -> str:
    """The reason why a view folds: its shortest stride that makes two cells share a byte."""
    named = [(d.stride, d.num_held, name) for name, axis in view.axes for d in axis.digits]
    taken = sorted(step for step in (*named, (view.block_stride, num_blocks, BLOCK)) if step[1] > 1)
    within = Comb(0, (), item_bytes)
    for stride, num_steps, name in taken:
        comb = replace(within, steps=((stride, num_steps), *within.steps))
        if comb.folds():
            span = f"smaller steps span {counted(within.stop, 'byte')}"
            return f"two cells share a byte: the stride of {name} is {counted(stride, 'byte')}, {span}"
        within = comb
    raise AssertionError("a view overlaps itself, but none of its steps does")


_TANGLED = "the strides are too complex to prove"


def _soundness(manifest: Manifest, rank: Rank, side: str) -> Iterator[Finding]:
    """Check that views are in bounds and one-to-one, and that no two live ones share a byte."""
    num_bytes = {region.name: region.num_bytes for region in rank.regions}
    looks: dict[tuple[object, ...], _Look] = {}
    by_region: dict[str, list[tuple[View, _Look]]] = defaultdict(list)
    for view in rank.views:
        item_bytes = manifest.state_by_name[view.state].item_bytes
        key = (id(view.axes), view.block_stride, view.group, item_bytes)
        look = looks.get(key) or looks.setdefault(key, _look(manifest, view))
        by_region[view.region].append((view, look))
        where = f"{side} rank {rank.rank}, region {view.region}"
        stop, size = view.offset + look.pages.stop, num_bytes[view.region]
        if stop > size:
            note = f"the view ends at byte {stop} of {size}"
            yield Finding(Code.OUT_OF_BOUNDS, state=view.state, field=where, note=note)
        if look.folds:
            yield Finding(Code.CELLS_COLLIDE, state=view.state, field=where, note=look.folds)
    seen: dict[tuple[object, ...], list[_Clash]] = {}
    for region, views in by_region.items():
        # Regions with equal views are checked once.
        region_look = tuple((view.offset, id(look)) for view, look in views)
        if region_look not in seen:
            seen[region_look] = list(
                _clashes([view.offset for view, _ in views], [look for _, look in views])
            )
        for clash in seen[region_look]:
            yield _overlap(f"{side} rank {rank.rank}, region {region}", views, clash)


class _Clash(NamedTuple):
    """Two views of a region, by index, that share a byte; ``None`` if the search was too complex."""

    views: tuple[int, int] | None
    note: str


def _clashes(offsets: Sequence[int], looks: Sequence[_Look]) -> Iterator[_Clash]:
    combs = [replace(look.pages, base=offset) for offset, look in zip(offsets, looks, strict=True)]
    by_group: dict[str, list[int]] = defaultdict(list)
    by_pool: dict[str, list[int]] = defaultdict(list)
    for i, look in enumerate(looks):
        by_group[look.group].append(i)
        by_pool[look.pool].append(i)
    try:
        for members in by_group.values():
            for i, j in overlaps([combs[i] for i in members]):
                yield _Clash((members[i], members[j]), "one group")
        if len(by_group) == 1:
            return
        for members in by_pool.values():
            pages = [looks[i].blocks(offsets[i]) for i in members]
            for i, j in overlaps_apart(pages, [looks[i].group for i in members]):
                strides = pages[i].stride, pages[j].stride
                apart = "" if strides[0] == strides[1] else f", {strides[0]} and {strides[1]} bytes apart"
                yield _Clash((members[i], members[j]), f"two blocks of one pool{apart}")
        for pair in overlaps(combs, [look.pool for look in looks]):
            yield _Clash(pair, "groups of two pools")
    except Tangled:
        yield _Clash(None, _TANGLED)


def _overlap(where: str, views: Sequence[tuple[View, _Look]], clash: _Clash) -> Finding:
    if clash.views is None:
        return Finding(Code.VIEWS_OVERLAP, field=where, note=clash.note)
    a, b = (views[i][0].state for i in clash.views)
    shared = f"{b} uses the same bytes ({clash.note}); two names of one state must be aliases"
    return Finding(Code.VIEWS_OVERLAP, state=a, field=where, note=shared)
