"""What of a source a reader can reach by itself: a raw agent of NIXL tries, with what the source tells it."""

import os
import time
from contextlib import ExitStack, closing
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from kvferry.core.way import Way
from kvferry.errors import TransportError
from kvferry.testing.packed import AskingTransport
from kvferry.testing.sources import serving
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, stale_memory, wait
from kvferry.transport import nixl
from kvferry.transport.base import ReadEnd
from kvferry.transport.cards import pack_card, segment_in, staging_in, unpack_card
from kvferry.transport.descriptors import SlicePair
from kvferry.transport.emulation import AgentMode
from kvferry.transport.expose import Expose
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.nixl_agent import Agent
from kvferry.transport.staging import PackedReads, Staging
from kvferry.transport.ucx import FABRICS, UcxSettings

pytest.importorskip("nixl", exc_type=ImportError)

GATHERING = {"KVFERRY_PACKED_READS": "auto"}
TCP = FABRICS["tcp"]
NUM_BYTES = 64 << 10
"""What is read raw: one fragment, so that whatever happens ends no source."""
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def served():
    """A source for each setting, in a process of its own. It can be read over CMA, and over TCP."""
    with ExitStack() as processes:
        yield {
            expose: processes.enter_context(
                serving(1, REGION_BYTES, env=GATHERING | {"KVFERRY_EXPOSE": expose.value})
            )
            for expose in Expose
        }


@pytest.fixture(scope="module")
def sources(served):
    return {expose: each.sources[0] for expose, each in served.items()}


class RawReader:
    """A member of the fleet that keeps to no protocol but NIXL's."""

    def __init__(self):
        self.memory = np.zeros(NUM_BYTES, np.uint8)
        settings = UcxSettings.from_environment(os.environ)
        self._agent = Agent(f"raw-{uuid4().hex}", settings.engine_config(AgentMode.CAREFUL))
        self._dst = np.array([[self.memory.ctypes.data, self.memory.nbytes, 0]], np.uint64)
        self._agent.register("DRAM", self._dst)

    def read(self, agent, metadata, region):
        """The beginning of a region, by the name and metadata of whoever registered it, or did not."""
        self._agent.add(agent, metadata)
        src = np.array([[region.address, NUM_BYTES, 0]], np.uint64)
        handle = self._agent.prepare(SlicePair("DRAM", "DRAM", src, self._dst), agent)
        is_done, deadline = self._agent.post(handle), time.monotonic() + PATIENCE_S
        while not is_done:
            assert time.monotonic() < deadline
            is_done = self._agent.check(handle)
        self._agent.release(handle)


@pytest.fixture
def raw(monkeypatch):
    monkeypatch.setenv("UCX_TLS", TCP["UCX_TLS"])
    return RawReader()


def test_the_pool_of_a_source_is_open_to_whoever_has_its_card(raw, sources):
    source = sources[Expose.POOL]
    raw.read(*unpack_card(source.card), source.regions[1])
    assert (raw.memory == source.contents[1][:NUM_BYTES]).all()


def test_with_expose_staging_a_raw_read_of_the_pool_fails(raw, sources):
    source = sources[Expose.STAGING]
    with pytest.raises(TransportError, match="NIXL_ERR_NOT_FOUND"):
        raw.read(*unpack_card(source.card), source.regions[1])
    assert not raw.memory.any()


def test_with_expose_staging_forged_metadata_still_opens_the_pool_over_tcp(raw, sources):
    """As docs/security.md says: it is the reader's own NIXL that refuses, and UCX asks nobody."""
    source = sources[Expose.STAGING]
    agent, metadata = unpack_card(source.card)
    ring = Staging.from_bytes(staging_in(source.card)).ring_address.to_bytes(8, "little")
    assert metadata.count(ring) == 1
    forged = metadata.replace(ring, source.regions[1].address.to_bytes(8, "little"))
    raw.read(agent, forged, source.regions[1])
    assert (raw.memory == source.contents[1][:NUM_BYTES]).all()


@pytest.mark.parametrize(("expose", "has_agent"), [(Expose.POOL, True), (Expose.NOTHING, False)])
def test_with_expose_nothing_no_agent_is_made(served, sources, expose, has_agent):
    card = sources[expose].card
    assert ("libucp" in Path(f"/proc/{served[expose].pid}/maps").read_text()) == has_agent
    assert any(unpack_card(card)) == has_agent
    assert bool(Staging.from_bytes(staging_in(card)).ring_address) == has_agent


HIDDEN = [Expose.STAGING, Expose.NOTHING]


@pytest.fixture
def reading():
    """Makes readers, each with memory of its own, and closes them in the end."""
    with ExitStack() as readers:

        def make(kind=AskingTransport, **settings):
            reader, holder = readers.enter_context(closing(kind(**settings))), stale_memory()
            reader.register(holder.regions)
            return reader, holder

        yield make


def reads_all_of(source, reader, holder):
    reader.read(1, "src", WHOLE)
    assert wait(reader, 1) == [ReadEnd(1)]
    return (holder.load()[0] == source.contents[0]).all()


@pytest.mark.parametrize("over", [{}, TCP], ids=["cma", "tcp"])
@pytest.mark.parametrize("ours", Expose)
@pytest.mark.parametrize("theirs", HIDDEN)
def test_whatever_a_reader_exposes_itself_it_reads_a_hidden_pool(
    sources, reading, theirs, ours, over, monkeypatch
):
    for name, value in over.items():
        monkeypatch.setenv(name, value)
    reader, holder = reading(packed_reads=PackedReads.AUTO, expose=ours)
    source = sources[theirs]
    connected = reader.connect("src", source.card, source.regions)
    assert connected.way is Way.PACKED
    assert connected.reason == f"its pool is not open to the fabric (KVFERRY_EXPOSE={theirs.value} there)"
    assert reads_all_of(source, reader, holder)


@pytest.mark.parametrize("ours", HIDDEN)
def test_a_rank_that_hides_its_pool_has_others_gather_for_it(sources, reading, ours):
    source = sources[Expose.POOL]
    reader, holder = reading(expose=ours)
    connected = reader.connect("src", source.card, source.regions)
    assert (
        str(connected) == f"packed (this rank's pool is not open to the fabric (KVFERRY_EXPOSE={ours.value}))"
    )
    assert reads_all_of(source, reader, holder)
    idle = pack_card(*unpack_card(source.card), segment_in(source.card))
    with pytest.raises(TransportError, match="its rank does not gather; set KVFERRY_PACKED_READS"):
        reader.connect("idle", idle, source.regions)


@pytest.mark.parametrize("theirs", HIDDEN)
def test_a_reader_that_has_nobody_gather_is_told_what_to_set(sources, reading, theirs):
    reader, _ = reading(NixlTransport, packed_reads=PackedReads.NEVER)
    source = sources[theirs]
    with pytest.raises(TransportError, match="KVFERRY_PACKED_READS=auto here") as told:
        reader.connect("src", source.card, source.regions)
    assert f"its pool is not open to the fabric (KVFERRY_EXPOSE={theirs.value} there)" in told.value.detail
    assert told.value.code == "hidden-pool"


def test_settings_that_make_no_sense_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("KVFERRY_EXPOSE", "ring")
    with pytest.raises(TransportError, match="KVFERRY_EXPOSE='ring': one of pool, staging, nothing"):
        NixlTransport()
    monkeypatch.setenv("KVFERRY_EXPOSE", "staging")
    with pytest.raises(TransportError, match="KVFERRY_EXPOSE='staging' needs ranks that gather"):
        NixlTransport(packed_reads=PackedReads.NEVER)


def test_memory_of_host_and_device_at_once_cannot_be_hidden(monkeypatch):
    """Nobody gathers for such a rank, so nobody could read it; and its pool must not be registered either."""

    class Mixed:
        is_mixed, cuda, copier, card_part = True, None, None, b""

        def close(self):
            pass

    monkeypatch.setattr(nixl, "device_of", lambda *_, **__: Mixed())
    monkeypatch.setattr(nixl, "AgentTeam", None)  # no agent is made
    holder = stale_memory()
    transport = NixlTransport(expose=Expose.STAGING, packed_reads=PackedReads.AUTO)
    with pytest.raises(TransportError, match="bad-device: some of this rank's memory is the host's"):
        transport.register(holder.regions)
    transport.close()
    holder.free()


@pytest.mark.parametrize("expose", HIDDEN)
def test_a_rank_that_hides_its_pool_and_does_not_gather_has_no_card(reading, expose):
    reader, _ = reading(NixlTransport, expose=expose)
    with pytest.raises(TransportError, match="nobody gathers for it"):
        reader.card()
