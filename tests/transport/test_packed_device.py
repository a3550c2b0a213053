"""The packed way between two processes on a GPU; without one: test_device_chunks, test_streams."""

import os
from contextlib import closing
from typing import ClassVar
from uuid import uuid4

import numpy as np
import pytest

from kvferry.core.way import Way
from kvferry.errors import TransportError
from kvferry.testing.packed import AskingTransport
from kvferry.testing.sources import serving
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, World, stale_memory, wait
from kvferry.transport.base import ReadEnd
from kvferry.transport.cards import export_in, staging_in, unpack_card
from kvferry.transport.cuda import Cuda, has_cuda
from kvferry.transport.descriptors import SlicePair
from kvferry.transport.device import MappedReads
from kvferry.transport.emulation import AgentMode
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.nixl_agent import Agent
from kvferry.transport.packed import PackedLink
from kvferry.transport.ring_window import RingWindow
from kvferry.transport.staging import PackedReads, Staging
from kvferry.transport.stream_reader import StreamLink
from kvferry.transport.ucx import FABRICS, UcxSettings

pytest.importorskip("nixl", exc_type=ImportError)
pytestmark = pytest.mark.skipif(
    not has_cuda(), reason="no CUDA device: packed reads of device memory are not run"
)

DEVICE = "cuda:0"
PACKED = {"KVFERRY_PACKED_READS": "require"}
APART = {"KVFERRY_SHARED_RINGS": "off"}
ON_HOST = {"KVFERRY_RING_MEMORY": "host"}
HIDDEN = {"KVFERRY_EXPOSE": "staging"}


class LawsOnADevice(TransportLaws):
    env: ClassVar[dict[str, str]] = PACKED

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls):
        with serving(3, REGION_BYTES, DEVICE, cls.env) as served:
            yield served

    @pytest.fixture
    def world(self, served, monkeypatch):
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        holder = stale_memory(DEVICE)
        yield World(AskingTransport, holder, served.sources)
        holder.free()


class TestPackedOnADevice(LawsOnADevice):
    """The reader looks at the source's ring, which is on the device."""


class TestPackedOnADeviceByTheFabric(LawsOnADevice):
    env: ClassVar[dict[str, str]] = PACKED | APART


class TestPackedThroughTheHost(LawsOnADevice):
    """The ring is in host memory that both processes and both devices see."""

    env: ClassVar[dict[str, str]] = PACKED | ON_HOST | HIDDEN


class TestPackedThroughTheHostByTheFabric(LawsOnADevice):
    env: ClassVar[dict[str, str]] = PACKED | ON_HOST | HIDDEN | APART


class TestPackedOverAStreamFromADevice(LawsOnADevice):
    env: ClassVar[dict[str, str]] = PACKED | FABRICS["tcp"] | {"KVFERRY_EXPOSE": "nothing"}


@pytest.fixture(scope="module")
def source():
    with serving(1, REGION_BYTES, DEVICE, PACKED) as served:
        yield served.sources[0]


def reads_all_of(source, transport, holder):
    transport.read(1, "src", WHOLE)
    assert wait(transport, 1) == [ReadEnd(1)]
    return (holder.load()[0] == source.contents[0]).all()


@pytest.mark.parametrize("theirs", [{}, ON_HOST], ids=["ring on the device", "ring on the host"])
@pytest.mark.parametrize("ours", ["cpu", DEVICE])
@pytest.mark.parametrize("shared", [{}, APART], ids=["seen", "apart"])
def test_host_and_device_read_each_other_whatever_their_rings_are(theirs, ours, shared, monkeypatch):
    for name, value in shared.items():
        monkeypatch.setenv(name, value)
    with serving(1, REGION_BYTES, DEVICE, PACKED | theirs | shared) as served:
        (source,), holder = served.sources, stale_memory(ours)
        with closing(AskingTransport(packed_reads=PackedReads.REQUIRE)) as transport:
            transport.register(holder.regions)
            assert transport.connect("src", source.card, source.regions).way is Way.PACKED
            link = transport._links["src"]
            is_window = isinstance(link, PackedLink) and isinstance(link.ring, RingWindow)
            assert is_window == (not shared and (ours == DEVICE or bool(theirs)))
            is_alike = ours == DEVICE if not theirs else ours == "cpu"
            assert isinstance(link, StreamLink) == (not is_window and not is_alike)
            assert reads_all_of(source, transport, holder)
        holder.free()


def test_nothing_is_written_before_the_device_has_come_to_the_event(source):
    holder, cuda = stale_memory(DEVICE), Cuda(0)
    transport = AskingTransport(packed_reads=PackedReads.REQUIRE)
    transport.register(holder.regions)
    assert transport.connect("src", source.card, source.regions).way is Way.PACKED
    region = holder.regions[0]
    with cuda.current():
        stream, event = cuda.make_stream(), cuda.make_event()
        for _ in range(300):
            cuda._cu.cuMemsetD8Async(region.address, 0x5A, region.num_bytes, stream)
        cuda.record(event, stream)
    transport.read(1, "src", WHOLE, after=event)
    assert wait(transport, 1) == [ReadEnd(1)]
    assert (holder.load()[0] == source.contents[0]).all()
    transport.close()
    holder.free()
    cuda.close()


def raw_read(source, region):
    """As a member that keeps to no protocol but NIXL's."""
    holder = stale_memory(DEVICE)
    ours = holder.regions[0]
    agent = Agent(
        f"raw-{uuid4().hex}", UcxSettings.from_environment(os.environ).engine_config(AgentMode.DIRECT)
    )
    dst = np.array([[ours.address, 4096, 0]], np.uint64)
    agent.register("VRAM", dst)
    name, metadata = unpack_card(source.card)
    agent.add(name, metadata)
    src = np.array([[region.address, 4096, 0]], np.uint64)
    agent.release(agent.prepare(SlicePair("VRAM", "VRAM", src, dst), name))


def test_with_expose_staging_nothing_of_the_pool_of_a_device_is_open(source):
    raw_read(source, source.regions[0])  # it is open by itself
    with serving(1, REGION_BYTES, DEVICE, PACKED | HIDDEN) as served:
        (hidden,) = served.sources
        with pytest.raises(TransportError, match="NIXL_ERR_NOT_FOUND"):
            raw_read(hidden, hidden.regions[0])
        assert not export_in(hidden.card)
        staging = Staging.from_bytes(staging_in(hidden.card))
        assert staging.place
        for region in hidden.regions:
            assert str(region.address) not in staging.place
        holder = stale_memory(DEVICE)
        with closing(NixlTransport(mapped_reads=MappedReads.REQUIRE)) as transport:
            transport.register(holder.regions)
            with pytest.raises(TransportError, match="hidden-pool"):
                transport.connect("src", hidden.card, hidden.regions)
        holder.free()
