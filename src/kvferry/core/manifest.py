"""An engine's description of its cache, and the comparison of two of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from kvferry.core.box import TOKEN, Box
from kvferry.core.identity import Identity, compare_identity, merge_identity
from kvferry.core.state import MAX_BYTES, Addressing, Group, Kind, State, check_range
from kvferry.core.view import View
from kvferry.errors import Code, Finding, Refused, SpecError

VERSION = 2
"""The version of the schema. Peers of another version are refused."""

MAX_REGIONS = 1 << 15
"""Regions of one rank: their index, in 15 bits, and a 48-bit offset make one 63-bit place."""


@dataclass(frozen=True, slots=True)
class Region:
    """A memory range registered with the transport.

    >>> Region("kv", 1 << 30, address=0x7F0000000000, device="cuda").device
    'cuda:0'
    """

    name: str
    num_bytes: int
    address: int = 0
    """Its address in the rank's process; 0 in an offline description."""
    device: str = "cpu"
    """``cpu``, or a device type and index (``cuda:0``). ``cuda`` becomes ``cuda:0``, ``cpu:0`` ``cpu``."""

    def __post_init__(self) -> None:
        check_range(f"region {self.name}: num_bytes", self.num_bytes, 1, MAX_BYTES)
        check_range(f"region {self.name}: address", self.address, 0, (1 << 64) - 1)
        object.__setattr__(self, "device", _one_spelling(self.name, self.device))

    @property
    def is_on_host(self) -> bool:
        return self.device == "cpu"


def _one_spelling(region: str, device: str) -> str:
    """The canonical name of a device."""
    found = re.fullmatch(r"([a-z]+)(?::([0-9]{1,5}))?", str(device))
    if not found or (found[1] == "cpu" and int(found[2] or 0)):
        rule = "device must be 'cpu', or a kind and an index like 'cuda:0'"
        raise SpecError(f"region {region}: {rule}, got {device!r}")
    return "cpu" if found[1] == "cpu" else f"{found[1]}:{int(found[2] or 0)}"


@dataclass(frozen=True)
class Rank:
    """One rank: its memory regions, and the views of its states in them.

    >>> Rank(0, (Region("k", 64), Region("v", 64)), views=()).region_index
    {'k': 0, 'v': 1}
    """

    rank: int
    regions: tuple[Region, ...]
    views: tuple[View, ...]

    @cached_property
    def by_state(self) -> dict[str, View]:
        return {view.state: view for view in self.views}

    @cached_property
    def boxes(self) -> dict[str, Box]:
        """The part of each state that this rank holds. Equal boxes are one object."""
        looks = {id(view.axes): view for view in self.views}
        equal: dict[Box, Box] = {}
        boxes = {at: equal.setdefault(box, box) for at, box in ((at, v.box()) for at, v in looks.items())}
        return {view.state: boxes[id(view.axes)] for view in self.views}

    @cached_property
    def region_index(self) -> dict[str, int]:
        return {region.name: i for i, region in enumerate(self.regions)}


@dataclass(frozen=True, eq=False, slots=True)
class Holders:
    """The ranks that hold a part of a state. States that are distributed alike share one object."""

    boxes: tuple[tuple[int, Box], ...]
    """(rank, its box of the state), sorted by rank."""


@dataclass(frozen=True)
class Manifest:
    """The description of an engine for its peers. Validated on creation: names resolve, maps fit their axes.

    A manifest may list only some of an engine's ranks: a plan needs one destination rank, and its source
    ranks.

    >>> from kvferry import Axis, AxisMap, Digit
    >>> latent = State("layers.0/latent", (Axis("channel", 576),), item_bytes=2, dtype="bf16")
    >>> maps = {"token": AxisMap((Digit(64, 1152),)), "channel": AxisMap((Digit(576, 2),))}
    >>> view = View.of("layers.0/latent", "full", "kv", block_stride=64 * 1152, axes=maps)
    >>> rank = Rank(0, (Region("kv", 1000 * 64 * 1152),), (view,))
    >>> Manifest("decode", (latent,), (Group("full", 1000, 64),), (rank,)).rank(0).views[0].group
    'full'
    """

    engine: str
    states: tuple[State, ...]
    groups: tuple[Group, ...]
    ranks: tuple[Rank, ...]
    model: str = ""
    """For people."""
    identity: Identity = field(default_factory=Identity)
    """The model; engines with different models are refused."""
    version: int = field(default=VERSION)

    def __post_init__(self) -> None:
        for what, names in (
            ("state", (name for state in self.states for name in (state.name, *state.aliases))),
            ("group", (group.name for group in self.groups)),
            ("rank", (str(rank.rank) for rank in self.ranks)),
        ):
            _check_unique(what, names)
        homes: dict[str, str] = {}
        # Thousands of layers share their maps: each combination is checked once.
        fitting: set[object] = set()
        for rank in self.ranks:
            self._check_rank(rank, fitting)
            for view in rank.views:
                if homes.setdefault(view.state, view.group) != view.group:
                    raise SpecError(
                        f"rank {rank.rank}: view of {view.state}: group {view.group!r} here,"
                        f" {homes[view.state]!r} on another rank"
                    )

    def rank(self, rank: int) -> Rank:
        if rank not in self._ranks:
            raise Refused(Finding(Code.UNKNOWN_RANK, note=f"engine {self.engine} has no rank {rank}"))
        return self._ranks[rank]

    def find(self, state: State) -> State | None:
        """This engine's state of that name or alias."""
        names = (state.name, *state.aliases)
        return next((self.state_by_name[n] for n in names if n in self.state_by_name), None)

    def name_of(self, name: str) -> str:
        """The primary name of a state, from any of its names."""
        return self.state_by_name[name].name if name in self.state_by_name else name

    @cached_property
    def state_by_name(self) -> dict[str, State]:
        return {n: state for state in self.states for n in (state.name, *state.aliases)}

    @cached_property
    def group_by_name(self) -> dict[str, Group]:
        return {group.name: group for group in self.groups}

    @cached_property
    def holders(self) -> dict[str, Holders]:
        """The ranks that hold a part of each state."""
        held: dict[str, list[tuple[int, Box]]] = defaultdict(list)
        for rank in self.ranks:
            for state, box in rank.boxes.items():
                held[state].append((rank.rank, box))
        alike: dict[tuple[tuple[int, int], ...], Holders] = {}
        return {
            state: alike.setdefault(tuple((rank, id(box)) for rank, box in boxes), Holders(tuple(boxes)))
            for state, boxes in held.items()
        }

    @cached_property
    def shapes(self) -> dict[str, int]:
        """A number for each state, by name; states of equal shape have equal numbers."""
        numbers: dict[object, int] = {}
        return {
            s.name: numbers.setdefault((s.axes, s.kind, s.tokens_per_cell), len(numbers)) for s in self.states
        }

    @cached_property
    def _primary(self) -> dict[str, State]:
        return {state.name: state for state in self.states}

    @cached_property
    def _ranks(self) -> dict[int, Rank]:
        return {rank.rank: rank for rank in self.ranks}

    def _check_rank(self, rank: Rank, fitting: set[object]) -> None:
        where = f"rank {rank.rank}"
        check_range(f"{where}: rank", rank.rank, 0, 1 << 20)
        _check_unique(f"{where}: region", (region.name for region in rank.regions))
        _check_unique(f"{where}: view of state", (view.state for view in rank.views))
        check_apart(where, rank.regions)
        if len(rank.regions) > MAX_REGIONS:
            raise SpecError(f"{where}: {len(rank.regions)} regions, at most {MAX_REGIONS} are allowed")
        primary = self._primary
        named = (("state", primary), ("region", rank.region_index), ("group", self.group_by_name))
        for view in rank.views:
            for what, known in named:
                name = getattr(view, what)
                if name not in known:
                    raise SpecError(f"{where}: view of {view.state}: unknown {what} {name!r}")
            state = primary[view.state]
            # By identity, since hashing the maps is what costs; this manifest keeps them alive.
            key = (id(view.axes), self.shapes[view.state], view.group)
            if key not in fitting:
                _check_axes(f"{where}: view of {view.state}", view, state, self.group_by_name[view.group])
                fitting.add(key)


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise SpecError(f"{what} {name!r} is given twice")
        seen.add(name)


def check_apart(where: str, regions: Iterable[Region]) -> None:
    """Regions with known addresses must not overlap: overlaps are proved region by region."""
    known = sorted((r.device, r.address, r.num_bytes, r.name) for r in regions if r.address)
    for (device, address, size, name), (next_device, next_address, _, next_name) in pairwise(known):
        if device == next_device and address + size > next_address:
            raise SpecError(
                f"{where}: regions {name!r} and {next_name!r} overlap in memory: describe only one of them"
            )


def _check_axes(where: str, view: View, state: State, group: Group) -> None:
    """The view must have the state's axes, and its token axis must be one block of the group."""
    maps = dict(view.axes)
    recurrent = state.kind is Kind.RECURRENT
    if recurrent != (group.addressing is Addressing.SLOT):
        raise SpecError(f"{where}: a {state.kind} state in a group with {group.addressing} addressing")
    expected = {axis.name: axis.size for axis in state.axes} | ({} if recurrent else {TOKEN: 0})
    if set(maps) != set(expected):
        raise SpecError(f"{where}: axes {sorted(maps)}, but the state has {sorted(expected)}")
    for name, size in expected.items():
        if name != TOKEN and maps[name].start + maps[name].size > size:
            reach = maps[name].start + maps[name].size
            raise SpecError(f"{where}: axis {name} reaches {reach}, but the state has {size}")
    if not recurrent:
        cells, rest = divmod(group.tokens_per_block, state.tokens_per_cell)
        if rest or cells != maps[TOKEN].size or maps[TOKEN].start:
            raise SpecError(
                f"{where}: axis {TOKEN} counts {maps[TOKEN].size} cells from {maps[TOKEN].start}, but a"
                f" block of {group.tokens_per_block} tokens has {group.tokens_per_block}/"
                f"{state.tokens_per_cell} from 0"
            )


def merge(parts: Sequence[Manifest]) -> Manifest:
    """One engine's manifest from those of its ranks, which must agree on everything they share."""
    first, identity = parts[0], parts[0].identity
    states: dict[str, State] = {}
    groups: dict[str, Group] = {}
    for part in parts:
        for name in ("engine", "model", "version"):
            ours, theirs = getattr(first, name), getattr(part, name)
            if ours != theirs:
                raise SpecError(f"ranks of one engine disagree: {name} is {ours!r} and {theirs!r}")
        identity = merge_identity(identity, part.identity)
        for state in part.states:
            if states.setdefault(state.name, state) != state:
                raise SpecError(f"ranks of one engine disagree about state {state.name}")
        for group in part.groups:
            if groups.setdefault(group.name, group) != group:
                raise SpecError(f"ranks of one engine disagree about group {group.name}")
    ranks = sorted((rank for part in parts for rank in part.ranks), key=lambda rank: rank.rank)
    return replace(
        first,
        states=tuple(states.values()),
        groups=tuple(groups.values()),
        ranks=tuple(ranks),
        identity=identity,
    )


def compare(src: Manifest, dst: Manifest, states: Collection[str] | None = None) -> tuple[Finding, ...]:
    """Every relevant difference, seen from the destination; empty if there is none.

    States that only the source has are ignored; ``states`` limits the comparison to some of the
    destination's states.

    >>> from kvferry.models import Topology, describe, model_named
    >>> src, dst = (describe(model_named("gemma-2b"), Topology(dtype=d)) for d in ("bf16", "fp8_e4m3"))
    >>> print(compare(src, dst)[0])
    state-differs: layers.0.attn/k: dtype: source has bf16, destination has fp8_e4m3
    """
    if src.version != dst.version:
        found = Finding(Code.VERSION, field="version", src=str(src.version), dst=str(dst.version))
        return (found,)
    names = None if states is None else {dst.name_of(name) for name in states}
    asked = [state for state in dst.states if names is None or state.name in names]
    check = compare_identity(src.identity, dst.identity)
    is_required = src.identity.is_required or dst.identity.is_required
    unknown = check.unknown if is_required else ()
    return (*check.differing, *unknown, *(f for state in asked for f in _differences(src, state)))


MEANING = ("kind", "dtype", "tokens_per_cell", "encoding", "tail", "item_bytes")
"""The fields of a state, besides its axes, that must be equal; causes come before their consequences."""


def _differences(src: Manifest, ours: State) -> Iterator[Finding]:
    theirs = src.find(ours)
    if theirs is None:
        yield Finding(Code.MISSING_STATE, state=ours.name, note=f"not in engine {src.engine}")
        return
    if theirs == ours:
        return
    known = [src.state_by_name[n].name for n in (ours.name, *ours.aliases) if n in src.state_by_name]
    if len(set(known)) > 1:
        note = "one state here matches several states there: ambiguous"
        yield Finding(
            Code.STATE_DIFFERS, ours.name, "aliases", str(known), str([ours.name, *ours.aliases]), note
        )
    pairs = [(name, getattr(theirs, name), getattr(ours, name)) for name in MEANING]
    sizes = [{axis.name: axis.size for axis in state.axes} for state in (theirs, ours)]
    for name in sorted(sizes[0].keys() | sizes[1].keys()):
        pairs.append((f"axis {name}", sizes[0].get(name, "none"), sizes[1].get(name, "none")))
    for name, a, b in pairs:
        if a != b:
            yield Finding(Code.STATE_DIFFERS, state=ours.name, field=name, src=str(a), dst=str(b))


@dataclass(frozen=True, eq=False, slots=True)
class Outline:
    """The states and groups of an engine, and the boxes of its ranks, without addresses.

    A plan needs outlines only; the proof and the lowering need the views of the source ranks.
    """

    common: Manifest
    """The engine's manifest without its ranks."""
    holders: Mapping[str, Holders]

    @classmethod
    def of(cls, manifest: Manifest) -> Outline:
        return cls(replace(manifest, ranks=()), manifest.holders)

    @property
    def ranks(self) -> tuple[int, ...]:
        alike = {id(holders): holders for holders in self.holders.values()}
        return tuple(sorted({rank for holders in alike.values() for rank, _ in holders.boxes}))
