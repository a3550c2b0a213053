"""The first contact of one destination rank with source engines: once each, before any read.

::

    GREETING ──▶ PLANNING ──▶ DESCRIBING ──▶ BUILDING ──▶ MET ──▶ BROKEN
        ▲                                                            │
        └────────────────────────────────────────────────────────────┘

A broken peer is met again before the next read, once no read uses it. A peer that cannot be met in time is
dropped.

An engine's outline says which rank holds what, which is enough to plan. Only the ranks to read from are
described.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from kvferry.runtime.failure import Failure, FailureCode, denied
from kvferry.runtime.values import Build, Drop, Effect, FindRanks, Peer, Send, Timing
from kvferry.wire.messages import (
    MAX_BATCH,
    PROTOCOL,
    DescribeRanks,
    Hello,
    RankDescription,
    RankDescriptions,
    Rejected,
    Welcome,
    is_spoken,
)

MAX_RANKS_BYTES = 64 << 20
"""Limit of the descriptions of one peer. Each rank's has tens of kilobytes."""


class Meeting(StrEnum):
    GREETING = "greeting"
    """The hello is repeated until it is answered."""
    PLANNING = "planning"
    """The ranks to read from are being determined."""
    DESCRIBING = "describing"
    """Requests for the descriptions of those ranks are repeated until all have come."""
    BUILDING = "building"
    """The plan is being proved and lowered, and the ranks connected."""
    MET = "met"
    BROKEN = "broken"
    """Met; but a read from it failed."""


AT_WORK = (Meeting.PLANNING, Meeting.BUILDING)
"""A worker thread is busy for such a peer, which is not dropped until the worker reports back."""


@dataclass(slots=True)
class _Asked:
    nonce: int
    """Of its requests; answers to earlier meetings are ignored."""
    welcome: Welcome
    missing: set[int] = field(default_factory=set)
    """Ranks without a description."""
    ranks: dict[int, RankDescription] = field(default_factory=dict)
    num_bytes: int = 0

    def take(self, ranks: Mapping[int, RankDescription]) -> bool:
        """Keep new descriptions; whether there are any."""
        new = {number: ranks[number] for number in self.missing & ranks.keys()}
        self.ranks |= new
        self.missing -= new.keys()
        self.num_bytes += sum(each.num_bytes for each in new.values())
        return bool(new)


@dataclass(slots=True)
class _Known:
    peer: Peer
    since: float
    """Time of its last progress: the timeout applies to each answer, not to the whole meeting."""
    asked_at: float
    state: Meeting = Meeting.GREETING
    asked: _Asked | None = None
    """From its welcome until it is built."""


Lost = list[tuple[Peer, Failure]]
"""Peers that cannot be met, and why."""


class Meetings:
    """Call it with events and ``now``; carry out the effects, and fail the fetches of lost peers."""

    def __init__(self, reader: str, timing: Timing) -> None:
        self._reader, self._timing = reader, timing
        self._known: dict[Peer, _Known] = {}
        """The last used come last."""
        self.unmet: set[Peer] = set()
        """Peers in first contact; a ticket may have made them up."""
        self._nonces = count(1)
        self.num_repeated = 0

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, peer: object) -> bool:
        return peer in self._known

    def state(self, peer: Peer) -> Meeting | None:
        known = self._known.get(peer)
        return None if known is None else known.state

    def since(self, peer: Peer) -> float:
        known = self._known.get(peer)
        return float("-inf") if known is None else known.since

    def is_met(self, peer: Peer) -> bool:
        return self.state(peer) in (Meeting.MET, Meeting.BROKEN)

    def at(self, address: str) -> list[Peer]:
        return [peer for peer in self._known if peer.authority == address]

    @property
    def addresses(self) -> set[str]:
        return {peer.authority for peer in self._known}

    @property
    def known(self) -> dict[Peer, Meeting]:
        return {peer: known.state for peer, known in self._known.items()}

    def meet(self, now: float, peer: Peer, *, is_used: bool) -> list[Effect]:
        """Meet a peer unless it is known; ``is_used``: a read still needs the broken one."""
        known = self._known.pop(peer, None)
        if known is None:
            return self._greet(now, peer)
        if known.state is Meeting.BROKEN and not is_used:
            return [Drop(peer), *self._greet(now, peer)]
        self._known[peer] = known
        return []

    def _greet(self, now: float, peer: Peer) -> list[Effect]:
        self._known[peer] = _Known(peer, since=now, asked_at=now)
        self.unmet.add(peer)
        return [self._hello(peer)]

    def _hello(self, peer: Peer) -> Send:
        return Send(peer.authority, Hello(PROTOCOL, self._reader))

    def make_room(self, busy: Set[Peer]) -> list[Effect]:
        """Drop the least recently used peer."""
        for peer, known in self._known.items():
            if peer not in busy and known.state not in AT_WORK:
                return self.forget(peer)
        return []

    def forget(self, peer: Peer) -> list[Effect]:
        self._known.pop(peer, None)
        self.unmet.discard(peer)
        return [Drop(peer)]

    def break_off(self, peer: Peer) -> None:
        """A read from the peer failed: meet it again before the next one."""
        if self.state(peer) is Meeting.MET:
            self._known[peer].state = Meeting.BROKEN

    # -- what the authority answers ----------------------------------------------------------------

    def _greeted_at(self, address: str) -> list[Peer]:
        waiting = (known for known in self._known.values() if known.state is Meeting.GREETING)
        return [known.peer for known in waiting if known.peer.authority == address]

    def welcomed(self, now: float, address: str, welcome: Welcome) -> tuple[list[Effect], Lost]:
        effects: list[Effect] = []
        lost: Lost = []
        for peer in self._greeted_at(address):
            if not is_spoken(welcome.protocol):
                detail = f"this reader speaks protocol {PROTOCOL}, the engine protocol {welcome.protocol}"
                lost.append((peer, Failure(FailureCode.PROTOCOL, detail)))
            elif (welcome.engine, welcome.generation) != (peer.engine, peer.generation):
                detail = f"{address} is now {welcome.engine}, generation {welcome.generation}"
                lost.append((peer, Failure(FailureCode.RESTARTED, detail)))
            else:
                known = self._known[peer]
                known.state, known.asked = Meeting.PLANNING, _Asked(next(self._nonces), welcome)
                known.since = now
                effects.append(FindRanks(peer, welcome.outline))
        return effects, lost

    def found(self, now: float, peer: Peer, ranks: Collection[int]) -> list[Effect]:
        """These ranks of the peer are read from."""
        known = self._known.get(peer)
        if known is None or known.asked is None or known.state is not Meeting.PLANNING:
            return []
        known.asked.missing, known.state = set(ranks), Meeting.DESCRIBING
        return self._go_on(now, known, known.asked)

    def described(self, now: float, address: str, answer: RankDescriptions) -> tuple[list[Effect], Lost]:
        for known in self._waiting():
            asked = known.asked
            if asked is None or (known.peer.authority, asked.nonce) != (address, answer.nonce):
                continue
            if answer.generation != known.peer.generation:
                detail = f"{address} is now generation {answer.generation} of {known.peer.engine}"
                return [], [(known.peer, Failure(FailureCode.RESTARTED, detail))]
            # An answer without anything new is a duplicate.
            is_new = asked.take(answer.ranks)
            if asked.num_bytes > MAX_RANKS_BYTES:
                detail = f"the descriptions of its ranks exceed {MAX_RANKS_BYTES} bytes"
                return [], [(known.peer, Failure(FailureCode.BAD_MANIFEST, detail))]
            return self._go_on(now, known, asked) if is_new else [], []
        return [], []

    def _go_on(self, now: float, known: _Known, asked: _Asked) -> list[Effect]:
        """Ask for missing ranks, or build the peer."""
        known.asked_at = known.since = now
        if asked.missing:
            return [self._ask(known.peer, asked)]
        known.state, known.asked = Meeting.BUILDING, None
        return [Build(known.peer, asked.welcome.transport, asked.welcome.outline, asked.ranks)]

    @staticmethod
    def _ask(peer: Peer, asked: _Asked) -> Send:
        missing = tuple(sorted(asked.missing)[:MAX_BATCH])
        return Send(peer.authority, DescribeRanks(asked.nonce, peer.generation, missing))

    def rejected(self, address: str, message: Rejected) -> Lost:
        if message.code == "not-ready":
            return []  # the hello is repeated until the meeting times out
        failure = denied(message.code, message.detail)
        return [(peer, failure) for peer in self._greeted_at(address)]

    def built(self, peer: Peer) -> bool:
        """The peer can be read from; False if it was dropped meanwhile."""
        if peer in self._known:
            self._known[peer].state = Meeting.MET
            self.unmet.discard(peer)
        return peer in self._known

    # -- time --------------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[list[Effect], Lost]:
        """Repeat messages, and give up peers that do not answer.

        A slow build fails the fetches that wait for it, and still serves later ones.
        """
        effects: list[Effect] = []
        lost: Lost = []
        for known in self._waiting():
            if now >= known.since + self._timing.meet:
                lost.append((known.peer, self.no_answer(known.peer)))
            elif now >= known.asked_at + self._timing.retry:
                known.asked_at = now
                self.num_repeated += 1
                asked = known.asked
                effects.append(self._hello(known.peer) if asked is None else self._ask(known.peer, asked))
        return effects, lost

    def next_deadline(self) -> float:
        meet, retry = self._timing.meet, self._timing.retry
        deadlines = (min(known.since + meet, known.asked_at + retry) for known in self._waiting())
        return min(deadlines, default=float("inf"))

    def _waiting(self) -> list[_Known]:
        asking = (Meeting.GREETING, Meeting.DESCRIBING)
        return [known for known in self._known.values() if known.state in asking]

    def no_answer(self, peer: Peer) -> Failure:
        detail = f"{peer.engine} did not complete the first contact within {self._timing.meet:g} s"
        return Failure(FailureCode.NO_ANSWER, detail)
