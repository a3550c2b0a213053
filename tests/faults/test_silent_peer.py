"""A peer that never answers delays nobody else."""

import socket
import time
from contextlib import contextmanager

import msgspec
import pytest

from tests.support.fleet import until

NUM_REQUESTS = 40
ROUNDS = 6


@pytest.fixture
def nobody():
    """An address where nobody listens, and nobody else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def sleeper(harbour):
    """A source engine to be stopped."""
    return harbour.source("sleeper", tp=1)


def rate(harbour, source, destination):
    """Requests per second, one after another, from a source that answers."""
    seconds = 0.0
    for _ in range(NUM_REQUESTS):
        ticket = harbour.offer(source)
        started = time.monotonic()
        load = destination.fetch(ticket)
        while not destination.is_over(load):
            destination.poll()
        seconds += time.monotonic() - started
        assert set(load.codes) == {""}
        source.poll()
    return NUM_REQUESTS / seconds


def is_undisturbed(harbour, source, destination, disturbance):
    """Whether a source that answers is read from at 70 % of its rate or more, beside a disturbance.

    The two rates are taken in turn until the best of each agree: on a busy machine one round says little,
    while a peer that is held up for seconds never gets there.
    """
    alone, beside = 0.0, 0.0
    for _ in range(ROUNDS):
        alone = max(alone, rate(harbour, source, destination))
        with disturbance():
            beside = max(beside, rate(harbour, source, destination))
        until(lambda: source.is_quiet() and destination.is_quiet(), "the round is over", seconds=60)
        print(f"{alone:.0f} requests/s alone, {beside:.0f} beside: {beside / alone:.0%}")
        if beside >= 0.7 * alone:
            return True
    return False


@pytest.mark.slow
def test_an_authority_where_nobody_listens(harbour, source, one, nobody):
    harbour.serves(source, one)

    @contextmanager
    def calls_to_nobody():
        ticket = harbour.offer(source)
        lost = [msgspec.structs.replace(ticket, authority=nobody, ticket_id=i) for i in range(20)]
        loads = [one.fetch(ticket) for ticket in lost]
        yield
        for load in loads:
            assert one.wait(load) == ["source-gone"]

    with harbour.level(source, one):
        assert is_undisturbed(harbour, source, one, calls_to_nobody)


@pytest.mark.slow
def test_an_authority_that_is_stopped(harbour, source, one, sleeper):
    # RB-6
    harbour.serves(source, one)
    harbour.serves(sleeper, one)

    @contextmanager
    def stopped_authority():
        tickets = [harbour.offer(sleeper) for _ in range(20)]
        sleeper.fleet.authority.stop()
        loads = [one.fetch(ticket) for ticket in tickets]
        yield
        for load in loads:
            assert one.wait(load) == ["source-gone"]
        sleeper.fleet.authority.resume()
        until(sleeper.is_quiet, "its leases are over")

    with harbour.level(source, sleeper, one):
        assert is_undisturbed(harbour, source, one, stopped_authority)
    harbour.serves(sleeper, one)


@pytest.mark.slow
def test_a_rank_that_is_stopped_during_its_reads(harbour, source, one, sleeper):
    harbour.serves(source, one)
    harbour.serves(sleeper, one)

    @contextmanager
    def stopped_rank():
        sleeper.fleet.ranks[0].stop()
        loads = [one.fetch(harbour.offer(sleeper)) for _ in range(20)]
        yield
        sleeper.fleet.ranks[0].resume()
        for load in loads:
            one.wait(load)
        until(sleeper.is_quiet, "its leases are over")

    with harbour.level(source, sleeper, one):
        assert is_undisturbed(harbour, source, one, stopped_rank)
    harbour.serves(sleeper, one)


@pytest.mark.slow
def test_a_rank_that_is_stopped_while_it_is_met_delays_no_other_meeting(harbour, source, sleeper):
    destination = harbour.destination("newcomer", tp=1)
    sleeper.fleet.ranks[0].stop()
    load = destination.fetch(harbour.offer(sleeper))
    until(lambda: destination.statuses()[0]["fetches"] == {"meeting": 1}, "the meeting is under way")
    # If it waited for the sleeper, this would end like the sleeper's own, after as long: in no answer.
    harbour.serves(source, destination)
    assert destination.wait(load) == ["transport"]
    sleeper.fleet.ranks[0].resume()
    harbour.serves(sleeper, destination)
    until(destination.is_quiet, "all is told")


@pytest.mark.parametrize("is_met", [False, True], ids=["new", "met"])
def test_a_source_that_stood_still_serves_within_a_second(harbour, sleeper, is_met):
    """It answers again: new loads go to it at once, and not when it would have been called anew."""
    destination = harbour.destination("newcomer", tp=1)
    if is_met:
        harbour.serves(sleeper, destination)
    ticket = harbour.offer(sleeper)
    sleeper.fleet.authority.stop()
    assert destination.wait(destination.fetch(ticket)) == ["source-gone"]
    sleeper.fleet.authority.resume()
    resumed = time.monotonic()
    while (code := destination.wait(destination.fetch(harbour.offer(sleeper)))) != [""]:
        assert code == ["source-gone"]
        assert time.monotonic() - resumed < 1.0
        time.sleep(0.05)
    print(f"served {time.monotonic() - resumed:.2f} s after it went on")
