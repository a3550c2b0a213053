"""The source engines that one destination rank knows: met once, before anything is read from them.

::

    GREETING ──▶ BUILDING ──▶ MET ──▶ BROKEN
        ▲                                │
        └────────────────────────────────┘   met anew, before the next read, once nothing needs it as it is

Whoever is not met in time, or cannot be served, is forgotten whole.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from kvferry.runtime.failure import Failure, FailureCode, denied
from kvferry.runtime.values import Build, Drop, Effect, Peer, Send, Timing
from kvferry.wire.messages import PROTOCOL, Hello, Rejected, Welcome


class Meeting(StrEnum):
    """How far it is with a peer."""

    GREETING = "greeting"
    """The hello is repeated until it is answered."""
    BUILDING = "building"
    """Its plan is being made, proved and lowered, and its ranks connected. Never dropped half done."""
    MET = "met"
    BROKEN = "broken"
    """Met; but a read from it failed."""


@dataclass(slots=True)
class _Known:
    peer: Peer
    since: float
    hello_at: float
    state: Meeting = Meeting.GREETING


Lost = list[tuple[Peer, Failure]]
"""Peers that cannot be met, and why."""


class Meetings:
    """Call it with events and ``now``; carry out what it returns, and tell who waits for a lost peer."""

    def __init__(self, reader: str, timing: Timing) -> None:
        self._reader, self._timing = reader, timing
        self._known: dict[Peer, _Known] = {}
        """The last used come last."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, peer: object) -> bool:
        return peer in self._known

    def state(self, peer: Peer) -> Meeting | None:
        """How far it is with a peer; None if it is not known."""
        known = self._known.get(peer)
        return None if known is None else known.state

    def is_met(self, peer: Peer) -> bool:
        """Whether the peer can be read from."""
        return self.state(peer) in (Meeting.MET, Meeting.BROKEN)

    @property
    def met(self) -> list[Peer]:
        """The peers that can be read from."""
        return [peer for peer in self._known if self.is_met(peer)]

    def meet(self, now: float, peer: Peer, *, is_used: bool) -> list[Effect]:
        """Somebody wants to read from a peer; ``is_used``: somebody needs it as it is."""
        known = self._known.pop(peer, None)
        if known is None:
            return self._greet(now, peer)
        if known.state is Meeting.BROKEN and not is_used:
            return [Drop(peer), *self._greet(now, peer)]
        self._known[peer] = known
        return []

    def _greet(self, now: float, peer: Peer) -> list[Effect]:
        self._known[peer] = _Known(peer, since=now, hello_at=now)
        return [self._hello(peer)]

    def _hello(self, peer: Peer) -> Send:
        return Send(peer.authority, Hello(PROTOCOL, self._reader))

    def make_room(self, busy: Set[Peer]) -> list[Effect]:
        """Forget the peer that was not used for the longest time."""
        for peer, known in self._known.items():
            if peer not in busy and known.state is not Meeting.BUILDING:
                return self.forget(peer)
        return []

    def forget(self, peer: Peer) -> list[Effect]:
        """Forget a peer whole."""
        self._known.pop(peer, None)
        return [Drop(peer)]

    def break_off(self, peer: Peer) -> None:
        """A read from the peer failed. One that is being met anew is not concerned."""
        if self.state(peer) is Meeting.MET:
            self._known[peer].state = Meeting.BROKEN

    # -- what the authority answers ----------------------------------------------------------------

    def _greeted_at(self, address: str) -> list[Peer]:
        waiting = (known for known in self._known.values() if known.state is Meeting.GREETING)
        return [known.peer for known in waiting if known.peer.authority == address]

    def welcomed(self, address: str, welcome: Welcome) -> tuple[list[Effect], Lost]:
        """The authority at an address says who it is."""
        effects: list[Effect] = []
        lost: Lost = []
        for peer in self._greeted_at(address):
            if welcome.protocol != PROTOCOL:
                detail = f"this reader speaks {PROTOCOL}, the engine {welcome.protocol}"
                lost.append((peer, Failure(FailureCode.PROTOCOL, detail)))
            elif (welcome.engine, welcome.generation) != (peer.engine, peer.generation):
                detail = f"{address} is now {welcome.engine}, generation {welcome.generation}"
                lost.append((peer, Failure(FailureCode.RESTARTED, detail)))
            else:
                self._known[peer].state = Meeting.BUILDING
                effects.append(Build(peer, welcome.manifest, welcome.cards, welcome.transport))
        return effects, lost

    def rejected(self, address: str, message: Rejected) -> Lost:
        """The authority at an address turns us away."""
        if message.code == "not-ready":
            return []  # the hello is repeated until the deadline of the meeting
        failure = denied(message.code, message.detail)
        return [(peer, failure) for peer in self._greeted_at(address)]

    def built(self, peer: Peer) -> bool:
        """The peer can be read from; whether it is still wanted."""
        if peer in self._known:
            self._known[peer].state = Meeting.MET
        return peer in self._known

    # -- time --------------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[list[Effect], Lost]:
        """Repeat hellos; give up whom was not met in time.

        A build that takes too long fails the fetches that wait for it, and still serves later ones.
        """
        effects: list[Effect] = []
        lost: Lost = []
        for known in self._greeting():
            if now >= known.since + self._timing.meet:
                lost.append((known.peer, self.no_answer(known.peer)))
            elif now >= known.hello_at + self._timing.retry:
                known.hello_at = now
                effects.append(self._hello(known.peer))
        return effects, lost

    def next_deadline(self) -> float:
        """When ``tick`` has something to do at the latest."""
        meet, retry = self._timing.meet, self._timing.retry
        deadlines = (min(known.since + meet, known.hello_at + retry) for known in self._greeting())
        return min(deadlines, default=float("inf"))

    def _greeting(self) -> list[_Known]:
        return [known for known in self._known.values() if known.state is Meeting.GREETING]

    def no_answer(self, peer: Peer) -> Failure:
        """What is told to who waited too long for a peer."""
        detail = f"{peer.engine} was not met within {self._timing.meet:g} s"
        return Failure(FailureCode.NO_ANSWER, detail)
