"""The destination side of the API, between two ranks of this process."""

import threading
import time
from dataclasses import replace

import pytest

from kvferry import SpecError
from kvferry.endpoint import Destination
from kvferry.errors import TransportError
from kvferry.models import Topology, describe
from kvferry.runtime import FailureCode, Timing
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport
from tests.support.faults import Faults, FaultyHub


def until(is_so, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (so := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return so


def fetched(pair):
    handle = pair.fetch()
    return pair.reports()[handle]


class NoClearing(MemoryTransport):
    """Its memory cannot be written by hand."""

    def clear(self, transfer, runs, *, after=None):
        raise TransportError("clear", "no")


def test_a_fetch_says_where_its_time_went(pair_of):
    """RB-7: planning, posting, moving and all in all, for each request."""
    pair = pair_of()
    handle = pair.fetch()
    report = pair.reports()[handle]
    record = report.record
    assert report.failure is None
    assert 0 < record.plan_seconds < record.meet_seconds < record.total_seconds
    assert record.post_seconds > 0
    assert record.num_runs > 0
    num_cells, num_wrong = pair.check()
    assert (num_cells > 0, num_wrong) == (True, 0)


def test_slack_that_cannot_be_cleared_fails_the_fetch(pair_of):
    """Stale bytes in a tail would poison attention: better no load than that one."""
    pair = pair_of(transport=NoClearing)
    handle = pair.fetch()
    report = pair.reports()[handle]
    assert report.failure is not None
    assert "could not be cleared" in report.failure.detail


def test_ranks_of_one_engine_must_name_their_start():
    manifest = describe(small("gqa"), Topology(tp=2, block=8, blocks=9), "decode")
    with pytest.raises(SpecError, match="reader"):
        Destination(manifest, 0, MemoryTransport(Hub()))


def test_a_rank_that_its_own_manifest_does_not_count_is_told_what_to_give():
    manifest = describe(small("gqa"), Topology(tp=2, block=8, blocks=9), "decode")
    alone = replace(manifest, ranks=manifest.ranks[1:])
    with pytest.raises(SpecError, match="rank 1 of 1: pass the manifest of the whole engine"):
        Destination(alone, 1, MemoryTransport(Hub()), reader="decode")


class NeverConnects(MemoryTransport):
    """A peer that does not answer, and a connection attempt that knows no deadline."""

    has_begun, is_over = threading.Event(), threading.Event()

    def connect(self, peer, card, regions, usual=None):
        self.has_begun.set()
        self.is_over.wait(60)


def test_close_does_not_wait_for_a_silent_meeting(pair_of, monkeypatch):
    """Law 8: every wait has a deadline."""
    monkeypatch.setattr("kvferry.endpoint.destination.CLOSE_SECONDS", 0.5)
    pair = pair_of(transport=NeverConnects)
    pair.fetch()
    assert NeverConnects.has_begun.wait(20)
    meeting = [t for t in threading.enumerate() if t.name.startswith("kvferry-work")]
    started = time.monotonic()
    try:
        pair.destination.close()
        assert time.monotonic() - started < 5
        assert all(thread.is_alive() for thread in meeting)
    finally:
        NeverConnects.is_over.set()


def test_a_fetch_that_is_given_up_is_not_waited_for(pair_of):
    """Its reads are cancelled: nothing more of them is asked of the fabric, and the blocks come back."""
    faults = Faults()
    pair = pair_of(hub=FaultyHub(faults))
    good = pair.fetch()
    assert pair.reports()[good].failure is None
    faults.delay(1_000_000)
    handle = pair.fetch()
    until(lambda: pair.destination.status()["in_flight"])
    pair.destination.abort(handle)
    failure = pair.reports()[handle].failure
    assert failure is not None
    assert failure.code is FailureCode.ABORTED
    faults.calm()
    again = pair.fetch()
    record = pair.reports()[again].record
    assert (record.outcome, record.plan_seconds) == ("read", 0.0), "the peer is still met"


def test_what_two_sides_cannot_agree_on_has_a_code(pair_of):
    pair = pair_of()
    handle = pair.destination.fetch(pair.offer(), {}, pair.request.need)
    failure = pair.reports()[handle].failure
    assert failure is not None
    assert failure.code is FailureCode.REQUEST
    assert failure.detail.startswith("dst-table-missing: group ")


def test_status_after_close_is_that_of_the_end(pair_of):
    pair = pair_of()
    handle = pair.fetch()
    pair.reports()
    pair.destination.close()
    assert pair.destination.status()["fetches"] == {}
    pair.destination.abort(handle)  # nobody is there any more: nothing happens


class RaisesOnce(MemoryTransport):
    """A bug: its first read raises what a transport must not raise."""

    num_reads = 0

    def read(self, transfer, peer, runs, *, after=None, permit=b""):
        self.num_reads += 1
        if self.num_reads == 1:
            raise MemoryError
        super().read(transfer, peer, runs, after=after)


def test_a_read_of_which_nobody_knows_whether_it_was_posted_is_quarantined(pair_of):
    """Law 6: what was not reported as ended has not ended. Others go on."""
    pair = pair_of(transport=RaisesOnce, timing=Timing(read=0.5, retry=0.05))
    first = pair.fetch()
    until(lambda: pair.destination.status()["in_flight"])  # of two at once, either may be read first
    second = pair.fetch()
    assert list(pair.reports()) == [second]
    until(lambda: pair.destination.status()["quarantined"] == 1)
    assert pair.destination.poll() == []
    assert first < second
