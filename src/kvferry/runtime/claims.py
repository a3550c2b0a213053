"""Claims of soft offers: the engine pins the remaining blocks, and the reader gets a ticket.
And running prefills: a reader that knows the router's name of one gets its growing ticket.

A soft offer is a signed ticket without block tables; the source keeps no state for it. Only the engine's own
thread can look into its prefix cache: a claim that it does not answer in time is denied, and blocks that it
pins later are released again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

from kvferry.runtime.values import HangUp, Send, SourceEffect, Wanted
from kvferry.wire.messages import Claimed, ClaimOffer, FindTransfer
from kvferry.wire.ticket import Ticket

MAX_CLAIMS = 1024
"""Claims that wait for the engine, or were answered recently."""
NO_ANSWER = "the engine is busy"


@dataclass(slots=True)
class _Asked:
    reply_to: str
    nonce: int
    deadline: float
    """When it is denied, or, once answered, forgotten."""
    answer: Claimed | None = None


class Claims:
    def __init__(self, patience: float) -> None:
        """``patience``: seconds for the engine to answer, and for a reader to repeat its claim."""
        self._patience = patience
        self._numbers = count(1)
        self._asked: dict[int, _Asked] = {}
        """By number, the oldest first."""

    def ask(self, now: float, reply_to: str, claim: ClaimOffer) -> list[SourceEffect]:
        """A reader claims a soft offer; a repeated claim gets the same answer."""
        for asked in self._asked.values():
            if (asked.reply_to, asked.nonce) == (reply_to, claim.nonce):
                return [Send(reply_to, asked.answer)] if asked.answer else []
        if len(self._asked) >= MAX_CLAIMS:
            return [Send(reply_to, Claimed(claim.nonce, detail="too many claims"))]
        number = next(self._numbers)
        until = now + self._patience
        self._asked[number] = _Asked(reply_to, claim.nonce, until)
        return [Wanted(number, claim.ticket, min(claim.num_tokens, claim.ticket.num_tokens), until)]

    def answer(self, now: float, number: int, ticket: Ticket | None, detail: str = "") -> Send | None:
        """The engine has pinned blocks, or found none. Returns None if the claim was denied already."""
        asked = self._asked.get(number)
        if asked is None or asked.answer:
            return None
        asked.answer, asked.deadline = Claimed(asked.nonce, ticket, detail), now + self._patience
        return Send(asked.reply_to, asked.answer)

    def tick(self, now: float) -> list[SourceEffect]:
        """Deny overdue claims; forget answered ones."""
        effects: list[SourceEffect] = []
        for number in [number for number, asked in self._asked.items() if asked.deadline <= now]:
            asked = self._asked.pop(number)
            if not asked.answer:
                effects.append(Send(asked.reply_to, Claimed(asked.nonce, detail=NO_ANSWER)))
        return effects

    def next_deadline(self) -> float:
        return min((asked.deadline for asked in self._asked.values()), default=float("inf"))


MAX_FINDERS = 4096
"""Readers that wait for prefills; the oldest is forgotten first, and asks again."""
FINDER_SECONDS = 5.0
"""How long a reader that does not repeat its request is remembered."""


@dataclass(frozen=True, slots=True)
class _Finder:
    nonce: int
    until: float


class NamedPrefills:
    """Growing prefills by the router's names, and the readers that wait for them.

    The names are unguessable: a reader that knows one may have the ticket.
    """

    def __init__(self) -> None:
        self._open: dict[str, Ticket] = {}
        self._refused: OrderedDict[str, str] = OrderedDict()
        """Reasons by name; the latest ones."""
        self._finders: OrderedDict[tuple[str, str], _Finder] = OrderedDict()
        """By name and reply address."""

    def open(self, transfer: str, ticket: Ticket) -> list[SourceEffect]:
        """A prefill has begun: answer waiting readers."""
        self._open[transfer] = ticket
        self._refused.pop(transfer, None)  # it may have been preempted, and begins again
        return self._answer(transfer, ticket, "")

    def refuse(self, transfer: str, why: str) -> list[SourceEffect]:
        """A prefill will not be offered: present and future requests get the reason."""
        self._refused[transfer] = why
        if len(self._refused) > MAX_FINDERS:
            self._refused.popitem(last=False)
        return self._answer(transfer, None, why)

    def _answer(self, transfer: str, ticket: Ticket | None, why: str) -> list[SourceEffect]:
        waiting = [key for key in self._finders if key[0] == transfer]
        return [Send(key[1], Claimed(self._finders.pop(key).nonce, ticket, why)) for key in waiting]

    def grown(self, transfer: str, ticket: Ticket) -> None:
        if transfer in self._open and self._open[transfer].ticket_id == ticket.ticket_id:
            self._open[transfer] = ticket

    def end(self, transfer: str, ticket_id: int, *, may_come_again: bool) -> list[SourceEffect]:
        """A lease is over; a revoked one may be offered again."""
        ticket = self._open.get(transfer)
        if ticket is None or ticket.ticket_id != ticket_id:
            return []
        del self._open[transfer]
        return [] if may_come_again else self.refuse(transfer, "it was read, or its lease is over")

    def find(self, now: float, reply_to: str, ask: FindTransfer) -> Claimed:
        """The ticket of a running prefill; otherwise it is sent when the prefill begins."""
        if ticket := self._open.get(ask.transfer):
            return Claimed(ask.nonce, ticket)
        if ask.transfer in self._refused:
            return Claimed(ask.nonce, detail=self._refused[ask.transfer])
        key = ask.transfer, reply_to
        self._finders[key] = _Finder(ask.nonce, now + FINDER_SECONDS)
        self._finders.move_to_end(key)
        if len(self._finders) > MAX_FINDERS:
            self._finders.popitem(last=False)
        return Claimed(ask.nonce, is_pending=True)

    def tick(self, now: float) -> None:
        while self._finders and next(iter(self._finders.values())).until <= now:
            self._finders.popitem(last=False)


@dataclass(frozen=True, slots=True)
class ClaimEnd:
    """The result of a claim: a ticket, or none and why."""

    number: int
    ticket: Ticket | None
    detail: str = ""


SILENCE_SECONDS, BEGIN_SECONDS = 10.0, 120.0
"""Timeouts for the engine to answer a ``find``, and for the prefill to begin."""
IDLE_SECONDS = 60.0
"""How long an unused connection to an engine is kept."""
ClaimerEffect = Send | ClaimEnd | HangUp


@dataclass(slots=True)
class _Open:
    send: Send
    deadline: float
    latest: float
    """Limit of the deadline."""
    sent_at: float


class Claimer:
    """The reader's side: claims soft offers and finds prefills. Each request ends once."""

    def __init__(self, patience: float, retry: float) -> None:
        self._patience, self._retry = patience, retry
        self._open: dict[int, _Open] = {}
        self._called: dict[str, float] = {}
        """When each engine was last contacted."""

    def claim(self, now: float, number: int, ticket: Ticket, num_tokens: int) -> list[ClaimerEffect]:
        """Claim the first tokens of a soft offer; ``number`` is unique per request."""
        send, until = Send(ticket.authority, ClaimOffer(number, ticket, num_tokens)), now + self._patience
        return self._ask(number, _Open(send, until, until, now))

    def find(self, now: float, number: int, authority: str, transfer: str) -> list[ClaimerEffect]:
        """Ask for the ticket of a prefill by the router's name, until it has begun."""
        send = Send(authority, FindTransfer(number, transfer))
        return self._ask(number, _Open(send, now + SILENCE_SECONDS, now + BEGIN_SECONDS, now))

    def _ask(self, number: int, asked: _Open) -> list[ClaimerEffect]:
        self._open[number], self._called[asked.send.to] = asked, asked.sent_at
        return [asked.send]

    def receive(self, now: float, sender: str, message: Claimed) -> list[ClaimerEffect]:
        """An answer; ignored if it is a duplicate or not from the asked authority."""
        asked = self._open.get(message.nonce)
        if asked is None or sender != asked.send.to:
            return []
        if message.is_pending:
            asked.deadline = min(now + SILENCE_SECONDS, asked.latest)
            return []
        del self._open[message.nonce]
        return [ClaimEnd(message.nonce, message.ticket, message.detail)]

    def cancel(self, number: int) -> list[ClaimerEffect]:
        """Cancel a request. Blocks pinned for it are released with their lease."""
        self._open.pop(number, None)
        return []

    def tick(self, now: float) -> list[ClaimerEffect]:
        """Repeat and time out requests; close unused connections."""
        effects: list[ClaimerEffect] = []
        for number, asked in [*self._open.items()]:
            if now >= asked.deadline:
                del self._open[number]
                effects.append(ClaimEnd(number, None, "the source did not answer"))
            elif now >= asked.sent_at + self._retry:
                asked.sent_at = self._called[asked.send.to] = now
                effects.append(asked.send)
        idle = [address for address, asked_at in self._called.items() if now >= asked_at + IDLE_SECONDS]
        for address in idle:
            del self._called[address]
        return [*effects, *(HangUp(address) for address in idle)]

    def next_deadline(self) -> float:
        open_until = [min(asked.deadline, asked.sent_at + self._retry) for asked in self._open.values()]
        idle_at = [asked_at + IDLE_SECONDS for asked_at in self._called.values()]
        return min([*open_until, *idle_at], default=float("inf"))
