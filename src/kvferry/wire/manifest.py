"""Manifests as JSON and msgpack: the schema, and the conversion from and to the core's values.

The structs define fields and types (documented in ``docs/manifest.md``); the core validates the values, and
its errors are prefixed with the place in the document.
"""

from __future__ import annotations

from typing import cast

import msgspec

from kvferry.core.identity import Identity
from kvferry.core.manifest import MAX_REGIONS, VERSION, Manifest, Rank, Region
from kvferry.core.span import Span
from kvferry.core.state import Addressing, Axis, Group, Kind, State, Tail
from kvferry.core.view import AxisMap, Digit, View
from kvferry.errors import SpecError
from kvferry.wire.reading import Doc, at, key_step, read_json, read_msgpack, write_json

READABLE = range(1, VERSION + 1)
"""Version 1 is version 2 without an identity."""
MAX_DIGITS = 16
"""Digits of one axis map."""
MAX_AXIS_MAPS = 1 << 14
"""Distinct axis maps of one manifest."""
MAX_COORDINATES = 1 << 23
"""Coordinates of all distinct axis maps of one manifest, which the core tabulates."""
MAX_STATES_TIMES_RANKS = 1 << 22


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all objects of the schema."""


class DigitDoc(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``[size, stride]`` or ``[size, stride, [held_start, held_stop]]``."""

    size: int
    stride: int
    held: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET


class AxisMapDoc(Schema, frozen=True):
    """``{"start": 4, "digits": [[2, 1024]]}``, the most significant digit first."""

    digits: tuple[DigitDoc, ...]
    start: int = 0


class ViewDoc(Schema, frozen=True):
    """One rank's view of one state; axis maps by axis name."""

    state: str
    group: str
    region: str
    block_stride: int
    offset: int = 0
    axes: dict[str, AxisMapDoc] = {}


class RegionDoc(Schema, frozen=True):
    name: str
    num_bytes: int
    address: int = 0
    device: str = "cpu"


class RankDoc(Schema, frozen=True):
    rank: int
    regions: tuple[RegionDoc, ...]
    views: tuple[ViewDoc, ...]


class StateDoc(Schema, frozen=True):
    """One state; its axes as ``{"head": 8, "channel": 128}``."""

    name: str
    item_bytes: int
    dtype: str
    axes: dict[str, int] = {}
    kind: Kind = Kind.PAGED
    tokens_per_cell: int = 1
    tail: Tail = Tail.COMPLETE
    encoding: str = "plain"
    aliases: tuple[str, ...] = ()


class GroupDoc(Schema, frozen=True):
    """The states that share a block table; ``pool`` defaults to the group's name."""

    name: str
    num_blocks: int
    tokens_per_block: int = 1
    addressing: Addressing = Addressing.TABLE
    pool: str = ""
    window: int = 0
    sinks: int = 0


class IdentityDoc(Schema, frozen=True):
    """The model: values of known parts, reasons for unknown parts."""

    known: dict[str, str] = {}
    unknown: dict[str, str] = {}
    required: bool = False


_NOTHING = IdentityDoc()
"""``omit_defaults`` compares by identity."""


class ManifestDoc(Schema, frozen=True):
    """The whole document. ``version`` is checked first."""

    version: int
    engine: str
    states: tuple[StateDoc, ...]
    groups: tuple[GroupDoc, ...]
    ranks: tuple[RankDoc, ...]
    model: str = ""
    identity: IdentityDoc = _NOTHING


def manifest_from_json(data: bytes) -> Manifest:
    """Read a manifest; raises ``SpecError`` with place, rule and value."""
    return manifest_of_doc(read_json(data, ManifestDoc, versions=READABLE))


def manifest_from_msgpack(data: bytes) -> Manifest:
    """Read a peer's manifest; raises ``SpecError`` with place, rule and value."""
    return manifest_of_doc(read_msgpack(data, ManifestDoc, versions=READABLE))


def manifest_to_json(manifest: Manifest, *, indent: int = 2) -> bytes:
    """Write a manifest for people (with ``indent=0`` on one line), without defaults."""
    return write_json(doc_of_manifest(manifest), indent)


def manifest_to_msgpack(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(doc_of_manifest(manifest))


# ------------------------------------------------------------------------------- schema -> core


def manifest_of_doc(doc: ManifestDoc) -> Manifest:
    return at("", _manifest, doc)


def _manifest(doc: ManifestDoc) -> Manifest:
    check_count("states times ranks", len(doc.states) * len(doc.ranks), MAX_STATES_TIMES_RANKS)
    identity, ranks = at(".identity", _identity, doc.identity), RankBuilder()
    parts = (
        tuple(at(f".states[{i}]", _state, each) for i, each in enumerate(doc.states)),
        tuple(at(f".groups[{i}]", _group, each) for i, each in enumerate(doc.groups)),
        tuple(at(f".ranks[{i}]", ranks.make, each) for i, each in enumerate(doc.ranks)),
    )
    return Manifest(doc.engine, *parts, model=doc.model, identity=identity)


def check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise SpecError(f"at most {limit} {what} are allowed, got {count}")


def _state(doc: StateDoc) -> State:
    axes = tuple(at(f".axes{key_step(name)}", Axis, name, size) for name, size in doc.axes.items())
    return State(**{**msgspec.structs.asdict(doc), "axes": axes})


def _group(doc: GroupDoc) -> Group:
    return Group(*msgspec.structs.astuple(doc))


def _identity(doc: IdentityDoc) -> Identity:
    return Identity.of(doc.known, doc.unknown, is_required=doc.required)


def _region(doc: RegionDoc) -> Region:
    return Region(*msgspec.structs.astuple(doc))


class RankBuilder:
    """Builds the ranks of one manifest, with equal axis maps as one object, so that caches are shared."""

    def __init__(self) -> None:
        self._maps: dict[AxisMapDoc, AxisMap] = {}
        self._counted: set[tuple[Digit, ...]] = set()
        self._num_coordinates = 0
        self._axes: dict[tuple[tuple[str, AxisMap], ...], tuple[tuple[str, AxisMap], ...]] = {}

    def make(self, doc: RankDoc) -> Rank:
        at(".regions", check_count, "regions of a rank", len(doc.regions), MAX_REGIONS)
        regions = tuple(at(f".regions[{i}]", _region, each) for i, each in enumerate(doc.regions))
        views = tuple(at(f".views[{i}]", self.view, each) for i, each in enumerate(doc.views))
        return Rank(doc.rank, regions, views)

    def view(self, doc: ViewDoc) -> View:
        maps = {
            name: self._maps.get(each) or at(f".axes{key_step(name)}", self._axis_map, each)
            for name, each in doc.axes.items()
        }
        axes = tuple(sorted(maps.items()))
        shared = self._axes.setdefault(axes, axes)
        return View(doc.state, doc.group, doc.region, doc.offset, doc.block_stride, shared)

    def _axis_map(self, doc: AxisMapDoc) -> AxisMap:
        at(".digits", check_count, "digits of an axis", len(doc.digits), MAX_DIGITS)
        digits = tuple(at(f".digits[{i}]", _digit, each) for i, each in enumerate(doc.digits))
        made = self._maps[doc] = AxisMap(digits, doc.start)
        check_count("distinct axis maps", len(self._maps), MAX_AXIS_MAPS)
        if digits not in self._counted:
            self._counted.add(digits)
            self._num_coordinates += made.size
        check_count("coordinates of distinct axis maps", self._num_coordinates, MAX_COORDINATES)
        return made


def _digit(doc: DigitDoc) -> Digit:
    return Digit(doc.size, doc.stride, None if doc.held is msgspec.UNSET else Span(*doc.held))


# ------------------------------------------------------------------------------- core -> schema


def doc_of_manifest(manifest: Manifest) -> ManifestDoc:
    return _doc(
        ManifestDoc,
        manifest,
        states=tuple(map(_state_doc, manifest.states)),
        groups=tuple(map(_group_doc, manifest.groups)),
        ranks=tuple(map(doc_of_rank, manifest.ranks)),
        identity=_identity_doc(manifest.identity),
    )


def _doc(schema: type[Doc], value: object, **written: object) -> Doc:
    """A document from the fields of a value, except those given."""
    same = {name: getattr(value, name) for name in schema.__struct_fields__ if name not in written}
    return schema(**same, **written)


def _identity_doc(identity: Identity) -> IdentityDoc:
    doc = IdentityDoc(dict(identity.known), dict(identity.unknown), identity.is_required)
    return _NOTHING if doc == _NOTHING else doc


def _state_doc(state: State) -> StateDoc:
    return _doc(StateDoc, state, axes={axis.name: axis.size for axis in state.axes})


def _group_doc(group: Group) -> GroupDoc:
    return _doc(GroupDoc, group, pool="" if group.pool == group.name else group.pool)


def doc_of_rank(rank: Rank) -> RankDoc:
    regions = tuple(_doc(RegionDoc, region) for region in rank.regions)
    return RankDoc(rank.rank, regions, tuple(map(_view_doc, rank.views)))


def _view_doc(view: View) -> ViewDoc:
    axes = {name: _axis_map_doc(axis_map) for name, axis_map in view.axes}
    return ViewDoc(view.state, view.group, view.region, view.block_stride, view.offset, axes)


def _axis_map_doc(axis_map: AxisMap) -> AxisMapDoc:
    return AxisMapDoc(tuple(_digit_doc(digit) for digit in axis_map.digits), axis_map.start)


def _digit_doc(digit: Digit) -> DigitDoc:
    # A tuple, since an array-like struct would write its defaults too.
    held = () if digit.held is None else ((digit.held.start, digit.held.stop),)
    return cast(DigitDoc, (digit.size, digit.stride, *held))
