"""Why a fetch failed: one closed list of codes, for reports, records, metrics and logs alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import RequestError
from kvferry.wire.secret import SET_A_SECRET, Trust, is_loopback
from kvferry.wire.ticket import Ticket, is_sealed, is_text_sealed


class FailureCode(StrEnum):
    """Why a fetch failed. The text of a code is stable: tools may match on it.

    >>> FailureCode("lease-ended") is FailureCode.LEASE_ENDED
    True
    """

    ABORTED = "aborted"
    """``abort`` was called."""
    REFUSED = "refused"
    """The two engines cannot be served together; the detail has every finding."""
    NO_ANSWER = "no-answer"
    """The source did not answer, not all of its ranks had joined, or it granted no lease, in time."""
    SOURCE_GONE = "source-gone"
    """The source engine was killed or stopped, or cannot be reached."""
    RESTARTED = "restarted"
    """The source engine has started anew since the ticket was made."""
    PROTOCOL = "protocol"
    """The two sides speak different versions of the protocol."""
    FORGED = "forged"
    """The ticket is not what the source handed out, or its maker does not know this engine's secret."""
    ELSEWHERE = "elsewhere"
    """The source serves its own host only, and this reader is on another, or in another network namespace."""
    NO_SECRET = "no-secret"
    """The source serves other hosts, and this engine has no secret."""
    NOT_ALLOWED = "not-allowed"
    """The source is not in this engine's list of authorities."""
    ENDED = "ended"
    """The ticket was read, given back or withdrawn, or its lease is over."""
    TAKEN = "taken"
    """Another engine reads the ticket."""
    SPENT = "spent"
    """This rank has read the ticket, or is reading it."""
    TICKET = "ticket"
    """``fetch`` names another ticket than the one that is held."""
    READER = "reader"
    """The ranks of the destination do not agree on who they are."""
    DENIED = "denied"
    """The source said no, for a reason that this version does not know; the detail has it."""
    LEASE_ENDED = "lease-ended"
    """The source's lease ended before the read did: what was read may not be what was asked for."""
    LEASE_LAPSED = "lease-lapsed"
    """The lease was not renewed in time: nothing was read."""
    UNCONFIRMED = "unconfirmed"
    """All bytes are in, but the source did not confirm in time that the lease was held until then."""
    DIGEST_DIFFERS = "digest-differs"
    """What arrived is not what the source holds; the detail names the source rank, state and tokens."""
    NO_DIGEST = "no-digest"
    """A digest of the load was wanted, and one side could not give it: what arrived was not checked."""
    TRANSPORT = "transport"
    """The fabric reported an error."""
    OVERDUE = "overdue"
    """The read, or the selection of its runs, did not end in time."""
    TOO_MANY_PEERS = "too-many-peers"
    """1,024 source engines are in use, 256 are met for the first time, or 4,096 fetches wait for those."""
    NOT_CONNECTED = "not-connected"
    """The source's memory could not be connected to."""
    BAD_MANIFEST = "bad-manifest"
    """The source's description of itself makes no sense."""
    BAD_TABLES = "bad-tables"
    """A block table of the ticket, or of the fetch, makes no sense by itself."""
    UNEXPECTED = "unexpected"
    """A bug; the log has the traceback."""

    # One request does not fit the two engines. The source's block tables:
    SRC_GROUP_UNKNOWN = "src-group-unknown"
    """The ticket has a table for a group that the source does not have."""
    SRC_TABLE_MISSING = "src-table-missing"
    """The ticket has no table for a group that is needed."""
    SRC_TABLE_SHORT = "src-table-short"
    """Needed tokens lie outside the ticket's blocks."""
    SRC_TABLE_START = "src-table-start"
    """The ticket's table starts inside a cell or a turn."""
    SRC_TABLE_LENGTH = "src-table-length"
    """A slot or a ring has one block, and the ticket names another number of them."""
    SRC_RING_SHORT = "src-ring-short"
    """The source's ring has fewer cells than are needed."""
    SRC_HOLE = "src-hole"
    """A needed token lies in a hole of the ticket's table."""
    SRC_BLOCK_RANGE = "src-block-range"
    """A block id of the ticket lies outside the source's pool."""
    SRC_BLOCK_TWICE = "src-block-twice"
    """A block stands twice in the ticket's tables."""
    # The destination's block tables:
    DST_GROUP_UNKNOWN = "dst-group-unknown"
    """The fetch has a table for a group that the destination does not have."""
    DST_TABLE_MISSING = "dst-table-missing"
    """The fetch has no table for a group that is needed."""
    DST_TABLE_SHORT = "dst-table-short"
    """Needed tokens lie outside the fetch's blocks."""
    DST_TABLE_START = "dst-table-start"
    """The fetch's table starts inside a cell or a turn."""
    DST_TABLE_LENGTH = "dst-table-length"
    """A slot or a ring has one block, and the fetch names another number of them."""
    DST_RING_SHORT = "dst-ring-short"
    """The destination's ring has fewer cells than are needed."""
    DST_HOLE = "dst-hole"
    """A needed token lies in a hole of the fetch's table."""
    DST_BLOCK_RANGE = "dst-block-range"
    """A block id of the fetch lies outside the destination's pool."""
    DST_BLOCK_TWICE = "dst-block-twice"
    """A block stands twice in the fetch's tables."""
    # And the need:
    NEED_GROUP_UNKNOWN = "need-group-unknown"
    """The fetch needs tokens of a group that the destination does not have."""
    KEPT_GROUP_UNKNOWN = "kept-group-unknown"
    """The fetch keeps tokens of a group that the destination does not have."""
    KEPT_SLOT = "kept-slot"
    """The fetch keeps tokens of a recurrent state, which is replaced as a whole."""
    NEED_MISSING = "need-missing"
    """The fetch does not say which tokens of a group it needs."""
    NEED_KEPT = "need-kept"
    """Tokens are both needed and kept."""
    NOT_PROVED = "not-proved"
    """The checker disagrees with what was selected: a bug in kvferry. Nothing was transferred."""
    TOO_MANY_RUNS = "too-many-runs"
    """The request would shatter into more runs than are allowed."""
    REQUEST = "request"
    """The request does not fit the two engines in a way that has no code of its own; the detail has it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a fetch failed: a stable code, and words.

    >>> print(Failure(FailureCode.NO_ANSWER, "prefill-3 was not met within 10 s"))
    no-answer: prefill-3 was not met within 10 s
    """

    code: FailureCode
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.code.value}: {self.detail}" if self.detail else self.code.value


_FROM_AUTHORITY = frozenset(
    {
        FailureCode.RESTARTED,
        FailureCode.PROTOCOL,
        FailureCode.FORGED,
        FailureCode.ENDED,
        FailureCode.TAKEN,
        FailureCode.SPENT,
        FailureCode.READER,
        FailureCode.LEASE_ENDED,
    }
)


def denied(code: str, detail: str) -> Failure:
    """What an authority said no for. Its text never becomes a code: whoever reads codes knows them all.

    >>> denied("taken", "another engine reads it").code, str(denied("bored", "go away"))
    (<FailureCode.TAKEN: 'taken'>, 'denied: bored: go away')
    """
    if code in _FROM_AUTHORITY:
        return Failure(FailureCode(code), detail)
    return Failure(FailureCode.DENIED, f"{code}: {detail}" if detail else code)


def unfit(error: RequestError) -> Failure:
    """The failure of a request that does not fit.

    >>> str(unfit(RequestError("src-hole", "full", "cell 3 lies in a hole")))
    'src-hole: group full: cell 3 lies in a hole'
    """
    try:
        return Failure(FailureCode(error.code), f"group {error.group}: {error.detail}")
    except ValueError:
        return Failure(FailureCode.REQUEST, str(error))


def refusal(ticket: Ticket, trust: Trust, host: str) -> Failure | None:
    """Why a reader on ``host`` does not use a ticket; None if it may call the ticket's authority.

    >>> ticket = Ticket("prefill", 7, 1, "r", "tcp://127.0.0.1:5555", 3, {}, 30_000, host="boot-1/4026531840")
    >>> refusal(ticket, Trust(), "boot-1/4026531840") is None
    True
    >>> print(refusal(ticket, Trust(), "boot-1/4026532208"))
    elsewhere: the source listens on loopback only, and this reader has another loopback (another host, or ...
    """
    if trust.secret is not None and not any(is_sealed(ticket, key) for key in trust.ticket_keys):
        return Failure(FailureCode.FORGED, _UNSEALED if not ticket.seal else _WRONG_SEAL)
    if ticket.host and ticket.host != host:
        return Failure(FailureCode.ELSEWHERE, _ELSEWHERE)
    if trust.is_one_host and not ticket.host:
        return Failure(FailureCode.NO_SECRET, _NO_SECRET)
    if trust.is_one_host and not is_loopback(ticket.authority):
        return Failure(FailureCode.FORGED, "the ticket names this host, and an address of another")
    if not trust.may_call(ticket.authority):
        return Failure(
            FailureCode.NOT_ALLOWED, "the source's address is not in this engine's list of authorities"
        )
    return None


def text_refusal(text: str, trust: Trust) -> Failure | None:
    """Why a reader does not even read the text of a ticket; None if it may."""
    if trust.secret is None or any(is_text_sealed(text, key) for key in trust.ticket_keys):
        return None
    return Failure(FailureCode.FORGED, _WRONG_SEAL if "." in text else _UNSEALED)


_UNSEALED = f"the ticket carries no proof of a secret, and this engine has one: {SET_A_SECRET}"
_WRONG_SEAL = "whoever made the ticket does not know this engine's secret, or the ticket was changed"
_ELSEWHERE = (
    "the source listens on loopback only, and this reader has another loopback (another host, or another"
    f" network namespace, as pods have): {SET_A_SECRET}"
)
_NO_SECRET = (
    f"the source serves other hosts, and this engine has no secret: {SET_A_SECRET}, or say insecure on both"
)
