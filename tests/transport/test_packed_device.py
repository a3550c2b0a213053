"""The packed way between two processes on a GPU; what needs none is in test_device_chunks."""

from typing import ClassVar

import pytest

from kvferry.core.way import Way
from kvferry.errors import TransportError
from kvferry.testing.packed import AskingTransport
from kvferry.testing.sources import serving
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, World, stale_memory, wait
from kvferry.transport.base import ReadEnd
from kvferry.transport.cuda import Cuda, has_cuda
from kvferry.transport.staging import PackedReads

pytest.importorskip("nixl", exc_type=ImportError)
pytestmark = pytest.mark.skipif(
    not has_cuda(), reason="no CUDA device: packed reads of device memory are not run"
)

DEVICE = "cuda:0"
PACKED = {"KVFERRY_PACKED_READS": "require"}


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


def test_a_reader_in_host_memory_is_refused_by_name(source):
    holder = stale_memory()
    transport = AskingTransport(packed_reads=PackedReads.REQUIRE)
    transport.register(holder.regions)
    with pytest.raises(TransportError, match="its memory is device memory, ours host memory"):
        transport.connect("src", source.card, source.regions)
    transport.close()
