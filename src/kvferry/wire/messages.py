"""What goes over the control channel: tagged, versioned, bounded messages.

A destination rank talks to the lease authority of each source engine it reads from; the ranks of a source
engine talk to their own authority. Every message of a reader is answered; none of them changes anything when
it arrives twice.
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
"""The version of the messages and of what they promise."""
OLDEST_PROTOCOL = 5
"""The oldest version that is still spoken. Usually the one before ours, so that engines can be upgraded one
by one: a new field has a default and may be ignored (fields that are not known are), a new message is sent
to nobody who has not said that it knows it. Version 4 read through rings that are gone, so 5 is the first.
"""


def is_spoken(protocol: int) -> bool:
    """Whether a peer of that version is understood. One that is newer by one speaks so that we understand it.

    >>> [version for version in range(PROTOCOL + 4) if is_spoken(version)]
    [5, 6, 7, 8]
    """
    return OLDEST_PROTOCOL <= protocol <= PROTOCOL + 1


MAX_MESSAGE_BYTES = 8 << 20
MAX_BATCH = 4096
"""Tickets in one renewal, requests in one notice, ranks in one question."""
MAX_SHORT_BYTES = 64 << 10
"""Of a message that has no length of its own below: whoever sends it may be anybody."""
TOO_LONG = "too-long"
"""What is answered to a longer one."""
TOKEN_BYTES = 16
MARK_BYTES = 16


class Outcome(StrEnum):
    """What became of one destination rank's read of a ticket."""

    READ = "read"
    """Every byte is in; it counts once the authority has confirmed that its lease was still held then."""
    FAILED = "failed"
    UNREAD = "unread"
    """Nothing was posted: the ticket may serve another reader, unless it is declined."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: who are you?"""

    protocol: int
    reader: Name


class RankDescription(msgspec.Struct, frozen=True):
    """One rank of a source engine, as its readers have to know it."""

    layout: bytes
    """Its regions and views, msgpack; the same for every rank of every engine that is laid out alike."""
    memory: tuple[tuple[int, Name], ...]
    """Where each of its regions is: address and device."""
    card: bytes
    """What its transport wants its readers to have."""

    @property
    def num_bytes(self) -> int:
        return len(self.layout) + len(self.card) + 32 * len(self.memory)


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: what is common to all ranks of the engine. Their layouts are asked for by rank."""

    protocol: int
    engine: Name
    generation: int
    transport: Name
    outline: bytes
    """The engine's outline, msgpack, without the engine's name: equal for engines of equal geometry."""


class DescribeRanks(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: how are these ranks laid out? Repeated for those that have not come yet."""

    nonce: int
    generation: int
    ranks: tuple[int, ...]


class RankDescriptions(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: as many of them as fit into a message of moderate length."""

    nonce: int
    generation: int
    """Which start of the engine answers; another one than was asked describes nothing."""
    ranks: dict[int, RankDescription]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """Authority → anybody: not now, or not you."""

    code: Name
    detail: Words = ""


class Acquire(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: one of the reader's ranks wants to read this ticket."""

    nonce: int
    ticket: Ticket
    reader: Name
    """One start of one destination engine: a restarted one has another name."""
    reader_rank: int
    reader_ranks: int
    attempt: int
    """Grows with each fetch of this rank: tells a late message of an earlier fetch from one of this."""
    token: bytes
    """What only this rank knows, for this ticket. The grant is tied to it: renewals and the settlement must
    show it, for names can be guessed. The reader makes it, and not the authority with the grant: so who gives
    up before the grant has come can still say so, and who asks again with a copy of the ticket gets nothing.
    """


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the blocks stay untouched for this long after the asking."""

    nonce: int
    ticket_id: int
    lease_ms: int
    proofs: dict[int, bytes] = {}
    """What each rank of the engine that gathers for readers wants to see with this ticket (``wire.ticket``).
    Whoever has one can have that rank gather the ticket's blocks until the lease ends."""
    is_whole: bool = True
    """Whether every rank had joined. If not, some proofs are missing, and come if it is asked for again."""
    board: Name = ""
    """Where a reader on the authority's host can see by itself whether the lease stands; empty: nowhere."""
    mark: bytes = b""
    """What is there while it does."""


class ClaimOffer(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: which of a soft offer's first tokens do you still have? Pin them for me."""

    nonce: int
    ticket: Ticket
    """A soft one."""
    num_tokens: int
    """How many of its first tokens are wanted: as many as the reader's prompt shares with it."""


class FindTransfer(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: the ticket of the prefill that a router named so. Repeated until there is one."""

    nonce: int
    transfer: Name


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the ticket that was asked for; or none, and why."""

    nonce: int
    ticket: Ticket | None = None
    detail: Words = ""
    is_pending: bool = False
    """Whether there may be one later: the answer comes again when there is."""


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Reader, while it holds a growing lease → authority: say when there is more than this. Repeated."""

    nonce: int
    generation: int
    ticket_id: int
    reader: Name
    reader_rank: int
    token: bytes
    num_complete: int
    """How many tokens the reader knows of."""


class Grown(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the newest stage of a growing lease."""

    nonce: int
    ticket: Ticket
    proofs: dict[int, bytes] = {}
    """As in a grant, of this stage."""


class Denial(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: no, and why."""

    nonce: int
    ticket_id: int
    code: Name
    detail: Words = ""


class Renew(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: these reads are still wanted."""

    nonce: int
    generation: int
    """Whose tickets: another start of the engine numbers its own from 1 again."""
    reader: Name
    reader_rank: int
    tickets: tuple[tuple[int, bytes], ...]
    """(ticket id, the rank's token for it)."""


class Renewal(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: which of them go on, from the moment of asking, and which have ended."""

    nonce: int
    lease_ms: int
    kept: tuple[int, ...]
    ended: tuple[int, ...]


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Reader → authority: this rank is through with the ticket; nothing of it is read any more.

    Repeated until acknowledged.
    """

    generation: int
    ticket_id: int
    reader: Name
    reader_rank: int
    attempt: int
    token: bytes
    outcome: Outcome
    reader_ranks: int = 0
    """Of the reader, where it declines."""
    declined: Ticket | None = None
    """The ticket, if the reader's engine does not need it: once every rank is through, its lease ends. The
    ticket proves itself, so that this also counts for a rank that was not granted it, whichever of its
    messages came first.
    """

    @property
    def acquire(self) -> Acquire | None:
        """What the rank would have asked for the declined ticket with; None if it declines none."""
        if self.declined is None or self.declined.ticket_id != self.ticket_id:
            return None
        who = self.reader, self.reader_rank, self.reader_ranks
        return Acquire(0, self.declined, *who, self.attempt, self.token)


class SettleAck(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the settle message arrived; for a read this is the confirmation that it counts.

    Whoever asks again within a lease gets the same answer.
    """

    ticket_id: int
    reader_rank: int
    attempt: int
    code: Name = ""
    """Why it does not count. Empty: the lease was still held when the message arrived, after the read."""
    detail: Words = ""


class DigestRequest(msgspec.Struct, frozen=True, tag=True):
    """Reader, while it holds a ticket → authority: what does this rank find? Repeated until answered."""

    nonce: int
    generation: int
    ticket_id: int
    reader: Name
    reader_rank: int
    token: bytes
    src_rank: int
    question: bytes
    """Which parts of which states, msgpack (``wire.rank_asks``)."""


class DigestAnswer(msgspec.Struct, frozen=True, tag=True):
    """Authority → reader: the sums of the parts, or why there are none."""

    nonce: int
    sums: bytes = b""
    """64-bit numbers, the lowest byte first."""
    detail: Words = ""
    """Why there are none; empty if they are there."""


class DigestTask(msgspec.Struct, frozen=True, tag=True):
    """Authority → source rank: digest this, of the blocks of a ticket that is leased."""

    generation: int
    number: int
    tables: dict[str, TableDoc]
    question: bytes
    ticket_id: int = 0
    """Tickets take turns, and none is digested after its release."""


class DigestResult(msgspec.Struct, frozen=True, tag=True):
    """Source rank → authority: the sums, or why there are none."""

    generation: int
    rank: int
    number: int
    sums: bytes = b""
    detail: Words = ""


class Join(msgspec.Struct, frozen=True, tag=True):
    """Source rank → its authority: here I am. Repeated; the answer lists what ended meanwhile."""

    protocol: int
    engine: Name
    rank: int
    transport: Name
    manifest: bytes
    """The engine's manifest as far as this rank knows it, msgpack, without any rank."""
    description: RankDescription
    previous: int = 0
    """The start of the engine that it belonged to before; 0 for a rank that belonged to none."""
    credential: bytes = b""
    """What the engine gave to its ranks, and to nobody else."""
    rank_key: bytes = b""
    """What the proofs in grants are made with, if this rank gathers for readers. It goes no further than to
    the rank's own authority."""

    def again(self, previous: int) -> Join:
        """The same rank, to be joined to the next start of its engine."""
        return msgspec.structs.replace(self, previous=previous)

    def invited(self, credential: bytes) -> Join:
        """The same rank, to be joined by itself once it is admitted: its key is known by then."""
        return msgspec.structs.replace(self, credential=credential, rank_key=b"")

    def __repr__(self) -> str:
        """Without card, credential and key: it may come into a log."""
        return f"Join(engine={self.engine!r}, rank={self.rank}, transport={self.transport!r})"


class ReleaseNotice(msgspec.Struct, frozen=True, tag=True):
    """Authority → source rank: these requests are released, by the source's own names.

    Repeated until acknowledged.
    """

    generation: int
    first: int
    """The number of the first of these notices; the others follow it."""
    requests: tuple[tuple[str, str], ...]
    """(request id, reason)."""
    ticket_ids: tuple[int, ...] = ()
    """The tickets of these requests: a rank that gathers for readers does so for none of them any more."""


class ReleaseAck(msgspec.Struct, frozen=True, tag=True):
    """Source rank → authority: notices up to this number arrived."""

    generation: int
    rank: int
    number: int


class JoinAck(msgspec.Struct, frozen=True, tag=True):
    """Authority → source rank: you belong to this start of the engine."""

    engine: Name
    generation: int


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """A person's tool → authority: how are you? It changes nothing."""

    protocol: int


class StatusAnswer(msgspec.Struct, frozen=True, tag=True):
    report: bytes
    """JSON, for people; bounded, and without cards, keys and tickets."""


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
"""How long a message of each kind may be. It is looked at before the message is decoded."""

_TAG = re.compile(rb"(?:[\x80-\x8f]|\xde..)\xa4type[\xa0-\xbf]([A-Za-z]+)", re.DOTALL)
"""How a message begins: a map whose first key is its kind. Whoever writes it otherwise keeps it short."""


def too_long(data: bytes) -> str:
    """What is wrong with the length of a message, by name; nothing if it may be read.

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
_to_authority = msgspec.msgpack.Decoder(ToAuthority)
_from_authority = msgspec.msgpack.Decoder(FromAuthority)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_to_authority(data: bytes) -> ToAuthority:
    message: ToAuthority = decoded(_to_authority.decode, data)
    return message


def decode_from_authority(data: bytes) -> FromAuthority:
    message: FromAuthority = decoded(_from_authority.decode, data)
    return message


Some = TypeVar("Some")


def decoded(decode: Callable[[bytes], Some], data: bytes) -> Some:
    """What a decoder makes of a message; whatever is wrong with it is a SpecError."""
    if complaint := too_long(data):
        raise SpecError(complaint)
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"message: {error}") from None
