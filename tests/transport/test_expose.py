"""What of a source a reader can reach by itself: a raw agent of NIXL tries, with what the source tells it."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from kvferry.cli.processes import FABRICS
from kvferry.errors import TransportError
from kvferry.testing.transport_world import REGION_BYTES, stale_memory
from kvferry.transport import process
from kvferry.transport.cards import Card
from kvferry.transport.nixl_agent import Agent, SlicePair
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import UCX_TRANSPORTS, Expose, UcxSettings
from tests.support.sources import serving

pytest.importorskip("nixl", exc_type=ImportError)

UCX = {UCX_TRANSPORTS: FABRICS["cma"][UCX_TRANSPORTS]}
NUM_BYTES = 64 << 10
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def served():
    """A source for each setting, in a process of its own."""
    with ExitStack() as processes:
        yield {
            expose: processes.enter_context(
                serving(1, REGION_BYTES, env=UCX | {"KVFERRY_EXPOSE": expose.value})
            )
            for expose in Expose
        }


class RawReader:
    """A member of the fleet that keeps to no protocol but NIXL's."""

    def __init__(self):
        self.memory = np.zeros(NUM_BYTES, np.uint8)
        settings = UcxSettings.from_environment(os.environ)
        self._agent = Agent(f"raw-{uuid4().hex}", settings.engine_config)
        self._dst = np.array([[self.memory.ctypes.data, self.memory.nbytes, 0]], np.uint64)
        self._agent.register("DRAM", self._dst)

    def read(self, card, region):
        """The beginning of a region, by the card of whoever registered it, or did not."""
        self._agent.add(card.agent, card.metadata)
        src = np.array([[region.address, NUM_BYTES, 0]], np.uint64)
        handle = self._agent.prepare(SlicePair("DRAM", "DRAM", src, self._dst), card.agent)
        is_done, deadline = self._agent.post(handle), time.monotonic() + PATIENCE_S
        while not is_done:
            assert time.monotonic() < deadline
            is_done = self._agent.check(handle)
        self._agent.release(handle)


def test_what_is_registered_is_open_to_whoever_has_the_card(served, monkeypatch):
    for name, value in UCX.items():
        monkeypatch.setenv(name, value)
    raw, (source,) = RawReader(), served[Expose.FABRIC].sources
    raw.read(Card.from_bytes(source.card), source.regions[1])
    assert (raw.memory == source.contents[1][:NUM_BYTES]).all()


@pytest.mark.parametrize("expose", Expose)
def test_an_agent_is_made_only_where_that_is_asked_for(served, expose):
    each, has_agent = served[expose], expose is Expose.FABRIC
    card = Card.from_bytes(each.sources[0].card)
    assert ("libucp" in Path(f"/proc/{each.pid}/maps").read_text()) == has_agent
    assert bool(card.agent) == bool(card.metadata) == has_agent


def test_memory_of_host_and_device_at_once_needs_nixl(monkeypatch):
    """No kernel copies both to chunks, so nobody could send it."""

    class Mixed:
        is_mixed, cuda, copier, card_part = True, None, None, b""

        def close(self):
            pass

    monkeypatch.setattr(process, "device_of", lambda *_, **__: Mixed())
    monkeypatch.setattr(process, "AgentTeam", None)  # no agent is made
    holder = stale_memory()
    transport = ProcessTransport(expose=Expose.HOST)
    with pytest.raises(TransportError, match="bad-device: this rank has host and device memory"):
        transport.register(holder.regions)
    transport.close()
    holder.free()
