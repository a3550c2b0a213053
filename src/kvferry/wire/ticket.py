"""Tickets: what the source hands out for one request, and how it proves that it did."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from array import array
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from kvferry.core.request import BlockTable, check_tables
from kvferry.errors import SpecError
from kvferry.wire.reading import Name, RequestId, decode_msgpack

MAX_TICKET_BYTES = 4 << 20

NotSaid = msgspec.UnsetType
NOT_SAID = msgspec.UNSET
"""The value of a field that a peer left out."""


class TableDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block table on the wire; a hole is -1."""

    block_ids: tuple[int, ...]
    first_token: int = 0


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The right to read one request's blocks, once. Self-proving: the MAC covers every other field."""

    engine: Name
    generation: int
    """Which start of the engine: a restarted engine knows none of its earlier tickets."""
    ticket_id: int
    request_id: RequestId
    """The source's own name of the request."""
    authority: Name
    """Where the lease authority of the source engine listens."""
    num_tokens: int
    tables: dict[str, TableDoc]
    """Block tables by group of the source engine."""
    lease_ms: int
    """How long a grant lasts, from the moment it is asked for."""
    digest: bytes = b""
    """A digest of the prompt's token ids: a ticket is good for that prompt only."""
    mac: bytes = b""
    """The proof of the source engine, by a key that only this start of it has."""
    host: Name = ""
    """Which host, where the source serves its own only: the boot, and the network namespace; else empty."""
    seal: bytes = b""
    """The proof of the fleet, over the ticket's text: whoever made it knows the fleet's secret."""
    held_from: int | NotSaid = NOT_SAID
    """Every block table holds the cells of all tokens from this one on, so that a reader can fill its own
    blocks to their edges. Unset: the source does not say."""
    parts: bytes | NotSaid = NOT_SAID
    """Of a soft offer: digests of the first ``PART_TOKENS`` tokens, of twice as many, and so on.
    They tell how many tokens another prompt has in common with it."""
    complete: int | NotSaid = NOT_SAID
    """Of a growing lease: how many of its first tokens the source has written; its tables may lack the rest.
    Unset: all of them. Each stage of a growing lease is a ticket of its own, under the same number."""

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle would look for msgspec's UNSET in every module of the process, and import half of them.
        return from_text, (to_text(self),)

    @property
    def is_soft(self) -> bool:
        """Whether it pins nothing: it names tokens that the engine may still have in its prefix cache, and is
        exchanged for a ticket of what is left of them (``ClaimOffer``).
        """
        return not self.tables and not self.is_growing

    @property
    def is_growing(self) -> bool:
        """Whether its prompt is still being computed."""
        return self.complete is not NOT_SAID

    @property
    def num_complete(self) -> int:
        return self.num_tokens if isinstance(self.complete, NotSaid) else self.complete

    def stage(self, tables: dict[str, TableDoc], complete: int | NotSaid, held_from: int | NotSaid) -> Ticket:
        """Another stage of the same lease, without any proof."""
        changes = {"tables": tables, "complete": complete, "held_from": held_from}
        return msgspec.structs.replace(self, **changes, mac=b"", seal=b"")

    def is_later_than(self, other: Ticket) -> bool:
        """Whether both are stages of one lease, and more of its tokens can be read by this one.

        The last stage is later than all others, and no stage is later than the last.
        """
        if self.lease_name != other.lease_name or not other.is_growing:
            return False
        return not self.is_growing or other.num_complete < self.num_complete <= self.num_tokens

    @property
    def lease_name(self) -> tuple[object, ...]:
        """What all stages of a lease have in common."""
        return (
            self.engine,
            self.generation,
            self.ticket_id,
            self.request_id,
            self.authority,
            self.num_tokens,
            self.lease_ms,
            self.digest,
        )

    @property
    def unsealed(self) -> Ticket:
        """The ticket without the fleet's seal, which is of its text."""
        return msgspec.structs.replace(self, seal=b"") if self.seal else self

    @property
    def fingerprint(self) -> bytes:
        """What it is known by: all that it says, its proof too. Anybody can write down a number."""
        return hashlib.sha256(msgspec.msgpack.encode(self.unsealed)).digest()

    def block_tables(self) -> Mapping[str, BlockTable]:
        """The tables as the core wants them; raises SpecError on senseless ones."""
        return {
            name: BlockTable.of(list(table.block_ids), table.first_token)
            for name, table in self.tables.items()
        }


PART_TOKENS, PART_BYTES = 64, 16
NO_MARKS: Mapping[int, bytes] = {}


def digest_parts(
    token_ids: Sequence[int], extra: bytes = b"", marks: Mapping[int, bytes] = NO_MARKS
) -> bytes:
    """The digests of growing beginnings of a prompt; ``extra``: what else its cache depends on.

    ``marks``: what is mixed in at a token, such as an image.

    >>> ours, theirs = digest_parts(range(1000)), digest_parts([*range(600), 7, *range(601, 1000)])
    >>> len(ours) // PART_BYTES, num_common_tokens(ours, theirs)
    (15, 576)
    """
    hasher, parts = hashlib.blake2b(extra, digest_size=PART_BYTES), bytearray()
    for stop in range(PART_TOKENS, len(token_ids) + 1, PART_TOKENS):
        start = stop - PART_TOKENS
        hasher.update(array("q", token_ids[start:stop]).tobytes())
        for at in sorted(at for at in marks if start <= at < stop):
            hasher.update(b"\0%d " % at + marks[at])
        parts += hasher.digest()
    return bytes(parts)


def part_at(parts: bytes, num_tokens: int) -> bytes:
    """The digest of so many first tokens, whole parts of them."""
    stop = num_tokens // PART_TOKENS * PART_BYTES
    return parts[max(0, stop - PART_BYTES) : stop]


def num_common_tokens(ours: bytes, theirs: bytes) -> int:
    """How many first tokens two prompts share at least, by their ``digest_parts``."""
    num_parts = 0
    for at in range(0, min(len(ours), len(theirs)), PART_BYTES):
        if ours[at : at + PART_BYTES] != theirs[at : at + PART_BYTES]:
            break
        num_parts += 1
    return num_parts * PART_TOKENS


def tables_to_wire(tables: Mapping[str, BlockTable]) -> dict[str, TableDoc]:
    """Block tables in the form that a ticket carries; raises SpecError where one is none."""
    check_tables("offered", tables)
    return {
        name: TableDoc(tuple(table.block_ids.tolist()), table.first_token) for name, table in tables.items()
    }


def sign(ticket: Ticket, key: bytes) -> Ticket:
    return msgspec.structs.replace(ticket, mac=_mac(ticket, key))


def is_proved(ticket: Ticket, key: bytes) -> bool:
    """Whether whoever holds ``key`` made this ticket, exactly as it is."""
    return hmac.compare_digest(ticket.mac, _mac(ticket, key))


def _mac(ticket: Ticket, key: bytes) -> bytes:
    body = msgspec.msgpack.encode(msgspec.structs.replace(ticket, mac=b"", seal=b""))
    return hmac.digest(key, body, "sha256")


def seal(ticket: Ticket, key: bytes) -> Ticket:
    """The ticket with the fleet's proof; as it is, if there is no key."""
    return msgspec.structs.replace(ticket, seal=_seal(_body(ticket), key)) if key else ticket


def is_sealed(ticket: Ticket, key: bytes) -> bool:
    """Whether somebody who knows the fleet's ``key`` made this ticket, exactly as it is."""
    return hmac.compare_digest(ticket.seal, _seal(_body(ticket), key))


def is_text_sealed(text: str, key: bytes) -> bool:
    """The same of a ticket's text, without reading it."""
    body, _, proof = text.partition(".")
    return hmac.compare_digest(proof.encode("utf-8", "replace"), _base64(_seal(body, key)).encode())


def _seal(body: str, key: bytes) -> bytes:
    return hmac.digest(key, body.encode("utf-8", "replace"), "sha256")


def to_text(ticket: Ticket) -> str:
    """The ticket as text that fits into JSON and URLs: a body, and a seal behind a dot if there is one."""
    return f"{_body(ticket)}.{_base64(ticket.seal)}" if ticket.seal else _body(ticket)


def _body(ticket: Ticket) -> str:
    return _base64(msgspec.msgpack.encode(ticket.unsealed))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii")


def from_text(text: str, key: bytes = b"") -> Ticket:
    """The ticket in a text; raises SpecError if there is none. Each ticket has one text only.

    With the fleet's ``key``, nothing of a text without the right seal is looked at.
    """
    if len(text) > MAX_TICKET_BYTES:
        raise SpecError(f"ticket: at most {MAX_TICKET_BYTES} characters are read, got {len(text)}")
    if key and not is_text_sealed(text, key):
        raise SpecError("ticket: issued without this fleet's secret")
    body, _, proof = text.partition(".")
    ticket = msgspec.structs.replace(decode_msgpack(_decoded(body), Ticket), seal=_decoded(proof))
    if to_text(ticket) != text:  # base64 has spare bits, msgpack longer forms: another text, the same ticket
        raise SpecError("ticket: not in canonical form")
    return ticket


def _decoded(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text.encode("ascii", "replace"))
    except (binascii.Error, ValueError) as error:
        raise SpecError(f"ticket: not base64: {error}") from None


RANK_KEY_BYTES = 32
"""Of the key that a rank draws at its start."""


# Permits: what a reader shows to a source rank, so that the rank gathers a ticket's blocks for it.
#
# A rank does not know the key that tickets are signed with. It gives a key of its own to its authority when
# it joins; the authority puts a proof under that key into every grant. So the rank can tell by itself,
# without asking anybody, that a ticket is its engine's and was granted. That the lease has not ended is
# what the rank hears from its authority (``ReleaseNotice``).


class Permit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ticket, and the proof that its authority granted it."""

    ticket: Ticket
    proof: bytes


def make_proofs(ticket: Ticket, rank_keys: Mapping[int, bytes]) -> dict[int, bytes]:
    """The proofs of a granted ticket, for every rank that has a key."""
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
