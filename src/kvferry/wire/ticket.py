"""Tickets: the authorisation to read one request's blocks, and its authentication."""

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
"""The value of a field that a peer omitted."""


class TableDoc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block table on the wire; a hole is -1."""

    block_ids: tuple[int, ...]
    first_token: int = 0


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The authorisation to read one request's blocks once. Its MAC covers every other field but the seal."""

    engine: Name
    generation: int
    """The start of the engine: tickets of an earlier start are invalid."""
    ticket_id: int
    request_id: RequestId
    """The source's id of the request."""
    authority: Name
    """The address of the source engine's lease authority."""
    num_tokens: int
    tables: dict[str, TableDoc]
    """Block tables by group of the source engine."""
    lease_ms: int
    """The duration of a grant, from the time of its request."""
    digest: bytes = b""
    """A digest of the prompt's token ids: a ticket is valid for that prompt only."""
    mac: bytes = b""
    """Authenticates the ticket with a key of this start of the source engine."""
    host: Name = ""
    """The boot and network namespace of a source that serves its own host only; otherwise empty."""
    seal: bytes = b""
    """Authenticates the ticket's text with a key of the fleet's secret."""
    held_from: int | NotSaid = NOT_SAID
    """Every block table has the cells of all tokens from this one on, so that a reader can fill its own
    blocks to their edges. Unset: unknown."""
    parts: bytes | NotSaid = NOT_SAID
    """Of a soft offer: digests of the first ``PART_TOKENS`` tokens, of twice as many, and so on, to find the
    common prefix with another prompt."""
    complete: int | NotSaid = NOT_SAID
    """Of a growing lease: the number of first tokens that the source has written. Unset: all. Each stage of a
    growing lease is a separate ticket with the same id."""

    def __reduce__(self) -> tuple[object, ...]:
        # Pickle would search every module of the process for msgspec's UNSET.
        return from_text, (to_text(self),)

    @property
    def is_soft(self) -> bool:
        """Whether it pins no blocks: its tokens may still be in the engine's prefix cache, and ``ClaimOffer``
        exchanges it for a ticket of those that are.
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
        """Another stage of the same lease, without MAC and seal."""
        changes = {"tables": tables, "complete": complete, "held_from": held_from}
        return msgspec.structs.replace(self, **changes, mac=b"", seal=b"")

    def is_later_than(self, other: Ticket) -> bool:
        """Whether both are stages of one lease, and this one has more readable tokens or is the last."""
        if self.lease_name != other.lease_name or not other.is_growing:
            return False
        return not self.is_growing or other.num_complete < self.num_complete <= self.num_tokens

    @property
    def lease_name(self) -> tuple[object, ...]:
        """The fields that all stages of a lease share."""
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
        """The ticket without the fleet's seal."""
        return msgspec.structs.replace(self, seal=b"") if self.seal else self

    @property
    def fingerprint(self) -> bytes:
        """A hash of all fields, including the MAC; ids alone can be guessed."""
        return hashlib.sha256(msgspec.msgpack.encode(self.unsealed)).digest()

    def block_tables(self) -> Mapping[str, BlockTable]:
        """The tables as core values; raises SpecError if one is invalid."""
        return {
            name: BlockTable.of(list(table.block_ids), table.first_token)
            for name, table in self.tables.items()
        }


PART_TOKENS, PART_BYTES = 64, 16
NO_MARKS: Mapping[int, bytes] = {}


def digest_parts(
    token_ids: Sequence[int], extra: bytes = b"", marks: Mapping[int, bytes] = NO_MARKS
) -> bytes:
    """The digests of growing prefixes of a prompt.

    ``extra``: further values that its cache depends on; ``marks``: bytes to include at a token (images).

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
    """The digest of the first tokens, rounded down to whole parts."""
    stop = num_tokens // PART_TOKENS * PART_BYTES
    return parts[max(0, stop - PART_BYTES) : stop]


def num_common_tokens(ours: bytes, theirs: bytes) -> int:
    """A lower bound of the common prefix of two prompts, from their ``digest_parts``."""
    num_parts = 0
    for at in range(0, min(len(ours), len(theirs)), PART_BYTES):
        if ours[at : at + PART_BYTES] != theirs[at : at + PART_BYTES]:
            break
        num_parts += 1
    return num_parts * PART_TOKENS


def check_ticket(ticket: object) -> None:
    if not isinstance(ticket, Ticket):
        raise SpecError(f"expected a Ticket, got {type(ticket).__name__}: parse text with from_text")


def tables_to_wire(tables: Mapping[str, BlockTable]) -> dict[str, TableDoc]:
    """Block tables for a ticket; raises SpecError for other types."""
    check_tables("offered", tables)
    return {
        name: TableDoc(tuple(table.block_ids.tolist()), table.first_token) for name, table in tables.items()
    }


def sign(ticket: Ticket, key: bytes) -> Ticket:
    return msgspec.structs.replace(ticket, mac=_mac(ticket, key))


def is_proved(ticket: Ticket, key: bytes) -> bool:
    """Whether the ticket is unchanged since it was signed with ``key``."""
    return hmac.compare_digest(ticket.mac, _mac(ticket, key))


def _mac(ticket: Ticket, key: bytes) -> bytes:
    body = msgspec.msgpack.encode(msgspec.structs.replace(ticket, mac=b"", seal=b""))
    return hmac.digest(key, body, "sha256")


def seal(ticket: Ticket, key: bytes) -> Ticket:
    """The ticket with the fleet's seal; unchanged without a key."""
    return msgspec.structs.replace(ticket, seal=_seal(_body(ticket), key)) if key else ticket


def is_sealed(ticket: Ticket, key: bytes) -> bool:
    """Whether the ticket is unchanged since it was sealed with ``key``."""
    return hmac.compare_digest(ticket.seal, _seal(_body(ticket), key))


def is_text_sealed(text: str, key: bytes) -> bool:
    """The same for a ticket's text, without decoding it."""
    body, _, proof = text.partition(".")
    return hmac.compare_digest(proof.encode("utf-8", "replace"), _base64(_seal(body, key)).encode())


def _seal(body: str, key: bytes) -> bytes:
    return hmac.digest(key, body.encode("utf-8", "replace"), "sha256")


def to_text(ticket: Ticket) -> str:
    """The ticket as text for JSON and URLs: a body, and a seal after a dot if there is one."""
    return f"{_body(ticket)}.{_base64(ticket.seal)}" if ticket.seal else _body(ticket)


def _body(ticket: Ticket) -> str:
    return _base64(msgspec.msgpack.encode(ticket.unsealed))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode("ascii")


def from_text(text: str, key: bytes = b"") -> Ticket:
    """The ticket of a text; raises SpecError if it is invalid. Each ticket has exactly one text.

    With the fleet's ``key``, a text without the right seal is not decoded.
    """
    if len(text) > MAX_TICKET_BYTES:
        raise SpecError(f"ticket: at most {MAX_TICKET_BYTES} characters are allowed, got {len(text)}")
    if key and not is_text_sealed(text, key):
        raise SpecError("ticket: issued without this fleet's secret")
    body, _, proof = text.partition(".")
    ticket = msgspec.structs.replace(decode_msgpack(_decoded(body), Ticket), seal=_decoded(proof))
    if to_text(ticket) != text:  # base64 has spare bits, msgpack longer forms
        raise SpecError("ticket: not in canonical form")
    return ticket


def _decoded(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text.encode("ascii", "replace"))
    except (binascii.Error, ValueError) as error:
        raise SpecError(f"ticket: not base64: {error}") from None


RANK_KEY_BYTES = 32
"""Bytes of a rank's random key."""


# Permits authorise a reader to have a source rank gather a ticket's blocks.
#
# A rank does not have the key of tickets. It gives its own key to its authority when it joins, and the
# authority adds a proof with that key to every grant. The rank can then verify by itself that its engine
# issued and granted a ticket. It learns of the lease's end from its authority (``ReleaseNotice``).


class Permit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A ticket, and the proof of its grant."""

    ticket: Ticket
    proof: bytes


def make_proofs(ticket: Ticket, rank_keys: Mapping[int, bytes]) -> dict[int, bytes]:
    """The proofs of a granted ticket, for every rank with a key."""
    if not any(rank_keys.values()):
        return {}
    fingerprint = ticket.fingerprint
    return {rank: _proof(fingerprint, key) for rank, key in rank_keys.items() if key}


def permits_for(ticket: Ticket, proofs: Mapping[int, bytes], ranks: Iterable[int]) -> dict[int, bytes]:
    """The encoded permits for these ranks, as far as there are proofs."""
    bare = ticket.unsealed
    return {rank: msgspec.msgpack.encode(Permit(bare, proofs[rank])) for rank in ranks if rank in proofs}


def read_permit(data: bytes, rank_key: bytes) -> Ticket:
    """The ticket of a permit; raises SpecError unless it was granted for the rank with this key."""
    permit = decode_msgpack(data, Permit)
    if not hmac.compare_digest(permit.proof, _proof(permit.ticket.fingerprint, rank_key)):
        raise SpecError("permit: this rank's authority did not grant the ticket")
    return permit.ticket


def _proof(fingerprint: bytes, rank_key: bytes) -> bytes:
    return hmac.digest(rank_key, b"gather\0" + fingerprint, "sha256")
