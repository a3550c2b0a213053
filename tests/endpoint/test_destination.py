"""The destination side of the API, between two ranks of this process."""

import time
from dataclasses import replace

import numpy as np
import pytest

from kvferry import SpecError
from kvferry.core.sample import sample_request
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.errors import TransportError
from kvferry.models import Topology, describe
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport, placed


class NoClearing(MemoryTransport):
    """Its memory cannot be written by hand."""

    def clear(self, runs):
        raise TransportError("clear", "no")


def with_memory(manifest):
    memory = {r.name: np.zeros(r.num_bytes, np.uint8) for r in manifest.ranks[0].regions}
    regions = placed(manifest.ranks[0], memory)
    return replace(manifest, ranks=(replace(manifest.ranks[0], regions=regions),)), memory


def fetched(transport):
    hub = Hub()
    src, _src_memory = with_memory(describe(small("gqa"), Topology(block=8, blocks=9), "prefill"))
    dst, _dst_memory = with_memory(describe(small("gqa"), Topology(block=12, blocks=9), "decode"))
    engine = SourceEngine("prefill", 1)
    rank = SourceRank(engine.address, src, MemoryTransport(hub))
    destination = Destination(dst, 0, transport(hub))
    try:
        request = sample_request(src, dst, 20)
        destination.fetch(engine.offer("request-1", request.src, 20), request.dst, request.need)
        deadline = time.monotonic() + 20
        while not (reports := destination.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return reports[0]
    finally:
        destination.close()
        rank.close()
        engine.close()


def test_a_fetch_says_where_its_time_went():
    """RB-7: planning, posting, moving and all in all, for each request."""
    report = fetched(MemoryTransport)
    record = report.record
    assert report.failure is None
    assert 0 < record.plan_seconds < record.meet_seconds < record.total_seconds
    assert record.post_seconds > 0
    assert record.num_runs > 0


def test_slack_that_cannot_be_cleared_fails_the_fetch():
    """Stale bytes in a tail would poison attention: better no load than that one."""
    report = fetched(NoClearing)
    assert report.failure is not None
    assert "could not be cleared" in report.failure.detail


def test_ranks_of_one_engine_must_name_their_start():
    manifest = describe(small("gqa"), Topology(tp=2, block=8, blocks=9), "decode")
    with pytest.raises(SpecError, match="reader"):
        Destination(manifest, 0, MemoryTransport(Hub()))
