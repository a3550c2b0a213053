"""The embedded transport: the laws, and the weather that tests make for it."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

import kvferry
from kvferry import Rank, Region, SpecError
from kvferry.core.sample import sample_request
from kvferry.errors import TransportError
from kvferry.models import Topology, describe
from kvferry.testing.small import small
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, STALE, Source, World, contents, run, stale_memory
from kvferry.transport import Hub, MemoryTransport, ReadEnd, Transport
from kvferry.transport.memory import placed
from tests.support.faults import Faults, FaultyHub


def source_in(hub, index):
    held = tuple(contents(index, j, num_bytes) for j, num_bytes in enumerate(REGION_BYTES))
    regions = tuple(Region(f"region{j}", data.nbytes, data.ctypes.data) for j, data in enumerate(held))
    transport = MemoryTransport(hub)
    transport.register(regions)
    return Source(transport.card(), regions, held)


class TestMemory(TransportLaws):
    @pytest.fixture
    def world(self):
        faults = Faults()
        hub = FaultyHub(faults)
        sources = [source_in(hub, i) for i in range(3)]
        return World(lambda: MemoryTransport(hub), stale_memory(), sources, partial(stalled, faults))


@contextmanager
def stalled(faults):
    faults.stall()
    yield
    faults.resume()


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def memory():
    return np.full(64, STALE, np.uint8)


@pytest.fixture
def reader(faults, memory):
    hub = FaultyHub(faults)
    transport = MemoryTransport(hub)
    transport.register([Region("kv", 64, memory.ctypes.data)])
    source = source_in(hub, 0)
    transport.connect("src", source.card, source.regions)
    transport.connect("other", source.card, source.regions)
    yield transport
    faults.calm()
    transport.poll()
    transport.close()


def three_runs():
    parts = [run((0, 16 * i), (0, 16 * i), 16) for i in range(3)]
    return kvferry.Runs(
        *(np.concatenate([getattr(p, n) for p in parts]) for n in ("src", "dst", "num_bytes"))
    )


def num_arrived(memory):
    return int((memory.reshape(-1, 16) != STALE).any(axis=1).sum())


def test_it_is_a_transport(reader):
    transport: Transport = reader
    assert transport.kind == "memory"


def test_a_delayed_read_ends_later(reader, faults, memory):
    faults.delay(2)
    reader.read(1, "src", three_runs())
    assert [reader.poll() for _ in range(2)] == [[], []]
    assert num_arrived(memory) == 0
    assert reader.poll() == [ReadEnd(1)]
    assert num_arrived(memory) == 3


def test_a_trickle_arrives_bit_by_bit(reader, faults, memory):
    faults.trickle(1)
    reader.read(1, "src", three_runs())
    assert [(reader.poll(), num_arrived(memory)) for _ in range(3)] == [([], 1), ([], 2), ([ReadEnd(1)], 3)]


def test_a_failed_read_may_have_brought_something(reader, faults, memory):
    faults.fail("cable cut", num_runs=2, peer="src")
    reader.read(1, "src", three_runs())
    reader.read(2, "other", run((0, 0), (0, 48), 16))
    assert reader.poll() == [ReadEnd(2)]
    assert reader.poll() == [ReadEnd(1, "cable cut")]
    assert num_arrived(memory) == 3
    assert reader.poll() == []


def test_a_stalled_read_outlives_its_peer_and_its_bytes_come_late(reader, faults, memory):
    faults.stall("src")
    reader.read(1, "src", three_runs())
    reader.forget("src")
    assert reader.poll() == []
    with pytest.raises(TransportError, match="still-under-way: 1 reads"):
        reader.close()
    assert num_arrived(memory) == 0
    faults.resume("src")
    assert reader.poll() == [ReadEnd(1)]
    assert num_arrived(memory) == 3


def test_runs_that_have_not_moved_when_a_read_is_cancelled_never_do(reader, faults, memory):
    faults.trickle(1)
    reader.read(1, "src", three_runs())
    assert reader.poll() == []
    reader.cancel(1)
    assert num_arrived(memory) == 1
    assert reader.poll() == [ReadEnd(1, "cancelled")]
    assert num_arrived(memory) == 1
    assert reader.poll() == []


def test_a_stalled_read_cannot_be_cancelled_and_its_bytes_come_late(reader, faults, memory):
    faults.stall("src")
    reader.read(1, "src", three_runs())
    assert reader.poll() == []
    reader.cancel(1)
    assert reader.poll() == []
    assert num_arrived(memory) == 0
    faults.resume("src")
    assert reader.poll() == [ReadEnd(1, "cancelled")]
    assert num_arrived(memory) == 3


def test_a_peer_that_left_gives_an_error():
    hub, memory = Hub(), np.zeros(64, np.uint8)
    source, reader = MemoryTransport(hub), MemoryTransport(hub)
    for transport in (source, reader):
        transport.register([Region("kv", 64, memory.ctypes.data)])
    reader.connect("src", source.card(), [Region("kv", 64, memory.ctypes.data)])
    reader.read(1, "src", run((0, 0), (0, 32), 16))
    source.close()
    assert reader.poll() == [ReadEnd(1, "src is gone")]


def test_a_request_moves_and_its_slack_is_cleared():
    src, dst = (
        describe(small("gqa"), Topology.parse(text), name)
        for name, text in (("src", "tp=2,block=4,blocks=20"), ("dst", "tp=1,block=8,blocks=20"))
    )
    route = kvferry.lower(kvferry.prove(kvferry.plan(src, dst, 0)))
    selection = kvferry.select(route, sample_request(src, dst, 13))
    hub, kept = Hub(), []

    def transport_of(rank, value):
        memory = {region.name: np.full(region.num_bytes, value, np.uint8) for region in rank.regions}
        kept.append(memory)
        transport, regions = MemoryTransport(hub), placed(rank, memory)
        transport.register(regions)
        return transport, regions

    reader, _ = transport_of(dst.rank(0), 99)
    for rank in src.ranks:
        transport, regions = transport_of(rank, 10 + rank.rank)
        reader.connect(str(rank.rank), transport.card(), regions)
    for src_rank, runs in selection.reads.items():
        reader.read(src_rank, str(src_rank), runs)
    reader.clear(2, selection.blank)
    assert sorted(reader.poll(), key=lambda end: end.transfer) == [ReadEnd(0), ReadEnd(1), ReadEnd(2)]
    counts = np.bincount(np.concatenate(list(kept[0].values())), minlength=100)
    assert counts[10] == selection.reads[0].total_bytes
    assert counts[11] == selection.reads[1].total_bytes
    assert counts[0] == selection.zeros.total_bytes > 0


@pytest.mark.parametrize("given", [{}, {"kv": np.zeros(63, np.uint8)}])
def test_memory_must_be_what_the_rank_says(given):
    with pytest.raises(SpecError, match="region kv has 64 bytes, the memory given for it has"):
        placed(Rank(0, (Region("kv", 64),), ()), given)
