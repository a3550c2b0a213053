"""What goes wrong in a simulated world, by name; a run has some of it, or what it is told to have."""

from __future__ import annotations

from enum import StrEnum
from random import Random

from kvferry.errors import SpecError
from kvferry.wire.messages import (
    TOKEN_BYTES,
    Acquire,
    Message,
    Outcome,
    Settle,
    decode_from_authority,
    decode_to_authority,
    encode,
)
from kvferry.wire.ticket import NotSaid, Ticket
from tests.support.simulation.fabric import ReadQuality
from tests.support.simulation.network import LinkQuality


class Trouble(StrEnum):
    """One kind of fault."""

    LOSS = "loss"
    """Messages are lost; now and then two hosts cannot reach each other for seconds."""
    REPEATS = "repeats"
    """Messages arrive twice."""
    LATE_MESSAGES = "late-messages"
    """Messages take seconds, and overtake each other."""
    SLOW_WORK = "slow-work"
    """Meetings, selections and posts take seconds."""
    READ_ERRORS = "read-errors"
    """Reads fail, with nothing, a part or all of their bytes there."""
    SLOW_READS = "slow-reads"
    """Reads take longer than a lease."""
    HUNG_READS = "hung-reads"
    """Reads neither end nor fail."""
    STOPS = "stops"
    """Processes and hosts stand still for seconds, longer than a lease."""
    SOURCE_DEATHS = "source-deaths"
    """Source engines die, and start again at their address."""
    AUTHORITY_DEATHS = "authority-deaths"
    """The authority of a source engine dies alone, and its ranks join the next one."""
    DESTINATION_DEATHS = "destination-deaths"
    """Destination engines die with reads under way, and start again."""
    CLOCK_RATES = "clock-rates"
    """Clocks run too fast or too slow, and stand still with their host."""
    ABORTS = "aborts"
    """Loads are given up, offers are withdrawn."""
    SHARED_TICKETS = "shared-tickets"
    """A ticket goes to several engines, twice to one, or long after its lease."""
    FORGED_TICKETS = "forged-tickets"
    """Tickets come with a field changed."""
    FORGED_MESSAGES = "forged-messages"
    """Strangers send what they have seen, under others' names, and junk."""
    LIARS = "liars"
    """An authority grants nothing, grants twice, to others, for longer, for less, as somebody else."""
    MISFITS = "misfits"
    """A source engine runs another model."""
    LIMITS = "limits"
    """Room for few peers and few offers."""
    WRONG_BYTES = "wrong-bytes"
    """Bytes change on their way, and the fabric says that all went well. Every load is digested."""


EVERY_TROUBLE = frozenset(Trouble)


def drawn(chance: Random, digests_chance: Random) -> frozenset[Trouble]:
    """Some troubles: few at a time tell more than all at once.

    Digests cost time, so that few worlds have them; those by a chance of their own.
    """
    share = chance.choice([0.1, 0.25, 0.5])
    others = (trouble for trouble in Trouble if trouble is not Trouble.WRONG_BYTES)
    some = {trouble for trouble in others if chance.random() < share}
    return frozenset(some | ({Trouble.WRONG_BYTES} if digests_chance.random() < 0.06 else set()))


def digest_every(troubles: frozenset[Trouble], digests_chance: Random) -> int:
    """Of how many loads one is digested; 0: none is."""
    by_chance = digests_chance.choice([0] * 14 + [3])
    return 1 if Trouble.WRONG_BYTES in troubles else by_chance


def link_quality(troubles: frozenset[Trouble]) -> LinkQuality:
    """What the network does."""
    return LinkQuality(
        loss=0.1 if Trouble.LOSS in troubles else 0.0,
        repeats=0.1 if Trouble.REPEATS in troubles else 0.0,
        late=0.05 if Trouble.LATE_MESSAGES in troubles else 0.0,
        is_ordered=Trouble.LATE_MESSAGES not in troubles,
    )


def read_quality(troubles: frozenset[Trouble]) -> ReadQuality:
    """What the fabric does."""
    return ReadQuality(
        errors=0.1 if Trouble.READ_ERRORS in troubles else 0.0,
        hangs=0.05 if Trouble.HUNG_READS in troubles else 0.0,
        slow=0.2 if Trouble.SLOW_READS in troubles else 0.0,
        wrong=0.3 if Trouble.WRONG_BYTES in troubles else 0.0,
    )


def forged(ticket: Ticket, chance: Random) -> Ticket:
    """A ticket with one field changed."""
    fields = {name: getattr(ticket, name) for name in Ticket.__struct_fields__}
    name = chance.choice(
        ["generation", "ticket_id", "request_id", "num_tokens", "tables", "digest", "held_from", "mac"]
    )
    changed = {
        "generation": ticket.generation + 1,
        "ticket_id": ticket.ticket_id + 1,
        "request_id": "another",
        "num_tokens": ticket.num_tokens + 1,
        "tables": {},
        "digest": b"another",
        "held_from": 0 if isinstance(ticket.held_from, NotSaid) else ticket.held_from + 1,
        "mac": b"another",
    }
    return Ticket(**{**fields, name: changed[name]})


def altered(message: Message, chance: Random) -> Message:
    """A message with numbers, names and secrets changed a little: what a stranger makes of one that it saw.

    Bytes are replaced whole, since they are what nobody can guess.
    """
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    for name, value in fields.items():
        if isinstance(value, bytes) and value:
            fields[name] = chance.randbytes(len(value))
        elif type(value) is int and chance.random() < 0.1:
            fields[name] = max(0, value + chance.choice([-1, 1, 1 << 20]))
    return type(message)(**fields)


class Liar:
    """Rewrites what an authority sends."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._said: list[tuple[str, bytes]] = []

    def __call__(self, to: str, data: bytes) -> list[tuple[str, bytes]]:
        """What it says instead."""
        chance = self._chance
        self._said = [*self._said[-50:], (to, data)]
        kind = chance.random()
        if kind < 0.5:
            return [(to, data)]
        if kind < 0.6:
            return []
        if kind < 0.7:
            return [(to, data), (to, data)]
        if kind < 0.8:
            return [(to, data), chance.choice(self._said)]
        if kind < 0.85:
            return [(chance.choice(self._said)[0], data)]
        if kind < 0.9:
            return [(to, data[: chance.randint(0, len(data))])]
        return [(to, encode(altered(decode_from_authority(data), chance)))]


def forgery(seen: bytes, chance: Random) -> bytes:
    """What a stranger sends to an authority that knows all names and numbers of a message to it, but not what
    is secret: tickets and tokens.
    """
    if chance.random() < 0.1:
        return chance.randbytes(chance.randint(0, 60))
    try:
        message = decode_to_authority(seen)
    except SpecError:
        return seen
    if isinstance(message, Acquire):
        message = _settle(message, chance) if chance.random() < 0.7 else _acquire(message, chance)
    return encode(altered(message, chance))


def _settle(acquire: Acquire, chance: Random) -> Settle:
    """The end of a read that has just begun, as if its reader said so."""
    return Settle(
        acquire.ticket.generation,
        acquire.ticket.ticket_id,
        acquire.reader,
        acquire.reader_rank,
        acquire.attempt,
        token=bytes(TOKEN_BYTES),
        outcome=chance.choice([*Outcome]),
        reader_ranks=acquire.reader_ranks,
        declined=chance.choice([None, forged(acquire.ticket, chance)]),
    )


def _acquire(acquire: Acquire, chance: Random) -> Acquire:
    fields = {name: getattr(acquire, name) for name in Acquire.__struct_fields__}
    return Acquire(**{**fields, "ticket": forged(acquire.ticket, chance)})
