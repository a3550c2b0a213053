"""Many threads that use one transport at once, and the account of what they were told."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np

from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.testing.sources import Source
from kvferry.transport.base import ReadEnd, Transport

CELL_BYTES = 96
"""What one read brings, in two runs; each has a cell of its own in the first region."""


class Storm:
    """Threads that read, collect, cancel, clear, connect and forget, as fast as they can.

    Reads are from the peer '0', which stays; others come and go, and two threads may use one name.
    """

    def __init__(self, transport: Transport, sources: Sequence[Source], max_reads: int) -> None:
        self.accepted: list[int] = []
        """Transfers that ``read`` took on."""
        self.ends: list[ReadEnd] = []
        self.wrong: list[BaseException] = []
        """Whatever was raised, and is no TransportError."""
        self._transport, self._sources, self._max_reads = transport, sources, max_reads
        self._numbers, self._visits, self._clears = count(), count(), count(max_reads)
        self._is_over = threading.Event()

    @contextmanager
    def blowing(self) -> Iterator[None]:
        """The threads work until the block ends."""
        work = [self._read, self._read, self._read, self._poll, self._poll, self._poll, self._cancel]
        work += [self._clear, self._come_and_go, self._come_and_go]
        threads = [threading.Thread(target=self._repeat, args=(one,)) for one in work]
        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(switch_interval)

    def wait_for_reads(self, seconds: float) -> None:
        """Until so many reads were taken on that the cells are used up, or the time is."""
        deadline = time.monotonic() + seconds
        while len(self.accepted) < self._max_reads and time.monotonic() < deadline:
            time.sleep(1e-3)

    def collect(self, seconds: float) -> None:
        """The ends that the threads did not wait for."""
        deadline = time.monotonic() + seconds
        while len(self.ends) < len(self.accepted) and time.monotonic() < deadline:
            self.ends += self._transport.poll()
            time.sleep(1e-3)

    def check(self) -> None:
        """Nothing odd was raised, and each read that was taken on ended once."""
        assert not self.wrong, self.wrong
        assert self.accepted
        assert Counter(end.transfer for end in self.ends) == Counter(self.accepted)

    @property
    def read_ends(self) -> list[ReadEnd]:
        """The ends of reads: clearings are numbered after them."""
        return [end for end in self.ends if end.transfer < self._max_reads]

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._is_over.is_set():
            try:
                work()
            except TransportError as error:
                if error.code == "closed" and work != self._poll:
                    return
            except BaseException as error:
                self.wrong.append(error)
                return
            time.sleep(0)

    def _read(self) -> None:
        transfer = next(self._numbers)
        if transfer >= self._max_reads:
            time.sleep(1e-3)
            return
        self._transport.read(transfer, "0", runs_of(transfer))
        self.accepted.append(transfer)

    def _poll(self) -> None:
        self.ends.extend(self._transport.poll())

    def _cancel(self) -> None:
        for transfer in self.accepted[-3:]:
            self._transport.cancel(transfer)
        time.sleep(1e-3)

    def _clear(self) -> None:
        transfer = next(self._clears)
        self._transport.clear(transfer, Runs(np.array([0]), np.array([1 << 48]), np.array([CELL_BYTES])))
        self.accepted.append(transfer)
        time.sleep(1e-3)

    def _come_and_go(self) -> None:
        name = f"1/{next(self._visits) % 3}"
        source = self._sources[1]
        try:
            self._transport.connect(name, source.card, source.regions)
        finally:
            self._transport.forget(name)


def runs_of(transfer: int) -> Runs:
    """Two runs to the cell of a transfer, from elsewhere."""
    dst = CELL_BYTES * transfer + np.array([0, CELL_BYTES // 2])
    return Runs(dst[::-1] + 1000, dst, np.full(2, CELL_BYTES // 2))
