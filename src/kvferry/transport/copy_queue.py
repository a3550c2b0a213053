"""One copy at a time on a device: a stream, room for the table that the kernel reads, and the copy's end.

Whoever puts a copy here decides in which thread, and who waits for its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from kvferry.transport.base import DeviceEvent
from kvferry.transport.copy_kernel import (
    NUM_ARGUMENTS,
    CopyKernel,
    Repeated,
    Words,
    Work,
    table_words,
    write_table,
)
from kvferry.transport.cuda import Arguments, Cuda

TABLE_BYTES = 4 << 20
"""Room for the table of one copy, pinned and on the device; a longer one makes it grow."""
SHORT_BYTES = 8 << 20
"""Up to so many, the kernel reads its table from the host's memory: to upload it first would take longer."""


class CopyQueue:
    """For one copy at a time, by whichever thread; the device must be current there."""

    def __init__(self, cuda: Cuda, kernel: CopyKernel) -> None:
        self._cuda, self._kernel = cuda, kernel
        self._arguments = Arguments(NUM_ARGUMENTS)
        with cuda.current(), ExitStack() as undo:
            self._stream = cuda.make_stream()
            undo.callback(cuda.free_stream, self._stream)
            self._mark = cuda.make_event()
            undo.callback(cuda.free_event, self._mark)
            self._table = _Table(cuda, TABLE_BYTES)
            undo.callback(self._table.free)
            # The first launch loads the kernel, and waits for all work of the device.
            kernel.launch(Work(0, 1, 1), self._table.address, self._stream, self._arguments)
            cuda.wait_stream(self._stream)
            self._give_up = undo.pop_all()

    def put(self, terms: Sequence[Repeated], num_bytes: int, after: DeviceEvent | None = None) -> None:
        """Queue a copy of so many bytes, behind an event. If it fails, some of it may have been queued."""
        num_words = table_words(terms)
        table = self._table.room(num_words)
        is_short = num_bytes <= SHORT_BYTES
        address = table.pinned if is_short else table.address
        work = write_table(terms, table.words, address)
        if not work.num_tiles:
            return
        if after is not None:
            self._cuda.wait_in_stream(self._stream, after)
        if not is_short:
            self._cuda.upload_later(address, table.pinned, 8 * num_words, self._stream)
        self._kernel.launch(work, address, self._stream, self._arguments)

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of what was put, whatever goes wrong before. ``meanwhile``: what comes first."""
        wait = partial(self._cuda.wait_stream, self._stream)
        try:
            self._cuda.record(self._mark, self._stream)
            wait = partial(self._cuda.wait_event, self._mark)
            meanwhile()
        finally:
            wait()

    def close(self) -> None:
        """Give everything up. Nothing may be under way."""
        self._give_up.close()


class _Table:
    """Pinned memory that tables are written in, and the device memory that they are uploaded to."""

    def __init__(self, cuda: Cuda, num_bytes: int) -> None:
        self._cuda = cuda
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        pinned = self._cuda.allocate_pinned(num_bytes)
        try:
            address = self._cuda.allocate(num_bytes)
        except BaseException:
            self._cuda.free_pinned(pinned)
            raise
        self.pinned, self.address = pinned, address
        self.words: Words = self._cuda.pinned_array(self.pinned, num_bytes).view(np.uint64)

    def room(self, num_words: int) -> _Table:
        """Itself, with room for so many words. Nothing of an earlier copy may be under way."""
        if num_words > len(self.words):
            pinned, address = self.pinned, self.address
            self._allocate(8 << (num_words - 1).bit_length())  # may fail: the table stays as it is then
            self._free(pinned, address)
        return self

    def free(self) -> None:
        self._free(self.pinned, self.address)

    def _free(self, pinned: int, address: int) -> None:
        self._cuda.free_pinned(pinned)
        self._cuda.free(address)
