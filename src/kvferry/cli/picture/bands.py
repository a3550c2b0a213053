"""The transfers between ranks: states as rows, ranks as columns, a band per pair of ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.cli.asked import Asked, Billed
from kvferry.cli.output import cell_words, kind_of, together
from kvferry.core.box import TOKEN, Box
from kvferry.core.check import LaneKey
from kvferry.core.lower import Lane, Route
from kvferry.core.manifest import Manifest
from kvferry.core.plan import Piece
from kvferry.core.request import Request
from kvferry.core.sample import sample_request
from kvferry.core.select import select
from kvferry.core.state import Group, Kind, State
from kvferry.errors import counted


@dataclass(frozen=True, slots=True)
class BandPart:
    """The same part of some states, between the same ranks."""

    states: str
    """Their names at the destination, joined."""
    box: str
    """The part of each of them."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Band:
    src_rank: int
    dst_rank: int
    parts: tuple[BandPart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


Parts = tuple[tuple[float, float], ...]
"""The parts of a state that one rank holds: intervals within [0, 1] of the axis by which it is split."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How the ranks of one engine hold the states of one row."""

    sentence: str
    is_replicated: bool
    """Whether several ranks hold the same part."""
    shares: Mapping[int, Parts]
    """By rank."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """States of one kind, held alike on both sides."""

    label: str
    names: tuple[str, ...]
    cell: str
    tokens: str
    """The tokens that the request transfers."""
    src: Holding
    dst: Holding
    bands: tuple[Band, ...]

    @property
    def num_bytes(self) -> int:
        return sum(band.num_bytes for band in self.bands)

    @property
    def parts(self) -> tuple[tuple[Band, BandPart], ...]:
        return tuple((band, part) for band in self.bands for part in band.parts)


def state_rows(asked: Asked, billed: Billed) -> tuple[StateRow, ...]:
    """The rows of a proved pair; their bytes are exactly those of its bill."""
    src, dst = billed.source, billed.destination
    request = sample_request(src, dst, billed.tokens, num_kept=asked.kept, placement=asked.placement)
    moved: dict[str, list[tuple[Piece, int]]] = defaultdict(list)
    for rank in billed.bill.ranks:
        for piece, num_bytes in piece_bytes(rank.route, request):
            moved[piece.state].append((piece, num_bytes))
    alike: dict[object, list[State]] = defaultdict(list)
    for state in dst.states:
        if state.name in moved:
            alike[_likeness(state, src, dst)].append(state)
    return tuple(_row(states, billed, moved) for states in alike.values())


def piece_bytes(route: Route, request: Request) -> Iterator[tuple[Piece, int]]:
    """The bytes of each piece for a request, including copied slack."""
    pieces: dict[object, list[Piece]] = defaultdict(list)
    for piece in route.plan.pieces:
        pieces[_lane_of(route, piece), piece.src_rank].append(piece)
    moved: Counter[tuple[LaneKey, int]] = Counter()
    for src_rank, product in select(route, request).products.items():
        for term in product.terms:
            if term.claim is not None:
                moved[term.claim.lane, src_rank] += term.total_bytes
    lanes = {lane.key: lane for lane in route.lanes}
    for (key, src_rank), num_bytes in moved.items():
        mine = pieces[key, src_rank]
        yield from zip(mine, _shared_out(num_bytes, mine, lanes[key], route), strict=True)


def _lane_of(route: Route, piece: Piece) -> LaneKey:
    src_view, dst_view = route.plan.views(piece)
    state = route.plan.dst.state_by_name[piece.state]
    return LaneKey(src_view.group, dst_view.group, state.kind, state.tokens_per_cell, state.tail)


def _shared_out(total: int, pieces: Sequence[Piece], lane: Lane, route: Route) -> Iterator[int]:
    """Divide a lane's bytes among its pieces by their cells; the shares add up to the total."""
    states = route.plan.dst.state_by_name
    weights = [p.box.over(lane.period).num_cells() * states[p.state].item_bytes for p in pieces]
    whole, passed = sum(weights), 0
    for weight in weights:
        before, passed = total * passed // whole, passed + weight
        yield total * passed // whole - before


def _likeness(state: State, src: Manifest, dst: Manifest) -> object:
    """Equal for states of one row."""
    source = src.find(state)
    held = id(src.holders[source.name]) if source else 0
    what = (state.axes, state.dtype, state.item_bytes, state.kind, state.tokens_per_cell)
    return (kind_of(state.name), what, _group(dst, state).window, held, id(dst.holders[state.name]))


def _group(manifest: Manifest, state: State) -> Group:
    view = next(rank.by_state[state.name] for rank in manifest.ranks if state.name in rank.by_state)
    return manifest.group_by_name[view.group]


def _row(states: Sequence[State], billed: Billed, moved: dict[str, list[tuple[Piece, int]]]) -> StateRow:
    src, dst, first = billed.source, billed.destination, states[0]
    names = tuple(state.name for state in states)
    source = src.find(first)
    return StateRow(
        together(names),
        names,
        cell_words(first) + (f", shared by {1 + len(first.aliases)} layers" if first.aliases else ""),
        _token_words(first, _group(dst, first), billed.tokens),
        _holding(src, source or first),
        _holding(dst, first),
        tuple(_bands([each for name in names for each in moved[name]])),
    )


def _bands(moved: Sequence[tuple[Piece, int]]) -> Iterator[Band]:
    pairs: dict[tuple[int, int], dict[str, list[tuple[str, int]]]] = defaultdict(lambda: defaultdict(list))
    for piece, num_bytes in moved:
        pairs[piece.src_rank, piece.dst_rank][str(piece.box)].append((piece.state, num_bytes))
    for (src_rank, dst_rank), boxes in sorted(pairs.items()):
        parts = (
            BandPart(together([name for name, _ in some]), box, sum(size for _, size in some))
            for box, some in boxes.items()
        )
        yield Band(src_rank, dst_rank, tuple(parts))


def _token_words(state: State, group: Group, num_tokens: int) -> str:
    if state.kind is Kind.RECURRENT:
        return "one value per request"
    cell = f", one cell per {state.tokens_per_cell} tokens" if state.tokens_per_cell > 1 else ""
    if group.window and group.window < num_tokens:
        return f"the last {counted(group.window, 'token')}{cell}"
    return cell.removeprefix(", ") or "one cell per token"


# -- the holders of a state --------------------------------------------------------------------------


def _holding(manifest: Manifest, state: State) -> Holding:
    boxes = dict(manifest.holders[state.name].boxes)
    axis = _split_axis(list(boxes.values()))
    sizes = {each.name: each.size for each in state.axes}
    shares = {
        rank: _parts(boxes[rank], axis, sizes.get(axis, 1)) if rank in boxes else ()
        for rank in (each.rank for each in manifest.ranks)
    }
    distinct = len(set(boxes.values()))
    return Holding(_sentence(len(boxes), distinct, axis), distinct < len(boxes), shares)


def _sentence(num_ranks: int, num_parts: int, axis: str) -> str:
    if num_ranks == 1:
        return "whole, on one rank"
    if num_parts == 1:
        return f"whole on each of {num_ranks} ranks"
    if num_parts == num_ranks:
        return f"split by {axis} over {num_ranks} ranks"
    return f"{num_parts} parts by {axis}, repeated over {num_ranks} ranks"


def _split_axis(boxes: Sequence[Box]) -> str:
    """The axis with the most different parts; empty if all boxes are equal."""
    different: dict[str, set[object]] = defaultdict(set)
    for box in boxes:
        for name, spans in box.axes:
            different[name].add((spans, box.period))
    most = max(different, key=lambda name: len(different[name]), default="")
    return most if most and len(different[most]) > 1 else ""


def _parts(box: Box, axis: str, size: int) -> Parts:
    if not axis:
        return ((0.0, 1.0),)
    whole = box.period if axis == TOKEN else size
    return tuple((span.start / whole, span.stop / whole) for span in dict(box.axes)[axis])
