"""Proves the lowered program, and each request's selection, against the two manifests.

The checker computes the source of every byte from the manifests with its own arithmetic (``addresses``,
``relation``), and shares no code with ``plan``, ``lower`` and ``select``:

* A **pattern** copies the common cells of one source block and one destination block. The patterns of a
  lane, over all source ranks, must write each byte of these cells once, from the source byte of the same
  state, cell and coordinates, and no other byte.
* A **selection** repeats patterns over pairs of blocks. Both blocks of a pair must hold the same cells of
  the request; all pairs together cover the need, do not write kept cells, and clear the rest of the blocks.

The cost does not depend on the size of the pool. Each pattern is checked once: common ones when two engines
meet, others when they are first selected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from kvferry.core.addresses import (
    BlockPlaces,
    Intervals,
    Ints,
    both,
    cells_of_tokens,
    intervals,
    minus,
    needed_cells,
)
from kvferry.core.box import TOKEN
from kvferry.core.choices import Slack
from kvferry.core.manifest import Manifest, Rank
from kvferry.core.relation import CommonCells, Relation
from kvferry.core.request import Request
from kvferry.core.runs import REGION_SHIFT, Runs
from kvferry.core.span import Span
from kvferry.core.state import Group, Kind, State, Tail
from kvferry.core.view import View
from kvferry.errors import Code, Finding, Refused, RequestError

MAX_CHECKED = 4096
"""The most shapes whose check is remembered; then all are forgotten and checked again at their next use."""


class LaneKey(NamedTuple):
    """The transfer from one source group to one destination group in cells of one kind."""

    src_group: str
    dst_group: str
    kind: Kind
    tokens_per_cell: int
    tail: Tail


class Shape(NamedTuple):
    """The common part of a source block and a destination block, in cells."""

    src_cell: int
    """Its first cell in the source block."""
    dst_cell: int
    """Its first cell in the destination block."""
    num_cells: int
    phase: int = 0
    """Its first cell modulo the period of the token axis."""


class BundleKey(NamedTuple):
    """The part of a lane that one source rank sends with one block stride on either side."""

    src_rank: int
    src_stride: int
    """Bytes from one source block to the next."""
    dst_stride: int
    is_blank: bool = False
    """Whether it is cleared instead of read; then its source is the destination itself."""


class Claim(NamedTuple):
    """The origin that a term of a selection claims, for the checker to verify."""

    lane: LaneKey
    bundle: BundleKey
    shape: Shape


class CheckedTerm(Protocol):
    """A term (``core.product``): a pattern, repeated for pairs of blocks."""

    @property
    def claim(self) -> Claim | None: ...
    @property
    def pattern(self) -> Runs: ...
    @property
    def steps(self) -> Ints: ...
    @property
    def block_bytes(self) -> int: ...


TermsByShape = dict[Shape, dict[BundleKey, CheckedTerm]]


class _Alike(NamedTuple):
    """States of a bundle that differ only in where their views begin."""

    src_view: View
    dst_view: View
    item_bytes: int
    src_places: Ints
    dst_places: Ints


@dataclass(frozen=True, eq=False)
class _Lane:
    key: LaneKey
    src_group: Group
    dst_group: Group
    states: list[tuple[State, State]] = field(default_factory=list)
    """(the source's, the destination's)."""


class Checker:
    """Checks all transfers from one source engine to one destination rank.

    ``states``: the states that the rank needs, by its own names; by default all that it holds.
    """

    def __init__(
        self, src: Manifest, dst: Manifest, dst_rank: int, states: Collection[str] | None = None
    ) -> None:
        self._src, self._dst = src, dst
        self._dst_rank = next(rank for rank in dst.ranks if rank.rank == dst_rank)
        self._src_ranks = {rank.rank: (rank, {view.state: view for view in rank.views}) for rank in src.ranks}
        self._dst_views = {view.state: view for view in self._dst_rank.views}
        self._common = CommonCells()
        self._alike_by_bundle: dict[tuple[LaneKey, BundleKey], list[_Alike]] = {}
        self._checked: dict[tuple[LaneKey, Shape, bool], dict[BundleKey, Runs]] = {}
        """The checked patterns, compared by identity."""
        self._lanes: dict[LaneKey, _Lane] = {}
        self._sort_states(states)

    # -- which states, by which lanes ------------------------------------------------------------------

    def _sort_states(self, wanted: Collection[str] | None) -> None:
        by_name = {name: state for state in self._src.states for name in (state.name, *state.aliases)}
        src_groups = {view.state: view.group for rank in self._src.ranks for view in rank.views}
        of_src, of_dst = ({group.name: group for group in m.groups} for m in (self._src, self._dst))
        left = set(self._dst_views) if wanted is None else set(wanted)
        for state in self._dst.states:
            names = state.name, *state.aliases
            if left.isdisjoint(names) or state.name not in self._dst_views:
                continue
            left.difference_update(names)
            source = self._source_of(state, [by_name[name] for name in names if name in by_name])
            if source.name not in src_groups:
                raise Refused(Finding(Code.NOT_HELD, state=state.name, note="no source rank holds it"))
            groups = src_groups[source.name], self._dst_views[state.name].group
            key = LaneKey(*groups, state.kind, state.tokens_per_cell, state.tail)
            if key not in self._lanes:
                self._lanes[key] = _Lane(key, of_src[groups[0]], of_dst[groups[1]])
            self._lanes[key].states.append((source, state))
        if left:
            raise Refused(
                *(Finding(Code.MISSING_STATE, state=n, note="not on this rank") for n in sorted(left))
            )

    @staticmethod
    def _source_of(state: State, found: Sequence[State]) -> State:
        """The source state with a name of this one, which must have the same format."""
        if not found or any(other is not found[0] for other in found):
            note = "several states of the source have its names" if found else "the source has no such state"
            raise Refused(Finding(Code.MISSING_STATE, state=state.name, note=note))
        ours, theirs = (
            (s.kind, s.dtype, s.tokens_per_cell, s.encoding, s.tail, s.item_bytes) for s in (state, found[0])
        )
        our_sizes, their_sizes = ({(a.name, a.size) for a in s.axes} for s in (state, found[0]))
        if ours != theirs or our_sizes != their_sizes:
            raise Refused(Finding(Code.STATE_DIFFERS, state=state.name))
        return found[0]

    def check_lanes(self, keys: Sequence[LaneKey]) -> None:
        """Raise unless these are the lanes of the needed states."""
        for key in sorted(self._lanes.keys() ^ set(keys)):
            code = Code.GAP if key in self._lanes else Code.NOT_NEEDED
            raise Refused(Finding(code, field=f"lane {key.src_group} -> {key.dst_group}"))

    def shapes(self, key: LaneKey, limit: int) -> list[Shape]:
        """The first shapes of a long request whose tables both begin at its first token."""
        lane, found, at = self._lanes[key], list[Shape](), 0
        sizes = [group.tokens_per_block // key.tokens_per_cell for group in (lane.src_group, lane.dst_group)]
        while len(found) < limit and (at == 0 or any(at % size for size in sizes)):
            stop = min(at - at % size + size for size in sizes)
            found.append(Shape(at % sizes[0], at % sizes[1], stop - at, at))
            at = stop
        return found

    # -- patterns --------------------------------------------------------------------------------------

    def check_patterns(self, key: LaneKey, shape: Shape, patterns: Mapping[BundleKey, Runs]) -> None:
        """Raise ``Refused`` unless these patterns of a lane together copy (or clear) the cells of a shape."""
        is_blank = any(bundle.is_blank for bundle in patterns)
        present = {bundle: runs for bundle, runs in patterns.items() if len(runs.dst)}
        known = self._checked.get((key, shape, is_blank))
        is_known = known is not None and known.keys() == present.keys()
        if known is not None and is_known and all(known[bundle] is runs for bundle, runs in present.items()):
            return
        self._check_patterns(self._lanes[key], shape, present)
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()
        self._checked[key, shape, is_blank] = present

    def _check_patterns(self, lane: _Lane, shape: Shape, patterns: Mapping[BundleKey, Runs]) -> None:
        for bundle, runs in patterns.items():
            outside = self._relation(lane, bundle, shape).first_outside(runs)
            if outside is not None:
                self._refuse(Code.WRONG_SOURCE, lane, shape, outside)
        # Every written byte is needed and has the right source. If none is written twice, equal numbers of
        # written and needed bytes mean that nothing is missing.
        needed = self._needed_bytes(lane, shape)
        for stride in {bundle.dst_stride for bundle in patterns} | needed.keys():
            some = [runs for bundle, runs in patterns.items() if bundle.dst_stride == stride]
            written = Relation.of([(runs.dst, runs.dst, runs.num_bytes) for runs in some])
            twice = written.dst[1:] < written.dst[:-1] + written.num_bytes[:-1]
            if twice.any():
                self._refuse(Code.WRITTEN_TWICE, lane, shape, int(written.dst[1:][twice][0]))
            if int(written.num_bytes.sum()) != needed.get(stride, 0):
                own = shape._replace(src_cell=shape.dst_cell)
                blank = BundleKey(self._dst_rank.rank, stride, stride, is_blank=True)
                wanted = self._relation(lane, blank, own)
                missing = written.first_outside(Runs(wanted.dst, wanted.dst, wanted.num_bytes))
                self._refuse(Code.GAP, lane, shape, missing or 0)

    def _needed_bytes(self, lane: _Lane, shape: Shape) -> dict[int, int]:
        """Bytes of the cells of a shape on the destination rank, by block stride."""
        needed: dict[int, int] = {}
        known: dict[int, int] = {}
        for _, state in lane.states:
            view = self._dst_views[state.name]
            if id(view.axes) not in known:
                num_cells = shape.num_cells
                for axis in (axis for name, axis in view.axes if name == TOKEN):
                    edges = np.searchsorted(
                        self._common.held(axis)[0], (shape.dst_cell, shape.dst_cell + num_cells)
                    )
                    num_cells = int(edges[1] - edges[0])
                known[id(view.axes)] = num_cells * self._common.num_items(view)
            needed.setdefault(view.block_stride, 0)
            needed[view.block_stride] += known[id(view.axes)] * state.item_bytes
        return needed

    def _relation(self, lane: _Lane, bundle: BundleKey, shape: Shape) -> Relation:
        parts = []
        for alike in self._alike(lane, bundle):
            one = self._common.relation(alike.src_view, alike.dst_view, alike.item_bytes, shape[:3])
            src, dst = np.add.outer(alike.src_places, one.src), np.add.outer(alike.dst_places, one.dst)
            parts.append((src.ravel(), dst.ravel(), np.tile(one.num_bytes, len(src))))
        return Relation.of(parts)

    def _alike(self, lane: _Lane, bundle: BundleKey) -> list[_Alike]:
        found = self._alike_by_bundle.get((lane.key, bundle))
        if found is not None:
            return found
        if bundle.is_blank:
            rank, views = self._dst_rank, self._dst_views
        elif bundle.src_rank in self._src_ranks:
            rank, views = self._src_ranks[bundle.src_rank]
        else:
            return []
        src_regions, dst_regions = _region_places(rank), _region_places(self._dst_rank)
        by_kind: dict[tuple[int, int, int], list[tuple[View, View]]] = defaultdict(list)
        for source, state in lane.states:
            src_view = views.get((state if bundle.is_blank else source).name)
            dst_view = self._dst_views[state.name]
            if src_view is None or (src_view.block_stride, dst_view.block_stride) != bundle[1:3]:
                continue
            by_kind[id(src_view.axes), id(dst_view.axes), state.item_bytes].append((src_view, dst_view))
        found = []
        for (_, _, item_bytes), ends in by_kind.items():
            src_places = np.array([src_regions[src.region] + src.offset for src, _ in ends])
            dst_places = np.array([dst_regions[dst.region] + dst.offset for _, dst in ends])
            found.append(_Alike(*ends[0], item_bytes, src_places, dst_places))
        self._alike_by_bundle[lane.key, bundle] = found
        return found

    def _refuse(self, code: Code, lane: _Lane, shape: Shape, place: int) -> NoReturn:
        """Raise with the state at a destination byte of block 0."""
        regions, offset = _region_places(self._dst_rank), place & ((1 << REGION_SHIFT) - 1)
        views = [self._dst_views[state.name] for _, state in lane.states]
        there = [view for view in views if regions[view.region] == place - offset and view.offset <= offset]
        state = max(there, key=lambda view: view.offset).state if there else ""
        where = f"lane {lane.key.src_group} -> {lane.key.dst_group}"
        note = f"the lowered program and the manifests disagree about byte {offset} of block 0 ({shape})"
        raise Refused(Finding(code, state=state, field=where, note=note))

    # -- requests --------------------------------------------------------------------------------------

    def check_selection(
        self,
        request: Request,
        reads: Mapping[int, Sequence[CheckedTerm]],
        zeros: Sequence[CheckedTerm],
        slack: Slack,
    ) -> None:
        """Raise ``RequestError`` unless a selection moves exactly the bytes that a request needs."""
        by_lane: dict[tuple[LaneKey, bool], TermsByShape] = {}
        for src_rank, terms in reads.items():
            _sort_terms(by_lane, terms, src_rank, is_blank=False)
        _sort_terms(by_lane, zeros, self._dst_rank.rank, is_blank=True)
        for key, _ in by_lane:
            if key not in self._lanes:
                raise _not_proved(key.dst_group, "bytes are transferred in a lane that is not needed")
        for key, lane in self._lanes.items():
            terms_by_shape = by_lane.get((key, False), {}), by_lane.get((key, True), {})
            self._check_lane(lane, request, *terms_by_shape, slack)

    def _check_lane(
        self, lane: _Lane, request: Request, reads: TermsByShape, zeros: TermsByShape, slack: Slack
    ) -> None:
        name, state, is_paged = lane.dst_group.name, lane.states[0][1], lane.key.kind is Kind.PAGED
        need = needed_cells(request.need, name, state)
        if not need:
            if reads or zeros:
                raise _not_proved(name, "bytes are transferred although none are needed")
            return
        src = BlockPlaces(lane.src_group, request.src, lane.key.tokens_per_cell, "src")
        dst = BlockPlaces(lane.dst_group, request.dst, lane.key.tokens_per_cell, "dst")
        moved = self._cells_of(lane, reads, src, dst, need)
        cleared = self._cells_of(lane, zeros, dst, dst, need)
        kept = cells_of_tokens(request.kept.get(name, ()), state) if is_paged else []
        kept, touched = dst.kept_cells(kept, need), dst.touched(need)
        written = intervals(Span(*each) for each in (*moved, *cleared))
        rules = {
            "are both needed and kept": both(need, kept),
            "are needed, and are not selected": self._held_here(lane, dst, minus(need, moved)),
            "are both copied and cleared": both(moved, cleared),
            "are needed, and are cleared": both(cleared, need),
            "are kept, and are written": both(written, kept),
            "are written, but are in no needed block": minus(written, touched),
        }
        if is_paged and slack is Slack.CLEAR:
            stale = minus(touched, intervals(Span(*each) for each in (*written, *kept)))
            rules["of its blocks are neither written nor kept"] = self._held_here(lane, dst, stale)
        for what, cells in rules.items():
            if cells:
                raise _not_proved(name, f"cells [{cells[0][0]}, {cells[0][1]}) {what}")

    def _cells_of(
        self, lane: _Lane, shapes: TermsByShape, src: BlockPlaces, dst: BlockPlaces, need: Intervals
    ) -> Intervals:
        """The cells that some terms write; raises if one is written twice or read from another cell."""
        name, starts, stops = lane.dst_group.name, list[Ints](), list[Ints]()
        for shape, terms in shapes.items():
            if not src.has_room(shape.src_cell, shape.num_cells):
                raise _not_proved(name, f"a segment leaves its block: {shape}")
            try:
                self.check_patterns(lane.key, shape, {bundle: term.pattern for bundle, term in terms.items()})
            except Refused as error:
                raise _not_proved(name, str(error)) from error
            (src_ids, dst_ids), *others = (_block_ids(name, *item) for item in terms.items())
            if not all(np.array_equal(src_ids, a) and np.array_equal(dst_ids, b) for a, b in others):
                raise _not_proved(name, "the source ranks send different blocks")
            cells = dst.cells_at(dst_ids, shape.dst_cell, need)
            if (src.cells_at(src_ids, shape.src_cell, need) != cells).any():
                raise _not_proved(name, "a block is read for the tokens of another block")
            starts.append(cells)
            stops.append(cells + shape.num_cells)
        if not starts:
            return []
        start, stop = np.sort(np.concatenate(starts)), np.sort(np.concatenate(stops))
        if (start[1:] < stop[:-1]).any():
            raise _not_proved(name, "a cell is written twice")
        is_edge = start[1:] != stop[:-1]
        first, last = (
            [int(start[0]), *start[1:][is_edge].tolist()],
            [*stop[:-1][is_edge].tolist(), int(stop[-1])],
        )
        return list(zip(first, last, strict=True))

    def _held_here(self, lane: _Lane, dst: BlockPlaces, cells: Intervals) -> Intervals:
        """The cells that this rank holds in part: context-parallel ranks alternate."""
        if not cells or lane.key.kind is Kind.RECURRENT:
            return cells
        is_held = np.zeros(dst.num_cells, bool)
        for _, state in lane.states:
            for name, axis in self._dst_views[state.name].axes:
                if name == TOKEN:
                    is_held[self._common.held(axis)[0]] = True
        each = np.concatenate([np.arange(start, stop) for start, stop in cells])
        return [(cell, cell + 1) for cell in each[is_held[(each - dst.first) % dst.num_cells]].tolist()]


def check_list(terms: Sequence[CheckedTerm], runs: Runs) -> None:
    """Raise unless a list of runs equals these terms, neighbours merged."""
    parts = [
        (
            np.add.outer(term.pattern.src, term.steps[0]).ravel(),
            np.add.outer(term.pattern.dst, term.steps[1]).ravel(),
            np.repeat(term.pattern.num_bytes, term.steps.shape[1]),
        )
        for term in terms
    ]
    if not Relation.of(parts).is_list(runs):
        raise _not_proved("of the whole request", "the list of runs differs from the selection")


def _not_proved(group: str, detail: str) -> RequestError:
    return RequestError("not-proved", group, detail)


def _region_places(rank: Rank) -> dict[str, int]:
    return {region.name: index << REGION_SHIFT for index, region in enumerate(rank.regions)}


def _sort_terms(
    by_lane: dict[tuple[LaneKey, bool], TermsByShape],
    terms: Sequence[CheckedTerm],
    rank: int,
    *,
    is_blank: bool,
) -> None:
    for term in terms:
        claim = term.claim
        if claim is None or claim.bundle.src_rank != rank or claim.bundle.is_blank != is_blank:
            raise _not_proved("unknown", f"a part of the selection has an unknown claim: {claim}")
        shapes = by_lane.setdefault((claim.lane, is_blank), {})
        if shapes.setdefault(claim.shape, {}).setdefault(claim.bundle, term) is not term:
            raise _not_proved(claim.lane.dst_group, "one part is selected twice")


def _block_ids(group: str, bundle: BundleKey, term: CheckedTerm) -> tuple[Ints, Ints]:
    """The source and destination blocks of a term."""
    strides = np.array(bundle[1:3])[:, None]
    ids = term.steps // strides
    if (ids * strides != term.steps).any():
        raise _not_proved(group, "a step is not a whole number of blocks")
    if term.block_bytes and (
        {term.block_bytes} != {bundle.src_stride, bundle.dst_stride}
        or (term.pattern.num_bytes != term.block_bytes).any()
    ):
        raise _not_proved(group, "non-adjacent blocks are joined")
    return ids[0], ids[1]
