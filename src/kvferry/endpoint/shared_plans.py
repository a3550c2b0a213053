"""Plans of a destination rank, one for all source engines of equal geometry.

What is planned, proved and lowered depends on what engines say of their states, boxes, views and regions, not
on their names or on where their memory is. It is made once and kept while somebody who is met needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from kvferry.core.lower import Route, lower
from kvferry.core.manifest import Manifest
from kvferry.core.outline import Outline
from kvferry.core.plan import Plan, plan
from kvferry.core.prove import prove
from kvferry.errors import Refused
from kvferry.wire.messages import RankDescription
from kvferry.wire.outline import outline_from_msgpack, with_ranks

Value = TypeVar("Value")


class MadeOnce(Generic[Value]):
    """Values by key: each is made once, whoever asks first, and kept while somebody has it."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._kept: WeakValueDictionary[bytes, Value] = WeakValueDictionary()
        self._being_made: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes, make: Callable[[], Value]) -> Value:
        """The value of a key. Who asks for one that is being made waits for it; others do not."""
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
    """Under the name of the engine that was first."""
    dst: Manifest
    dst_rank: int
    plan: Plan | None
    """None if there is none: whoever is met next is told why, by its own name."""
    ranks: tuple[int, ...]
    """Those that are read from; all of them if there is no plan, so that people can see why."""
    _routes: MadeOnce[Route] = field(default_factory=MadeOnce)
    """By how the ranks are laid out."""

    def source(self, engine: str, ranks: Mapping[int, RankDescription]) -> Manifest:
        """What an engine says of itself; raises ``SpecError`` if that makes no sense."""
        return with_ranks(replace(self.outline.common, engine=engine), ranks)

    def route(self, engine: str, ranks: Mapping[int, RankDescription]) -> Route:
        """The proved and lowered plan for engines whose ranks are laid out like these."""

        def make() -> Route:
            source = self.source(engine, ranks)
            if self.plan is None:
                return lower(prove(plan(source, self.dst, self.dst_rank, holders=self.outline.holders)))
            return lower(prove(replace(self.plan, src=source)))

        return self._routes.get(_digest_of(ranks), make)


class SharedPlans:
    """The plans of one destination rank. Callable from any thread."""

    def __init__(self, dst: Manifest, dst_rank: int, *, accept_unknown_identity: bool = False) -> None:
        if not accept_unknown_identity:
            dst = replace(dst, identity=replace(dst.identity, is_required=True))
        self._dst, self._dst_rank = dst, dst_rank
        self._plans: MadeOnce[SharedPlan] = MadeOnce()

    def __len__(self) -> int:
        """How many different plans are in use."""
        return len(self._plans)

    def find(self, engine: str, outline: bytes) -> SharedPlan:
        """The plan for an engine of this outline; raises ``SpecError`` if that makes no sense."""
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
