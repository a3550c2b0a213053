"""Why a fetch failed: a closed list of codes for reports, records, metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.errors import RequestError
from kvferry.wire.secret import SET_A_SECRET, Trust, is_loopback
from kvferry.wire.ticket import Ticket, is_sealed, is_text_sealed


class FailureCode(StrEnum):
    """Codes are stable: tools may match on them."""

    ABORTED = "aborted"
    """``abort`` was called."""
    REFUSED = "refused"
    """The engines are incompatible; the detail has every finding."""
    NO_ANSWER = "no-answer"
    """Timeout: the source did not answer, not all of its ranks had joined, or it granted no lease."""
    SOURCE_GONE = "source-gone"
    """The source engine was killed or suspended, or is unreachable."""
    RESTARTED = "restarted"
    """The source engine has restarted since it issued the ticket."""
    PROTOCOL = "protocol"
    """The protocol versions are incompatible."""
    FORGED = "forged"
    """The ticket was modified, or issued without this engine's secret."""
    ELSEWHERE = "elsewhere"
    """The source serves its own host only; this reader is on another host or network namespace."""
    NO_SECRET = "no-secret"
    """The source serves other hosts, and this engine has no secret."""
    NOT_ALLOWED = "not-allowed"
    """The source is not in this engine's list of authorities."""
    ENDED = "ended"
    """The ticket was read, declined or withdrawn, or its lease expired."""
    TAKEN = "taken"
    """Another engine reads the ticket."""
    SPENT = "spent"
    """This rank has read the ticket, or is reading it."""
    TICKET = "ticket"
    """``fetch`` names a different ticket than ``hold``."""
    READER = "reader"
    """The ranks of the destination disagree on their reader name or rank numbers."""
    DENIED = "denied"
    """The source denied the lease for a reason unknown to this version; see the detail."""
    LEASE_ENDED = "lease-ended"
    """The lease ended before the read did: the bytes may be wrong."""
    LEASE_LAPSED = "lease-lapsed"
    """The lease was not renewed in time; nothing was read."""
    UNCONFIRMED = "unconfirmed"
    """All bytes arrived, but the source did not confirm the lease in time."""
    DIGEST_DIFFERS = "digest-differs"
    """The bytes differ from the source's; the detail names the source rank, state and tokens."""
    NO_DIGEST = "no-digest"
    """One side could not compute the requested digest."""
    TRANSPORT = "transport"
    """The fabric reported an error."""
    OVERDUE = "overdue"
    """The read, or the selection of its runs, timed out."""
    TOO_MANY_PEERS = "too-many-peers"
    """1,024 source engines are in use, 256 are in first contact, or 4,096 fetches wait for those."""
    NOT_CONNECTED = "not-connected"
    """The transport could not connect to the source."""
    BAD_MANIFEST = "bad-manifest"
    """The source's manifest is invalid."""
    BAD_TABLES = "bad-tables"
    """A block table of the ticket or the fetch is invalid."""
    UNEXPECTED = "unexpected"
    """A bug; the log has the traceback."""

    NOT_PROVED = "not-proved"
    """The checker rejected the selection: a bug in kvferry. Nothing was transferred."""
    TOO_MANY_RUNS = "too-many-runs"
    """The request needs more runs than the limit."""
    SRC_TABLES = "src-tables"
    """The ticket's block tables do not match the source's manifest, or lack needed tokens; see the detail."""
    REQUEST = "request"
    """The fetch does not match the two engines; the detail names the group and the tokens."""


@dataclass(frozen=True, slots=True)
class Failure:
    code: FailureCode
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.code.value}: {self.detail}" if self.detail else self.code.value


NO_LAST_TOKEN = Failure(
    FailureCode.SRC_TABLES, "no ticket has the last needed token, or a state of exactly these tokens"
)
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
    """The failure for an authority's denial; codes unknown to this version become DENIED.

    >>> denied("taken", "another engine reads it").code, str(denied("bored", "go away"))
    (<FailureCode.TAKEN: 'taken'>, 'denied: bored: go away')
    """
    if code in _FROM_AUTHORITY:
        return Failure(FailureCode(code), detail)
    return Failure(FailureCode.DENIED, f"{code}: {detail}" if detail else code)


def unfit(error: RequestError) -> Failure:
    """The failure for a request that does not match the plan.

    >>> str(unfit(RequestError("src-hole", "full", "cell 3 lies in a hole")))
    'src-tables: src-hole: group full: cell 3 lies in a hole'
    """
    if error.code in (FailureCode.NOT_PROVED, FailureCode.TOO_MANY_RUNS):
        return Failure(FailureCode(error.code), f"group {error.group}: {error.detail}")
    is_of_source = error.code.startswith("src-")
    return Failure(FailureCode.SRC_TABLES if is_of_source else FailureCode.REQUEST, str(error))


def refusal(ticket: Ticket, trust: Trust, host: str) -> Failure | None:
    """Why a reader on ``host`` rejects a ticket; None if it may call the ticket's authority."""
    if trust.secret is not None and not any(is_sealed(ticket, key) for key in trust.ticket_keys):
        return Failure(FailureCode.FORGED, _UNSEALED if not ticket.seal else _WRONG_SEAL)
    if ticket.host and ticket.host != host:
        return Failure(FailureCode.ELSEWHERE, _ELSEWHERE)
    if trust.is_one_host and not ticket.host:
        return Failure(FailureCode.NO_SECRET, _NO_SECRET)
    return address_refusal(ticket.authority, trust)


def address_refusal(authority: str, trust: Trust) -> Failure | None:
    """Why a reader must not call an authority; None if it may."""
    if trust.is_one_host and not is_loopback(authority):
        return Failure(
            FailureCode.FORGED,
            "this engine connects to its own host only, and the address is on another host",
        )
    if not trust.may_call(authority):
        return Failure(
            FailureCode.NOT_ALLOWED, "the source's address is not in this engine's list of authorities"
        )
    return None


def text_refusal(text: str, trust: Trust) -> Failure | None:
    """Why a reader rejects a ticket's text before decoding it; None if it may be decoded."""
    if trust.secret is None or any(is_text_sealed(text, key) for key in trust.ticket_keys):
        return None
    return Failure(FailureCode.FORGED, _WRONG_SEAL if "." in text else _UNSEALED)


_UNSEALED = f"the ticket carries no proof of a secret, and this engine has one: {SET_A_SECRET}"
_WRONG_SEAL = "the ticket was issued without this engine's secret, or was modified"
_ELSEWHERE = (
    "the source listens on loopback only, and this reader is on another host or network namespace (each pod"
    f" has its own): {SET_A_SECRET}"
)
_NO_SECRET = (
    f"the source serves other hosts, and this engine has no secret: {SET_A_SECRET}, or set insecure on both"
)
