"""The reads of a destination rank: selected, posted, and watched until they end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.core.product import Product
from kvferry.core.select import select
from kvferry.endpoint.edges import WorkerThreads
from kvferry.endpoint.meeting import MetPeer, failure_of, remote_name
from kvferry.endpoint.owner import Event
from kvferry.errors import KVFerryError
from kvferry.log import log_of
from kvferry.runtime import FailureCode, Reader
from kvferry.runtime.active_fetches import ActiveFetches
from kvferry.runtime.values import Effect, PostReads, Select
from kvferry.transport.base import Transport

log = log_of(__name__)

READS = "reads"
"""The workers' key: reads are submitted in order, by one thread."""
CANCELLED = "cancelled before it was submitted"


class PostedReads:
    """Zeroes slack; submits, cancels and collects reads. Every transfer ends once, also a rejected one."""

    def __init__(
        self,
        transport: Transport,
        workers: WorkerThreads,
        put: Callable[[Event[Effect]], None],
        fetches: ActiveFetches,
    ) -> None:
        self._transport, self._workers, self._put, self._fetches = transport, workers, put, fetches
        self._cancelled: set[int] = set()
        """Cancelled transfers, until they end."""
        self._is_looking = False
        """Whether a ``collect`` is in the inbox."""
        self.must_poll = True
        """Whether the transport has never signalled an end: then reads may advance in ``poll`` only."""
        transport.on_end(self._look)

    def post(self, post: PostReads, *, is_quick: bool = False) -> None:
        """Zero slack and submit reads; called by the owner thread."""
        if is_quick:
            self._post(post)
        else:
            self._workers.submit(READS, partial(self._post, post))

    def cancel(self, transfer: int) -> None:
        """Cancel a transfer; called by the owner thread.

        The transport does not know a read that is still queued in a worker; the worker then sees the mark.
        """
        self._cancelled.add(transfer)
        self._transport.cancel(transfer)

    def collect(self, now: float) -> list[Effect]:
        """Report ended transfers to the machine; called by the owner thread."""
        self._is_looking = False
        effects: list[Effect] = []
        for end in self._transport.poll():
            effects += self._end(end.transfer, end.error, now)
        return effects

    def _end(self, transfer: int, error: str, now: float) -> list[Effect]:
        self._cancelled.discard(transfer)
        return self._fetches.ended(now, transfer, error)

    # -- in a worker, the owner, or a thread of the transport --------------------------------------

    def _look(self) -> None:
        self.must_poll = False
        if not self._is_looking:
            self._is_looking = True
            self._put(self.collect)

    def _post(self, post: PostReads) -> None:
        error = self._clear(post)
        for transfer, (src_rank, product) in post.reads.items():
            name = remote_name(post.peer, src_rank)
            permit = post.permits.get(src_rank, b"")
            refusal = error or self._submit(transfer, name, product, post.after, permit)
            if refusal:
                self._put(partial(self._end, transfer, refusal))

    def _is_unwanted(self, post: PostReads) -> bool:
        return bool(post.reads) and self._cancelled.issuperset(post.reads)

    def _clear(self, post: PostReads) -> str:
        """Submit the zeroing of a fetch's slack; returns the error."""
        error = ""
        try:
            if post.zeros.num_runs and not self._is_unwanted(post):
                self._transport.clear(post.clear, post.zeros, after=post.after)
                return ""
        except KVFerryError as refusal:
            error = f"its slack could not be cleared: {refusal}"
        self._put(partial(self._end, post.clear, error))
        return error

    def _submit(
        self, transfer: int, remote: str, product: Product, after: object | None, permit: bytes
    ) -> str:
        """Submit one read; returns the error if it was rejected."""
        if transfer in self._cancelled:
            return CANCELLED
        try:
            self._transport.read(transfer, remote, product, after=after, permit=permit)
        except KVFerryError as error:
            return str(error)
        except Exception:
            # A bug: some of it may have been posted, so this read will be quarantined.
            log.exception("a read from %s could not be submitted", remote)
        if transfer in self._cancelled:
            self._transport.cancel(transfer)
        return ""


SELECTIONS = "selections"
"""The workers' key: selecting is CPU-bound, so one thread suffices."""
QUICK_BLOCKS = 2048
"""Blocks that one step selects in the owner thread; this takes a millisecond or two."""


class Selecting:
    """Selects fetches, and puts the results into the owner's inbox."""

    def __init__(self, workers: WorkerThreads, put: Callable[[Event[Effect]], None], reader: Reader) -> None:
        self._workers, self._put, self._reader = workers, put, reader
        self._room = QUICK_BLOCKS

    def step(self) -> None:
        self._room = QUICK_BLOCKS

    def start(self, wanted: Select, met: MetPeer) -> None:
        """Called by the owner thread."""
        job, num_blocks = partial(self._select, wanted, met), wanted.fetch.num_blocks
        if met.is_quick and num_blocks <= self._room:  # a limit, so that others need not wait
            self._room -= num_blocks
            job()
        else:
            self._workers.submit(SELECTIONS, job)

    def _select(self, wanted: Select, met: MetPeer) -> None:
        handle, fetch = wanted.handle, wanted.fetch
        try:
            selection = select(met.route, fetch.request(), slack=fetch.slack)
            num_runs = met.num_runs(selection)  # makes the lists here, not in the owner thread
        except Exception as error:
            failure = failure_of(error, FailureCode.BAD_TABLES)
            self._put(lambda now: self._reader.not_selected(now, handle, failure))
        else:
            self._put(lambda now: self._reader.selected(now, handle, selection, num_runs, met.way))
