"""One rank of a source engine: joins its authority, and receives every release.

::

    JOINING ──▶ JOINED          and back, when the authority has restarted at its address
       └──▶ REFUSED             final
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
"""The rejection of an unknown rank."""


class Membership(StrEnum):
    JOINING = "joining"
    JOINED = "joined"
    REFUSED = "refused"


class Member:
    """Call it with events and ``now``; carry out what it returns.

    A joined rank acknowledges releases periodically. A restarted authority rejects that, and the rank joins
    again; offers of the earlier start are over.
    """

    def __init__(self, authority: str, join: Join, timing: Timing | None = None) -> None:
        self._authority, self._join = authority, join
        self._timing = timing or Timing()
        self.state = Membership.JOINING
        self.refusal = ""
        self._generation = 0
        self._heard = 0
        """The number of the last release received."""
        self._sent_at = float("-inf")
        self.num_unanswered = 0
        """Requests to join since the last answer."""

    @property
    def generation(self) -> int:
        return self._generation

    def receive(self, now: float, reply_to: str, message: FromAuthority) -> list[MemberEffect]:
        """A message from the authority; messages from other addresses are ignored."""
        if reply_to != self._authority:
            return []
        match message:
            case JoinAck() if self.state is Membership.JOINING:
                self.state, self.num_unanswered = Membership.JOINED, 0
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
        self.num_unanswered += not is_joined
        message = ReleaseAck(self._generation, self._join.rank, self._heard) if is_joined else self._join
        return [Send(self._authority, message)]

    def tick(self, now: float) -> list[MemberEffect]:
        """Ask to join until answered; then check periodically that the authority is the same."""
        return self._say(now) if now >= self.next_deadline() else []

    def next_deadline(self) -> float:
        match self.state:
            case Membership.JOINING:
                return self._sent_at + self._timing.retry
            case Membership.JOINED:  # soon enough for readers that wait until a new start is whole
                return self._sent_at + self._timing.meet / 2
            case Membership.REFUSED:
                return float("inf")
