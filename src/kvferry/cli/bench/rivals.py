"""Who takes part: each can move a case's bytes into this process, and says how long that took."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from kvferry.cli.bench.checks import Bytes
from kvferry.cli.bench.engine import BENCH_TIMING, GROUP, cache_manifest
from kvferry.cli.bench.grid import NUM_LAYERS, TOKENS_PER_BLOCK, BenchCase, CacheShape
from kvferry.cli.bench.memory import BenchMemory
from kvferry.core.request import BlockTable
from kvferry.core.runs import Runs
from kvferry.core.span import Span
from kvferry.endpoint import Destination
from kvferry.errors import TransportError
from kvferry.testing.fleet.measure import RankCard, RawNixl
from kvferry.transport.nixl import NixlTransport

READ_SECONDS = 120.0
POLL_SECONDS = 10e-6


class Rival(StrEnum):
    """Everybody who can be asked for."""

    DIRECT = "direct"
    """kvferry's transport over NIXL: list made, posted in slices, ended."""
    MAPPED = "mapped"
    """kvferry's copy kernel over the source's device memory."""
    PACKED = "packed"
    """kvferry's transport: the source gathers and sends, the reader scatters."""
    FETCH = "fetch"
    """kvferry's whole fetch, by the way that it chooses itself; ticket held and peer met."""
    NIXL = "nixl"
    """NIXL alone, given the same list of runs."""
    ONE_RUN = "nixl-one-run"
    """NIXL alone, as many bytes in one run: what no request between paged caches can be."""
    COPY = "copy"
    """As many bytes copied in a row within the reader's process."""
    VLLM = "vllm"
    """The worker of vLLM's own NixlConnector, on the same contents and block ids."""

    @property
    def is_ours(self) -> bool:
        return self in (*TRANSPORT_RIVALS, Rival.FETCH)

    @property
    def is_apart(self) -> bool:
        """Whether it has processes of its own: its agent keeps a core busy, whoever's turn it is."""
        return self is Rival.VLLM

    @property
    def needs_offer(self) -> bool:
        """Whether the source is told of every request."""
        return self in (Rival.FETCH, Rival.VLLM)


NIXL_RIVALS = (Rival.DIRECT, Rival.NIXL, Rival.ONE_RUN)
"""Those that read by NIXL, as kvferry sets it up."""
TRANSPORT_RIVALS = (Rival.DIRECT, Rival.MAPPED, Rival.PACKED)
"""One read of kvferry's transport: what a cost is told from."""


@dataclass(frozen=True)
class Turn:
    """One read of one rival."""

    seconds: float
    way: str
    """What moved the bytes."""
    num_runs: int


class Contender:
    """A rival in the reader's process."""

    way = ""
    is_whole = False
    """Whether it moves as many bytes in a row instead of the case's blocks."""

    def lay_out(self, shape: CacheShape) -> None:
        """Get ready for caches of another shape."""

    def read(self, case: BenchCase, offer: Any) -> float:
        """Move a case's bytes; seconds from asking to knowing that all is in."""
        raise NotImplementedError

    def num_runs(self, case: BenchCase) -> int:
        """How many runs it moves them in."""
        return 1 if self.is_whole else len(case.product().runs)

    def close(self) -> None:
        """Give everything up."""


class TransportReads(Contender):
    """One ``read`` of kvferry's transport."""

    def __init__(self, memory: BenchMemory, source: RankCard, transport: NixlTransport) -> None:
        self._transport = transport
        self._transport.register([memory.region])
        self._ended = threading.Event()
        self._transport.on_end(self._ended.set)
        self.way = self._transport.connect("src", source.card, source.regions).way.value

    def read(self, case: BenchCase, offer: Any) -> float:
        product = case.product()
        self._ended.clear()
        started = time.perf_counter()
        self._transport.read(1, "src", product)
        is_over = self._ended.wait(READ_SECONDS)
        seconds = time.perf_counter() - started
        if not is_over:
            raise TransportError("late", f"a read did not end within {READ_SECONDS:g} s")
        (end,) = self._transport.poll()
        if end.error:
            raise TransportError("failed", end.error)
        return seconds

    def close(self) -> None:
        self._transport.close()


class Fetches(Contender):
    """A whole fetch."""

    _destination: Destination | None = None

    def __init__(self, memory: BenchMemory) -> None:
        self._memory = memory

    def lay_out(self, shape: CacheShape) -> None:
        self.close()
        manifest = cache_manifest("dst", shape, self._memory.region)
        self._destination = Destination(manifest, 0, NixlTransport(), timing=BENCH_TIMING)

    def read(self, case: BenchCase, offer: Any) -> float:
        assert self._destination is not None
        tables = {GROUP: BlockTable.of(case.block_ids()[1])}
        need = {GROUP: (Span(0, case.num_blocks * TOKENS_PER_BLOCK),)}
        held = self._destination.hold(offer)
        time.sleep(0.005)  # so that the lease is granted: a request waits for its blocks meanwhile
        started = time.perf_counter()
        self._destination.fetch(offer, tables, need, held=held)
        while not (reports := self._destination.poll()):
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - started
        if reports[0].failure is not None:
            raise TransportError("failed", str(reports[0].failure))
        self.way = reports[0].record.way
        return seconds

    def close(self) -> None:
        if self._destination is not None:
            self._destination.close()


class RawList(Contender):
    """NIXL alone, on the list that kvferry would post."""

    way = "nixl"

    def __init__(self, raw: RawNixl) -> None:
        self._raw = raw

    def read(self, case: BenchCase, offer: Any) -> float:
        return self._raw.read([("src", self._runs(case))]).seconds

    def _runs(self, case: BenchCase) -> Runs:
        return case.product().runs


class RawOneRun(RawList):
    """NIXL alone, as if all were in a row."""

    is_whole = True

    def _runs(self, case: BenchCase) -> Runs:
        return Runs(np.array([0]), np.array([0]), np.array([case.total_bytes]))


class PlainCopy(Contender):
    """What memory allows, within one process."""

    way = "copy"
    is_whole = True

    def __init__(self, memory: BenchMemory, source: Bytes) -> None:
        self._memory = memory
        self._original = BenchMemory(memory.region.device, len(source))
        self._original.write(source)

    def read(self, case: BenchCase, offer: Any) -> float:
        src, dst, num_bytes = self._original, self._memory, case.total_bytes
        started = time.perf_counter()
        if dst.cuda:
            dst.cuda.copy(src.region.address, dst.region.address, num_bytes)
        else:
            np.copyto(dst.host[:num_bytes], src.host[:num_bytes])
        return time.perf_counter() - started

    def close(self) -> None:
        self._original.close()


class OwnWorker(Contender):
    """The worker of vLLM's own connector. It does not merge neighbours."""

    way = "vllm"
    _worker: Any = None

    def __init__(self, memory: BenchMemory, folder: str) -> None:
        self._memory, self._folder = memory, folder

    def lay_out(self, shape: CacheShape) -> None:
        from kvferry.testing.vllm.nixl_worker import NixlReader

        self.close()
        self._worker = NixlReader(worker_caches(shape, self._folder), self._memory.region, self._memory.host)

    def read(self, case: BenchCase, offer: Any) -> float:
        return float(self._worker.load(offer, case.block_ids()[1].tolist(), READ_SECONDS))

    def num_runs(self, case: BenchCase) -> int:
        return case.num_pages

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def worker_caches(shape: CacheShape, folder: str) -> Any:
    """A shape in vLLM's words."""
    from kvferry.testing.vllm.nixl_worker import WorkerCaches

    return WorkerCaches(
        folder,
        num_layers=NUM_LAYERS,
        num_blocks=shape.num_blocks,
        num_kv_heads=shape.num_heads,
        head_size=shape.head_dim,
        block_size=TOKENS_PER_BLOCK,
    )
