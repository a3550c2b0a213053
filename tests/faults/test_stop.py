"""A process is stopped (SIGSTOP) while its memory is being read, or while it reads; later it goes on."""

import time
from dataclasses import replace

import pytest

from tests.faults.conftest import TIMING
from tests.support.fleet import until

BIG = 2048


def test_blocks_that_were_reused_during_the_read_do_not_count(harbour, source, one):
    harbour.serves(source, one)
    with harbour.level(source, one):
        # The source is stopped first, so that the read is posted and cannot be over before the reader stops.
        for rank in source.fleet.ranks:
            rank.stop()
        ticket = harbour.offer(source, BIG)
        load = one.fetch(ticket)
        harbour.in_flight(one, 2)
        one.fleet.ranks[0].stop()
        for rank in source.fleet.ranks:
            rank.resume()
        tables = source.out[ticket.request_id]
        assert source.reason(ticket.request_id) == "expired"
        # The blocks are the source's own again, and it uses them; few of the old bytes are on their way.
        for rank in source.fleet.ranks:
            rank.call("fill", tables, BIG, "another request")
        one.fleet.ranks[0].resume()
        # Any of these is a load that does not count; which, depends on how long the reader was stopped.
        assert one.wait(load)[0] in ("lease-ended", "lease-lapsed", "overdue", "transport")
        assert one.num_wrong(load, ticket.request_id) > 0
        harbour.unchanged(one)
    harbour.serves(source, one)


@pytest.mark.slow
def test_late_bytes_of_a_stopped_source_land_nowhere(harbour, source, two):
    harbour.serves(source, two)
    with harbour.level(source, two):
        for rank in source.fleet.ranks:
            rank.stop()
        ticket = harbour.offer(source, BIG)
        load = two.fetch(ticket)
        harbour.in_flight(two, 2)
        source.fleet.authority.stop()
        assert {"transport", "source-gone"} >= set(two.wait(load))
        before = two.fingerprints()
        for worker in source.fleet.workers():
            worker.resume()
        harbour.unchanged(two)
        assert two.fingerprints() == before
        assert source.reason(ticket.request_id) in ("failed", "expired")
    harbour.serves(source, two)


def test_a_read_from_a_rank_that_is_stopped_fails_in_seconds(harbour, source, one):
    """Nobody waits for it: a rank answers heartbeats as long as it runs."""
    harbour.serves(source, one)
    with harbour.level(source, one):
        source.fleet.ranks[1].stop()
        started = time.monotonic()
        load = one.fetch(harbour.offer(source, BIG))
        assert one.wait(load) == ["transport"]
        assert time.monotonic() - started < 10
        source.fleet.ranks[1].resume()
        harbour.unchanged(one)
    harbour.serves(source, one)


def test_an_abort_in_flight_is_reported_at_once_and_nothing_lands_later(harbour, source, two):
    harbour.serves(source, two)
    with harbour.level(source, two):
        for rank in source.fleet.ranks:
            rank.stop()
        ticket = harbour.offer(source, BIG)
        load = two.fetch(ticket)
        harbour.in_flight(two, 2)
        two.abort(load)
        assert two.wait(load) == ["aborted", "aborted"]
        two.abort(load)  # again: nothing changes
        before = two.fingerprints()
        for rank in source.fleet.ranks:
            rank.resume()
        harbour.unchanged(two)
        assert two.fingerprints() == before
        assert source.reason(ticket.request_id) == "declined"
    harbour.serves(source, two)


@pytest.mark.slow
def test_an_abort_before_anything_was_read_gives_the_ticket_back(harbour, source, one, two):
    harbour.serves(source, one)
    ticket = harbour.offer(source, is_filled=True)
    source.fleet.authority.stop()
    load = one.fetch(ticket)
    one.abort(load)
    assert one.wait(load) == ["aborted"]
    source.fleet.authority.resume()
    assert source.reason(ticket.request_id) == "declined"
    until(one.is_quiet, "the authority has noted it")
    assert two.wait(two.fetch(ticket)) == ["ended", "ended"]


@pytest.mark.slow
def test_renewals_carry_a_slow_read_past_its_first_lease(harbour, source):
    one = harbour.destination("patient", tp=1, timing=replace(TIMING, silence=30, read=30))
    harbour.serves(source, one)
    ticket = harbour.offer(source, is_filled=True)
    source.fleet.ranks[0].stop()
    load = one.fetch(ticket)
    harbour.in_flight(one, 1)
    deadline = time.monotonic() + 1.5 * harbour.lease
    while time.monotonic() < deadline:
        assert source.status()["being_read"] == 1
        time.sleep(0.05)
    source.fleet.ranks[0].resume()
    assert one.wait(load) == [""]
    assert one.num_wrong(load) == 0
