"""How many leases one authority is asked for at a time, and which first."""

import pytest

from kvferry.runtime import Fetch, Reader, Report, Timing
from kvferry.runtime.fetch_job import AcquireQueue
from kvferry.runtime.values import Send
from kvferry.wire.messages import Acquire, Denial, Grant, Renew
from kvferry.wire.ticket import Ticket

TIMING = Timing(lease=30.0, meet=10.0, read=120.0, retry=0.5)
MANY = 1_000
MOST = AcquireQueue.MAX_UNANSWERED


def fetch_of(ticket_id, authority="src"):
    return Fetch(Ticket("prefill", 7, ticket_id, f"r{ticket_id}", authority, 20, {}, lease_ms=9_000), {}, {})


def asked(effects, authority="src"):
    """The numbers of the tickets that an authority is asked for."""
    sent = [each.message for each in effects if isinstance(each, Send) and each.to == authority]
    return [message.ticket.ticket_id for message in sent if isinstance(message, Acquire)]


def nonces(effects):
    sent = [each.message for each in effects if isinstance(each, Send)]
    return {m.ticket.ticket_id: m.nonce for m in sent if isinstance(m, Acquire)}


@pytest.fixture
def reader():
    return Reader("A", 0, 1, TIMING, key=bytes(range(32)))


@pytest.fixture
def full(reader):
    """Far more than can be asked for at once; what was sent."""
    effects = [each for n in range(1, MANY + 1) for each in reader.fetch(0.0, n, fetch_of(n))]
    return reader, effects


def test_an_authority_is_asked_for_so_many_at_a_time(full):
    _, effects = full
    assert asked(effects) == list(range(1, MOST + 1))


def test_another_authority_is_asked_all_the_same(full):
    reader, _ = full
    assert asked(reader.fetch(0.0, MANY + 1, fetch_of(1, "other")), "other") == [1]


def test_an_answer_makes_room_for_the_newest(full):
    reader, effects = full
    sent = nonces(effects)
    assert asked(reader.receive(0.1, "src", Denial(sent[5], 5, "forged"))) == [MANY]
    assert asked(reader.receive(0.1, "src", Grant(sent[7], 7, 30_000))) == [MANY - 1]


def test_who_is_given_up_makes_room_too(full):
    reader, _ = full
    assert asked(reader.abort(0.1, 3)) == []
    assert asked(reader.tick(0.1)) == [MANY]
    assert reader.next_deadline() > 0.1


def test_who_waits_may_be_given_up(full):
    reader, effects = full
    reader.abort(0.1, MANY)
    assert asked(reader.receive(0.1, "src", Denial(nonces(effects)[1], 1, "forged"))) == [MANY - 1]


def test_no_answer_is_asked_for_again_ever_more_rarely(reader):
    now, effects, times = 0.0, reader.fetch(0.0, 1, fetch_of(1)), []
    while not any(isinstance(each, Report) for each in effects):
        times += [now] * len(asked(effects))
        now = reader.next_deadline()
        effects = reader.tick(now)
    assert times == [0.0, 0.5, 1.5, 3.5, 5.5, 7.5, 9.5]
    assert now == TIMING.meet


def test_an_overloaded_source_is_asked_no_more_than_an_idle_one(full):
    reader, _ = full
    repeated = [asked(reader.tick(now / 10)) for now in range(1, 51)]
    assert max(map(len, repeated)) == MOST
    assert sum(map(len, repeated)) == 3 * MOST, "at 0.5, 1.5 and 3.5 s"


def test_all_are_answered_in_the_end(full):
    reader, effects = full
    open_, done = nonces(effects), set()
    while open_:
        number, nonce = open_.popitem()
        done.add(number)
        open_ |= nonces(reader.receive(0.1, "src", Denial(nonce, number, "forged")))
    assert done == set(range(1, MANY + 1))
    assert len(reader._acquires._asked) == len(reader._acquires._waiting) == 0


def test_renewals_do_not_wait_behind(full):
    reader, effects = full
    reader.receive(0.0, "src", Grant(nonces(effects)[1], 1, 9_000))
    renewed = [each.message for each in reader.tick(3.0) if isinstance(each, Send)]
    assert any(isinstance(message, Renew) and message.tickets[0][0] == 1 for message in renewed)
