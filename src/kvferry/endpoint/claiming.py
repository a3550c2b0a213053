"""Exchanges soft offers and names of prefills for tickets, for an engine's scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count

from kvferry.channel import ContactChange, Received
from kvferry.core.span import MAX_STOP
from kvferry.core.state import check_range
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.owner import Owner
from kvferry.runtime.claims import ClaimEnd, Claimer, ClaimerEffect
from kvferry.runtime.values import HangUp, Send
from kvferry.wire.messages import Claimed, decode_from_authority, encode
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import Ticket, check_ticket

PATIENCE_SECONDS, RETRY_SECONDS = 1.5, 0.5
"""A source answers within a second; computing the request is cheaper than a longer wait."""


class Claimant:
    """Claims soft offers, and requests tickets of running prefills: one per engine. No call blocks."""

    def __init__(self, name: str, *, trust: Trust, edges: Edges | None = None) -> None:
        edges = edges or Edges()
        self._numbers = count(1)
        self._ends: deque[ClaimEnd] = deque()
        self._claimer = Claimer(PATIENCE_SECONDS, RETRY_SECONDS)  # the owner's alone
        self._owner = Owner(f"kvferry-{name}-claims", self._carry_out, self._tick, edges.clock)
        self._channel = edges.open_channel("", trust.secret)
        edges.start_owner(self._owner)
        self._channel.start(f"kvferry-{name}-claims-channel", self._receive, lambda: self._owner.is_behind)

    def claim(self, ticket: Ticket, num_tokens: int) -> int:
        """Claim the first tokens of a soft offer; returns the number that ``poll`` reports."""
        check_ticket(ticket)
        check_range("num_tokens", num_tokens, 0, MAX_STOP)
        number = next(self._numbers)
        self._owner.put(lambda now: self._claimer.claim(now, number, ticket, num_tokens))
        return number

    def find(self, authority: str, transfer: str) -> int:
        """Request the ticket of a prefill by the router's name for it; granted once the prefill has started.

        Decline a ticket that is no longer needed when it comes (``Destination.decline``).
        """
        number = next(self._numbers)
        self._owner.put(lambda now: self._claimer.find(now, number, authority, transfer))
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request; ``poll`` does not report it."""
        self._owner.put(lambda _: self._claimer.cancel(number))

    def poll(self) -> list[ClaimEnd]:
        """The claims that ended since the last call."""
        return [self._ends.popleft() for _ in range(len(self._ends))]

    def close(self) -> None:
        self._owner.close()
        self._channel.close()

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, ContactChange):
            return
        message, sender = decode_from_authority(received.data), received.reply_to
        if isinstance(message, Claimed):
            self._owner.put(lambda now: self._claimer.receive(now, sender, message), len(received.data))

    # -- the owner's -------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[ClaimerEffect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._channel.send(effect.to, encode(effect.message))
                case HangUp():
                    self._channel.hang_up(effect.address)
                case ClaimEnd():
                    self._ends.append(effect)

    def _tick(self, now: float) -> float:
        self._carry_out(self._claimer.tick(now))
        return self._claimer.next_deadline()
