"""Permits: what a reader shows to a source rank, so that the rank gathers a ticket's blocks for it.

A rank does not know the key that tickets are signed with. It gives a key of its own to its authority when it
joins; the authority puts a proof under that key into every grant. So the rank can tell by itself, without
asking anybody, that a ticket is its engine's and was granted. That the lease has not ended is what the rank
hears from its authority (``ReleaseNotice``).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping

import msgspec

from kvferry.errors import SpecError
from kvferry.wire.reading import decode_msgpack
from kvferry.wire.ticket import Ticket

RANK_KEY_BYTES = 32
"""Of the key that a rank draws at its start."""


class Permit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ticket, and the proof that its authority granted it."""

    ticket: Ticket
    proof: bytes


def make_proofs(ticket: Ticket, rank_keys: Mapping[int, bytes]) -> dict[int, bytes]:
    """The proofs of a granted ticket, for every rank that has a key.

    >>> ticket = Ticket("prefill", 7, 1, "req-1", "tcp://127.0.0.1:5555", 300, {}, lease_ms=30_000)
    >>> proofs = make_proofs(ticket, {0: bytes(32), 1: b""})
    >>> [*proofs], read_permit(permits_for(ticket, proofs, [0, 1])[0], bytes(32)) == ticket
    ([0], True)
    >>> read_permit(permits_for(ticket, proofs, [0])[0], b"another rank's key")
    Traceback (most recent call last):
    kvferry.errors.SpecError: permit: this rank's authority did not grant the ticket
    """
    if not any(rank_keys.values()):
        return {}
    fingerprint = ticket.fingerprint
    return {rank: _proof(fingerprint, key) for rank, key in rank_keys.items() if key}


def permits_for(ticket: Ticket, proofs: Mapping[int, bytes], ranks: Iterable[int]) -> dict[int, bytes]:
    """What a reader shows to each of these ranks, as bytes; nothing to one that wants none."""
    bare = ticket.unsealed
    return {rank: msgspec.msgpack.encode(Permit(bare, proofs[rank])) for rank in ranks if rank in proofs}


def read_permit(data: bytes, rank_key: bytes) -> Ticket:
    """The ticket of a permit; raises SpecError unless the authority of the rank with this key granted it."""
    permit = decode_msgpack(data, Permit)
    if not hmac.compare_digest(permit.proof, _proof(permit.ticket.fingerprint, rank_key)):
        raise SpecError("permit: this rank's authority did not grant the ticket")
    return permit.ticket


def _proof(fingerprint: bytes, rank_key: bytes) -> bytes:
    return hmac.digest(rank_key, b"gather\0" + fingerprint, "sha256")
