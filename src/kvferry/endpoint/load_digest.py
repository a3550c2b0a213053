"""Digests of loaded bytes in this process's memory, for both sides of a load."""

from __future__ import annotations

import ctypes
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from kvferry.core.digest import (
    DigestPart,
    DigestSide,
    TakenDigest,
    digest_parts,
    most_bytes,
    sums_to_bytes,
)
from kvferry.core.digest_cells import Bytes, ChunkedCells, Words, sums_by_numpy
from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.request import BlockTable
from kvferry.core.state import check_range
from kvferry.endpoint.edges import WorkerThreads
from kvferry.endpoint.meeting import MetPeer, failure_of
from kvferry.endpoint.owner import Event
from kvferry.errors import KVFerryError, SpecError, TransportError
from kvferry.log import log_of
from kvferry.runtime import FailureCode
from kvferry.runtime.active_fetches import ActiveFetches
from kvferry.runtime.figures import rank_block_bytes
from kvferry.runtime.values import Effect, TakeDigest
from kvferry.transport.digest_kernel import DigestKernel, digest_kernel
from kvferry.wire.messages import DigestResult, DigestTask
from kvferry.wire.rank_asks import question_from_msgpack, question_to_msgpack
from kvferry.wire.reading import printable
from kvferry.wire.ticket import TableDoc

log = log_of(__name__)

HOST = "cpu"


class DigestMemory:
    """Raises SpecError for memory that cannot be digested in this process."""

    def __init__(self, rank: Rank) -> None:
        for region in rank.regions:
            if not region.address:
                raise SpecError(f"region {region.name} has no address and cannot be digested")
        self._regions = {region.name: region for region in rank.regions}
        self.host: Mapping[str, Bytes] = {
            region.name: _bytes_at(region.address, region.num_bytes)
            for region in rank.regions
            if region.device == HOST
        }
        on_devices = {region.device: region for region in rank.regions if region.device != HOST}
        self._kernels = {device: _kernel_of(region) for device, region in on_devices.items()}

    @property
    def is_of_host(self) -> bool:
        """Whether all memory is host memory: then a digest is computed part by part."""
        return not self._kernels

    def chunk_sums(self, wanted: Sequence[ChunkedCells]) -> list[Words]:
        devices = [self._regions[each.blocks.region].device for each in wanted]
        found: dict[int, Words] = {}
        for device in sorted({*devices}):
            at = [i for i, other in enumerate(devices) if other == device]
            some = [wanted[i] for i in at]
            if device == HOST:
                sums = sums_by_numpy(self.host, some)
            else:
                sums = self._kernels[device].sums(self._regions, some)
            found.update(zip(at, sums, strict=True))
        return [found[i] for i in range(len(wanted))]


def _kernel_of(region: Region) -> DigestKernel:
    index = re.fullmatch(r"cuda:(\d+)", region.device)
    if index is None:
        raise SpecError(f"memory on {region.device} (region {region.name}) cannot be digested")
    try:
        return digest_kernel(int(index[1]))
    except TransportError as error:
        raise SpecError(f"region {region.name} on {region.device} cannot be digested: {error}") from error


def _bytes_at(address: int, num_bytes: int) -> Bytes:
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)


DIGESTS = "digests"
"""The workers' key: one digest at a time, since each uses a core."""
MAX_SHARE = 2
"""Limit of the requested bytes, as a multiple of the bytes of the ticket's blocks."""
MAX_PARTS_PER_VIEW = 64
MAX_WAITING = 64
"""Requests per ticket: each rank of a reader has one."""
CLOSE_SECONDS = 5.0
"""How long ``close`` waits for a running part of a digest."""


class NotWanted(KVFerryError):
    """The digest is no longer needed."""


class LoadDigest:
    """Computes digests of one rank's memory.

    ``is_wanted`` is called between parts, so that released memory is not touched.
    """

    def __init__(self, manifest: Manifest, rank: int, side: str, is_wanted: Callable[[], bool]) -> None:
        self._manifest, self._rank, self._side = manifest, manifest.rank(rank), side
        self._memory, self._is_wanted = DigestMemory(self._rank), is_wanted

    def sums(self, tables: Mapping[str, BlockTable], parts: Sequence[DigestPart], seed: int) -> list[Words]:
        memory = self._memory
        side = DigestSide(self._manifest, self._rank, tables, memory.host, self._side, memory.chunk_sums)
        if not memory.is_of_host:  # devices compute all parts at once
            self._check_wanted()
            return side.sums(parts, seed=seed)
        sums = []
        for part in parts:
            self._check_wanted()
            sums += side.sums([part], seed=seed)
        return sums

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise NotWanted("the ticket was released, or this endpoint is closing")


def _check_question(manifest: Manifest, rank: Rank, task: DigestTask, parts: Sequence[DigestPart]) -> None:
    """Raise SpecError for requests beyond the blocks of the ticket."""
    block_bytes = rank_block_bytes(manifest, rank)
    most = sum(len(table.block_ids) * block_bytes.get(name, 0) for name, table in task.tables.items())
    states = manifest.state_by_name
    asked = sum(most_bytes(manifest, part) for part in parts if part.state in states)
    if asked > MAX_SHARE * most:
        raise SpecError(f"digest: {asked} bytes requested, the ticket's blocks on this rank have {most}")
    if len(parts) > MAX_PARTS_PER_VIEW * len(rank.views):
        raise SpecError(f"digest: {len(parts)} parts requested, this rank has {len(rank.views)} views")


def answer_digest(
    manifest: Manifest, rank: int, task: DigestTask, is_wanted: Callable[[], bool]
) -> DigestResult:
    """A source rank's sums, or why there are none."""
    named = task.generation, rank, task.number
    try:
        seed, parts = question_from_msgpack(task.question)
        _check_question(manifest, manifest.rank(rank), task, parts)
        sums = LoadDigest(manifest, rank, "src", is_wanted).sums(_tables(task.tables), parts, seed)
        return DigestResult(*named, sums=sums_to_bytes(sums))
    except Exception as error:
        if not isinstance(error, KVFerryError):
            log.exception("a digest could not be computed")
        return DigestResult(*named, detail=printable(str(error) or type(error).__name__))


class DigestService:
    """Computes the digests requested from a source rank, one at a time, in a worker.

    Tickets take turns, so that many requests for one delay the others by one digest.
    """

    def __init__(
        self, manifest: Manifest, rank: int, workers: WorkerThreads, say: Callable[[DigestResult], None]
    ) -> None:
        self._manifest, self._rank, self._workers, self._say = manifest, rank, workers, say
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, dict[int, DigestTask]] = OrderedDict()
        """By ticket and number, so that repeated requests count once."""
        self._taken: DigestTask | None = None
        self._is_closed = False

    def take(self, task: DigestTask) -> None:
        """Queue a request; never blocks."""
        with self._lock:
            waiting = self._waiting.setdefault(task.ticket_id, {})
            is_taken = self._taken is not None and self._taken.number == task.number
            if task.number in waiting or is_taken or len(waiting) >= MAX_WAITING:
                return
            waiting[task.number] = task
        self._workers.submit(DIGESTS, self._take_next)

    def release(self, ticket_id: int) -> None:
        """Drop all requests for a ticket."""
        with self._lock:
            self._waiting.pop(ticket_id, None)
            if self._taken is not None and self._taken.ticket_id == ticket_id:
                self._taken = None

    def close(self) -> None:
        """Stop, and touch no more memory."""
        self._is_closed = True
        self._workers.close(CLOSE_SECONDS)

    def _take_next(self) -> None:
        task = self._next()
        if task is None:
            return  # released
        result = answer_digest(
            self._manifest, self._rank, task, lambda: not self._is_closed and self._taken is task
        )
        with self._lock:
            self._taken = None
        self._say(result)

    def _next(self) -> DigestTask | None:
        with self._lock:
            while self._waiting:
                ticket_id, waiting = self._waiting.popitem(last=False)
                if waiting:
                    self._taken = waiting.pop(next(iter(waiting)))
                    if waiting:
                        self._waiting[ticket_id] = waiting
                    return self._taken
            return None


class TakenDigests:
    """Computes the digests of a destination rank's loads, one at a time, in a worker."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        workers: WorkerThreads,
        put: Callable[[Event[Effect]], None],
        fetches: ActiveFetches,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._manifest, self._rank, self._workers = manifest, rank, workers
        self._put, self._fetches, self._random_bytes = put, fetches, random_bytes
        self._is_closed = False

    def take(self, wanted: TakeDigest, met: MetPeer | None) -> None:
        """Queue a digest; never blocks. Called by the owner thread."""
        self._workers.submit(DIGESTS, partial(self._take, wanted, met))

    def close(self) -> None:
        """Touch no more memory, except for a running part of a digest."""
        self._is_closed = True

    def _take(self, wanted: TakeDigest, met: MetPeer | None) -> None:
        # A new seed for each load: an error that collides under one seed is found under the next.
        handle, fetch, seed = wanted.handle, wanted.fetch, int.from_bytes(self._random_bytes(8))
        try:
            if met is None:
                raise SpecError(f"{wanted.peer.engine} was disconnected before its digest was requested")
            parts = digest_parts(met.route.plan, fetch.request())
            questions = {src_rank: question_to_msgpack(seed, some) for src_rank, some in parts.items()}
            self._put(lambda now: self._fetches.digest_asked(now, handle, questions))
            ours = LoadDigest(self._manifest, self._rank, "dst", lambda: not self._is_closed)
            sums = {rank: (some, ours.sums(fetch.dst, some, seed)) for rank, some in parts.items()}
            taken = TakenDigest(self._manifest, sums)
        except Exception as error:
            failure = failure_of(error, FailureCode.NO_DIGEST)
            self._put(lambda now: self._fetches.not_digested(now, handle, failure))
        else:
            self._put(lambda now: self._fetches.digest_taken(now, handle, taken))


DEFAULT_EVERY = 100


def default_digest_every(rank: Rank) -> int:
    """The default of ``digest_every``; 0 if this memory cannot be digested."""
    try:
        DigestMemory(rank)
    except SpecError as error:
        log.warning("digests are disabled: %s", error)
        return 0
    return DEFAULT_EVERY


def check_digest_every(every: int, rank: Rank) -> None:
    """Raise SpecError unless loads of this rank can be digested."""
    check_range("digest_every", every, 0, 1 << 30)
    if every:
        DigestMemory(rank)


def _tables(docs: Mapping[str, TableDoc]) -> dict[str, BlockTable]:
    return {name: BlockTable.of(list(doc.block_ids), doc.first_token) for name, doc in docs.items()}
