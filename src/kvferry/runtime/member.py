"""One rank of a source engine: joins its authority, and hears of every release.

::

    JOINING ──▶ JOINED          and back, when the authority has started anew at its address
       └──▶ REFUSED             for good: it does not belong there
"""

from __future__ import annotations

from enum import StrEnum

from kvferry.runtime.values import AnswerDigest, MemberEffect, Released, Send, Timing
from kvferry.wire.messages import (
    DigestTask,
    FromAuthority,
    Join,
    JoinAck,
    Rejected,
    ReleaseAck,
    ReleaseNotice,
)

NOT_JOINED = "not-joined"
"""What an authority says to a rank that it does not know."""


class Membership(StrEnum):
    """Whether the authority knows a rank."""

    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"


class Member:
    """Call it with events and ``now``; carry out what it returns.

    A rank that has joined still says now and then how much it has heard. An authority that has started anew
    does not know it, says so, and is joined again; what its earlier start had on offer is over.
    """

    def __init__(self, authority: str, join: Join, timing: Timing | None = None) -> None:
        self._authority, self._join = authority, join
        self._timing = timing or Timing()
        self.state = Membership.JOINING
        self.refusal = ""
        """Why it was turned away."""
        self._generation = 0
        self._heard = 0
        """The number of the last notice that arrived."""
        self._sent_at = float("-inf")

    @property
    def generation(self) -> int:
        return self._generation

    def receive(self, now: float, reply_to: str, message: FromAuthority) -> list[MemberEffect]:
        """A message from the authority; whoever else is at ``reply_to`` has nothing to say here."""
        if reply_to != self._authority:
            return []
        match message:
            case JoinAck() if self.state is Membership.JOINING:
                self.state = Membership.JOINED
                if message.generation != self._generation:
                    self._generation, self._heard = message.generation, 0
            case Rejected() if self.state is Membership.JOINED and message.code == NOT_JOINED:
                self.state = Membership.JOINING
                self._join = self._join.again(self._generation)
                return self._say(now)
            case Rejected() if self.state is Membership.JOINING and message.code != NOT_JOINED:
                self.state, self.refusal = Membership.REFUSED, f"{message.code}: {message.detail}"
            case ReleaseNotice() if (
                self.state is Membership.JOINED and message.generation == self._generation
            ):
                return [*self._hear(message), *self._say(now)]
            case DigestTask() if self.state is Membership.JOINED and message.generation == self._generation:
                return [AnswerDigest(message)]
            case _:
                pass  # for readers, or too late
        return []

    def _hear(self, notice: ReleaseNotice) -> list[MemberEffect]:
        released: list[MemberEffect] = []
        for number, (request_id, reason) in enumerate(notice.requests, notice.first):
            if number > self._heard:
                at = number - notice.first
                ticket_id = notice.ticket_ids[at] if at < len(notice.ticket_ids) else 0
                released.append(Released(request_id, reason, ticket_id))
                self._heard = number
        return released

    def _say(self, now: float) -> list[MemberEffect]:
        self._sent_at = now
        is_joined = self.state is Membership.JOINED
        message = ReleaseAck(self._generation, self._join.rank, self._heard) if is_joined else self._join
        return [Send(self._authority, message)]

    def tick(self, now: float) -> list[MemberEffect]:
        """Ask to join, until it is answered; then make sure that the authority is still the same."""
        return self._say(now) if now >= self.next_deadline() else []

    def next_deadline(self) -> float:
        match self.state:
            case Membership.JOINING:
                return self._sent_at + self._timing.retry
            case Membership.JOINED:  # soon enough for readers that wait until a new start is whole
                return self._sent_at + self._timing.meet / 2
            case Membership.REFUSED:
                return float("inf")
