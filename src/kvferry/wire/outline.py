"""An engine in parts: an outline for all readers, and a description of each rank for its readers.

Engines of equal geometry have equal outlines and layouts, since names and addresses are separate. Equal bytes
are decoded once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from kvferry.core.box import TOKEN, Box
from kvferry.core.manifest import VERSION, Holders, Manifest, Outline, Rank, Region, check_apart, merge
from kvferry.core.span import Span, Spans, normal
from kvferry.core.state import MAX_AXIS, Kind, State, check_range
from kvferry.core.view import MAX_PARTS
from kvferry.errors import SpecError
from kvferry.wire.manifest import (
    MAX_STATES_TIMES_RANKS,
    ManifestDoc,
    RankBuilder,
    RankDoc,
    Schema,
    check_count,
    doc_of_manifest,
    doc_of_rank,
    manifest_from_msgpack,
    manifest_of_doc,
    manifest_to_msgpack,
)
from kvferry.wire.messages import PROTOCOL, Join, RankDescription
from kvferry.wire.reading import SpanDoc, read_msgpack, span_docs

MAX_SPANS = 1 << 18
"""Spans of all boxes of an outline."""


class BoxDoc(Schema, frozen=True):
    """``{"axes": {"head": [[0, 2]]}}``: the part of a state that a rank holds."""

    axes: dict[str, tuple[SpanDoc, ...]]
    period: int = 1


class HoldersDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The indices of states with equal holders, and their (rank, box index)."""

    states: tuple[int, ...]
    boxes: tuple[tuple[int, int], ...]


class OutlineDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    common: ManifestDoc
    boxes: tuple[BoxDoc, ...]
    holders: tuple[HoldersDoc, ...]


def outline_to_msgpack(outline: Outline) -> bytes:
    """Write an outline for a peer, without the engine's name."""
    index = {state.name: i for i, state in enumerate(outline.common.states)}
    alike: dict[int, list[int]] = defaultdict(list)
    for name, holders in outline.holders.items():
        alike[id(holders)].append(index[name])
    boxes: dict[Box, int] = {}
    docs = []
    for holders in {id(each): each for each in outline.holders.values()}.values():
        held = tuple((rank, boxes.setdefault(box, len(boxes))) for rank, box in holders.boxes)
        docs.append(HoldersDoc(tuple(sorted(alike[id(holders)])), held))
    common = doc_of_manifest(replace(outline.common, engine=""))
    docs.sort(key=lambda doc: doc.states)
    box_docs = tuple(BoxDoc({n: span_docs(spans) for n, spans in box.axes}, box.period) for box in boxes)
    return msgspec.msgpack.encode(OutlineDoc(VERSION, common, box_docs, tuple(docs)))


def outline_from_msgpack(data: bytes, engine: str) -> Outline:
    """Read the outline of an engine of this name; raises ``SpecError``."""
    doc = read_msgpack(data, OutlineDoc, versions=range(VERSION, VERSION + 1))
    common = replace(manifest_of_doc(doc.common), engine=engine)
    if common.ranks:
        raise SpecError("outline: ranks are not allowed here; they are described separately")
    check_count("spans of boxes", sum(len(s) for box in doc.boxes for s in box.axes.values()), MAX_SPANS)
    num_held = sum(max(1, len(each.states)) * len(each.boxes) for each in doc.holders)
    check_count("states times ranks", num_held, MAX_STATES_TIMES_RANKS)
    boxes = [_box(f"outline: box {i}", each) for i, each in enumerate(doc.boxes)]
    held: dict[str, Holders] = {}
    for each in doc.holders:
        holders, states = _holders(each, boxes), _states(each, common.states)
        # Each shape is checked once.
        for state in {(state.axes, state.kind): state for state in states}.values():
            for box in {id(box): box for _, box in holders.boxes}.values():
                _check_box(f"outline: state {state.name}", box, state)
        for state in states:
            if held.setdefault(state.name, holders) is not holders:
                raise SpecError(f"outline: state {state.name}: its holders are given twice")
    return Outline(common, held)


def _box(where: str, doc: BoxDoc) -> Box:
    check_range(f"{where}: period", doc.period, 1, MAX_AXIS)
    axes = tuple(sorted((name, _spans(where, spans)) for name, spans in doc.axes.items()))
    return Box(axes, doc.period)


def _spans(where: str, doc: Sequence[tuple[int, int]]) -> Spans:
    check_count("parts of an axis", len(doc), MAX_PARTS)
    spans = tuple(Span(*each) for each in doc)
    if not spans or normal(spans) != spans:
        raise SpecError(f"{where}: spans must be sorted, apart, and none empty, got {list(doc)[:8]}")
    return spans


def _holders(doc: HoldersDoc, boxes: Sequence[Box]) -> Holders:
    ranks = [rank for rank, _ in doc.boxes]
    if ranks != sorted(set(ranks)):
        raise SpecError(f"outline: holders must be sorted by rank, each rank once, got {ranks[:8]}")
    for rank, box_index in doc.boxes:
        check_range("outline: rank", rank, 0, 1 << 20)
        check_range("outline: box", box_index, 0, len(boxes) - 1)
    return Holders(tuple((rank, boxes[box_index]) for rank, box_index in doc.boxes))


def _states(doc: HoldersDoc, states: Sequence[State]) -> list[State]:
    for index in doc.states:
        check_range("outline: state", index, 0, len(states) - 1)
    return [states[index] for index in doc.states]


def _check_box(where: str, box: Box, state: State) -> None:
    """A box must have the axes of its state, and be within their sizes."""
    sizes = {axis.name: axis.size for axis in state.axes}
    if state.kind is Kind.PAGED:
        sizes[TOKEN] = box.period
    elif box.period != 1:
        raise SpecError(f"{where}: a recurrent state has no token axis, and so no period")
    if {name for name, _ in box.axes} != sizes.keys():
        raise SpecError(
            f"{where}: the box has axes {[n for n, _ in box.axes]}, the state has {sorted(sizes)}"
        )
    for name, spans in box.axes:
        if spans[-1].stop > sizes[name]:
            raise SpecError(f"{where}: axis {name} reaches {spans[-1].stop}, its size is {sizes[name]}")


# ------------------------------------------------------------------------------- one rank


def join_of(
    manifest: Manifest, transport: str, card: bytes, credential: bytes = b"", rank_key: bytes = b""
) -> Join:
    """The join message of the only rank of a manifest."""
    (rank,) = manifest.ranks
    who = PROTOCOL, manifest.engine, rank.rank, transport
    what = manifest_to_msgpack(replace(manifest, ranks=())), describe_rank(rank, card)
    return Join(*who, *what, credential=credential, rank_key=rank_key)


def describe_rank(rank: Rank, card: bytes) -> RankDescription:
    bare = tuple(Region(region.name, region.num_bytes) for region in rank.regions)
    layout = msgspec.msgpack.encode(doc_of_rank(Rank(0, bare, rank.views)))
    return RankDescription(layout, tuple((r.address, r.device) for r in rank.regions), card)


def with_ranks(common: Manifest, described: Mapping[int, RankDescription]) -> Manifest:
    """An engine's manifest with these ranks; raises ``SpecError`` if they do not fit it."""
    check_count("states times ranks", len(common.states) * len(described), MAX_STATES_TIMES_RANKS)
    build, layouts = RankBuilder(), dict[bytes, Rank]()
    ranks = []
    for number, each in sorted(described.items()):
        try:
            if each.layout not in layouts:
                layouts[each.layout] = build.make(read_msgpack(each.layout, RankDoc))
            layout = layouts[each.layout]
            ranks.append(Rank(number, regions_at(layout.regions, each.memory), layout.views))
        except SpecError as error:
            raise SpecError(f"rank {number}: {error}") from None
    return replace(common, ranks=tuple(ranks))


def regions_at(regions: Sequence[Region], memory: Sequence[tuple[int, str]]) -> tuple[Region, ...]:
    if len(regions) != len(memory):
        raise SpecError(f"{len(regions)} regions, but {len(memory)} addresses")
    pairs = zip(regions, memory, strict=True)
    found = tuple(Region(r.name, r.num_bytes, address, device) for r, (address, device) in pairs)
    check_apart("memory", found)
    return found


def manifest_of_joins(joins: Mapping[int, Join]) -> Manifest:
    """The manifest of an engine whose ranks have all joined; raises ``SpecError`` if they do not fit."""
    described: dict[bytes, dict[int, RankDescription]] = defaultdict(dict)
    for number, join in sorted(joins.items()):
        described[join.manifest][number] = join.description
    parts = [with_ranks(manifest_from_msgpack(data), ranks) for data, ranks in described.items()]
    return merge(parts)
