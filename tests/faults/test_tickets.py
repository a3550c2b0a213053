"""Tickets that were tampered with, stolen, late or spent."""

import base64
import random

import msgspec
import pytest

from kvferry.errors import SpecError
from kvferry.wire.ticket import from_text, to_text
from tests.support.fleet import until


def flipped(ticket):
    """The ticket with one bit flipped, for every byte of it; those that can still be read as tickets."""
    data = base64.urlsafe_b64decode(to_text(ticket))
    chance = random.Random(0)
    for at in range(len(data)):
        other = bytearray(data)
        other[at] ^= 1 << chance.randrange(8)
        try:
            yield from_text(base64.urlsafe_b64encode(bytes(other)).decode())
        except SpecError:
            continue


def calls_nobody_else(forged, ticket):
    """Whether its authority is on this host, or no address at all: tests must not call strangers."""
    host = ticket.authority[: ticket.authority.rindex(":")]
    return forged.authority.startswith(host) or not forged.authority.startswith("tcp://")


@pytest.mark.slow
def test_a_ticket_with_one_bit_flipped_reads_nothing(harbour, source, one):
    harbour.serves(source, one)
    ticket = harbour.offer(source, is_filled=True)
    forged = [other for other in flipped(ticket) if calls_nobody_else(other, ticket)]
    assert len(forged) > 50
    before = one.fingerprints()
    elsewhere = [one.fetch(other, 64) for other in forged if other.authority != ticket.authority]
    codes = {code for load in elsewhere for code in one.wait(load)}
    # Forged, without a call: it names this host, and an address of another.
    assert codes <= {"no-answer", "source-gone", "forged"}
    # One after another: a rank reads a ticket of one number once at a time.
    for other in forged:
        if other.authority == ticket.authority:
            codes.update(one.wait(one.fetch(other, 64)))
    assert codes <= {"no-answer", "source-gone", "forged", "elsewhere", "restarted", "ended"}
    assert "forged" in codes
    assert one.fingerprints() == before
    until(lambda: one.is_quiet() and source.is_quiet(), "all is told")
    harbour.serves(source, one)


def test_a_forger_cannot_spend_the_real_ticket(harbour, source, one):
    ticket = harbour.offer(source, is_filled=True)
    forged = msgspec.structs.replace(ticket, num_tokens=ticket.num_tokens - 1)
    assert one.wait(one.fetch(forged)) == ["forged"]
    load = one.fetch(ticket)
    assert one.wait(load) == [""]
    assert one.num_wrong(load) == 0


def test_a_second_reader_is_turned_away(harbour, source, one, two):
    harbour.serves(source, one)
    ticket = harbour.offer(source, is_filled=True)
    source.fleet.ranks[0].stop()
    load = one.fetch(ticket)
    harbour.in_flight(one, 1)
    assert two.wait(two.fetch(ticket)) == ["taken", "taken"]
    assert one.wait(one.fetch(ticket)) == ["spent"]
    source.fleet.ranks[0].resume()
    assert one.wait(load) == [""]
    assert one.num_wrong(load) == 0
    assert source.reason(ticket.request_id) == "read"


@pytest.mark.parametrize("again", ["one", "two"])
def test_a_ticket_that_was_read_is_spent(harbour, source, one, again, request):
    ticket = harbour.offer(source)
    assert one.wait(one.fetch(ticket)) == [""]
    assert source.reason(ticket.request_id) == "read"
    other = request.getfixturevalue(again)
    assert set(other.wait(other.fetch(ticket))) == {"ended"}


def test_a_ticket_is_void_after_its_lease(harbour, source, one):
    ticket = harbour.offer(source)
    assert source.reason(ticket.request_id) == "expired"
    assert one.wait(one.fetch(ticket)) == ["ended"]
    assert source.status()["offered"] == 0
