"""A process is killed (SIGKILL) while its memory is being read, or while it reads."""

import time

import msgspec
import numpy as np
import pytest

from kvferry.cli.processes import FABRICS
from tests.support.fleet import until

BIG = 2048
"""Tokens: 32 MiB, a read of some 50 ms."""
CMA = FABRICS["cma"]


def part_way(harbour, source, destination):
    """A load of which some bytes have arrived and others cannot: the source is stopped in the middle."""
    worker = source.fleet.ranks[0]
    for _ in range(20):
        worker.stop()
        load = destination.fetch(harbour.offer(source, BIG))
        harbour.in_flight(destination, len(destination.fleet.ranks))
        before = destination.fingerprints()
        while destination.num_in_flight():
            if destination.fingerprints() != before:
                return load
            worker.resume()
            time.sleep(0.002)
            worker.stop()
        worker.resume()
        destination.wait(load)
    pytest.fail("never caught a read in the middle")


def test_a_source_rank_dies_in_the_middle_of_a_read(harbour, two):
    source = harbour.source("mortal", tp=1)
    harbour.serves(source, two)
    with harbour.level(two):
        load = part_way(harbour, source, two)
        assert not load.reports or not two.is_over(load)
        source.fleet.ranks[0].kill()
        assert "transport" in two.wait(load)
        assert two.num_in_flight() == 0
        harbour.unchanged(two)
    # The ticket was read from: nobody gets it again, and its blocks are the engine's own.
    assert source.reason(load.request_id) in ("failed", "expired")
    until(source.is_quiet, "the authority lives on")


def test_one_of_four_sources_dies_and_what_the_others_still_send_lands_nowhere(harbour, one):
    source = harbour.source("four", tp=4)
    harbour.serves(source, one)
    ranks = source.fleet.ranks
    with harbour.level(one):
        for rank in ranks:
            rank.stop()
        load = one.fetch(harbour.offer(source, BIG))
        harbour.in_flight(one, 4)
        ranks[2].kill()
        assert one.wait(load) == ["transport"]
        assert one.num_in_flight() == 0
        before = one.fingerprints()
        for rank in (ranks[0], ranks[1], ranks[3]):
            rank.resume()
        harbour.unchanged(one)
        assert one.fingerprints() == before
    assert source.reason(load.request_id) in ("failed", "expired")


@pytest.mark.slow
def test_a_destination_rank_dies_and_its_lease_ends_everywhere_once(harbour, source, one):
    victim = harbour.destination("mortal", tp=2)
    harbour.serves(source, one)
    harbour.serves(source, victim)
    with harbour.level(source):
        ticket = harbour.offer(source, BIG)
        source.fleet.authority.stop()
        load = victim.fetch(ticket)  # both ranks have asked for the lease …
        victim.fleet.ranks[1].kill()
        source.fleet.authority.resume()  # … and both get it, but only one lives to read and to settle
        assert victim.wait(load) == [""]
        assert source.reason(load.request_id) == "expired"
        harbour.serves(source, one)
    until(victim.is_quiet, "the surviving rank is quiet")


@pytest.mark.slow
def test_a_destination_rank_dies_in_the_middle_of_a_read_over_cma(harbour):
    source = harbour.source("prefill-cma", tp=1, env=CMA)
    other = harbour.destination("decode-cma", tp=1, env=CMA)
    harbour.serves(source, other)
    for _ in range(3):
        victim = harbour.destination("mortal", tp=1, env=CMA)
        harbour.serves(source, victim)
        with harbour.level(source):
            load = victim.fetch(harbour.offer(source, BIG))
            until(lambda: source.status()["being_read"], "the lease is granted")
            victim.fleet.ranks[0].kill()
            assert source.reason(load.request_id) in ("expired", "read")  # a read may be over by then
            harbour.serves(source, other)


@pytest.mark.slow
def test_a_destination_rank_dies_in_the_middle_of_a_read_over_tcp(harbour, one):
    source = harbour.source("prefill-tcp", tp=1)
    victim = harbour.destination("mortal", tp=1)
    harbour.serves(source, victim)
    source.fleet.ranks[0].stop()
    victim.fetch(harbour.offer(source, BIG))
    harbour.in_flight(victim, 1)
    victim.fleet.ranks[0].kill()
    source.fleet.ranks[0].resume()
    harbour.serves(source, one)


@pytest.mark.slow
def test_a_destination_rank_dies_at_any_moment_over_tcp_and_another_reads_on(harbour, one):
    source, half = harbour.source("prefill-tcp", tp=1), BIG // 2
    harbour.serves(source, one)
    for moment in np.random.default_rng().uniform(0, 0.2, 3):
        victim = harbour.destination("mortal", tp=1)
        harbour.serves(source, victim)
        with harbour.level(source, one):
            theirs = harbour.offer(source, half, is_filled=True)
            load = one.fetch(theirs)
            ticket = harbour.offer(source, half)
            victim.fetch(ticket)
            until(lambda: source.status()["being_read"], "a lease is granted")
            time.sleep(moment)
            victim.fleet.ranks[0].kill()
            assert one.wait(load) == [""], f"killed after {moment:.3f} s"
            assert one.num_wrong(load) == 0
            assert source.reason(ticket.request_id) in ("expired", "read")  # a read may be over by then
            harbour.serves(source, one)


def test_an_engine_dies_and_starts_again_at_the_same_address(harbour, one):
    # RB-6
    source = harbour.source("phoenix", tp=1)
    harbour.serves(source, one)
    old = harbour.offer(source)
    source.fleet.ranks[0].stop()
    reading = one.fetch(harbour.offer(source))
    harbour.in_flight(one, 1)
    with harbour.level(one):
        for worker in source.fleet.workers():
            worker.kill()
        assert one.wait(reading) == ["transport"]
        again = harbour.source("phoenix", tp=1, listen=source.fleet.address)
        assert again.fleet.address == source.fleet.address
        until(lambda: one.wait(one.fetch(old)) == ["restarted"], "it answers at its address again")
        forged = msgspec.structs.replace(old, generation=again.status()["generation"])
        assert one.wait(one.fetch(forged)) == ["forged"]
        harbour.serves(again, one)
        peers = one.statuses()[0]["peers"]
        assert [peer for peer in peers if peer.startswith("phoenix#")] == [
            f"phoenix#{again.status()['generation']}"
        ]
    harbour.serves(again, one)
    until(again.is_quiet, "the new start is quiet")
