"""Reads between two processes, measured and verified, for ``doctor`` and ``bench``.

Both sides are processes of their own, so that a library that crashes does not end the command.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from kvferry.cli.processes import AskingTransport, Worker, gather_openly, quiet_environment
from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.core.view import Ints
from kvferry.errors import TransportError
from kvferry.transport.base import Connected
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import Bytes, RegionMemory

HOST = "host"
LOOPBACK = "127.0.0.1"
NUM_LAYERS = 16
READ_SECONDS = 120.0
CALL_SECONDS = 300.0
ALIGNMENT = 4096
CELL_BYTES = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class ReadCase:
    """Blocks of 16 layers: scattered, or consecutive as one run."""

    run_bytes: int
    """One block of one layer."""
    num_blocks: int
    is_scattered: bool = True

    @property
    def num_runs(self) -> int:
        return NUM_LAYERS * self.num_blocks if self.is_scattered else 1

    @property
    def total_bytes(self) -> int:
        return NUM_LAYERS * self.num_blocks * self.run_bytes

    @property
    def pool_bytes(self) -> int:
        """Scattered blocks take every other place, so that none are neighbours."""
        return self.total_bytes * (2 if self.is_scattered else 1)

    def block_ids(self) -> tuple[Ints, Ints]:
        """Source and destination blocks, the same in every process.

        >>> [ids.tolist() for ids in ReadCase(256, 4).block_ids()]
        [[7, 1, 3, 5], [3, 5, 1, 7]]
        """
        if not self.is_scattered:
            return np.arange(self.num_blocks), np.arange(self.num_blocks)
        random = np.random.default_rng(self.num_blocks)
        return 1 + 2 * random.permutation(self.num_blocks), 1 + 2 * random.permutation(self.num_blocks)

    def product(self) -> Product:
        """A new object, so that each read includes listing the runs."""
        starts = np.arange(NUM_LAYERS) * (self.pool_bytes // NUM_LAYERS)
        pattern = Runs(starts, starts, np.full(NUM_LAYERS, self.run_bytes))
        return Product((Term(pattern, np.stack(self.block_ids()) * self.run_bytes, self.run_bytes),))

    def expected(self, source: Bytes) -> Bytes:
        """The destination's pool after a read into zeros, computed without runs."""
        shape = (NUM_LAYERS, -1, self.run_bytes)
        src_ids, dst_ids = self.block_ids()
        pool = np.zeros(self.pool_bytes, np.uint8)
        pool.reshape(shape)[:, dst_ids] = source[: self.pool_bytes].reshape(shape)[:, src_ids]
        return pool


NUM_TURNS = 5
CASE_SECONDS = 1.5
"""Time limit of one size: slow sizes have fewer turns."""
LONG_SECONDS = 2.0
"""No larger size is tried after a read that took this long."""
SIZES = (
    ReadCase(256, 1, is_scattered=False),
    ReadCase(64 << 10, 4),
    ReadCase(1 << 20, 1, is_scattered=False),
    ReadCase(4 << 10, 64),
    ReadCase(512, 256),
    ReadCase(1 << 20, 4, is_scattered=False),
)
"""From quick to slow."""
DEVICE_SIZES = (*SIZES, ReadCase(1 << 20, 16, is_scattered=False))
"""On a device, 64 MiB take less time than starting the copy."""


@dataclass(frozen=True, slots=True)
class TimedRead:
    num_runs: int
    run_bytes: int
    seconds: tuple[float, ...]

    @property
    def total_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class ReadsSeen:
    """Reads of one kind of memory."""

    memory: str
    """``host``, or ``cuda:0``."""
    way: Way | None = None
    """None: no read was possible."""
    reason: str = ""
    """Why no faster mode is available, from the transport."""
    times: tuple[TimedRead, ...] = ()
    copy_bytes_per_second: float = 0.0
    """Of a plain copy within the reader's process."""
    cma_error: str = ""
    """Why process_vm_readv fails; empty if it works."""
    error: str = ""
    wrong: str = ""
    """The first cell that differs from the source's."""

    @property
    def bytes_per_second(self) -> float:
        """Of the longest run; 0 if nothing was read."""
        longest = max(self.times, key=lambda one: one.run_bytes, default=None)
        return longest.total_bytes / min(longest.seconds) if longest else 0.0

    @property
    def most_runs(self) -> TimedRead | None:
        return max(self.times, key=lambda one: one.num_runs, default=None)

    @property
    def seconds_per_run(self) -> float:
        """Of the read of the most runs; 0 if nothing was read."""
        most = self.most_runs
        return min(most.seconds) / most.num_runs if most else 0.0


def contents(num_bytes: int) -> Bytes:
    """A source's memory: each cell of eight bytes has a unique number other than 0.

    >>> cells = contents(1 << 20).view(np.uint64)
    >>> len(np.unique(cells)) == len(cells), bool(cells.all())
    (True, True)
    """
    return ((np.arange(num_bytes // CELL_BYTES, dtype=np.uint64) + np.uint64(1)) * _ODD).view(np.uint8)


def first_wrong(expected: Bytes, found: Bytes, start: int = 0) -> str:
    """The first wrong cell, and their number; empty if all are right.

    >>> wanted = contents(64)
    >>> found = wanted.copy()
    >>> first_wrong(wanted, found)
    ''
    >>> found[17] ^= 1
    >>> first_wrong(wanted, found)
    '1 of 8 cells wrong; the first, at byte 16, is 0xdaa66d2c7ddf753f instead of 0xdaa66d2c7ddf743f'
    """
    wanted, got = (array.view(np.uint64) for array in (expected, found))
    wrong = np.flatnonzero(wanted != got)
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (
        f"{len(wrong):,} of {len(wanted):,} cells wrong; the first, at byte {start + CELL_BYTES * first},"
        f" is {int(got[first]):#x} instead of {int(wanted[first]):#x}"
    )


def cache_memory(memory: str, data: Bytes) -> RegionMemory:
    """One region with these bytes; on the host it starts at a page, as engines' caches do."""
    room = np.empty(data.nbytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    aligned = room[start : start + data.nbytes]
    aligned[:] = data
    made = RegionMemory("cpu" if memory == HOST else memory)
    made.add("kv", aligned)
    return made


def timed_read(transport: ProcessTransport, wanted: Product, patience: float = READ_SECONDS) -> float:
    """Of one read of the peer ``src``, from the call to its end."""
    ended = threading.Event()
    transport.on_end(ended.set)
    started = time.perf_counter()
    transport.read(1, "src", wanted)
    is_over = ended.wait(patience)
    seconds = time.perf_counter() - started
    if not is_over:
        raise TransportError("late", f"a read did not end within {patience:g} s")
    (end,) = transport.poll()
    if end.error:
        raise TransportError("failed", end.error)
    return seconds


# -- in processes of their own ---------------------------------------------------------------------


@dataclass(frozen=True)
class ServedMemory:
    """Memory that a process of ours, or another doctor, serves."""

    memory: str
    card: bytes
    region: Region
    pid: int


class ProbeSource:
    """Serves memory with known contents, by the mode of the environment."""

    def __init__(self, memory: str, num_bytes: int, listen: str = f"tcp://{LOOPBACK}:*") -> None:
        logging.disable(logging.WARNING)  # the report has the same
        self._name = memory
        self._memory = cache_memory(memory, contents(num_bytes))
        self._transport = ProcessTransport()
        self._transport.register(self._memory.regions)
        self._service = gather_openly(self._transport, listen)

    def served(self) -> ServedMemory:
        return ServedMemory(self._name, self._transport.card(), self._memory.regions[0], os.getpid())

    def close(self) -> None:
        self._service.close()
        self._transport.close()
        self._memory.free()


class ProbeReader:
    """Reads a source's memory into its own, and verifies every cell."""

    def __init__(self, memory: str, num_bytes: int) -> None:
        logging.disable(logging.WARNING)
        self._contents = contents(num_bytes)
        self._memory = cache_memory(memory, np.zeros(num_bytes, np.uint8))
        self._transport = AskingTransport()
        self._transport.register(self._memory.regions)

    def connect(self, source: ServedMemory) -> Connected:
        return self._transport.connect("src", source.card, [source.region])

    def read(self, case: ReadCase) -> float:
        """Seconds of one read into cleared memory."""
        self._memory.clear(0, case.pool_bytes)
        return timed_read(self._transport, case.product())

    def first_wrong(self, case: ReadCase) -> str:
        """After the last read; empty if all cells are right."""
        return first_wrong(case.expected(self._contents), self._memory.read(0, case.pool_bytes))

    def copy_seconds(self, num_bytes: int) -> float:
        """Of a plain copy within this process: half of the memory into the other half, at most."""
        cuda, (region,) = self._memory.cuda, self._memory.regions
        started = time.perf_counter()
        if cuda:
            cuda.copy(region.address, region.address + region.num_bytes // 2, num_bytes)
        else:
            np.copyto(self._memory.read(0, num_bytes), self._contents[:num_bytes])
        return time.perf_counter() - started

    def vm_error(self, source: ServedMemory) -> str:
        return vm_error(source.pid, source.region.address)

    def close(self) -> None:
        self._transport.close()
        self._memory.free()


def vm_error(pid: int, address: int) -> str:
    """Why process_vm_readv, which CMA uses, cannot read a byte of a process; empty if it can.

    >>> byte = ctypes.create_string_buffer(b"x")
    >>> vm_error(os.getpid(), ctypes.addressof(byte))
    ''
    """
    room, vector = ctypes.create_string_buffer(1), ctypes.c_size_t * 2
    ours, theirs = vector(ctypes.addressof(room), 1), vector(address, 1)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    read.restype = ctypes.c_ssize_t
    return "" if read(pid, ours, 1, theirs, 1, 0) == 1 else os.strerror(ctypes.get_errno())


# -- in this process -------------------------------------------------------------------------------


def sizes_of(memory: str) -> Sequence[ReadCase]:
    return SIZES if memory == HOST else DEVICE_SIZES


def pool_bytes(sizes: Sequence[ReadCase]) -> int:
    return max(size.pool_bytes for size in sizes)


@contextmanager
def serving_memory(
    memory: str, num_bytes: int, host: str = LOOPBACK, env: Mapping[str, str] | None = None
) -> Iterator[ServedMemory]:
    """A process that serves one kind of memory, listening on ``host``."""
    made = (ProbeSource, memory, num_bytes, f"tcp://{host}:*")
    with closing(Worker("src", *made, env={**quiet_environment(), **(env or {})})) as worker:
        yield worker.call("served", timeout=CALL_SECONDS)


def read_here(memory: str, sizes: Sequence[ReadCase], env: Mapping[str, str] | None = None) -> ReadsSeen:
    """Read from another process of this machine, both with these environment variables."""
    try:
        with serving_memory(memory, pool_bytes(sizes), env=env) as served:
            return read_from(served, sizes, shares_pids=True, env=env)
    except Exception as error:  # of the process that serves
        return ReadsSeen(memory, error=last_line(error))


def read_from(
    source: ServedMemory,
    sizes: Sequence[ReadCase],
    *,
    shares_pids: bool,
    env: Mapping[str, str] | None = None,
) -> ReadsSeen:
    """Read in a process of its own; its failure is a result, too."""
    memory, found, half = source.memory, dict[str, Any](), pool_bytes(sizes) // 2
    made = (ProbeReader, memory, pool_bytes(sizes))
    with closing(Worker("dst", *made, env={**quiet_environment(), **(env or {})})) as worker:
        call = partial(worker.call, timeout=CALL_SECONDS)
        try:
            if shares_pids and memory == HOST:
                found["cma_error"] = call("vm_error", source)
            found["copy_bytes_per_second"] = half / min(call("copy_seconds", half) for _ in range(NUM_TURNS))
            connected = call("connect", source)
            found |= {"way": connected.way, "reason": connected.reason}
            times, found["wrong"] = _measured(call, sizes)
            found["times"] = tuple(times)
        except Exception as error:
            found["error"] = last_line(error)
    return ReadsSeen(memory, **found)


def _measured(call: Callable[..., Any], sizes: Sequence[ReadCase]) -> tuple[list[TimedRead], str]:
    """The times of each size, until the first wrong cell; that cell."""
    times: list[TimedRead] = []
    for size in sizes:
        run_bytes = size.total_bytes // size.num_runs
        warm_up = call("read", size)
        num_turns = min(NUM_TURNS, int(CASE_SECONDS / warm_up))
        seconds = tuple(call("read", size) for _ in range(num_turns)) or (warm_up,)
        if wrong := call("first_wrong", size):
            return times, f"{size.num_runs:,} runs of {run_bytes:,} bytes: {wrong}"
        times.append(TimedRead(size.num_runs, run_bytes, seconds))
        if warm_up > LONG_SECONDS:
            break
    return times, ""


def last_line(error: Exception) -> str:
    """The message of a worker's error, without its class."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return re.sub(r"^kvferry\.errors\.\w+: ", "", line)
