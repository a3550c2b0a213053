"""From a proved plan to byte patterns, once per peer.

A piece and its two views become a *pattern*: the runs that copy the common part of one source block and
one destination block. Addresses are separable, so a pattern is an outer sum: per axis, look up both sides'
offsets of the common coordinates, add them, and merge adjacent runs. The patterns of all states with equal
block strides are merged again, which fuses K with V, values with scales, and layer with layer wherever they
are adjacent on both sides. The cost does not depend on the number of blocks in the pool.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from kvferry.core.box import TOKEN, Box
from kvferry.core.check import BundleKey, Checker, LaneKey, Shape
from kvferry.core.choices import MAX_RUNS_PER_BLOCK
from kvferry.core.manifest import Rank
from kvferry.core.plan import Plan
from kvferry.core.prove import Proof
from kvferry.core.runs import NO_RUNS, Runs, coalesce, place
from kvferry.core.span import Spans
from kvferry.core.state import Group, State
from kvferry.core.view import NOT_HELD, AxisMap, Ints, View, is_inside
from kvferry.errors import Code, Finding, Refused, SpecError

MAX_PATTERN = 1 << 22
"""The most runs of a pattern before neighbours are merged."""
MAX_RUNS_KEPT = 1 << 22
"""The most runs of patterns that a route, or a bundle, caches."""

USUAL_SHAPES = 4
"""Shapes of a lane whose patterns are made and proved when two engines meet: enough for 16 ↔ 64 or 64 ↔ 96.
Others are made and proved when they are first selected."""

K = TypeVar("K")


class Geometry(NamedTuple):
    """Everything that determines a pattern except the views' offsets. Equal for all layers of a kind."""

    src_axes: tuple[tuple[str, AxisMap], ...]
    dst_axes: tuple[tuple[str, AxisMap], ...]
    box: Box
    item_bytes: int


class PieceSet(NamedTuple):
    """All pieces of a bundle with one geometry."""

    geometry: Geometry
    src_places: Ints
    """The first byte of each piece at the source."""
    dst_places: Ints
    state: str
    """The first state, for messages."""


class KeptRuns(Generic[K]):
    """A cache of runs, cleared when it exceeds ``MAX_RUNS_KEPT``."""

    def __init__(self) -> None:
        self._runs: dict[K, Runs] = {}
        self._num_runs = 0

    def get(self, key: K, make: Callable[[K], Runs]) -> Runs:
        runs = self._runs.get(key)
        if runs is None:
            runs = make(key)
            self._num_runs += len(runs) + 1
            if self._num_runs > MAX_RUNS_KEPT:
                self._runs.clear()
                self._num_runs = len(runs) + 1
            self._runs[key] = runs
        return runs


class Patterns:
    def __init__(self) -> None:
        self._made: KeptRuns[tuple[Geometry, Shape]] = KeptRuns()
        self._offsets: dict[AxisMap, Ints] = {}

    def of(self, geometry: Geometry, shape: Shape) -> Runs:
        """The runs that copy the common part of two blocks, relative to the views' offsets."""
        return self._made.get((geometry, shape), lambda key: _pattern(*key, self._offsets_of))

    def _offsets_of(self, axis: AxisMap) -> Ints:
        if axis not in self._offsets:
            self._offsets[axis] = axis.offsets()
        return self._offsets[axis]


@dataclass(frozen=True, eq=False)
class Bundle:
    """The pieces from one source rank with equal block strides, as one pattern per shape."""

    key: BundleKey
    piece_sets: tuple[PieceSet, ...]
    patterns: Patterns = field(repr=False)
    """The patterns of the whole route."""
    _fused_patterns: KeptRuns[Shape] = field(default_factory=KeptRuns, repr=False)

    def pattern(self, shape: Shape) -> Runs:
        """The runs for one segment of this shape between block 0 and block 0."""
        return self._fused_patterns.get(shape, self._fused)

    def _fused(self, shape: Shape) -> Runs:
        patterns = [self.patterns.of(each.geometry, shape) for each in self.piece_sets]
        num_pieces = (len(each.src_places) for each in self.piece_sets)
        num_runs = sum(len(one) * num for one, num in zip(patterns, num_pieces, strict=True))
        if num_runs > MAX_PATTERN:
            note = f"{num_runs:,} runs per block for all states together, the limit is {MAX_PATTERN:,}"
            raise Refused(Finding(Code.TOO_MANY_RUNS, state=self.piece_sets[0].state, note=note))
        placed = [
            (
                np.add.outer(each.src_places, one.src).ravel(),
                np.add.outer(each.dst_places, one.dst).ravel(),
                np.tile(one.num_bytes, len(each.src_places)),
            )
            for one, each in zip(patterns, self.piece_sets, strict=True)
        ]
        return coalesce(*(np.concatenate(column) for column in zip(*placed, strict=True)))


@dataclass(frozen=True, eq=False)
class Lane:
    """The transfer from one source group to one destination group in cells of one kind."""

    key: LaneKey
    src_group: Group
    dst_group: Group
    period: int
    """The period of the pieces on the token axis, in cells; 1 without context parallelism."""
    src_period: int
    """The period of the source ranks: the source block table must start at a multiple."""
    dst_period: int
    bundles: tuple[Bundle, ...]
    blanks: tuple[Bundle, ...]
    """The destination's views paired with themselves, for zeroing."""


@dataclass(frozen=True, eq=False)
class Route:
    """A proved plan as byte patterns, without block ids. Made once per peer, used for every request.

    >>> lower("a plan")
    Traceback (most recent call last):
    kvferry.errors.SpecError: lower needs a proof: lower(prove(plan)), got str
    """

    plan: Plan
    lanes: tuple[Lane, ...]
    checker: Checker = field(repr=False)
    """Checks its patterns and every selection."""

    def __repr__(self) -> str:
        groups = (f"{lane.src_group.name} -> {lane.dst_group.name}" for lane in self.lanes)
        return f"Route({self.plan!r}, lanes: {', '.join(groups)})"


def lower(proof: Proof, *, max_runs_per_block: int = MAX_RUNS_PER_BLOCK) -> Route:
    """Turn a proved plan into patterns; raise ``Refused`` if a pattern has too many runs.

    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> from kvferry import plan, prove
    >>> lower(prove(plan(src, dst, 0)), max_runs_per_block=1)
    Traceback (most recent call last):
    kvferry.errors.Refused: too-many-runs: layers.0.linear/conv.q: 3 runs per block of 1 cells, ...
    """
    if not isinstance(proof, Proof):
        raise SpecError(f"lower needs a proof: lower(prove(plan)), got {type(proof).__name__}")
    plan, patterns = proof.plan, Patterns()
    dst = plan.dst.rank(plan.dst_rank)
    by_lane: dict[LaneKey, list[_Move]] = defaultdict(list)
    for piece in plan.pieces:
        src_view, dst_view = plan.views(piece)
        state = plan.dst.state_by_name[piece.state]
        key = LaneKey(src_view.group, dst_view.group, state.kind, state.tokens_per_cell, state.tail)
        by_lane[key].append(_Move(plan.src.rank(piece.src_rank), src_view, dst, dst_view, piece.box, state))
    lanes = []
    for key, moves in by_lane.items():
        period = lcm(*(move.box.period for move in moves))
        by_state = {move.dst_view.state: move for move in moves}
        dst_period = lcm(*(dst.boxes[name].period for name in by_state))
        blanks = [
            _Move(dst, move.dst_view, dst, move.dst_view, dst.boxes[name], move.state, is_blank=True)
            for name, move in by_state.items()
        ]
        lane = Lane(
            key,
            plan.src.group_by_name[key.src_group],
            plan.dst.group_by_name[key.dst_group],
            period,
            lcm(*(move.src.boxes[move.src_view.state].period for move in moves)),
            dst_period,
            _bundles(moves, period, patterns),
            _bundles(blanks, dst_period, patterns),
        )
        _check_budget(lane, max_runs_per_block)
        lanes.append(lane)
    return Route(plan, tuple(lanes), _check(proof, lanes))


def _check(proof: Proof, lanes: Sequence[Lane]) -> Checker:
    """Prove the lanes, and the patterns of a long request."""
    plan = proof.plan
    checker = Checker(plan.src, plan.dst, plan.dst_rank, proof.states)
    checker.check_lanes([lane.key for lane in lanes])
    for lane in lanes:
        for shape in checker.shapes(lane.key, USUAL_SHAPES):
            usual = shape._replace(phase=shape.phase % lane.period)
            checker.check_patterns(lane.key, usual, {each.key: each.pattern(usual) for each in lane.bundles})
    return checker


class _Move(NamedTuple):
    """A box of a state, and its views at both ends."""

    src: Rank
    src_view: View
    dst: Rank
    dst_view: View
    box: Box
    state: State
    """The destination's."""
    is_blank: bool = False


def _bundles(moves: Iterable[_Move], period: int, patterns: Patterns) -> tuple[Bundle, ...]:
    """Moves grouped by source rank and block strides, then by geometry."""
    bundles: dict[BundleKey, dict[Geometry, list[_Move]]] = {}
    known: dict[tuple[int, ...], list[_Move]] = {}
    for move in moves:
        src_view, dst_view, state = move.src_view, move.dst_view, move.state
        key = BundleKey(move.src.rank, src_view.block_stride, dst_view.block_stride, move.is_blank)
        # Layers share their axes and boxes: comparing identities is faster than comparing digits.
        kind = (*key, id(src_view.axes), id(dst_view.axes), id(move.box), state.item_bytes)
        if kind not in known:
            geometry = Geometry(src_view.axes, dst_view.axes, move.box.over(period), state.item_bytes)
            known[kind] = bundles.setdefault(key, {}).setdefault(geometry, [])
        known[kind].append(move)
    return tuple(
        Bundle(key, tuple(_piece_set(*each) for each in by_geometry.items()), patterns)
        for key, by_geometry in bundles.items()
    )


def _piece_set(geometry: Geometry, moves: Sequence[_Move]) -> PieceSet:
    src_places = [place(m.src.region_index[m.src_view.region], m.src_view.offset) for m in moves]
    dst_places = [place(m.dst.region_index[m.dst_view.region], m.dst_view.offset) for m in moves]
    return PieceSet(geometry, np.array(src_places), np.array(dst_places), moves[0].state.name)


def _check_budget(lane: Lane, budget: int) -> None:
    """Refuse a lane with too many runs per block."""
    src_cells = lane.src_group.tokens_per_block // lane.key.tokens_per_cell
    dst_cells = lane.dst_group.tokens_per_block // lane.key.tokens_per_cell
    shape = Shape(0, 0, min(src_cells, dst_cells))
    nests = dst_cells % src_cells == 0 or src_cells % dst_cells == 0
    segments = -(-dst_cells // shape.num_cells) + (not nests)
    for bundle in lane.bundles:
        for each in bundle.piece_sets:
            runs = len(bundle.patterns.of(each.geometry, shape)) * segments
            if runs > budget:
                note = f"{runs} runs per block of {dst_cells} cells, the budget is {budget}"
                raise Refused(Finding(Code.TOO_MANY_RUNS, state=each.state, note=note))
        bundle.pattern(shape)  # checks the limit for all states together, and fills the cache


def _pattern(geometry: Geometry, shape: Shape, offsets: Callable[[AxisMap], Ints]) -> Runs:
    axes = zip(geometry.box.axes, geometry.src_axes, geometry.dst_axes, strict=True)
    steps = [
        _token_steps(offsets(src_map), offsets(dst_map), spans, geometry.box.period, shape)
        if name == TOKEN
        else _axis_steps(offsets(src_map), src_map.start, offsets(dst_map), dst_map.start, spans)
        for (name, spans), (_, src_map), (_, dst_map) in axes
    ]
    runs = Runs(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([geometry.item_bytes]))
    for src, dst in sorted(steps, key=_finest):
        if not len(src):
            return NO_RUNS
        if len(src) * len(runs) > MAX_PATTERN:
            note = f"more than {MAX_PATTERN:,} runs per block before merging"
            raise Refused(Finding(Code.TOO_MANY_RUNS, field=str(geometry.box), note=note))
        runs = coalesce(
            np.add.outer(src, runs.src).ravel(),
            np.add.outer(dst, runs.dst).ravel(),
            np.tile(runs.num_bytes, len(src)),
        )
    return runs


def _axis_steps(src: Ints, src_start: int, dst: Ints, dst_start: int, spans: Spans) -> tuple[Ints, Ints]:
    """Both sides' byte offsets of the coordinates in ``spans``, from the offsets of all coordinates."""
    at = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    return _held(src[at - src_start]), _held(dst[at - dst_start])


def _token_steps(src: Ints, dst: Ints, spans: Spans, period: int, shape: Shape) -> tuple[Ints, Ints]:
    """Both sides' byte offsets of the cells of a segment that belong to the piece."""
    cells = np.arange(shape.num_cells)
    if period > 1:
        # Searching the spans is cheaper than a table of the period, which can be long.
        residues = (cells + shape.phase) % period
        cells = cells[is_inside(spans, residues)]
    return _held(src[cells + shape.src_cell]), _held(dst[cells + shape.dst_cell])


def _held(offsets: Ints) -> Ints:
    if (offsets == NOT_HELD).any():
        raise AssertionError("a proved piece reached a cell that its rank does not hold")
    return offsets


def _finest(steps: tuple[Ints, Ints]) -> int:
    """The smallest step at the destination: fine axes come first, so that runs are merged early."""
    gaps: Sequence[int] = np.diff(np.sort(steps[1])).tolist()
    return min((gap for gap in gaps if gap), default=0)
