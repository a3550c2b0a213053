"""A process is stopped (SIGSTOP) while its memory is being read, or while it reads; later it goes on."""

import time

import pytest

from kvferry.testing.fleet import until

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
        assert one.wait(load)[0] in ("lease-ended", "lease-lapsed", "overdue")
        assert one.num_wrong(load, ticket.request_id) > 0
        harbour.unchanged(one)
    harbour.serves(source, one)


@pytest.mark.slow
def test_late_bytes_of_a_stopped_source_do_not_count(harbour, source, two):
    harbour.serves(source, two)
    with harbour.level(source, two):
        for rank in source.fleet.ranks:
            rank.stop()
        ticket = harbour.offer(source, BIG)
        load = two.fetch(ticket)
        harbour.in_flight(two, 2)
        source.fleet.authority.stop()
        harbour.silent(two, load, seconds=1.2 * harbour.lease)
        assert two.num_in_flight() == 2
        before = two.fingerprints()
        for worker in source.fleet.workers():
            worker.resume()
        assert {"lease-ended", "lease-lapsed", "overdue", "source-gone"} >= set(two.wait(load))
        assert two.fingerprints() != before  # the bytes did come
        harbour.unchanged(two)
        assert source.reason(ticket.request_id) == "expired"
    harbour.serves(source, two)


@pytest.mark.slow
def test_a_read_that_does_not_end_is_quarantined_and_shown(harbour, source, one):
    harbour.serves(source, one)
    with harbour.level(source, one):
        source.fleet.ranks[1].stop()
        load = one.fetch(harbour.offer(source, BIG))
        until(lambda: one.statuses()[0]["quarantined"] == 1, "the load is quarantined")
        harbour.silent(one, load)
        assert one.num_in_flight() == 1
        source.fleet.ranks[1].resume()
        assert one.wait(load) == ["overdue"]
        assert one.statuses()[0]["quarantined"] == 0
        harbour.unchanged(one)
    harbour.serves(source, one)


def test_an_abort_in_flight_is_reported_after_the_last_byte(harbour, source, two):
    harbour.serves(source, two)
    with harbour.level(source, two):
        for rank in source.fleet.ranks:
            rank.stop()
        ticket = harbour.offer(source, BIG)
        load = two.fetch(ticket)
        harbour.in_flight(two, 2)
        time.sleep(0.5)  # until the fabric was asked: before that, an abort is reported at once
        two.abort(load)
        harbour.silent(two, load)
        two.abort(load)  # again: nothing changes
        for rank in source.fleet.ranks:
            rank.resume()
        assert two.wait(load) == ["aborted", "aborted"]
        harbour.unchanged(two)
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
def test_renewals_carry_a_slow_read_past_its_first_lease(harbour, source, one):
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
