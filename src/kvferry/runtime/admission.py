"""Which tickets a reader takes: looked at before anybody is called."""

from __future__ import annotations

from kvferry.runtime.failure import Failure, FailureCode
from kvferry.wire.ticket import Ticket, is_sealed, is_text_sealed
from kvferry.wire.trust import SET_A_SECRET, Trust, is_loopback


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
