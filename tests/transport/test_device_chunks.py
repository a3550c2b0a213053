"""Chunks of a device without one: the kernel's own text, compiled for this CPU, gathers and scatters."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.manifest import Region
from kvferry.core.runs import place
from kvferry.errors import TransportError
from kvferry.transport import copy_kernel, packed
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.pack import ChunkCopier, TermSide
from kvferry.transport.packed import PackedWay
from kvferry.transport.places import Places
from kvferry.transport.transfers import Transfers
from tests.transport.fake_cuda import FakeCuda
from tests.transport.kernel_on_cpu import kernel_on_cpu

REGION_BYTES = 1 << 15
CHUNK_BYTES = 8192
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_on_cpu(copy_kernel.source("copy"), tmp_path_factory.mktemp("kernel"))


@pytest.fixture(autouse=True)
def _without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "compiled_kernel", lambda *_: b"")


class Device:
    """A rank's memory on a device, and who copies it to chunks."""

    is_mixed, limits = False, CopyLimits(2, 1024)

    def __init__(self, kernel: ctypes.CDLL) -> None:
        self.cuda: Any = FakeCuda(0.0, kernel)
        addresses = [self.cuda.allocate(REGION_BYTES) for _ in range(2)]
        self.regions = [Region(f"r{i}", REGION_BYTES, at, "cuda:0") for i, at in enumerate(addresses)]
        self.arrays = [self.cuda.memory[at] for at in addresses]
        self.memory = Places("ours", self.regions)
        self.num_buffers = len(self.cuda.memory)
        rank: Any = self
        self.copiers = PackedWay(Transfers(), self.memory, rank, CHUNK_BYTES)
        self.chunk = self.copiers.sender.new_chunk()

    def close(self) -> None:
        self.copiers.sender.free_chunk(self.chunk)
        self.copiers.close()
        assert len(self.cuda.memory) == self.num_buffers
        assert (self.cuda.num_streams, self.cuda.num_events) == (0, 0)
        assert not self.cuda.faults
        assert not self.cuda.mapped


@pytest.fixture
def device(kernel: ctypes.CDLL) -> Iterator[Device]:
    device = Device(kernel)
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
    return sides if sum(side.total_bytes for side in sides) <= CHUNK_BYTES else sides[:0]


@settings(deadline=None, max_examples=100)
@given(sides=asked())
def test_a_device_gathers_and_scatters_the_same_bytes_as_the_host(
    kernel: ctypes.CDLL, sides: list[TermSide]
) -> None:
    """RA-4: through the host's memory."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(copy_kernel, "compiled_kernel", lambda *_: b"")
    device, rng = Device(kernel), np.random.default_rng(3)
    monkeypatch.undo()
    for array in device.arrays:
        array[:] = rng.integers(0, 256, REGION_BYTES)
    host, expected = ChunkCopier(device.memory, CHUNK_BYTES), np.full(CHUNK_BYTES, 0xAB, np.uint8)
    host.gather(sides, expected.ctypes.data)
    chunk, at = device.chunk, device.chunk.ctypes.data
    chunk[:] = 0xAB
    device.copiers.sender.gather(sides, at)
    assert (chunk == expected).all()

    chunk[:] = expected[::-1]
    reversed_chunk = expected[::-1].copy()
    before = [array.copy() for array in device.arrays]
    device.copiers.receiver.scatter(sides, at)
    by_device = [array.copy() for array in device.arrays]
    for array, then in zip(device.arrays, before, strict=True):
        array[:] = then
    host.scatter(sides, reversed_chunk.ctypes.data)
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
    before = device.chunk.copy()
    side = TermSide(np.array([where]), np.array([num_bytes]), np.array([step]))
    for copier in (device.copiers.sender, device.copiers.receiver):
        with pytest.raises(TransportError):
            copier.gather([side], device.chunk.ctypes.data)
        with pytest.raises(TransportError):
            copier.scatter([side], device.chunk.ctypes.data)
    assert (device.chunk == before).all()


def test_runs_of_no_bytes_are_no_error(device: Device) -> None:
    """A reader may ask for nothing; it once got the rank a line of the log each time."""
    side, before = TermSide(np.array([8]), np.array([0]), np.array([0])), device.chunk.copy()
    device.copiers.sender.gather([side], device.chunk.ctypes.data)
    device.copiers.receiver.scatter([side], device.chunk.ctypes.data)
    assert (device.chunk == before).all()


def test_a_copy_that_fails_is_waited_for_and_the_next_one_is_right(device: Device) -> None:
    side = TermSide(np.array([0]), np.array([64]), np.array([0]))
    device.cuda.failing = {"launch"}
    with pytest.raises(TransportError, match="launch failed"):
        device.copiers.sender.gather([side], device.chunk.ctypes.data)
    device.cuda.failing = set()
    device.arrays[0][:64] = np.arange(64)
    device.copiers.sender.gather([side], device.chunk.ctypes.data)
    assert (device.chunk[:64] == np.arange(64)).all()


def test_copiers_that_cannot_be_made_leave_nothing(kernel: ctypes.CDLL, monkeypatch: Any) -> None:
    made = [packed.DeviceChunkCopier]

    def second(*args: Any) -> Any:
        if not made:
            raise TransportError("cuda", "out of memory")
        return made.pop()(*args)

    monkeypatch.setattr(packed, "DeviceChunkCopier", second)
    cuda: Any = FakeCuda(0.0, kernel)
    rank: Any = type("Rank", (), {"cuda": cuda, "limits": CopyLimits()})()
    with pytest.raises(TransportError, match="out of memory"):
        PackedWay(Transfers(), Places("ours", [Region("r", 64, cuda.allocate(64), "cuda:0")]), rank)
    assert len(cuda.memory) == 1
    assert (cuda.num_streams, cuda.num_events) == (0, 0)
