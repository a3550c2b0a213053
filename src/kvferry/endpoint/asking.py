"""Questions to a running source engine, by commands: its status and its manifest."""

from __future__ import annotations

import json
import secrets
from contextlib import closing
from time import monotonic
from typing import Any, TypeVar

from kvferry.channel import Channel, Received
from kvferry.core.manifest import Manifest
from kvferry.endpoint.invitation import this_host
from kvferry.errors import SpecError
from kvferry.runtime.failure import refusal
from kvferry.wire.messages import (
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    TOKEN_BYTES,
    AskStatus,
    DescribeRanks,
    Hello,
    Outcome,
    RankDescription,
    RankDescriptions,
    Rejected,
    Settle,
    SettleAck,
    StatusAnswer,
    ToAuthority,
    Welcome,
    decode_from_authority,
    encode,
    is_spoken,
)
from kvferry.wire.outline import outline_from_msgpack, with_ranks
from kvferry.wire.secret import Secret, Trust
from kvferry.wire.ticket import Ticket

ASK_SECONDS = 5.0
ASK_AGAIN_SECONDS = 1.0
READER = "kvferry plan"

Answer = TypeVar("Answer")


class Asking:
    """Asks the engine at an address one question after another; raises SpecError without an answer."""

    def __init__(self, address: str, secret: Secret | None, seconds: float) -> None:
        self._address, self._has_secret, self._seconds = address, secret is not None, seconds
        self._channel = Channel(secret=secret, max_bytes=MAX_MESSAGE_BYTES)

    def ask(self, question: ToAuthority, expected: type[Answer]) -> Answer:
        until, again = monotonic() + self._seconds, 0.0
        while (now := monotonic()) < until:
            if now >= again:
                self._channel.send(self._address, encode(question))
                again = now + ASK_AGAIN_SECONDS
            for received in self._channel.wait(min(until, again) - now):
                if isinstance(received, Received):
                    match decode_from_authority(received.data):
                        case Rejected(_, detail):
                            raise SpecError(f"{self._address}: {detail}")
                        case answer if isinstance(answer, expected):
                            return answer
                        case _:
                            pass  # of an earlier question, which was repeated
        hint = "that KVFERRY_SECRET_FILE is set here if it has a secret"
        if self._has_secret:
            hint = "that it has this secret"
        raise SpecError(
            f"{self._address} did not answer within {self._seconds:g} s: check that it is running, and {hint}"
        )

    def close(self) -> None:
        self._channel.close()


def ask_status(address: str, secret: Secret | None, seconds: float = ASK_SECONDS) -> dict[str, Any]:
    """The report of the engine at an address."""
    with closing(Asking(address, secret, seconds)) as asking:
        answer = json.loads(asking.ask(AskStatus(PROTOCOL), StatusAnswer).report)
    if not isinstance(answer, dict):
        raise SpecError(f"{address}: the status report is not an object")
    return answer


def manifest_of(ticket: Ticket, secret: Secret | None, seconds: float = ASK_SECONDS) -> Manifest:
    """The manifest of the engine that issued a ticket; declines the ticket."""
    if failure := refusal(ticket, Trust(secret), this_host()):
        raise SpecError(str(failure))
    with closing(Asking(ticket.authority, secret, seconds)) as asking:
        welcome = asking.ask(Hello(PROTOCOL, READER), Welcome)
        if not is_spoken(welcome.protocol):
            raise SpecError(f"{ticket.authority}: speaks protocol {welcome.protocol}, not {PROTOCOL}")
        try:
            outline = outline_from_msgpack(welcome.outline, welcome.engine)
            return with_ranks(outline.common, _described(asking, welcome.generation, outline.ranks))
        finally:
            who = READER, 0, 1, secrets.token_bytes(TOKEN_BYTES)
            settle = Settle(
                ticket.generation, ticket.ticket_id, *who, Outcome.UNREAD, reader_ranks=1, declined=ticket
            )
            asking.ask(settle, SettleAck)


def _described(asking: Asking, generation: int, ranks: tuple[int, ...]) -> dict[int, RankDescription]:
    found: dict[int, RankDescription] = {}
    while missing := [rank for rank in ranks if rank not in found]:
        question = DescribeRanks(len(found), generation, tuple(missing[:MAX_BATCH]))
        answer = asking.ask(question, RankDescriptions)
        if answer.nonce == question.nonce and missing[0] not in answer.ranks:
            raise SpecError(f"rank {missing[0]} is not described: the engine has restarted; try again")
        found |= answer.ranks
    return found
