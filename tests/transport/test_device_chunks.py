"""Rings on a device without one: the kernel's own text, compiled for this CPU, gathers and scatters."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport import copy_kernel, exports
from kvferry.transport.base import CANCELLED
from kvferry.transport.cards import pack_card
from kvferry.transport.chunk_copier import HostChunkCopier
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.device_chunks import DeviceStagingRing
from kvferry.transport.gather_line import GatheredChunk
from kvferry.transport.pack import TermSide, src_of
from kvferry.transport.packed import PackedMover
from kvferry.transport.packed_rings import PackedRings
from kvferry.transport.places import Places
from kvferry.transport.ring_options import RingMemory, RingOptions
from kvferry.transport.ring_pair import RingPair, device_rings, host_rings, rings_for
from kvferry.transport.ring_window import RingWindows, SharedRings
from kvferry.transport.staging import PackedReads, Staging, digest_of
from kvferry.transport.staging_ring import StagingRing, StagingSize
from tests.transport.fake_cuda import UUID, FakeCuda, FakeEvent
from tests.transport.kernel_on_cpu import kernel_on_cpu
from tests.transport.turning import Turning

REGION_BYTES = 1 << 15
SIZE = StagingSize(num_chunks=4, chunk_bytes=8192)
OPTIONS = RingOptions(SIZE)
RANK = "tcp://127.0.0.1:5"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_on_cpu(copy_kernel.source(), tmp_path_factory.mktemp("kernel"))


@pytest.fixture(autouse=True)
def _without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "compiled_kernel", lambda *_: b"")


class Device:
    """A rank's memory on a device, and its rings there."""

    def __init__(self, kernel: ctypes.CDLL, delay_s: float = 0.0, *, are_rings_on_host: bool = False) -> None:
        self.cuda = FakeCuda(delay_s, kernel)
        addresses = [self.cuda.allocate(REGION_BYTES) for _ in range(2)]
        self.regions = [Region(f"r{i}", REGION_BYTES, at, "cuda:0") for i, at in enumerate(addresses)]
        self.arrays = [self.cuda.memory[at] for at in addresses]
        self.memory = Places("ours", self.regions)
        self.num_buffers = len(self.cuda.memory)
        cuda: Any = self.cuda
        limits = CopyLimits(2, 1024)
        self.pair = device_rings(self.memory, OPTIONS, cuda, limits, are_on_host=are_rings_on_host)

    def chunk(self, ring: StagingRing, chunk: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * SIZE.chunk_bytes).from_address(ring.address(chunk)))

    def close(self) -> None:
        self.pair.close()
        assert self.pair.events
        self.pair.events._thread.join(PATIENCE_S)
        assert len(self.cuda.memory) == self.num_buffers
        assert (self.cuda.num_streams, self.cuda.num_events) == (0, 0)
        assert not self.cuda.faults
        assert not self.cuda.pinned
        assert not self.cuda.mapped


@pytest.fixture(params=[False, True], ids=["rings on the device", "rings on the host"])
def device(kernel: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[Device]:
    device = Device(kernel, are_rings_on_host=request.param)
    yield device
    device.close()


@st.composite
def asked(draw: st.DrawFn) -> list[TermSide]:
    """Sides that fit into a chunk: any lengths and alignments, steps up and down, disjoint."""
    sides, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        unit = draw(st.sampled_from([1, 3, 8, 16, 64]))
        num_bytes = unit * np.array(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
        num_pairs = draw(st.integers(1, 5))
        shift, stride = draw(st.integers(0, 16)), int(num_bytes.sum()) + 16
        regions = draw(st.lists(st.integers(0, 1), min_size=len(num_bytes), max_size=len(num_bytes)))
        starts = at + shift + np.cumsum(num_bytes) - num_bytes
        first = draw(st.integers(0, num_pairs - 1))  # of which block the pattern is
        places = np.array([place(r, int(s)) for r, s in zip(regions, starts, strict=True)]) + first * stride
        order = np.array(draw(st.permutations(range(num_pairs)))) - first
        sides.append(TermSide(places, num_bytes, order * stride))
        at += shift + stride * num_pairs
    return sides if sum(side.total_bytes for side in sides) <= SIZE.chunk_bytes else sides[:0]


@settings(deadline=None, max_examples=100)
@given(sides=asked(), chunk=st.integers(0, SIZE.num_chunks - 1), are_rings_on_host=st.booleans())
def test_a_device_gathers_and_scatters_the_same_bytes_as_the_host(
    kernel: ctypes.CDLL, sides: list[TermSide], chunk: int, *, are_rings_on_host: bool
) -> None:
    """RA-4: also through rings in the host's memory."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(copy_kernel, "compiled_kernel", lambda *_: b"")
    device, rng = Device(kernel, are_rings_on_host=are_rings_on_host), np.random.default_rng(3)
    monkeypatch.undo()
    for array in device.arrays:
        array[:] = rng.integers(0, 256, REGION_BYTES)
    host, expected = (
        HostChunkCopier(device.memory, SIZE.chunk_bytes),
        np.full(SIZE.chunk_bytes, 0xAB, np.uint8),
    )
    host.gather(sides, expected.ctypes.data)
    source, reader = device.pair.source, device.pair.reader
    for ring in (source.ring, reader.ring):
        device.chunk(ring, chunk)[:] = 0xAB
    source.copier.gather(sides, source.ring.address(chunk))
    assert (device.chunk(source.ring, chunk) == expected).all()

    device.chunk(reader.ring, chunk)[:] = expected[::-1]
    reversed_chunk = expected[::-1].copy()
    before = [array.copy() for array in device.arrays]
    reader.copier.scatterer(sides)(reader.ring.address(chunk))
    by_device = [array.copy() for array in device.arrays]
    for array, then in zip(device.arrays, before, strict=True):
        array[:] = then
    host.scatterer(sides)(reversed_chunk.ctypes.data)
    for array, got in zip(device.arrays, by_device, strict=True):
        assert (got == array).all()
    device.close()


@pytest.mark.parametrize(
    ("where", "num_bytes", "step"),
    [(REGION_BYTES - 8, 16, 0), (0, 16, REGION_BYTES), (0, 16, -16), (place(2, 0), 16, 0), (0, 8193, 0)],
)
def test_what_leaves_the_memory_or_the_chunk_never_reaches_the_kernel(
    device: Device, where: int, num_bytes: int, step: int
) -> None:
    before = device.chunk(device.pair.source.ring, 0).copy()
    side = TermSide(np.array([where]), np.array([num_bytes]), np.array([step]))
    for copied in (device.pair.source, device.pair.reader):
        with pytest.raises(TransportError):
            copied.copier.gather([side], copied.ring.address(0))
        with pytest.raises(TransportError):
            copied.copier.scatterer([side])
    assert (device.chunk(device.pair.source.ring, 0) == before).all()


def test_runs_of_no_bytes_are_no_error(device: Device) -> None:
    """A reader may ask for nothing; it once got the rank a line of the log each time."""
    side, source = TermSide(np.array([8]), np.array([0]), np.array([0])), device.pair.source
    before = device.chunk(source.ring, 0).copy()
    source.copier.gather([side], source.ring.address(0))
    device.pair.reader.copier.scatterer([side])(device.pair.reader.ring.address(0))
    assert (device.chunk(source.ring, 0) == before).all()


def test_a_copy_that_fails_is_waited_for_and_the_next_one_is_right(device: Device) -> None:
    source, side = device.pair.source, TermSide(np.array([0]), np.array([64]), np.array([0]))
    device.cuda.failing = {"launch"}
    with pytest.raises(TransportError, match="launch failed"):
        source.copier.gather([side], source.ring.address(0))
    device.cuda.failing = set()
    device.arrays[0][:64] = np.arange(64)
    source.copier.gather([side], source.ring.address(0))
    assert (device.chunk(source.ring, 0)[:64] == np.arange(64)).all()


def test_rings_that_find_no_room_leave_nothing(kernel: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: Any = FakeCuda(0.0, kernel)
    region = Region("r", 64, cuda.allocate(64), "cuda:0")
    allocate, made = cuda.allocate, count()

    def allocate_some(num_bytes: int) -> int:
        if next(made) == 2:
            raise TransportError("cuda", "out of memory")
        return int(allocate(num_bytes))

    monkeypatch.setattr(cuda, "allocate", allocate_some)
    with pytest.raises(TransportError, match="out of memory"):
        device_rings(Places("ours", [region]), OPTIONS, cuda, CopyLimits())
    assert len(cuda.memory) == 1
    assert (cuda.num_streams, cuda.num_events) == (0, 0)


class RankAndFabric:
    """A rank that gathers on its device; the fabric between its ring and the reader's is a copy."""

    def __init__(self, src: Device, dst: Device) -> None:
        self.src, self.dst = src, dst
        self.answers: Any = None
        self.is_forgotten = False
        self.lent_s, self.num_asking = 0.0, 0
        self.turning = Turning()
        self.wake = self.turning.wake

    def ask(self, to: str, nonce: int, permit: bytes, terms: Any, into: bytes) -> None:
        ring, chunk = self.src.pair.source, nonce % SIZE.num_chunks
        ring.copier.gather([src_of(term) for term in terms], ring.ring.address(chunk))
        self.answers.gathered(RANK, nonce, GatheredChunk(ring.ring.address(chunk), chunk, 1, self.lent_s))

    def give_back(self, to: str, nonce: int, chunk: int, generation: int, *, is_asking: bool) -> None:
        self.num_asking += is_asking
        if is_asking:
            self.answers.given_back(RANK, nonce, is_valid=True)

    def hang_up(self, address: str) -> None:
        pass

    def read(self, transfer: int, product: Product, report: Any, after: object, permit: bytes = b"") -> None:
        ((_, src, _, dst, num_bytes),) = product.runs
        at, to = (pair.region.address for pair in (self.src.pair.source.ring, self.dst.pair.reader.ring))
        ctypes.memmove(to + dst, at + src, num_bytes)
        report("")

    def forget(self) -> None:
        self.is_forgotten = True


class World:
    def __init__(self, kernel: ctypes.CDLL, *, are_rings_on_host: bool = False) -> None:
        self.src, self.dst = (Device(kernel, 1e-4, are_rings_on_host=are_rings_on_host) for _ in range(2))
        for array in self.src.arrays:
            array[:] = np.random.default_rng(5).integers(1, 171, REGION_BYTES)  # never what is there at first
        reader, rank = self.dst.pair.reader, RankAndFabric(self.src, self.dst)
        line: Any = rank
        self.mover = PackedMover(reader.copier, reader.ring, line, count(1), self.dst.pair.events)
        rank.answers = self.mover
        rank.turning.start(self.mover.turn)
        self.rank = rank
        ring = self.src.pair.source.ring.region
        staging = Staging(RANK, ring.address, SIZE.num_bytes, SIZE.chunk_bytes)
        self.link = self.mover.link("src", staging, self.src.memory, line)
        self.ends: dict[int, str] = {}

    def read(self, transfer: int, after: object = None) -> Runs:
        at = np.arange(60) * 500
        runs = Runs(at, np.flip(at) + place(1, 0), np.full(60, 400))
        end = self.ends.__setitem__
        self.link.read(transfer, Product.of(runs), lambda error: end(transfer, error), after)
        return runs

    def wait(self, transfer: int) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while transfer not in self.ends and time.monotonic() < deadline:
            time.sleep(1e-3)
        return self.ends[transfer]

    def settle(self) -> None:
        done = threading.Event()
        self.mover.put(done.set)
        assert done.wait(PATIENCE_S)

    def has_arrived(self, runs: Runs) -> bool:
        return all(
            (self.dst.arrays[r][dst : dst + n] == self.src.arrays[s][src : src + n]).all()
            for s, src, r, dst, n in runs
        )

    def close(self) -> None:
        assert self.mover.close(PATIENCE_S)
        self.rank.turning.close()
        self.src.close()
        self.dst.close()


@pytest.fixture(params=[False, True], ids=["rings on the device", "rings on the host"])
def world(kernel: ctypes.CDLL, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(kernel, are_rings_on_host=request.param)
    yield world
    world.close()


def test_what_is_gathered_on_a_device_arrives_on_another(world: World) -> None:
    runs = world.read(1)
    assert world.wait(1) == ""
    assert world.has_arrived(runs)


def staging_of(ring: StagingRing) -> Staging:
    is_on_host = ring.region.device == "cpu"
    sizes = ring.region.address, SIZE.num_bytes, SIZE.chunk_bytes
    return Staging(RANK, *sizes, ring_id=ring.ring_id, place=ring.place, is_on_host=is_on_host)


@pytest.fixture
def seen(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The reader's device looks at the source's ring."""
    monkeypatch.setattr(exports, "visible_devices", lambda: frozenset({UUID}))
    world.dst.cuda.exported = world.src.cuda.exported
    staging = Staging.from_bytes(staging_of(world.src.pair.source.ring).to_bytes())
    window = world.dst.pair.open_window(staging)
    world.link = world.mover.link("src", staging, world.src.memory, window)
    yield world
    window.close()


@pytest.mark.parametrize("lent_s", [0.0, 60.0])
def test_a_device_scatters_from_the_ring_that_it_sees(
    seen: World, monkeypatch: pytest.MonkeyPatch, lent_s: float
) -> None:
    monkeypatch.setattr(seen.rank, "read", None)  # nobody reads by the fabric
    seen.rank.lent_s = lent_s
    ours = [seen.dst.chunk(seen.dst.pair.reader.ring, chunk).copy() for chunk in range(SIZE.num_chunks)]
    runs = seen.read(1)
    assert seen.wait(1) == ""
    assert seen.has_arrived(runs)
    assert bool(seen.rank.num_asking) == (not lent_s)
    for chunk, before in enumerate(ours):
        assert (seen.dst.chunk(seen.dst.pair.reader.ring, chunk) == before).all(), "our own ring is not used"


def test_a_ring_that_the_device_cannot_reach_is_given_up_whole(
    seen: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = staging_of(seen.src.pair.source.ring)
    pinned, mapped = {**seen.dst.cuda.pinned}, [*seen.dst.cuda.mapped]
    windows = RingWindows(SharedRings.ON, seen.dst.pair.open_window)
    seen.dst.cuda.failing = {"pin"}
    seen.dst.cuda.exported = {}
    assert windows.open("src", staging) is None
    assert windows.open("src", replace(staging, place="nowhere")) is None
    assert windows.open("src", replace(staging, ring_bytes=1 << 40)) is None
    assert (seen.dst.cuda.pinned, seen.dst.cuda.mapped) == (pinned, mapped)
    assert RingWindows(SharedRings.OFF, seen.dst.pair.open_window).open("src", staging) is None


def test_a_ring_that_is_shorter_than_it_is_said_to_be_is_not_looked_at(seen: World) -> None:
    windows = RingWindows(SharedRings.ON, seen.dst.pair.open_window)
    told = staging_of(seen.src.pair.source.ring)
    assert windows.open("src", replace(told, ring_bytes=SIZE.num_bytes + 4096)) is None
    assert windows.open("src", replace(told, is_on_host=not told.is_on_host)) is None


@pytest.mark.parametrize("is_described", [True, False], ids=["never read", "regions without an address"])
def test_windows_are_closed_with_their_transport(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_described: bool
) -> None:
    """Whether anything was read, and whether the link was ever made."""
    monkeypatch.setattr(exports, "visible_devices", lambda: frozenset({UUID}))
    world.dst.cuda.exported = world.src.cuda.exported
    pinned = {**world.dst.cuda.pinned}
    rings, team = open_rings(world.dst.pair), None
    regions = world.src.regions if is_described else [Region("r", 64, 0, "cuda:0")]
    told = replace(staging_of(world.src.pair.source.ring), regions_digest=digest_of(regions))
    card = pack_card("agent", b"metadata", staging=told.to_bytes())
    if is_described:
        rings.link("src", card, regions, team, time.monotonic() + PATIENCE_S)
        gc.collect()
        assert (world.dst.cuda.pinned, world.dst.cuda.mapped) != (pinned, [])
    else:
        with pytest.raises(TransportError, match="no-address"):
            rings.link("src", card, regions, team, time.monotonic() + PATIENCE_S)
    rings._windows.close()
    assert (world.dst.cuda.pinned, world.dst.cuda.mapped) == (pinned, [])
    for mover in rings.movers:
        assert mover.close(PATIENCE_S)


def test_a_ring_that_cannot_be_exported_is_not_offered(kernel: ctypes.CDLL) -> None:
    cuda: Any = FakeCuda(0.0, kernel)
    cuda.failing = {"export"}
    ring = DeviceStagingRing(cuda, "cuda:0", SIZE, is_shared=True)
    assert ring.place == ""
    ring.close()
    assert not cuda.memory


def test_rings_that_cannot_be_pinned_leave_nothing(kernel: ctypes.CDLL) -> None:
    cuda: Any = FakeCuda(0.0, kernel)
    region = Region("r", 64, cuda.allocate(64), "cuda:0")
    cuda.failing = {"pin"}
    with pytest.raises(TransportError, match="pin failed"):
        device_rings(Places("ours", [region]), OPTIONS, cuda, CopyLimits(), are_on_host=True)
    assert len(cuda.memory) == 1
    assert (cuda.num_streams, cuda.num_events) == (0, 0)


def late_event() -> FakeEvent:
    event = FakeEvent()
    event.has_come = threading.Event()
    return event


def test_nothing_is_written_before_the_device_has_come_to_the_event_and_others_go_on(world: World) -> None:
    event = late_event()
    runs = world.read(1, event)
    world.settle()
    assert (world.dst.arrays[1] == 0xAB).all()
    assert not world.ends
    other = Runs(np.array([0]), np.array([0]), np.array([64]))
    world.link.read(2, Product.of(other), lambda error: world.ends.__setitem__(2, error), None)
    assert world.wait(2) == ""
    assert (world.dst.arrays[1] == 0xAB).all()
    event.has_come.set()
    assert world.wait(1) == ""
    assert world.has_arrived(runs)


def test_a_read_that_waits_for_its_event_can_be_cancelled_and_writes_nothing_later(world: World) -> None:
    event = late_event()
    world.read(1, event)
    world.link.cancel(1)
    assert world.wait(1) == CANCELLED
    event.has_come.set()
    world.read(2, FakeEvent())  # events come in order: after this one, the first has come, too
    assert world.wait(2) == ""
    assert world.ends == {1: CANCELLED, 2: ""}


def test_a_thing_that_is_no_event_is_refused(world: World) -> None:
    with pytest.raises(TransportError, match="cannot wait for"):
        world.read(1, "no event")
    world.settle()
    assert not world.ends


def card_of(regions: list[Region], *, is_on_host: bool) -> bytes:
    sizes = 4096, SIZE.num_bytes, SIZE.chunk_bytes
    told = Staging(RANK, *sizes, regions_digest=digest_of(regions), is_on_host=is_on_host)
    return pack_card("agent", b"metadata", staging=told.to_bytes())


class SilentLine:
    def listen(self, answers: object, turn: Callable[[], float]) -> None:
        self._turn = turn

    def open_stream(self, to: str, nonce: int, regions: object) -> None:
        pass

    def hang_up(self, address: str) -> None:
        pass

    def wake(self) -> None:
        self._turn()

    def close(self) -> None:
        pass


def open_rings(pair: RingPair) -> PackedRings:
    rings, line = PackedRings(pair), SilentLine()
    rings.open_mover(line)  # type: ignore[arg-type]
    return rings


def close_rings(rings: PackedRings) -> None:
    for mover in rings.movers:
        assert mover.close(PATIENCE_S)
    rings.close()


def test_a_ring_of_another_kind_is_not_read_by_the_fabric(kernel: ctypes.CDLL) -> None:
    """What is gathered is sent then; here nobody answers."""
    on_device, on_host = [Region("kv", 64, 1 << 20, "cuda:1")], [Region("kv", 64, 1 << 20)]
    host = open_rings(host_rings(Places("ours", on_host), RingOptions(SIZE, SharedRings.OFF)))
    ours = Device(kernel)
    device = open_rings(ours.pair)
    assert [region.device for region in device.table.places.regions] == ["cuda:0", "cuda:0"]
    team: Any = None
    for rings, theirs, is_on_host in ((host, on_device, False), (device, on_host, True)):
        with pytest.raises(TimeoutError):
            rings.link("src", card_of(theirs, is_on_host=is_on_host), theirs, team, 0.0)
    close_rings(host)
    close_rings(device)


class RankDeviceOfTest:
    is_mixed, limits = False, CopyLimits()

    def __init__(self, cuda: object) -> None:
        self.cuda = cuda


def test_rings_of_a_device_are_there_if_they_are_required_and_else_on_the_host(kernel: ctypes.CDLL) -> None:
    cuda: Any = FakeCuda(0.0, kernel)
    table = RegionTable("ours", [Region("kv", 64, cuda.allocate(64), "cuda:0")])
    device: Any = RankDeviceOfTest(cuda)
    assert rings_for(table, device, PackedReads.NEVER, OPTIONS) is None
    for packed_reads, memory, where in (
        (PackedReads.REQUIRE, RingMemory.OWN, "cuda:0"),
        (PackedReads.REQUIRE, RingMemory.HOST, "cpu"),
        (PackedReads.AUTO, RingMemory.OWN, "cpu"),
    ):
        pair = rings_for(table, device, packed_reads, replace(OPTIONS, memory=memory))
        assert pair
        assert {pair.source.ring.region.device, pair.reader.ring.region.device} == {where}
        assert pair.source.ring.place
        pair.close()
    device.is_mixed = True
    assert rings_for(table, device, PackedReads.AUTO, OPTIONS) is None
    with pytest.raises(TransportError, match="bad-device: some of this rank's memory is the host's"):
        rings_for(table, device, PackedReads.REQUIRE, OPTIONS)
