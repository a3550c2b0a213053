"""Long reads that several NIXL agents share: the laws hold, and a read ends when all its shares have."""

import os
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.processes import FABRICS
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, STALE, WHOLE, World, run, stale_memory, wait
from kvferry.transport import ReadEnd, agent_team
from kvferry.transport.agent_team import share_out
from kvferry.transport.agent_thread import RemoteRank
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import UcxSettings
from tests.support.sources import serving
from tests.transport.fake_cuda import FakeCuda, FakeEvent


@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=200), st.integers(1, 9))
def test_shares_move_the_same_bytes_and_cost_about_the_same(lengths, number):
    ends = np.cumsum(lengths)
    runs = Runs(ends - lengths, ends - lengths + 7, np.array(lengths))
    shares = list(share_out(runs, number))
    assert len(shares) <= number
    assert sum(share.total_bytes for share in shares) == runs.total_bytes
    at = 0
    for share in shares:  # in order, with nothing between and nothing twice
        for _, src, _, dst, num_bytes in share:
            assert (src, dst) == (at, at + 7)
            at += num_bytes
    costs = [share.total_bytes + agent_team.RUN_COST_BYTES * len(share) for share in shares]
    most = -(-(runs.total_bytes + agent_team.RUN_COST_BYTES * len(runs)) // number)
    assert max(costs) <= 2 * most + 2 * agent_team.RUN_COST_BYTES


nixl = pytest.importorskip("nixl", exc_type=ImportError)


class TestTeamOfAgents(TransportLaws):
    """Every law, with reads cut into tiny shares."""

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls):
        with serving(3, REGION_BYTES, env=FABRICS["cma"]) as served:
            yield served

    @pytest.fixture
    def world(self, served, monkeypatch):
        monkeypatch.setattr(agent_team, "SHARE_RUNS", 2)
        monkeypatch.setattr(agent_team, "SHARE_HOST_BYTES", 4096)
        holder = stale_memory("cpu")
        for name, value in FABRICS["cma"].items():
            monkeypatch.setenv(name, value)
        settings = replace(UcxSettings.from_environment(os.environ), num_agents=3)
        yield World(partial(ProcessTransport, settings=settings), holder, served.sources, None)
        holder.free()

    def test_it_really_shares(self, world, monkeypatch):
        asked = []
        work = RemoteRank.work

        def noted(rank, *args):
            asked.append(rank)
            return work(rank, *args)

        monkeypatch.setattr(RemoteRank, "work", noted)
        with world.reader(0) as transport:
            transport.read(1, "0", WHOLE)
            assert wait(transport, 1) == [ReadEnd(1)]
        assert len(set(asked)) == 3

    def test_reads_wait_for_the_device_are_cancelled_forgotten_and_closed_while_they_do(
        self, world, monkeypatch
    ):
        cuda = FakeCuda()
        later, never = FakeEvent(), FakeEvent()
        later.has_come, never.has_come = threading.Event(), threading.Event()
        with world.reader(0) as transport, monkeypatch.context() as patch:
            patch.setattr(ProcessTransport, "_cuda", property(lambda _: cuda))
            transport.read(1, "0", WHOLE, after=later)
            transport.read(2, "0", WHOLE, after=later)
            transport.cancel(2)
            assert wait(transport, 1) == [ReadEnd(2, "cancelled")]
            assert (world.holder.load()[0] == STALE).all(), "nothing is written before"
            with pytest.raises(TransportError, match="out-of-bounds"):
                transport.read(3, "0", run((0, 0), (0, 0), 1 << 40), after=later)
            later.has_come.set()
            assert wait(transport, 1) == [ReadEnd(1)]
            assert (world.holder.load()[0] == world.sources[0].contents[0]).all()
            transport.read(4, "0", WHOLE, after=never)
            transport.forget("0")
            (end,) = wait(transport, 1)
            assert "forgotten" in end.error
        with world.reader(0) as transport, monkeypatch.context() as patch:
            patch.setattr(ProcessTransport, "_cuda", property(lambda _: cuda))
            transport.read(5, "0", WHOLE, after=never)
            transport.close()
            assert [(end.transfer, "closed" in end.error) for end in transport.poll()] == [(5, True)]
        never.has_come.set()
        soon = time.monotonic() + 60
        while cuda.num_streams + cuda.num_events and time.monotonic() < soon:
            time.sleep(0.01)
        assert (cuda.num_streams, cuda.num_events) == (0, 0)
