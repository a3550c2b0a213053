"""Many threads at one endpoint: everything is reported once, nothing raises, nothing is left behind."""

import random
import sys
import threading
import time
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from kvferry.endpoint.metrics import EngineMetrics
from kvferry.runtime import Timing
from tests.support.faults import Faults, FaultyHub

NUM_CALLERS = 32
MOST_UNDER_WAY = 400
EXPECTED = {"read", "aborted"}


class Crowd:
    """Callers that hold, fetch and give up, one that polls, one that looks."""

    def __init__(self, pair):
        self.pair = pair
        self.handles: list[int] = []
        self.requests: list[str] = []
        self.reports: list = []
        self.errors: list[BaseException] = []
        self.is_over = threading.Event()
        self.is_done = threading.Event()

    def run(self, seconds):
        callers = [threading.Thread(target=self.guarded, args=(self.call, n)) for n in range(NUM_CALLERS)]
        watchers = [threading.Thread(target=self.guarded, args=(work,)) for work in (self.poll, self.look)]
        for thread in (*callers, *watchers):
            thread.start()
        time.sleep(seconds)
        self.is_over.set()
        for thread in callers:
            thread.join(60)
        deadline = time.monotonic() + 60
        while len(self.reports) < len(self.handles) and time.monotonic() < deadline and not self.errors:
            time.sleep(0.01)
        self.is_done.set()
        for thread in watchers:
            thread.join(60)

    def guarded(self, work, *args):
        try:
            work(*args)
        except BaseException as error:
            self.errors.append(error)
            self.is_over.set()

    def call(self, number):
        chance, destination = random.Random(number), self.pair.destination
        while not self.is_over.is_set():
            if len(self.handles) - len(self.reports) > MOST_UNDER_WAY:
                time.sleep(0.005)
                continue
            ticket = self.pair.offer()
            self.requests.append(ticket.request_id)
            if chance.random() < 0.5:
                handle = destination.hold(ticket)
                self.handles.append(handle)
                time.sleep(chance.random() * 0.002)
                if chance.random() < 0.8:
                    assert self.pair.fetch(ticket, held=handle) == handle
                else:
                    destination.abort(handle)
            else:
                handle = self.pair.fetch(ticket)
                self.handles.append(handle)
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.004)
                destination.abort(handle)

    def poll(self):
        while not self.is_done.is_set():
            self.reports += self.pair.destination.poll()
            self.pair.engine.poll()
            self.pair.rank.poll()
            time.sleep(0.001)

    def look(self):
        while not self.is_done.is_set():
            self.pair.destination.status()
            self.pair.engine.status()
            time.sleep(0.002)


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_many_threads_at_one_endpoint(pair_of, caplog, seconds):
    """The issue's measure: 32 callers, holds, aborts, metrics on; with and without a fabric in the way."""
    faults, usual = Faults(), sys.getswitchinterval()
    registry = CollectorRegistry()
    timing = Timing(lease=30.0, meet=30.0, read=60.0, retry=0.02)
    pair = pair_of(hub=FaultyHub(faults), metrics=EngineMetrics(registry), timing=timing)
    faults.delay(3)
    crowd = Crowd(pair)
    sys.setswitchinterval(1e-5)
    try:
        crowd.run(seconds)
    finally:
        sys.setswitchinterval(usual)
    assert crowd.errors == []
    assert [record for record in caplog.records if record.exc_info] == []
    assert Counter(report.handle for report in crowd.reports) == Counter(crowd.handles), "each once"
    outcomes = Counter(report.record.outcome for report in crowd.reports)
    assert set(outcomes) == EXPECTED, outcomes
    for outcome, number in outcomes.items():
        ways = ({"outcome": outcome, "way": way} for way in ("memory", "none"))
        counted = (registry.get_sample_value("kvferry_loads_total", labels) or 0 for labels in ways)
        assert sum(counted) == number
    assert pair.check()[1] == 0, "wrong bytes"
    for request_id in crowd.requests:  # what was given up unread would wait for another reader
        pair.engine.withdraw(request_id)
    until_quiet(pair)


def until_quiet(pair):
    deadline = time.monotonic() + 40
    while True:
        pair.engine.poll()
        here, there = pair.destination.status(), pair.engine.status()
        if not (here["fetches"] or here["settling"] or here["in_flight"] or pair.engine.num_leases):
            break
        assert time.monotonic() < deadline, (here, there)
        time.sleep(0.05)
    assert here["quarantined"] == 0
    for refused in (here["refused"], there["refused"]):
        # Where 32 callers leave the owner little of the processor, messages are dropped, and said again.
        assert not refused.keys() - {"behind"}
