"""How soon a destination knows that a source engine is gone; and that one that is merely busy is not.

Each of the first three took 10 s, every time, while only our own messages told.
"""

import threading
import time

import pytest

from kvferry.runtime import Timing
from tests.support.fleet import until

TIMING = Timing(lease=30, meet=20, read=30)
"""By default where it matters here; ``meet`` is longer than an engine is busy in these tests."""
SLACK = 0.7
"""A machine with more to do than it has processors for."""


@pytest.fixture
def pair(harbour):
    """Two engines of one rank each that have met."""
    source = harbour.source("mortal", tp=1, timing=TIMING)
    destination = harbour.destination("watcher", tp=1, timing=TIMING)
    harbour.serves(source, destination)
    return source, destination


def seconds_until(destination, load, codes):
    """How long it takes until a load has ended as it should."""
    started = time.monotonic()
    assert destination.wait(load) == codes
    return time.monotonic() - started


@pytest.mark.timed
def test_a_killed_source_is_known_within_a_second_and_at_once_to_the_next(harbour, pair):
    source, destination = pair
    tickets = [harbour.offer(source) for _ in range(4)]
    source.fleet.authority.kill()
    first = seconds_until(destination, destination.fetch(tickets[0]), ["source-gone"])
    rest = [seconds_until(destination, destination.fetch(one), ["source-gone"]) for one in tickets[1:]]
    print(f"killed: known after {first:.2f} s, to the next after {max(rest) * 1e3:.0f} ms")
    assert first < 1.0 + SLACK
    assert max(rest) < 0.3
    assert destination.statuses()[0]["fetches"] == {}


@pytest.mark.timed
def test_a_stranger_to_a_killed_source_knows_it_within_a_second(harbour, pair):
    source, _ = pair
    stranger = harbour.destination("stranger", tp=1, timing=TIMING)
    ticket = harbour.offer(source)
    source.fleet.authority.kill()
    took = seconds_until(stranger, stranger.fetch(ticket), ["source-gone"])
    print(f"killed before it was called: known after {took:.2f} s")
    assert took < 1.0 + SLACK


@pytest.mark.timed
def test_a_stopped_source_is_known_within_three_seconds_and_serves_when_it_goes_on(harbour, pair):
    source, destination = pair
    tickets = [harbour.offer(source) for _ in range(2)]
    source.fleet.authority.stop()
    first = seconds_until(destination, destination.fetch(tickets[0]), ["source-gone"])
    second = seconds_until(destination, destination.fetch(tickets[1]), ["source-gone"])
    print(f"stopped: known after {first:.2f} s, to the next after {second * 1e3:.0f} ms")
    assert first < 3.0 + SLACK
    assert second < 0.3
    source.fleet.authority.resume()
    until(lambda: _serves(harbour, source, destination), "it serves again")


def _serves(harbour, source, destination):
    return destination.wait(destination.fetch(harbour.offer(source))) == [""]


@pytest.mark.timed
def test_a_source_that_holds_the_interpreter_for_ten_seconds_is_not_gone(harbour, pair):
    """Its network thread answers heartbeats; and what was asked meanwhile is answered in the end."""
    source, destination = pair
    tickets = [harbour.offer(source, is_filled=True) for _ in range(2)]
    holding = threading.Thread(target=source.fleet.authority.call, args=("hold_interpreter", 10))
    holding.start()
    time.sleep(1.0)
    began = time.monotonic()
    loads = [destination.fetch(one) for one in tickets]
    codes = {code for load in loads for code in destination.wait(load)}
    print(f"busy for 10 s: {codes} after {time.monotonic() - began:.1f} s")
    assert codes == {""}
    assert [destination.num_wrong(load) for load in loads] == [0, 0]
    holding.join()


@pytest.mark.timed
def test_a_read_in_flight_from_a_killed_engine_ends_by_the_transport(harbour, pair):
    source, destination = pair
    source.fleet.ranks[0].stop()
    load = destination.fetch(harbour.offer(source, 2048))
    harbour.in_flight(destination, 1)
    source.fleet.authority.kill()
    assert destination.wait(load)[0] in ("source-gone", "transport")
    before = destination.fingerprints()
    source.fleet.ranks[0].resume()
    harbour.unchanged(destination)
    assert destination.fingerprints() == before
