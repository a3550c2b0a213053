"""A device that is made of threads and host memory, for whatever copies by the kernel.

Its streams run by themselves, a little later than they are asked to, and it notes what would destroy a real
context: memory that is read or written after it was given up.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np

from kvferry.errors import TransportError
from kvferry.transport.copy_kernel import TERM
from kvferry.transport.cuda import Allocation

UUID = "00" * 16


class FakeEvent:
    def __init__(self) -> None:
        self.has_come = threading.Event()
        self.has_come.set()
        self.is_freed = False


class FakeStream:
    """Does what is queued, in order, in a thread of its own."""

    def __init__(self, delay_s: float) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._delay_s = delay_s
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, job: Callable[[], None] | None) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while job := self._jobs.get():
            time.sleep(random.random() * self._delay_s)
            job()


class FakeCuda:
    """A device: its calls are those of ``Cuda`` that the copier makes."""

    uuid, architecture, num_multiprocessors = UUID, "sm_0", 4

    def __init__(self, delay_s: float = 0.0, kernel: ctypes.CDLL | None = None) -> None:
        """``kernel``: the kernel's own text, compiled for this CPU (``kernel_on_cpu``)."""
        self._delay_s, self._kernel = delay_s, kernel
        self._lock = threading.Lock()
        self.memory: dict[int, np.ndarray] = {}
        """What is allocated or pinned, by address."""
        self._given_up: list[np.ndarray] = []
        """Kept, so that nobody else gets its addresses."""
        """Host memory that the device reaches, by address."""
        self.exported: dict[bytes, np.ndarray] = {}
        self.mapped: list[Allocation] = []
        self.num_streams = self.num_events = 0
        self.faults: list[str] = []
        self.failing: set[str] = set()
        """Calls that fail."""

    def _may_fail(self, call: str) -> None:
        if call in self.failing:
            raise TransportError("cuda", f"{call} failed")

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    current_for_launches = current

    def bind_thread(self) -> None:
        pass

    # -- memory

    def allocate(self, num_bytes: int) -> int:
        self._may_fail("allocate")
        return self._new(num_bytes)

    def allocate_pinned(self, num_bytes: int) -> int:
        return self._new(num_bytes)

    def _new(self, num_bytes: int) -> int:
        buffer = np.full(num_bytes, 0xAB, np.uint8)
        with self._lock:
            self.memory[buffer.ctypes.data] = buffer
        return buffer.ctypes.data

    def free(self, address: int) -> None:
        with self._lock:
            buffer = self.memory.pop(address, None)
            if buffer is None:
                self.faults.append("freed twice")
                return
            buffer[:] = 0xDD
            self._given_up.append(buffer)

    free_pinned = free

    def pinned_array(self, address: int, num_bytes: int) -> np.ndarray:
        return self.memory[address][:num_bytes]

    def download(self, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)

    def upload(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    # -- memory of others

    def allocation_of(self, address: int) -> Allocation:
        with self._lock:
            for at, buffer in self.memory.items():
                if at <= address < at + buffer.nbytes:
                    return Allocation(at, buffer.nbytes)
        raise TransportError("cuda", "no such memory")

    def export(self, allocation: Allocation) -> bytes:
        self._may_fail("export")
        handle = allocation.address.to_bytes(8, "big")
        self.exported[handle] = self.memory[allocation.address]
        return handle

    def export_virtual(self, allocation: Allocation) -> int:
        raise TransportError("cuda", "no virtual memory")

    def open(self, handle: bytes) -> Allocation:
        if handle not in self.exported:
            raise TransportError("cuda", "no such handle")
        buffer = self.exported[handle]
        allocation = Allocation(buffer.ctypes.data, buffer.nbytes)
        with self._lock:
            self.mapped.append(allocation)
        return allocation

    def close_opened(self, allocation: Allocation) -> None:
        with self._lock:
            self.mapped.remove(allocation)
        self._may_fail("close_opened")

    def _check_mapped(self, address: int, num_bytes: int) -> None:
        with self._lock:
            spans = [(a.address, a.num_bytes) for a in self.mapped]
            spans += [(address, buffer.nbytes) for address, buffer in self.memory.items()]
        if not any(at <= address and address + num_bytes <= at + length for at, length in spans):
            self.faults.append("a copy read memory that is not mapped")

    # -- work in order

    def make_stream(self) -> FakeStream:
        with self._lock:
            self.num_streams += 1
        return FakeStream(self._delay_s)

    def free_stream(self, stream: FakeStream) -> None:
        with self._lock:
            self.num_streams -= 1
        stream.put(None)

    def make_event(self) -> FakeEvent:
        with self._lock:
            self.num_events += 1
        return FakeEvent()

    def free_event(self, event: FakeEvent) -> None:
        with self._lock:
            self.num_events -= 1
        event.is_freed = True

    def wait_stream(self, stream: FakeStream) -> None:
        is_done = threading.Event()
        stream.put(is_done.set)
        is_done.wait()

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._may_fail("record")
        event.has_come = come = threading.Event()
        stream.put(come.set)

    def wait_event(self, event: FakeEvent) -> None:
        event.has_come.wait()

    def has_come_to(self, event: FakeEvent) -> bool:
        if event.is_freed:
            raise TransportError("cuda", "cuEventQuery: CUDA_ERROR_INVALID_HANDLE")
        return event.has_come.is_set()

    def wait_in_stream(self, stream: FakeStream, event: FakeEvent) -> None:
        if not isinstance(event, FakeEvent):
            raise TypeError(event)
        come = event.has_come

        def wait() -> None:
            come.wait()

        stream.put(wait)

    def upload_later(self, address: int, pinned: int, num_bytes: int, stream: FakeStream) -> None:
        def upload() -> None:
            if address not in self.memory or pinned not in self.memory:
                self.faults.append("a table was given up before its copy was over")
                return
            ctypes.memmove(address, pinned, num_bytes)

        stream.put(upload)

    # -- kernels

    def load(self, binary: bytes, name: str) -> None:
        pass

    def launch(
        self, kernel: None, num_blocks: int, num_threads: int, stream: FakeStream, args: object
    ) -> None:
        self._may_fail("launch")
        table, num_terms, first, stop = args._values  # type: ignore[attr-defined]
        if compiled := self._kernel:
            numbers = [ctypes.c_uint64(n) for n in (table, num_terms, first, stop, 4)]
            stream.put(lambda: compiled.copy_runs(*numbers))
        elif num_terms and not first:
            stream.put(lambda: self._copy(table, num_terms))

    def _copy(self, table: int, num_terms: int) -> None:
        if table not in self.memory:
            self.faults.append("a table was given up before its copy was over")
            return
        for term in np.frombuffer(ctypes.string_at(table, num_terms * TERM.itemsize), TERM):
            runs, num_bytes = int(term["pattern_runs"]), int(term["words_per_run"]) * int(term["word_bytes"])
            pairs = int(term["num_words"]) // (int(term["words_per_run"]) * runs)
            for pair in range(pairs):
                for run in range(runs):
                    dst = _at(term["dst"], run) + _at(term["dst_steps"], pair)
                    if not term["src"]:
                        ctypes.memset(dst, 0, num_bytes)
                        continue
                    src = _at(term["src"], run) + _at(term["src_steps"], pair)
                    self._check_mapped(src, num_bytes)
                    ctypes.memmove(dst, src, num_bytes)


def _at(array: int, index: int) -> int:
    return ctypes.c_uint64.from_address(int(array) + 8 * index).value
