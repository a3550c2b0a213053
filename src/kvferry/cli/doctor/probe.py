"""Two processes, one of which reads the other's memory: by which way, and how fast.

Each side runs in a process of its own, so that a library that crashes does not end the doctor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import tempfile
import timeit
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kvferry.cli.bench.cases import Stretch, cache_memory, contents, first_wrong_in, wipe
from kvferry.cli.bench.sides import timed_read
from kvferry.cli.doctor.seen import HOST, ReadsSeen, TimedRead
from kvferry.cli.processes import QUIET, AskingTransport, Worker, choices_told_in, gather_openly
from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import Bytes, RegionMemory

READ_SECONDS = 60.0
NUM_TURNS = 5
CASE_SECONDS = 1.5
"""What the turns of one size may take; slow ones have fewer."""
LONG_SECONDS = 2.0
"""After a read that took so long, no slower one is tried."""
CALL_SECONDS = 180.0
CARRIERS = {Way.MAPPED: "copy kernel", Way.PACKED: "stream"}


@dataclass(frozen=True)
class ProbeSize:
    """One read: so many runs of so many bytes, scattered, so that none of them touch."""

    num_runs: int
    run_bytes: int

    @property
    def _num_places(self) -> int:
        return 1 if self.num_runs == 1 else 2 * self.num_runs

    @property
    def room_bytes(self) -> int:
        return self._num_places * self.run_bytes

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        dst = np.arange(0, self._num_places, 2, dtype=np.int64)
        return np.random.default_rng(self.num_runs).permutation(dst), dst

    def runs(self) -> Runs:
        src, dst = self._places
        return Runs(src * self.run_bytes, dst * self.run_bytes, np.full(self.num_runs, self.run_bytes))

    def expected(self, source: Bytes) -> Stretch:
        """The memory after it, with zeros where nothing was read."""
        src, dst = self._places
        image = np.zeros((self._num_places, self.run_bytes), np.uint8)
        image[dst] = source[: self.room_bytes].reshape(image.shape)[src]
        return Stretch(0, image.ravel())


SIZES = (
    ProbeSize(1, 4 << 10),
    ProbeSize(64, 64 << 10),
    ProbeSize(1, 16 << 20),
    ProbeSize(1024, 4 << 10),
    ProbeSize(4096, 512),
    ProbeSize(1, 64 << 20),
)
"""From quick to slow: a slow link stops on the way."""
DEVICE_SIZES = (*SIZES, ProbeSize(1, 256 << 20))
"""64 MiB take a device less time than starting to copy them."""


def sizes_of(memory: str) -> tuple[ProbeSize, ...]:
    return SIZES if memory == HOST else DEVICE_SIZES


def holding(memory: str, data: Bytes) -> RegionMemory:
    """Memory of a kind, by the name that users have for it."""
    return cache_memory("cpu" if memory == HOST else memory, data)


def probe_contents(memory: str) -> Bytes:
    return contents(max(size.room_bytes for size in sizes_of(memory)))


@dataclass(frozen=True)
class ServedMemory:
    """Memory that a process serves, ours or another doctor's."""

    memory: str
    card: bytes
    region: Region
    pid: int


class ProbeSource:
    def __init__(self, memory: str, listen: str) -> None:
        logging.disable(logging.WARNING)  # findings say the same
        self._name = memory
        self._memory = holding(memory, probe_contents(memory))
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
    """Reads a source's memory into its own, and checks every cell."""

    def __init__(self, memory: str) -> None:
        logging.disable(logging.WARNING)
        self._name = memory
        self._contents = probe_contents(memory)
        self._memory = holding(memory, np.zeros_like(self._contents))
        self._transport = AskingTransport()
        self._transport.register(self._memory.regions)

    def read(self, source: ServedMemory, log_folder: str, *, shares_pids: bool) -> ReadsSeen:
        may_ask = shares_pids and self._name == HOST
        cma_error = vm_error(source.pid, source.region.address) if may_ask else ""
        way, times = None, list[TimedRead]()
        reason = carrier = error = wrong = ""
        try:
            connected = self._transport.connect("src", source.card, [source.region])
            way, reason = connected.way, connected.reason
            wrong = self._measure(times)
            carrier = CARRIERS.get(way) or carrier_in(_logged(log_folder))
        except TransportError as failure:
            error = failure.detail
        speed = self._copy_speed()
        return ReadsSeen(self._name, way, reason, carrier, tuple(times), speed, cma_error, error, wrong)

    def _measure(self, times: list[TimedRead]) -> str:
        """Time each size, until one brings a wrong cell; that cell, or nothing."""
        for size in sizes_of(self._name):
            expected = size.expected(self._contents)
            wipe(self._memory, [expected])
            warm_up = self._timed(size)
            if wrong := first_wrong_in(self._memory, [expected]):
                return f"{size.num_runs:,} runs of {size.run_bytes:,} bytes: {wrong}"
            num_turns = min(NUM_TURNS, int(CASE_SECONDS / warm_up))
            seconds = tuple(self._timed(size) for _ in range(num_turns)) or (warm_up,)
            times.append(TimedRead(size.num_runs, size.run_bytes, seconds))
            if warm_up > LONG_SECONDS:
                break
        return ""

    def _timed(self, size: ProbeSize) -> float:
        return timed_read(self._transport, size.runs, READ_SECONDS)

    def _copy_speed(self) -> float:
        """Bytes per second of a plain copy within this process, the best of some turns."""
        cuda, (region,) = self._memory.cuda, self._memory.regions
        half = region.num_bytes // 2

        def copy() -> None:
            if cuda:
                cuda.copy(region.address, region.address + half, half)
            else:
                np.copyto(self._memory.read(0, half), self._contents[:half])

        copy()
        return half / min(timeit.repeat(copy, repeat=NUM_TURNS, number=1))

    def close(self) -> None:
        self._transport.close()
        self._memory.free()


def _logged(folder: str) -> str:
    """UCX's log of this process; the last of it may still be in a buffer of the C library."""
    ctypes.CDLL(None).fflush(None)
    files = sorted(Path(folder).glob(f"*{os.getpid()}*"))
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


_ROW = re.compile(r"\|\s*\S+\s*\|\s*[^|]*?\s*\|\s*(?P<by>[^|]*?/[^|]*?)\s*\|")


def carrier_in(log: str) -> str:
    """UCX's lane for the last reads of another process, by its tables of protocols; empty without one."""
    found, is_read, is_self = "", False, False
    for line in log.splitlines():
        if " cfg#" in line:
            is_self, is_read = " self cfg#" in line, False
        elif " by ucp_" in line:
            is_read = "ucp_get" in line and not is_self
        elif is_read and (row := _ROW.search(line)):
            found = row["by"]
    return found


def vm_error(pid: int, address: int) -> str:
    """Why the system does not let this process read a byte of another one; empty if it does.

    CMA makes the same system call.

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


# -- in processes of their own ---------------------------------------------------------------------


def quiet_environment() -> dict[str, str]:
    """The environment as it is, except that libraries log nothing beside our report."""
    return {name: os.environ.get(name, value) for name, value in QUIET.items()}


@contextmanager
def serving_memory(memory: str, host: str = "127.0.0.1") -> Iterator[ServedMemory]:
    """A process that serves one kind of memory at a host, until the end of the block."""
    listen = f"tcp://{host}:*"
    with closing(Worker("doctor-src", ProbeSource, memory, listen, env=quiet_environment())) as worker:
        yield worker.call("served", timeout=CALL_SECONDS)


def read_from(source: ServedMemory, *, shares_pids: bool) -> ReadsSeen:
    """Read it in a process of its own; a failure of that process is a result, too."""
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        env = {**quiet_environment(), **choices_told_in(folder)}
        with closing(Worker("doctor-dst", ProbeReader, source.memory, env=env)) as worker:
            try:
                seen: ReadsSeen = worker.call(
                    "read", source, folder, shares_pids=shares_pids, timeout=CALL_SECONDS
                )
            except Exception as error:
                return ReadsSeen(source.memory, error=last_line(error))
            return seen


def read_here(memory: str) -> ReadsSeen:
    """Read from another process of this machine."""
    try:
        with serving_memory(memory) as served:
            return read_from(served, shares_pids=True)
    except Exception as error:  # of the process that serves
        return ReadsSeen(memory, error=last_line(error))


def last_line(error: Exception) -> str:
    """The message of another process's error, without its class."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return re.sub(r"^kvferry\.errors\.\w+: ", "", line)
