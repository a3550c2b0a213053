"""Two processes, one of which reads the other's memory: what really happens, and how fast.

Each holds memory of its own in a process of its own, so that a library that crashes does not take the doctor
along.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kvferry.cli.bench.cases import Stretch, cache_memory, contents, first_wrong_in, wipe
from kvferry.cli.bench.sides import timed_read
from kvferry.cli.doctor.seen import HOST, ReadsSeen, TimedRead
from kvferry.cli.processes import QUIET, AskingTransport, RankCard, Worker, choices_told_in, gather_openly
from kvferry.core.choices import Way
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.nixl_agent import NixlBuild, describe_build
from kvferry.transport.region_memory import Bytes

_ROW = re.compile(r"\|\s*\S+\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<by>[^|]*?/[^|]*?)\s*\|")


def carrier_in(log: str) -> str:
    """What the last reads of another process are carried by; empty if nothing.

    >>> carrier_in('''
    ... [1.5] [vm:7:0]   | an-agent intra-node cfg#1                                        |
    ... [1.5] [vm:7:0]   | remote memory read by ucp_get*(multi) into host memory from host |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+
    ... [1.5] [vm:7:0]   | Range  | Description |                  Config                   |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+
    ... [1.5] [vm:7:0]   | 0..inf | zero-copy   | cma/memory                                |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+''')
    'cma/memory'
    """
    found, is_read, is_self = "", False, False
    for line in log.splitlines():
        if " cfg#" in line:
            is_self, is_read = " self cfg#" in line, False
        elif " by ucp_" in line:
            is_read = "ucp_get" in line and not is_self
        elif is_read and (row := _ROW.search(line)):
            found = row["by"]
    return found


READ_SECONDS = 60.0
NUM_TURNS = 5
CASE_SECONDS = 1.5
"""What the turns of one size may take; slow ones have fewer."""
LONG_SECONDS = 2.0
"""After a read that took so long, no slower one is tried."""
COPY_KERNEL, STREAM = "copy kernel", "stream"


@dataclass(frozen=True)
class ProbeSize:
    """One read: so many runs of so many bytes, scattered, so that none of them touch."""

    num_runs: int
    run_bytes: int

    @property
    def room_bytes(self) -> int:
        """How much memory it reaches over."""
        return self._num_places * self.run_bytes

    @property
    def _num_places(self) -> int:
        return 1 if self.num_runs == 1 else 2 * self.num_runs

    @cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        dst = np.arange(0, self._num_places, 2, dtype=np.int64)
        return np.random.default_rng(self.num_runs).permutation(dst), dst

    def runs(self) -> Runs:
        """Which bytes go where."""
        src, dst = self._places
        return Runs(src * self.run_bytes, dst * self.run_bytes, np.full(self.num_runs, self.run_bytes))

    def expected(self, source: Bytes) -> Stretch:
        """What must be there after it, with zeros where nothing was read."""
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
    """What is read of a kind of memory."""
    return SIZES if memory == HOST else DEVICE_SIZES


def room_bytes_of(memory: str) -> int:
    """How much memory both sides need for it.

    >>> room_bytes_of("host") >> 20, room_bytes_of("cuda:0") >> 20
    (64, 256)
    """
    return max(size.room_bytes for size in sizes_of(memory))


def device_of(memory: str) -> str:
    """The device of a region, by the name that users have for a kind of memory."""
    return "cpu" if memory == HOST else memory


class ProbeSource:
    """Memory to read from."""

    def __init__(self, memory: str, listen: str = "tcp://127.0.0.1:*") -> None:
        logging.disable(logging.WARNING)  # what there is to say, a diagnosis says
        self._memory = cache_memory(device_of(memory), contents(room_bytes_of(memory)))
        self._transport = NixlTransport()
        self._transport.register(self._memory.regions)
        self._service = gather_openly(self._transport, listen)

    def card(self) -> RankCard:
        """What a reader must know."""
        return RankCard(self._transport.card(), self._memory.regions)

    def close(self) -> None:
        self._service.close()
        self._transport.close()
        self._memory.free()


class ProbeReader:
    """Reads a source's memory into its own, and looks at every cell."""

    def __init__(self, memory: str) -> None:
        logging.disable(logging.WARNING)
        self._name = memory
        self._memory = cache_memory(device_of(memory), np.zeros(room_bytes_of(memory), np.uint8))
        self._contents = contents(room_bytes_of(memory))
        self._transport = AskingTransport()
        self._transport.register(self._memory.regions)

    def read(self, source: RankCard, src_pid: int, log_folder: str) -> ReadsSeen:
        """Everything about one source. ``src_pid`` is 0 if it cannot be named here."""
        cma_error = vm_error(src_pid, source.regions[0].address) if src_pid and self._name == HOST else ""
        try:
            connected = self._transport.connect("src", source.card, source.regions)
        except TransportError as error:
            return ReadsSeen(self._name, cma_error=cma_error, error=error.detail)
        times, wrong, failure = self._measure()
        match connected.way:
            case Way.MAPPED:
                carrier = COPY_KERNEL
            case Way.PACKED:
                carrier = STREAM
            case _:
                carrier = carrier_in(_logged(log_folder))
        return ReadsSeen(
            self._name,
            connected.way,
            connected.reason,
            carrier,
            times,
            self._copy_speed(),
            cma_error,
            failure,
            wrong,
        )

    def build(self) -> NixlBuild | None:
        """Which NIXL and UCX read; None if there is none."""
        with suppress(TransportError):
            return describe_build()
        return None

    def _measure(self) -> tuple[tuple[TimedRead, ...], str, str]:
        """Times by size, the first wrong cell, and the first error; none of them after that."""
        times: list[TimedRead] = []
        for size in sizes_of(self._name):
            expected = size.expected(self._contents)
            wipe(self._memory, [expected])
            try:
                warm_up = self._timed(size)
                if wrong := first_wrong_in(self._memory, [expected]):
                    return tuple(times), f"{size.num_runs:,} runs of {size.run_bytes:,} bytes: {wrong}", ""
                num_turns = min(NUM_TURNS, int(CASE_SECONDS / warm_up))
                seconds = tuple(self._timed(size) for _ in range(num_turns)) or (warm_up,)
            except TransportError as error:
                return tuple(times), "", error.detail
            times.append(TimedRead(size.num_runs, size.run_bytes, seconds))
            if warm_up > LONG_SECONDS:
                break
        return tuple(times), "", ""

    def _timed(self, size: ProbeSize) -> float:
        return timed_read(self._transport, size.runs, READ_SECONDS)

    def _copy_speed(self) -> float:
        """A plain copy of as many bytes as the memory allows, within this process: the best of some turns."""
        num_bytes = self._memory.regions[0].num_bytes // 2
        copy = self._device_copy(num_bytes) if self._memory.cuda else self._host_copy(num_bytes)
        copy()
        return num_bytes / min(_seconds(copy) for _ in range(NUM_TURNS))

    def _host_copy(self, num_bytes: int) -> Callable[[], None]:
        src, dst = self._contents[:num_bytes], self._memory.read(0, num_bytes)
        return lambda: np.copyto(dst, src)

    def _device_copy(self, num_bytes: int) -> Callable[[], None]:
        cuda, start = self._memory.cuda, self._memory.regions[0].address
        assert cuda is not None
        return lambda: cuda.copy(start, start + num_bytes, num_bytes)

    def close(self) -> None:
        self._transport.close()
        self._memory.free()


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _logged(folder: str) -> str:
    """What UCX wrote down in this process; some of it may still wait in a buffer of the C library's."""
    ctypes.CDLL(None).fflush(None)
    files = sorted(Path(folder).glob(f"*{os.getpid()}*"))
    return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t))


def vm_error(pid: int, address: int) -> str:
    """Why the system does not let this process read a byte of another one; empty if it does.

    This is what CMA does, asked without UCX.

    >>> byte = ctypes.create_string_buffer(b"x")
    >>> vm_error(os.getpid(), ctypes.addressof(byte))
    ''
    """
    room = ctypes.create_string_buffer(1)
    ours, theirs = _Piece(ctypes.addressof(room), 1), _Piece(address, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    read = libc.process_vm_readv
    read.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)
    read.restype = ctypes.c_ssize_t
    if read(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0) == 1:
        return ""
    return os.strerror(ctypes.get_errno())


CALL_SECONDS = 180.0


@dataclass(frozen=True)
class ServedMemory:
    """Memory that a process serves, ours or another doctor's."""

    memory: str
    card: RankCard
    pid: int


def quiet_environment() -> dict[str, str]:
    """The environment as it is, but for libraries that would be loud beside our report."""
    return {name: os.environ.get(name, value) for name, value in QUIET.items()}


@contextmanager
def serving_memory(memory: str, host: str = "127.0.0.1") -> Iterator[ServedMemory]:
    """A process that serves one kind of memory at a host, until the end of the block."""
    listen, env = f"tcp://{host}:*", quiet_environment()
    with closing(Worker("doctor-src", ProbeSource, memory, listen, env=env)) as worker:
        yield ServedMemory(memory, worker.call("card", timeout=CALL_SECONDS), worker.pid)


def read_from(memory: str, source: RankCard, src_pid: int) -> tuple[ReadsSeen, NixlBuild | None]:
    """Read it in a process of its own, by which NIXL; whatever goes wrong there is what was seen.

    ``src_pid`` is 0 if the source's process cannot be named here.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        env = {**quiet_environment(), **choices_told_in(folder)}
        with closing(Worker("doctor-dst", ProbeReader, memory, env=env)) as worker:
            try:
                seen = worker.call("read", source, src_pid, folder, timeout=CALL_SECONDS)
                return seen, worker.call("build", timeout=CALL_SECONDS)
            except Exception as error:
                return ReadsSeen(memory, error=last_line(error)), None


def last_line(error: Exception) -> str:
    """Of what a process said; the class of its error means nothing to users."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return re.sub(r"^kvferry\.errors\.\w+: ", "", line)
