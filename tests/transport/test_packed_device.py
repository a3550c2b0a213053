"""The packed way between two processes on a GPU; without one: test_device_chunks, test_streams."""

from contextlib import closing
from typing import ClassVar

import pytest

from kvferry.cli.processes import AskingTransport
from kvferry.core.choices import Way
from kvferry.errors import TransportError
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, World, stale_memory, wait
from kvferry.transport.base import ReadEnd
from kvferry.transport.cards import Card
from kvferry.transport.cuda import Cuda, has_cuda
from kvferry.transport.settings import WayChoice
from tests.support.sources import serving

pytestmark = pytest.mark.skipif(
    not has_cuda(), reason="no CUDA device: packed reads of device memory are not run"
)

DEVICE = "cuda:0"
PACKED = {"KVFERRY_WAY": "packed"}


class TestPackedOnADevice(TransportLaws):
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


@pytest.fixture(scope="module")
def source():
    with serving(1, REGION_BYTES, DEVICE, PACKED) as served:
        yield served.sources[0]


def reads_all_of(source, transport, holder):
    transport.read(1, "src", WHOLE)
    assert wait(transport, 1) == [ReadEnd(1)]
    return (holder.load()[0] == source.contents[0]).all()


@pytest.mark.parametrize("theirs", ["cpu", DEVICE])
@pytest.mark.parametrize("ours", ["cpu", DEVICE])
def test_host_and_device_read_each_other(theirs, ours):
    with serving(1, REGION_BYTES, theirs) as served:
        (source,), holder = served.sources, stale_memory(ours)
        with closing(AskingTransport(way=WayChoice.PACKED)) as transport:
            transport.register(holder.regions)
            assert transport.connect("src", source.card, source.regions).way is Way.PACKED
            assert reads_all_of(source, transport, holder)
        holder.free()


def test_nothing_is_written_before_the_device_has_come_to_the_event(source):
    holder, cuda = stale_memory(DEVICE), Cuda(0)
    transport = AskingTransport(way=WayChoice.PACKED)
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


def test_what_is_not_exposed_is_not_mapped_and_the_rank_sends_it(source):
    with serving(1, REGION_BYTES, DEVICE, {"KVFERRY_EXPOSE": "nothing"}) as served:
        (hidden,), holder = served.sources, stale_memory(DEVICE)
        assert not Card.from_bytes(hidden.card).export
        for way in (WayChoice.AUTO, WayChoice.MAPPED):
            with closing(AskingTransport(way=way)) as transport:
                transport.register(holder.regions)
                if way is WayChoice.MAPPED:
                    with pytest.raises(TransportError, match="no-export"):
                        transport.connect("src", hidden.card, hidden.regions)
                    continue
                connected = transport.connect("src", hidden.card, hidden.regions)
                assert connected.way is Way.PACKED
                assert "not mapped: " in connected.reason
                assert reads_all_of(hidden, transport, holder)
        holder.free()
