"""A manifest as JSON and msgpack: the schema, and the way from and to the core's values.

The structs are the schema, ``docs/manifest.md`` is their page. They say which fields there are and of what
type; which values make sense is for the core to say, and its word is passed on with the place prefixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import msgspec

from kvferry.core.manifest import VERSION, Manifest, Rank, Region
from kvferry.core.span import Span
from kvferry.core.state import Addressing, Axis, Group, Kind, State, Tail
from kvferry.core.view import AxisMap, Digit, View
from kvferry.errors import SpecError
from kvferry.wire.misfit import Misfit, key_step, make, make_all, make_each, require
from kvferry.wire.reading import read_json, read_msgpack
from kvferry.wire.text import write_json

MAX_DIGITS = 16
"""Digits of one axis map."""
MAX_AXIS_MAPS = 1 << 14
"""Distinct axis maps of one manifest; equal ones count once."""
MAX_COORDINATES = 1 << 23
"""Coordinates that the distinct maps of one manifest count through together: the core tabulates them."""
MAX_REGIONS = 1 << 15
"""Regions of one rank: a place in memory has 15 bits for the region's index."""
MAX_STATES_TIMES_RANKS = 1 << 22


class _Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What every object of the schema has in common."""


class WholeDigitDoc(msgspec.Struct, frozen=True, array_like=True):
    """``[size, stride]``: how a digit of which all values are held is written."""

    size: int
    stride: int


class DigitDoc(WholeDigitDoc, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``[size, stride]`` or ``[size, stride, [held_start, held_stop]]``: how a digit is read."""

    held: tuple[int, int] | None = None


class AxisMapDoc(_Schema, frozen=True):
    """``{"start": 4, "digits": [[2, 1024]]}``, the most significant digit first."""

    digits: tuple[DigitDoc, ...]
    start: int = 0


class ViewDoc(_Schema, frozen=True):
    """Where one rank keeps its box of one state; axis maps by axis name."""

    state: str
    group: str
    region: str
    block_stride: int
    offset: int = 0
    axes: dict[str, AxisMapDoc] = {}


class RegionDoc(_Schema, frozen=True):
    """A piece of memory."""

    name: str
    num_bytes: int
    address: int = 0
    device: str = "cpu"


class RankDoc(_Schema, frozen=True):
    """One rank: its memory and its views."""

    rank: int
    regions: tuple[RegionDoc, ...]
    views: tuple[ViewDoc, ...]


class StateDoc(_Schema, frozen=True):
    """What one state is; its axes as ``{"head": 8, "channel": 128}``."""

    name: str
    item_bytes: int
    dtype: str
    axes: dict[str, int] = {}
    kind: Kind = Kind.PAGED
    tokens_per_cell: int = 1
    tail: Tail = Tail.COMPLETE
    encoding: str = "plain"
    aliases: tuple[str, ...] = ()


class GroupDoc(_Schema, frozen=True):
    """The states that share a block table; ``pool`` is the group's own name unless given."""

    name: str
    num_blocks: int
    tokens_per_block: int = 1
    addressing: Addressing = Addressing.TABLE
    pool: str = ""
    window: int = 0
    sinks: int = 0


class ManifestDoc(_Schema, frozen=True):
    """The whole document. ``version`` is checked before anything else is read."""

    version: int
    engine: str
    states: tuple[StateDoc, ...]
    groups: tuple[GroupDoc, ...]
    ranks: tuple[RankDoc, ...]
    model: str = ""
    fingerprint: str = ""


def manifest_from_json(data: bytes) -> Manifest:
    """Read a manifest; raises ``SpecError`` with place, rule and value."""
    return _manifest(read_json(data, ManifestDoc, version=VERSION))


def manifest_from_msgpack(data: bytes) -> Manifest:
    """Read a manifest that a peer sent; raises ``SpecError`` with place, rule and value."""
    return _manifest(read_msgpack(data, ManifestDoc, version=VERSION))


def manifest_to_json(manifest: Manifest, *, indent: int = 2) -> bytes:
    """Write a manifest for people (or, with ``indent=0``, on one line); defaults are left out."""
    return write_json(_manifest_doc(manifest), indent)


def manifest_to_msgpack(manifest: Manifest) -> bytes:
    """Write a manifest for a peer; defaults are left out."""
    return msgspec.msgpack.encode(_manifest_doc(manifest))


# ------------------------------------------------------------------------------- schema -> core


def _manifest(doc: ManifestDoc) -> Manifest:
    try:
        product = len(doc.states) * len(doc.ranks)
        detail = f"at most {MAX_STATES_TIMES_RANKS} states times ranks are read, got {product}"
        require(product <= MAX_STATES_TIMES_RANKS, "", detail)
        states = make_all(".states", _state, doc.states)
        groups = make_all(".groups", _group, doc.groups)
        ranks = make_all(".ranks", _Ranks().make, doc.ranks)
        return _whole(doc, states, groups, ranks)
    except Misfit as misfit:
        raise misfit.spec_error() from None


def _state(doc: StateDoc) -> State:
    axes = (make(f".axes{key_step(name)}", _axis, (name, size)) for name, size in doc.axes.items())
    return State(
        doc.name,
        tuple(axes),
        item_bytes=doc.item_bytes,
        dtype=doc.dtype,
        kind=doc.kind,
        tokens_per_cell=doc.tokens_per_cell,
        tail=doc.tail,
        encoding=doc.encoding,
        aliases=doc.aliases,
    )


def _axis(named_size: tuple[str, int]) -> Axis:
    return Axis(*named_size)


def _group(doc: GroupDoc) -> Group:
    return Group(
        doc.name, doc.num_blocks, doc.tokens_per_block, doc.addressing, doc.pool, doc.window, doc.sinks
    )


def _region(doc: RegionDoc) -> Region:
    return Region(doc.name, doc.num_bytes, doc.address, doc.device)


class _Ranks:
    """Makes the ranks of one manifest, equal axis maps as one object.

    Layers and ranks repeat a few maps thousands of times, and what is computed from a map is kept by it.
    """

    def __init__(self) -> None:
        self._maps: dict[AxisMapDoc, AxisMap] = {}
        self._counted: set[tuple[Digit, ...]] = set()
        self._num_coordinates = 0
        self._axes: dict[tuple[tuple[str, AxisMap], ...], tuple[tuple[str, AxisMap], ...]] = {}

    def make(self, doc: RankDoc) -> Rank:
        """One rank with its regions and views."""
        detail = f"at most {MAX_REGIONS} regions of a rank are read, got {len(doc.regions)}"
        require(len(doc.regions) <= MAX_REGIONS, ".regions", detail)
        regions = make_all(".regions", _region, doc.regions)
        return Rank(doc.rank, regions, make_all(".views", self._view, doc.views))

    def _view(self, doc: ViewDoc) -> View:
        axes = tuple(sorted(make_each(".axes", self._axis_map, doc.axes).items(), key=lambda axis: axis[0]))
        shared = self._axes.setdefault(axes, axes)
        return View(doc.state, doc.group, doc.region, doc.offset, doc.block_stride, shared)

    def _axis_map(self, doc: AxisMapDoc) -> AxisMap:
        known = self._maps.get(doc)
        if known is None:
            detail = f"at most {MAX_DIGITS} digits of an axis are read, got {len(doc.digits)}"
            require(len(doc.digits) <= MAX_DIGITS, ".digits", detail)
            known = AxisMap(make_all(".digits", _digit, doc.digits), doc.start)
            self._maps[doc] = known
            self._count(known)
        return known

    def _count(self, axis_map: AxisMap) -> None:
        detail = f"at most {MAX_AXIS_MAPS} distinct axis maps are read, here is one more"
        require(len(self._maps) <= MAX_AXIS_MAPS, "", detail)
        if axis_map.digits not in self._counted:
            self._counted.add(axis_map.digits)
            self._num_coordinates += axis_map.size
        detail = f"distinct axis maps may count {MAX_COORDINATES} coordinates in all; this one exceeds that"
        require(self._num_coordinates <= MAX_COORDINATES, "", detail)


def _digit(doc: DigitDoc) -> Digit:
    return Digit(doc.size, doc.stride, None if doc.held is None else Span(*doc.held))


def _whole(
    doc: ManifestDoc, states: tuple[State, ...], groups: tuple[Group, ...], ranks: tuple[Rank, ...]
) -> Manifest:
    try:
        return Manifest(
            doc.engine,
            states,
            groups,
            ranks,
            model=doc.model,
            fingerprint=doc.fingerprint,
            version=doc.version,
        )
    except SpecError as error:
        _blame(states, groups, ranks)
        raise Misfit(".ranks", str(error)) from None


def _blame(states: tuple[State, ...], groups: tuple[Group, ...], ranks: tuple[Rank, ...]) -> None:
    """Raise at the smallest part of a manifest that does not even hold together by itself."""
    make(".states", lambda states: Manifest("", states, (), ()), states)
    make(".groups", lambda groups: Manifest("", (), groups, ()), groups)
    by_name = ({state.name: state for state in states}, {group.name: group for group in groups})
    for i, rank in enumerate(ranks):
        alone = Rank(rank.rank, (), ())
        make(f".ranks[{i}].rank", lambda rank: Manifest("", (), (), (rank,)), alone)
        alone = replace(alone, regions=rank.regions)
        make(f".ranks[{i}].regions", lambda rank: Manifest("", (), (), (rank,)), alone)
        make_all(f".ranks[{i}].views", lambda part: Manifest("", *part), _single_views(rank, *by_name))


def _single_views(
    rank: Rank, states: dict[str, State], groups: dict[str, Group]
) -> Iterator[tuple[tuple[State, ...], tuple[Group, ...], tuple[Rank, ...]]]:
    """Each view of a rank with just the state, the group and the region that it names."""
    regions = {region.name: region for region in rank.regions}
    for view in rank.views:
        one_state = tuple(states[name] for name in (view.state,) if name in states)
        one_group = tuple(groups[name] for name in (view.group,) if name in groups)
        one_region = tuple(regions[name] for name in (view.region,) if name in regions)
        yield one_state, one_group, (Rank(rank.rank, one_region, (view,)),)


# ------------------------------------------------------------------------------- core -> schema


def _manifest_doc(manifest: Manifest) -> ManifestDoc:
    return ManifestDoc(
        version=manifest.version,
        engine=manifest.engine,
        states=tuple(_state_doc(state) for state in manifest.states),
        groups=tuple(_group_doc(group) for group in manifest.groups),
        ranks=tuple(_rank_doc(rank) for rank in manifest.ranks),
        model=manifest.model,
        fingerprint=manifest.fingerprint,
    )


def _state_doc(state: State) -> StateDoc:
    return StateDoc(
        name=state.name,
        item_bytes=state.item_bytes,
        dtype=state.dtype,
        axes={axis.name: axis.size for axis in state.axes},
        kind=state.kind,
        tokens_per_cell=state.tokens_per_cell,
        tail=state.tail,
        encoding=state.encoding,
        aliases=state.aliases,
    )


def _group_doc(group: Group) -> GroupDoc:
    return GroupDoc(
        name=group.name,
        num_blocks=group.num_blocks,
        tokens_per_block=group.tokens_per_block,
        addressing=group.addressing,
        pool="" if group.pool == group.name else group.pool,
        window=group.window,
        sinks=group.sinks,
    )


def _rank_doc(rank: Rank) -> RankDoc:
    regions = tuple(
        RegionDoc(region.name, region.num_bytes, region.address, region.device) for region in rank.regions
    )
    return RankDoc(rank.rank, regions, tuple(_view_doc(view) for view in rank.views))


def _view_doc(view: View) -> ViewDoc:
    return ViewDoc(
        state=view.state,
        group=view.group,
        region=view.region,
        block_stride=view.block_stride,
        offset=view.offset,
        axes={name: _axis_map_doc(axis_map) for name, axis_map in view.axes},
    )


def _axis_map_doc(axis_map: AxisMap) -> AxisMapDoc:
    return AxisMapDoc(tuple(_digit_doc(digit) for digit in axis_map.digits), axis_map.start)


def _digit_doc(digit: Digit) -> DigitDoc:
    if digit.held is None:
        # An array-like struct writes its defaults too; the shorter struct spares people the null.
        return cast(DigitDoc, WholeDigitDoc(digit.size, digit.stride))
    return DigitDoc(digit.size, digit.stride, (digit.held.start, digit.held.stop))
