"""The digest kernel on a device: a table goes up, the kernel runs over it, the sums come back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

import numpy as np

from kvferry.core.digest_cells import ChunkedCells
from kvferry.core.digest_keys import Words
from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.transport.copy_kernel import NUM_ARGUMENTS, THREADS_PER_BLOCK, CopyLimits, compiled_kernel
from kvferry.transport.cuda import Arguments, Cuda
from kvferry.transport.digest_table import DigestTable, tables_of

LIMITS = CopyLimits(num_blocks=0)
"""The whole device: a digest only reads, and is through in a third of the time that 32 blocks take. What it
costs others, their slowdown times its length, is less so (``docs/performance.md``)."""
SCRATCH_BYTES = 16 << 20
"""Of a table and its sums, on the device and pinned: digests of more take several turns."""


class DigestKernel:
    """The compiled kernel on one device, with its stream and scratch; one digest at a time."""

    def __init__(self, cuda: Cuda, limits: CopyLimits) -> None:
        self._cuda, self._limits = cuda, limits
        self._num_multiprocessors = cuda.num_multiprocessors
        self._kernel = cuda.load(compiled_kernel("digest", source(), cuda.architecture), "sum_cells")
        self._arguments = Arguments(NUM_ARGUMENTS)
        with cuda.current():
            self._stream = cuda.make_stream()
        self._lock = threading.Lock()
        self._num_bytes, self._device, self._pinned = 0, 0, 0

    def sums(self, regions: Mapping[str, Region], wanted: Sequence[ChunkedCells]) -> list[Words]:
        """The sums of each state's chunks; waits for the device."""
        tables = tables_of(wanted, regions, SCRATCH_BYTES)
        with self._lock:
            return [sums for table in tables for sums in self._turn(table)]

    def _turn(self, table: DigestTable) -> list[Words]:
        cuda, start = self._cuda, table.num_words
        stop = start + table.num_sums
        self._grow(8 * stop)
        pinned = cuda.pinned_array(self._pinned, self._num_bytes).view(np.uint64)
        table.write(pinned[:stop], self._device)
        launches = self._limits.launches(table.num_tiles, table.num_bytes, self._num_multiprocessors)
        with cuda.current():
            try:
                cuda.upload_later(self._device, self._pinned, 8 * stop, self._stream)
                for first, end, num_blocks in launches:
                    self._arguments.set(self._device, table.num_sums, first, end)
                    cuda.launch(self._kernel, num_blocks, THREADS_PER_BLOCK, self._stream, self._arguments)
                place, num_bytes = 8 * start, 8 * table.num_sums
                cuda.download_later(self._pinned + place, self._device + place, num_bytes, self._stream)
            finally:  # also what was begun before an error ends here
                cuda.wait_stream(self._stream)
        return table.split(pinned[start:stop].copy())

    def _grow(self, num_bytes: int) -> None:
        """Take scratch once; only a state that needs more than it makes it grow."""
        if num_bytes <= self._num_bytes:
            return
        num_bytes = max(num_bytes, SCRATCH_BYTES)
        device, pinned = self._device, self._pinned
        self._num_bytes = self._device = self._pinned = 0
        if device:
            self._cuda.free(device)
            self._cuda.free_pinned(pinned)
        device = self._cuda.allocate(num_bytes)
        try:
            self._pinned = self._cuda.allocate_pinned(num_bytes)
        except TransportError:
            self._cuda.free(device)
            raise
        self._num_bytes, self._device = num_bytes, device


@cache
def digest_kernel(device_index: int) -> DigestKernel:
    """Of a device, for the life of the process; raises TransportError where there is no such device."""
    return DigestKernel(Cuda(device_index), LIMITS)


def source() -> str:
    """The kernel's text."""
    return files(__package__).joinpath("digest.cu").read_text(encoding="utf-8")
