"""The slow steps of the first contact: compare, plan, prove, lower, connect.

Engines of equal geometry share all but the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from kvferry.core.choices import Way
from kvferry.core.identity import IdentityCheck, compare_identity
from kvferry.core.lower import Route, lower
from kvferry.core.manifest import Manifest, Outline
from kvferry.core.plan import Plan, plan
from kvferry.core.prove import prove
from kvferry.core.select import Selection
from kvferry.errors import KVFerryError, Refused, RequestError, SpecError, TransportError, counted
from kvferry.log import log_of
from kvferry.runtime import Failure, FailureCode
from kvferry.runtime.failure import unfit
from kvferry.runtime.values import Build, Peer
from kvferry.transport.base import Connected, Transport
from kvferry.wire.messages import RankDescription
from kvferry.wire.outline import outline_from_msgpack, regions_at, with_ranks
from kvferry.wire.reading import MAX_WORDS, printable

log = log_of(__name__)

Value = TypeVar("Value")


# A plan depends on the states, boxes, views and regions of a source engine, not on its name or addresses. So
# one plan serves all source engines of equal geometry, and is kept while one of them is met.


class MadeOnce(Generic[Value]):
    """Values by key: each is made once, and kept while it is referenced."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._kept: WeakValueDictionary[bytes, Value] = WeakValueDictionary()
        self._being_made: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes, make: Callable[[], Value]) -> Value:
        """The value of a key; waits if another thread is making it."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._being_made)
            kept = self._kept.get(key)
            if kept is not None:
                return kept
            self._being_made.add(key)
        try:
            made = make()
            with self._changed:
                self._kept[key] = made
            return made
        finally:
            with self._changed:
                self._being_made.discard(key)
                self._changed.notify_all()


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """The plan for all source engines of one outline."""

    outline: Outline
    """Under the name of the first engine."""
    dst: Manifest
    dst_rank: int
    plan: Plan | None
    """None if refused; planning is repeated to name the engine in the error."""
    ranks: tuple[int, ...]
    """The ranks to read from; all of them if there is no plan, to explain why."""
    _routes: MadeOnce[Route] = field(default_factory=MadeOnce)
    """By the layout of the ranks."""

    def source(self, engine: str, ranks: Mapping[int, RankDescription]) -> Manifest:
        """An engine's manifest; raises ``SpecError`` if it is invalid."""
        return with_ranks(replace(self.outline.common, engine=engine), ranks)

    def route(self, engine: str, ranks: Mapping[int, RankDescription]) -> Route:
        """The proved and lowered plan for engines with this layout of ranks."""

        def make() -> Route:
            source = self.source(engine, ranks)
            if self.plan is None:
                return lower(prove(plan(source, self.dst, self.dst_rank, holders=self.outline.holders)))
            return lower(prove(replace(self.plan, src=source)))

        return self._routes.get(_digest_of(ranks), make)


class SharedPlans:
    """The plans of one destination rank. Thread-safe."""

    def __init__(self, dst: Manifest, dst_rank: int, *, accept_unknown_identity: bool = False) -> None:
        if not accept_unknown_identity:
            dst = replace(dst, identity=replace(dst.identity, is_required=True))
        self._dst, self._dst_rank = dst, dst_rank
        self._plans: MadeOnce[SharedPlan] = MadeOnce()

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, engine: str, outline: bytes) -> SharedPlan:
        """The plan for an engine of this outline; raises ``SpecError`` if it is invalid."""
        key = hashlib.blake2b(outline).digest()
        return self._plans.get(key, lambda: self._make(outline_from_msgpack(outline, engine)))

    def _make(self, outline: Outline) -> SharedPlan:
        try:
            made = plan(outline.common, self._dst, self._dst_rank, holders=outline.holders)
        except Refused:
            return SharedPlan(outline, self._dst, self._dst_rank, None, outline.ranks)
        ranks = tuple(sorted({piece.src_rank for piece in made.pieces}))
        return SharedPlan(outline, self._dst, self._dst_rank, made, ranks)


def _digest_of(ranks: Mapping[int, RankDescription]) -> bytes:
    digest = hashlib.blake2b()
    for number, description in sorted(ranks.items()):
        digest.update(b"%d %d " % (number, len(description.layout)))
        digest.update(description.layout)
    return digest.digest()


@dataclass(frozen=True, eq=False)
class MetPeer:
    """A peer that can be read from."""

    shared: SharedPlan
    """Referenced so that later peers of equal geometry can reuse it."""
    route: Route
    links: Mapping[int, Connected]
    """By connected rank."""
    plan_seconds: float

    @property
    def way(self) -> str:
        """The transfer mode; several are joined by +."""
        return "+".join(sorted({link.way.value for link in self.links.values()}))

    @property
    def is_quick(self) -> bool:
        """Whether selecting and submitting takes less time than switching threads."""
        return all(link.way is Way.MAPPED for link in self.links.values())

    @property
    def identity(self) -> IdentityCheck:
        """Whether both sides run the same model."""
        plan = self.route.plan
        return compare_identity(plan.src.identity, plan.dst.identity)

    def num_runs(self, selection: Selection) -> int:
        """The number of runs of a load; makes the lists of runs, except for the copy kernel."""
        return sum(
            product.num_runs if self.links[src_rank].way is Way.MAPPED else len(product.runs)
            for src_rank, product in selection.products.items()
        )

    def summary(self, peer: Peer) -> str:
        reasons = sorted({link.reason for link in self.links.values() if link.reason})
        why = f", since {'; '.join(reasons)}" if reasons else ""
        states = (
            f"{counted(len(self.route.plan.states), 'state')} in {counted(len(self.route.lanes), 'group')}"
        )
        planned = f"compared, planned and proved in {self.plan_seconds * 1e3:.0f} ms"
        ranks = ", ".join(map(str, self.links))
        line = (
            f"met {peer.engine} at {peer.authority}: {self.identity.sentence}; {states}, {planned};"
            f" read from rank(s) {ranks}, {self.way}{why}"
        )
        return printable(line, MAX_WORDS)


def source_shown(peer: Peer, state: str, why: str, met: MetPeer | None) -> dict[str, object]:
    """One source engine in a status report."""
    links = met.links.values() if met else ()
    reasons = sorted({link.reason for link in links if link.reason})
    return {
        "engine": peer.engine,
        "generation": peer.generation,
        "address": peer.authority,
        "state": state,
        "way": met.way if met else "",
        "ranks": list(met.links) if met else [],
        "why": why or "; ".join(reasons),
    }


@dataclass(frozen=True, eq=False)
class NotMet:
    """A peer that cannot be read from."""

    failure: Failure
    source: Manifest | None
    """Its manifest, if valid."""


def meet(
    build: Build,
    shared: SharedPlan,
    transport: Transport,
    clock: Callable[[], float],
    seconds: float = 0.0,
) -> MetPeer | NotMet:
    """Build a peer completely, or not at all. ``seconds``: how long finding the plan took."""
    connected: list[str] = []
    engine = build.peer.engine
    try:
        if build.transport != transport.kind:
            kinds = f"source has {build.transport}, destination has {transport.kind}"
            raise TransportError("kind", f"both sides must use one transport: {kinds}")
        started = clock()
        route = shared.route(engine, build.ranks)
        plan_seconds = seconds + clock() - started
        links = {}
        for src_rank, description in sorted(build.ranks.items()):
            name = remote_name(build.peer, src_rank)
            regions = regions_at(route.plan.src.rank(src_rank).regions, description.memory)
            links[src_rank] = transport.connect(name, description.card, regions)
            connected.append(name)
        return MetPeer(shared, route, links, plan_seconds)
    except Exception as error:
        for name in connected:
            transport.forget(name)
        return NotMet(failure_of(error, FailureCode.BAD_MANIFEST), _source(build, shared))


def _source(build: Build, shared: SharedPlan) -> Manifest | None:
    try:
        return shared.source(build.peer.engine, build.ranks)
    except SpecError:
        return None


def remote_name(peer: Peer, src_rank: int) -> str:
    """The transport's name of a rank of a peer."""
    return f"{peer.engine}#{peer.generation}@{peer.authority}/{src_rank}"


def failure_of(error: Exception, senseless: FailureCode) -> Failure:
    """The failure for an error; ``senseless`` is the code of a SpecError here."""
    match error:
        case Refused():
            return Failure(FailureCode.REFUSED, str(error))
        case RequestError():
            return unfit(error)
        case TransportError():
            return Failure(FailureCode.NOT_CONNECTED, str(error))
        case SpecError():
            return Failure(senseless, str(error))
        case KVFerryError():
            return Failure(FailureCode.UNEXPECTED, str(error))
        case _:
            log.exception("unexpected error while preparing a load; the load fails", exc_info=error)
            return Failure(FailureCode.UNEXPECTED, f"{type(error).__name__}: {error}")
