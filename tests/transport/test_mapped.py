"""Device memory that is mapped and copied by our own kernel: what the laws of every transport do not say."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from kvferry.cli.processes import FABRICS, AskingTransport
from kvferry.core.choices import Way
from kvferry.errors import TransportError
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, run, scattered, stale_memory, wait
from kvferry.transport import ReadEnd
from kvferry.transport.base import Connected
from kvferry.transport.cards import Card
from kvferry.transport.cuda import Cuda, has_cuda
from kvferry.transport.exports import Export
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import RegionMemory
from tests.support.sources import serving

pytest.importorskip("nixl", exc_type=ImportError)
pytestmark = pytest.mark.skipif(not has_cuda(), reason="no CUDA device")

DEVICE = "cuda:0"


@pytest.fixture
def served():
    with serving(1, REGION_BYTES, DEVICE) as served:
        yield served


@pytest.fixture
def holder():
    holder = stale_memory(DEVICE)
    yield holder
    holder.free()


@pytest.fixture
def reader(holder):
    transport = AskingTransport()
    transport.register(holder.regions)
    yield transport
    transport.close()


@pytest.fixture
def cuda():
    cuda = Cuda(0)
    yield cuda
    cuda.close()


def free_bytes(cuda):
    with cuda.current():
        return cuda._cu.cuMemGetInfo()[1]


def test_the_way_is_mapped(reader, served):
    source = served.sources[0]
    assert reader.connect("src", source.card, source.regions) == Connected(Way.MAPPED)


def test_nothing_is_written_before_the_device_has_come_to_the_event(reader, served, holder, cuda):
    """The engine's own kernels still write to the blocks when a load is ordered."""
    source = served.sources[0]
    reader.connect("src", source.card, source.regions)
    region = holder.regions[0]
    with cuda.current():
        stream, event = cuda.make_stream(), cuda.make_event()
        for _ in range(300):  # more would fill the queue of the device, and whoever comes next waits
            cuda._cu.cuMemsetD8Async(region.address, 0x5A, region.num_bytes, stream)
        cuda.record(event, stream)
    started = time.perf_counter()
    reader.read(1, "src", WHOLE, after=event)
    reader.clear(2, run((1, 0), (1, 0), 4096), after=event)
    assert time.perf_counter() - started < 0.05, "ordering a load waits for nothing"
    assert wait(reader, 2) == [ReadEnd(1), ReadEnd(2)]
    with cuda.current():
        cuda.wait_event(event)
    memory = holder.load()
    assert (memory[0] == source.contents[0]).all()
    assert not memory[1][:4096].any()


def test_a_direct_read_waits_for_the_event_too(holder, cuda, monkeypatch):
    for name, value in FABRICS["cma"].items():
        monkeypatch.setenv(name, value)
    with serving(1, REGION_BYTES, DEVICE, FABRICS["cma"]) as served:
        _waits_for_the_event(ProcessTransport(), served.sources[0], holder, cuda)


def _waits_for_the_event(transport, source, holder, cuda):
    region = holder.regions[0]
    transport.register(holder.regions)
    assert transport.connect("src", source.card, source.regions).way is Way.DIRECT
    with cuda.current():
        stream, event = cuda.make_stream(), cuda.make_event()
        for _ in range(300):  # more would fill the queue of the device, and whoever comes next waits
            cuda._cu.cuMemsetD8Async(region.address, 0x5A, region.num_bytes, stream)
        cuda.record(event, stream)
    transport.read(1, "src", WHOLE, after=event)
    assert wait(transport, 1) == [ReadEnd(1)]
    assert (holder.load()[0] == source.contents[0]).all()
    transport.close()


def changed(data, **changes):
    card = Card.from_bytes(data)
    return replace(card, export=replace(Export.from_bytes(card.export), **changes).to_bytes())


def test_a_card_that_lies_is_found_out_and_the_context_lives(reader, served, holder, monkeypatch, cuda):
    """A wrong size, offset, device or handle: nothing is mapped, and the next honest card is."""
    source = served.sources[0]
    export = Export.from_bytes(Card.from_bytes(source.card).export)
    first, *others = export.extents
    piece, *pieces = export.pieces
    handle = bytearray.fromhex(piece.handle)
    wrong: dict[str, dict[str, object]] = {
        "offset past the end": {"extents": (replace(first, offset=piece.num_bytes), *others)},
        "offset before the start": {"extents": (replace(first, offset=-4096), *others)},
        "a piece that is not there": {"extents": (replace(first, first_piece=99), *others)},
        "a region too few": {"extents": tuple(others)},
        "another secret": {"probe": "00" * 64},
        "half a handle": {"pieces": (replace(piece, handle=piece.handle[:40]), *pieces)},
        "no handle": {"pieces": (replace(piece, handle="zz"), *pieces)},
        "handle of nobody": {"pieces": (replace(piece, handle=bytes(64).hex()), *pieces)},
        "another device": {"device": "00" * 16},
    }
    for i in (24, 27, 33, 48):
        spoilt = bytes(b ^ 0x41 if j == i else b for j, b in enumerate(handle))
        wrong[f"byte {i} of the handle"] = {"pieces": (replace(piece, handle=spoilt.hex()), *pieces)}
    for what, changes in wrong.items():
        with pytest.raises(TransportError):
            reader._device.connect(what, changed(source.card, **changes).export, source.regions)
    regions = (replace(source.regions[0], num_bytes=2 * source.regions[0].num_bytes), *source.regions[1:])
    with pytest.raises(TransportError, match="bad-card"):
        reader._device.connect("larger", Card.from_bytes(source.card).export, regions)
    assert reader.connect("src", source.card, source.regions).way is Way.MAPPED
    reader.read(1, "src", WHOLE)
    assert wait(reader, 1) == [ReadEnd(1)]
    assert (holder.load()[0] == source.contents[0]).all()


def test_what_cannot_be_mapped_falls_back_with_a_reason(reader, served, caplog):
    source = served.sources[0]
    card = changed(source.card, refusal="no handle for it").to_bytes()
    connected = reader.connect("src", card, source.regions)
    assert connected.way is Way.PACKED
    assert "no handle for it" in connected.reason
    assert "no handle for it" in caplog.text


NUM_KILLS = int(os.environ.get("KVFERRY_KILLS", "4"))
KILL_BYTES, NUM_READS = 256 << 20, 600


def test_a_killed_source_hurts_nobody_and_its_memory_comes_back(cuda):
    """The reader's context lives, copies end, and the dead engine's memory is free once it is forgotten."""
    holder, transport = RegionMemory(DEVICE), ProcessTransport()
    holder.add("kv", np.zeros(KILL_BYTES, np.uint8))
    transport.register(holder.regions)
    num_mid_copy = 0
    for first in range(0, NUM_KILLS, 10):
        with ExitStack() as stack, ThreadPoolExecutor(10) as pool:
            number = min(10, NUM_KILLS - first)
            entered = pool.map(lambda _: stack.enter_context(serving(1, [KILL_BYTES], DEVICE)), range(number))
            for i, served in enumerate(entered):
                num_mid_copy += kill_while_copying(transport, served, np.random.default_rng(first + i))
                check_forgotten(transport, cuda)
    with serving(1, [KILL_BYTES], DEVICE) as served:
        source = served.sources[0]
        transport.connect("src", source.card, source.regions)
        transport.read(0, "src", run((0, 0), (0, 0), KILL_BYTES))
        assert wait(transport, 1) == [ReadEnd(0)]
        assert (holder.load()[0] == source.contents[0]).all()
        transport.close()
    holder.free()
    print(f"{NUM_KILLS} sources killed, {num_mid_copy} of them while copies were under way")
    assert num_mid_copy >= NUM_KILLS // 2


def kill_while_copying(transport, served, random):
    """Whether copies were under way when the source died."""
    source = served.sources[0]
    assert transport.connect("src", source.card, source.regions).way is Way.MAPPED
    for i in range(NUM_READS):
        transport.read(i, "src", run((0, 0), (0, 0), KILL_BYTES))
    time.sleep(0.01 * random.random())
    os.kill(served.pid, signal.SIGKILL)
    time.sleep(0.001)
    ends = transport.poll()
    num_left = NUM_READS - len(ends)
    ends += wait(transport, num_left)
    assert sorted(end.transfer for end in ends) == [*range(NUM_READS)]
    return num_left > 0


def check_forgotten(transport, cuda):
    """The memory of a source that is gone is free within two seconds of forgetting it."""
    mapped = free_bytes(cuda)
    transport.forget("src")
    deadline = time.monotonic() + 2
    while free_bytes(cuda) < mapped + KILL_BYTES // 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert free_bytes(cuda) >= mapped + KILL_BYTES // 2


def test_short_runs_of_any_alignment(reader, served, holder):
    source = served.sources[0]
    reader.connect("src", source.card, source.regions)
    runs = scattered(3000, 300, seed=5)
    expected = holder.load()
    for src_region, src, dst_region, dst, num_bytes in runs:
        expected[dst_region][dst : dst + num_bytes] = source.contents[src_region][src : src + num_bytes]
    reader.read(1, "src", runs)
    assert wait(reader, 1) == [ReadEnd(1)]
    assert all((now == then).all() for now, then in zip(holder.load(), expected, strict=True))


def test_a_stopped_source_holds_no_copy_up(reader, served, holder):
    """A copy needs nothing of the process whose memory it reads."""
    source = served.sources[0]
    reader.connect("src", source.card, source.regions)
    os.kill(served.pid, signal.SIGSTOP)
    try:
        reader.read(1, "src", WHOLE)
        assert wait(reader, 1) == [ReadEnd(1)]
    finally:
        os.kill(served.pid, signal.SIGCONT)
    assert (holder.load()[0] == source.contents[0]).all()


def test_a_source_that_was_started_again_is_read_under_its_name(reader, holder):
    for _ in range(3):
        with serving(1, REGION_BYTES, DEVICE) as served:
            source = served.sources[0]
            assert reader.connect("src", source.card, source.regions).way is Way.MAPPED
            os.kill(served.pid, signal.SIGKILL)
        reader.read(1, "src", WHOLE)
        assert wait(reader, 1) == [ReadEnd(1)]
        assert (holder.load()[0] == source.contents[0]).all()
        reader.forget("src")


READ_FOR_EVER = """
import sys
import numpy as np
from kvferry import Region
from kvferry.transport.region_memory import RegionMemory
from kvferry.testing.transport_world import run
from kvferry.transport.process import ProcessTransport
from kvferry.cli.processes import FABRICS
holder, transport = RegionMemory("cuda:0"), ProcessTransport()
num_bytes = int(sys.argv[2])
holder.add("kv", np.zeros(num_bytes, np.uint8))
transport.register(holder.regions)
regions = [Region("region0", num_bytes, int(sys.argv[3]), "cuda:0")]
print(transport.connect("src", bytes.fromhex(sys.argv[1]), regions).way.value, flush=True)
for i in range(10**9):
    transport.read(i, "src", run((0, 0), (0, 0), num_bytes))
    transport.poll()
"""


def test_a_reader_that_is_killed_while_it_copies_hurts_no_source():
    with serving(1, [KILL_BYTES], DEVICE) as served:
        source = served.sources[0]
        told = source.card.hex(), str(KILL_BYTES), str(source.regions[0].address)
        for i in range(5):
            command = [sys.executable, "-c", READ_FOR_EVER, *told]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "mapped\n"
                time.sleep(0.02 * i)
                process.kill()
        holder, transport = RegionMemory(DEVICE), ProcessTransport()
        holder.add("kv", np.zeros(KILL_BYTES, np.uint8))
        transport.register(holder.regions)
        transport.connect("src", source.card, source.regions)
        transport.read(0, "src", run((0, 0), (0, 0), KILL_BYTES))
        assert wait(transport, 1) == [ReadEnd(0)]
        assert (holder.load()[0] == source.contents[0]).all()
        transport.close()
        holder.free()


def test_a_graph_that_another_thread_captures_is_left_alone(reader, served, holder):
    torch = pytest.importorskip("torch", reason="torch captures the graph")
    source = served.sources[0]
    reader.connect("src", source.card, source.regions)
    is_over = threading.Event()

    def read_on() -> int:
        number = 0
        while not is_over.is_set():
            number += 2
            reader.read(number, "src", WHOLE)
            reader.clear(number + 1, run((1, 0), (1, 0), 4096))
            assert [end.error for end in wait(reader, 2)] == ["", ""]
        return number

    with ThreadPoolExecutor(1) as pool:
        reads = pool.submit(read_on)
        for _ in range(20):
            graph, x = torch.cuda.CUDAGraph(), torch.ones(1000, device=DEVICE)
            with torch.cuda.graph(graph):
                y = x
                for _ in range(100):
                    y = y + 1
                time.sleep(0.005)
            graph.replay()
            torch.cuda.synchronize()
            assert (y == 101).all()
        is_over.set()
        assert reads.result() > 20
    assert (holder.load()[0] == source.contents[0]).all()
