"""The messages of the control channel: tagged, versioned, bounded.

A destination rank talks to the lease authority of each source engine that it reads from; the ranks of a
source engine talk to their own authority. Every message of a reader is answered, and all are idempotent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar, get_args

import msgspec

from kvferry.errors import SpecError
from kvferry.wire.reading import Name, Words
from kvferry.wire.ticket import TableDoc, Ticket

PROTOCOL = 7
"""The version of the messages and their semantics."""
OLDEST_PROTOCOL = 5
"""The oldest supported version. At least the previous one is, so that engines can be upgraded one by one: a
new field has a default and may be ignored, a new message is only sent to peers that support it."""


def is_spoken(protocol: int) -> bool:
    """Whether this version is supported. The next one stays compatible with this one.

    >>> [version for version in range(PROTOCOL + 4) if is_spoken(version)]
    [5, 6, 7, 8]
    """
    return OLDEST_PROTOCOL <= protocol <= PROTOCOL + 1


MAX_MESSAGE_BYTES = 8 << 20
MAX_BATCH = 4096
"""Tickets in one renewal, requests in one notice, ranks in one question."""
MAX_SHORT_BYTES = 64 << 10
"""The limit of kinds without an entry in ``_MAX_BYTES``."""
TOO_LONG = "too-long"
"""The code of the answer to a longer message."""
TOKEN_BYTES = 16
MARK_BYTES = 16


class Outcome(StrEnum):
    """The outcome of one destination rank's read of a ticket."""

    READ = "read"
    """Complete; valid once the authority confirms that the lease was still held."""
    FAILED = "failed"
    UNREAD = "unread"
    """Nothing was posted: the ticket is free for another reader, unless it is declined."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: the first message; answered by ``Welcome``."""

    protocol: int
    reader: Name


class RankDescription(msgspec.Struct, frozen=True):
    """One rank of a source engine, for its readers."""

    layout: bytes
    """Its regions and views, msgpack; equal for ranks and engines of equal layout."""
    memory: tuple[tuple[int, Name], ...]
    """Address and device of each region."""
    card: bytes
    """Connection data of its transport."""

    @property
    def num_bytes(self) -> int:
        return len(self.layout) + len(self.card) + 32 * len(self.memory)


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the properties that all ranks of the engine share."""

    protocol: int
    engine: Name
    generation: int
    transport: Name
    outline: bytes
    """The engine's outline, msgpack, without its name: equal for engines of equal geometry."""


class DescribeRanks(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: request the layouts of ranks. Repeated for missing ones."""

    nonce: int
    generation: int
    ranks: tuple[int, ...]


class RankDescriptions(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: as many descriptions as fit into a message of moderate length."""

    nonce: int
    generation: int
    """The start of the engine that answers; a request to another start gets no descriptions."""
    ranks: dict[int, RankDescription]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Authority → any peer: a request is rejected."""

    code: Name
    detail: Words = ""


class Acquire(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: one of the reader's ranks requests a lease of this ticket."""

    nonce: int
    ticket: Ticket
    reader: Name
    """One start of one destination engine; a restarted engine has another name."""
    reader_rank: int
    reader_ranks: int
    attempt: int
    """Increases with each fetch of this rank, to detect late messages of earlier fetches."""
    token: bytes
    """A secret of this rank for this ticket, required by renewals and the settlement, since names can be
    guessed. The reader creates it, so that it can settle before the grant arrives, and a copy of the ticket
    is not enough to take over the lease."""


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the blocks stay untouched for this long after the request."""

    nonce: int
    ticket_id: int
    lease_ms: int
    proofs: dict[int, bytes] = {}
    """A proof for each rank that gathers for readers (``wire.ticket``): authorises gathering the ticket's
    blocks until the lease ends."""
    is_whole: bool = True
    """Whether every rank had joined. If not, a repeated request returns the missing proofs."""
    board: Name = ""
    """Shared memory that shows a reader on the authority's host whether the lease is held; or empty."""
    mark: bytes = b""
    """The board's entry while the lease is held."""


class ClaimOffer(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: pin those of a soft offer's first tokens that are still cached."""

    nonce: int
    ticket: Ticket
    """A soft one."""
    num_tokens: int
    """The number of first tokens that the reader's prompt shares with it."""


class FindTransfer(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: request the ticket of a transfer that a router named. Repeated until it exists."""

    nonce: int
    transfer: Name


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the requested ticket, or the reason why there is none."""

    nonce: int
    ticket: Ticket | None = None
    detail: Words = ""
    is_pending: bool = False
    """Whether there may be one later; the authority then answers again."""


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Reader, while it holds a growing lease → authority: request the next stage. Repeated."""

    nonce: int
    generation: int
    ticket_id: int
    reader: Name
    reader_rank: int
    token: bytes
    num_complete: int
    """The number of complete tokens that the reader knows of."""


class Grown(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the newest stage of a growing lease."""

    nonce: int
    ticket: Ticket
    proofs: dict[int, bytes] = {}
    """As in a grant, of this stage."""


class Denial(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: a lease is denied."""

    nonce: int
    ticket_id: int
    code: Name
    detail: Words = ""


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: extend the leases of these reads."""

    nonce: int
    generation: int
    """The start of the engine: each numbers its tickets from 1."""
    reader: Name
    reader_rank: int
    tickets: tuple[tuple[int, bytes], ...]
    """(ticket id, the rank's token for it)."""


class Renewal(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the leases extended from the time of the request, and those that ended."""

    nonce: int
    lease_ms: int
    kept: tuple[int, ...]
    ended: tuple[int, ...]


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: this rank reads nothing more of the ticket. Repeated until acknowledged."""

    generation: int
    ticket_id: int
    reader: Name
    reader_rank: int
    attempt: int
    token: bytes
    outcome: Outcome
    reader_ranks: int = 0
    """The reader's number of ranks, if it declines."""
    declined: Ticket | None = None
    """The ticket, if the reader's engine does not need it: once every rank has settled, its lease ends. The
    ticket authenticates itself, so that a rank without a grant can decline, in any order of messages."""

    @property
    def acquire(self) -> Acquire | None:
        """The request that the rank would have sent for the declined ticket, if any."""
        if self.declined is None or self.declined.ticket_id != self.ticket_id:
            return None
        who = self.reader, self.reader_rank, self.reader_ranks
        return Acquire(0, self.declined, *who, self.attempt, self.token)


class SettleAck(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: acknowledges ``Settle``, and confirms a read. A repetition gets the same answer."""

    ticket_id: int
    reader_rank: int
    attempt: int
    code: Name = ""
    """Why the read is invalid. Empty: the lease was still held when the message arrived, after the read."""
    detail: Words = ""


class DigestRequest(msgspec.Struct, frozen=True, tag=True):
    """Reader, while it holds a ticket → authority: request digests of a rank. Repeated until answered."""

    nonce: int
    generation: int
    ticket_id: int
    reader: Name
    reader_rank: int
    token: bytes
    src_rank: int
    question: bytes
    """The parts of the states, msgpack (``wire.rank_asks``)."""


class DigestAnswer(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the sums of the parts, or the error."""

    nonce: int
    sums: bytes = b""
    """64-bit integers, little-endian."""
    detail: Words = ""
    """The error; empty if there are sums."""


class DigestTask(msgspec.Struct, frozen=True, tag=True):
    """Authority → source rank: digest these parts of a leased ticket's blocks."""

    generation: int
    number: int
    tables: dict[str, TableDoc]
    question: bytes
    ticket_id: int = 0
    """For fairness between tickets, and to drop tasks of released ones."""


class DigestResult(msgspec.Struct, frozen=True, tag=True):
    """Source rank → authority: the sums, or the error."""

    generation: int
    rank: int
    number: int
    sums: bytes = b""
    detail: Words = ""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Source rank → its authority: joins the engine. Repeated."""

    protocol: int
    engine: Name
    rank: int
    transport: Name
    manifest: bytes
    """The engine's manifest as known to this rank, msgpack, without ranks."""
    description: RankDescription
    previous: int = 0
    """The start of the engine that it belonged to before, or 0."""
    credential: bytes = b""
    """A secret of the engine's ranks."""
    rank_key: bytes = b""
    """The key of the proofs in grants, if this rank gathers for readers; known to its authority only."""

    def again(self, previous: int) -> Join:
        """The message to the next start of the engine."""
        return msgspec.structs.replace(self, previous=previous)

    def invited(self, credential: bytes) -> Join:
        """The message of an admitted rank, without its key, which the authority already has."""
        return msgspec.structs.replace(self, credential=credential, rank_key=b"")

    def __repr__(self) -> str:
        """Without card, credential and key, for logs."""
        return f"Join(engine={self.engine!r}, rank={self.rank}, transport={self.transport!r})"


class ReleaseNotice(msgspec.Struct, frozen=True, tag=True):
    """Authority → source rank: these requests are released. Repeated until acknowledged."""

    generation: int
    first: int
    """The number of the first notice; the others are consecutive."""
    requests: tuple[tuple[str, str], ...]
    """(request id, reason)."""
    ticket_ids: tuple[int, ...] = ()
    """The tickets of these requests, for which ranks stop gathering."""


class ReleaseAck(msgspec.Struct, frozen=True, tag=True):
    """Source rank → authority: acknowledges notices up to this number."""

    generation: int
    rank: int
    number: int


class JoinAck(msgspec.Struct, frozen=True, tag=True):
    """Authority → source rank: the rank belongs to this start of the engine."""

    engine: Name
    generation: int


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Command → authority: request the status. Changes nothing."""

    protocol: int


class StatusAnswer(msgspec.Struct, frozen=True, tag=True):
    report: bytes
    """JSON; bounded, and without cards, keys and tickets."""


ToAuthority = (
    Hello
    | DescribeRanks
    | Acquire
    | ClaimOffer
    | FindTransfer
    | Watch
    | Renew
    | Settle
    | DigestRequest
    | Join
    | ReleaseAck
    | DigestResult
    | AskStatus
)
FromAuthority = (
    Welcome
    | RankDescriptions
    | Rejected
    | Grant
    | Claimed
    | Grown
    | Denial
    | Renewal
    | SettleAck
    | DigestAnswer
    | ReleaseNotice
    | JoinAck
    | DigestTask
    | StatusAnswer
)
Message = ToAuthority | FromAuthority

_MAX_BYTES: dict[str, int] = {
    "Acquire": 4 << 20,
    "ClaimOffer": 1 << 20,
    "DigestRequest": 1 << 20,
    "DigestResult": 4 << 20,
    "Gather": MAX_MESSAGE_BYTES,
    "Join": MAX_MESSAGE_BYTES,
    "Renew": 256 << 10,
    "Settle": 4 << 20,
    **dict.fromkeys((kind.__name__ for kind in get_args(FromAuthority)), MAX_MESSAGE_BYTES),
}
"""The longest message of each kind, checked before decoding."""

_TAG = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xa4type[\xa0-\xbf]([A-Za-z]+)", re.DOTALL)
"""The start of a message: a map with its kind as the first key. Other forms have the shortest limit."""


def too_long(data: bytes) -> str:
    """The error of a message that is too long; otherwise empty.

    >>> too_long(encode(Hello(PROTOCOL, "decode"))), too_long(encode(Hello(PROTOCOL, "x" * 70_000)))
    ('', 'a message of the kind Hello has at most 65536 bytes, got 70034')
    """
    found = _TAG.match(data[:64])
    kind = found[1].decode() if found else "unknown"
    limit = _MAX_BYTES.get(kind, MAX_SHORT_BYTES)
    if len(data) <= limit:
        return ""
    return f"a message of the kind {kind} has at most {limit} bytes, got {len(data)}"


_encoder = msgspec.msgpack.Encoder()
_to_authority: msgspec.msgpack.Decoder[ToAuthority] = msgspec.msgpack.Decoder(ToAuthority)
_from_authority: msgspec.msgpack.Decoder[FromAuthority] = msgspec.msgpack.Decoder(FromAuthority)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_authority(data: bytes) -> ToAuthority:
    return decoded(_to_authority.decode, data)


def decode_from_authority(data: bytes) -> FromAuthority:
    return decoded(_from_authority.decode, data)


Some = TypeVar("Some")


def decoded(decode: Callable[[bytes], Some], data: bytes) -> Some:
    """Decode a message; raises SpecError if it is invalid."""
    if complaint := too_long(data):
        raise SpecError(complaint)
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"message: {error}") from None
