"""Both sides of a load's digest, taken of memory in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvferry.core.digest import (
    DigestPart,
    DigestSide,
    TakenDigest,
    digest_parts,
    num_bytes,
    sums_to_bytes,
)
from kvferry.core.digest_keys import Words
from kvferry.core.manifest import Manifest, Rank
from kvferry.core.request import BlockTable
from kvferry.core.state import check_range
from kvferry.endpoint.digest_memory import DigestMemory
from kvferry.endpoint.edges import Workers
from kvferry.endpoint.meeting import MetPeer, failure_of
from kvferry.endpoint.owner import Event
from kvferry.errors import KVFerryError, SpecError
from kvferry.log import log_of
from kvferry.runtime import FailureCode, Reader
from kvferry.runtime.values import Effect, TakeDigest
from kvferry.wire.bad_input import printable
from kvferry.wire.digest import question_from_msgpack, question_to_msgpack
from kvferry.wire.messages import DigestResult, DigestTask
from kvferry.wire.ticket import TableDoc

log = log_of(__name__)

DIGESTS = "digests"
"""The workers' key: one digest at a time, since each is all that a core can do."""
MAX_THREADS = 4
"""That take one digest together, if there are twice as many processors: the engine needs some, too."""
PARALLEL_BYTES = 16 << 20
"""From so many on: a few milliseconds of one processor are not worth threads."""
CLOSE_SECONDS = 5.0
"""How long ``close`` waits for a part of a digest that has begun."""


class NotWanted(KVFerryError):
    """Whoever asked for a digest does not wait for it any more."""


class LoadDigest:
    """Takes digests of one rank's memory.

    ``is_wanted`` is looked at between two parts of a long one: memory that is given back is not touched.
    """

    def __init__(self, manifest: Manifest, rank: int, side: str, is_wanted: Callable[[], bool]) -> None:
        self._manifest, self._rank, self._side = manifest, manifest.rank(rank), side
        self._memory, self._is_wanted = DigestMemory(self._rank), is_wanted

    def sums(self, tables: Mapping[str, BlockTable], parts: Sequence[DigestPart], seed: int) -> list[Words]:
        """The sums of each part."""
        total_bytes = self._total_bytes(parts) if self._memory.host else 0
        chunk_sums = self._memory.chunk_sums(total_bytes)
        side = DigestSide(self._manifest, self._rank, tables, self._memory.host, self._side, chunk_sums)
        if not self._memory.is_of_host:  # a device takes all parts at once
            self._check_wanted()
            return side.sums(parts, seed=seed)

        def of_part(part: DigestPart) -> Words:
            self._check_wanted()
            return side.sums([part], seed=seed)[0]

        num_threads = self._num_threads(parts, total_bytes)
        if num_threads < 2:
            return [of_part(part) for part in parts]
        with ThreadPoolExecutor(num_threads, "kvferry-digest") as pool:
            return list(pool.map(of_part, parts))

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise NotWanted("this end is closing")

    def _num_threads(self, parts: Sequence[DigestPart], total_bytes: int) -> int:
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2, len(parts))
        return num_threads if num_threads > 1 and total_bytes >= PARALLEL_BYTES else 1

    def _total_bytes(self, parts: Sequence[DigestPart]) -> int:
        states = self._manifest.state_by_name
        known = (part for part in parts if part.state in states)  # what is not known is refused later
        return sum(num_bytes(self._manifest, part) for part in known)

    def taken(
        self, tables: Mapping[str, BlockTable], parts: Mapping[int, Sequence[DigestPart]], seed: int
    ) -> TakenDigest:
        """What a fetch has brought, by source rank."""
        by_rank = {src_rank: (some, self.sums(tables, some, seed)) for src_rank, some in parts.items()}
        return TakenDigest(self._manifest, by_rank)


def answer_digest(
    manifest: Manifest, rank: int, task: DigestTask, is_wanted: Callable[[], bool]
) -> DigestResult:
    """What a source rank says to its authority: its sums, or why there are none."""
    named = task.generation, rank, task.number
    try:
        seed, parts = question_from_msgpack(task.question)
        sums = LoadDigest(manifest, rank, "src", is_wanted).sums(_tables(task.tables), parts, seed)
        return DigestResult(*named, sums=sums_to_bytes(sums))
    except Exception as error:
        if not isinstance(error, KVFerryError):
            log.exception("a digest could not be taken")
        return DigestResult(*named, detail=printable(str(error) or type(error).__name__))


class DigestService:
    """Takes the digests that an authority asks a source rank for, one at a time, in a worker."""

    def __init__(
        self, manifest: Manifest, rank: int, workers: Workers, say: Callable[[DigestResult], None]
    ) -> None:
        self._manifest, self._rank, self._workers, self._say = manifest, rank, workers, say
        self._waiting: set[int] = set()
        """What is being taken, by number: a question that is repeated meanwhile is not taken twice."""
        self._is_closed = False

    def take(self, task: DigestTask) -> None:
        """Take it soon; never blocks."""
        if task.number not in self._waiting:
            self._waiting.add(task.number)
            self._workers.submit(DIGESTS, partial(self._take, task))

    def close(self) -> None:
        """Take no more, and touch no memory any more."""
        self._is_closed = True
        self._workers.close(CLOSE_SECONDS)

    def _take(self, task: DigestTask) -> None:
        result = answer_digest(self._manifest, self._rank, task, lambda: not self._is_closed)
        self._waiting.discard(task.number)
        self._say(result)


class TakenDigests:
    """Takes the digests of what one destination rank has loaded, one at a time, in a worker."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        workers: Workers,
        put: Callable[[Event[Effect]], None],
        reader: Reader,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._manifest, self._rank, self._workers = manifest, rank, workers
        self._put, self._reader, self._random_bytes = put, reader, random_bytes
        self._is_closed = False

    def take(self, wanted: TakeDigest, met: MetPeer | None) -> None:
        """Take it soon; never blocks. The owner's to call."""
        self._workers.submit(DIGESTS, partial(self._take, wanted, met))

    def close(self) -> None:
        """Touch no memory any more, but for a part of a digest that has begun."""
        self._is_closed = True

    def _take(self, wanted: TakeDigest, met: MetPeer | None) -> None:
        # Other keys for each load: what escapes one by chance does not escape the next.
        handle, fetch, seed = wanted.handle, wanted.fetch, int.from_bytes(self._random_bytes(8))
        try:
            if met is None:
                raise SpecError(f"{wanted.peer.engine} was forgotten before its digest could be asked for")
            parts = digest_parts(met.route.plan, fetch.request())
            questions = {src_rank: question_to_msgpack(seed, some) for src_rank, some in parts.items()}
            self._put(lambda now: self._reader.digest_asked(now, handle, questions))
            # While the source ranks do the same.
            ours = LoadDigest(self._manifest, self._rank, "dst", lambda: not self._is_closed).taken(
                fetch.dst, parts, seed
            )
        except Exception as error:
            failure = failure_of(error, FailureCode.NO_DIGEST)
            self._put(lambda now: self._reader.not_digested(now, handle, failure))
        else:
            self._put(lambda now: self._reader.digest_taken(now, handle, ours))


def check_digest_every(every: int, rank: Rank) -> None:
    """Raise SpecError unless one in so many loads of this rank can be digested."""
    check_range("digest_every", every, 0, 1 << 30)
    if every:
        DigestMemory(rank)


def _tables(docs: Mapping[str, TableDoc]) -> dict[str, BlockTable]:
    return {name: BlockTable.of(list(doc.block_ids), doc.first_token) for name, doc in docs.items()}
