"""A machine has one owner: what happened when several threads called one."""

import sys
import threading
import time

import pytest
from prometheus_client import CollectorRegistry

from kvferry.endpoint.metrics import EngineMetrics
from kvferry.errors import TransportError
from kvferry.runtime import Timing
from kvferry.transport.memory import MemoryTransport


@pytest.fixture
def quick_turns():
    """Threads take turns far more often than usual: a race that needs an hour needs a second."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("quick_turns")
def test_metrics_count_while_fetches_come_and_go(pair_of, caplog):
    """They were counted over a dictionary that other threads changed."""
    metrics = EngineMetrics(CollectorRegistry())
    pair = pair_of(metrics=metrics, timing=Timing(retry=0.004))
    deadline = time.monotonic() + 2
    held = []
    while time.monotonic() < deadline:
        held += [pair.destination.hold(pair.offer()) for _ in range(20)]
        if len(held) > 300:
            for handle in held:
                pair.destination.abort(handle)
            held = []
        pair.destination.status()
    assert not pair.destination.status()["refused"].keys() - {"behind"}  # those are said again
    assert not [record for record in caplog.records if record.exc_info]


class FailsOnce(MemoryTransport):
    """Its first connection cannot be made."""

    num_connects = 0

    def connect(self, peer, card, regions, usual=None):
        self.num_connects += 1
        if self.num_connects == 1:
            raise TransportError("no-connection", "the cable is being plugged in")
        return super().connect(peer, card, regions)


def test_a_peer_that_is_met_again_while_its_failure_is_explained_stays_met(pair_of):
    """The late end of the first meeting took the second one's connection away: KeyError ever after."""
    explained = threading.Event()

    def explain(source, failure):
        if not explained.is_set():
            pair.fetch()
            time.sleep(0.5)  # the peer answers, and is met again
            explained.set()

    pair = pair_of(transport=FailsOnce, on_refusal=explain)
    first = pair.fetch()
    reports = pair.reports(2)
    assert reports.pop(first).failure is not None
    assert [report.failure for report in reports.values()] == [None]
    third = pair.fetch()
    assert pair.reports()[third].failure is None
