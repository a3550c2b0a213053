"""The reads of a destination rank: each is selected, then posted, then watched until it ends."""

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
    """Zeroes slack, submits, cancels and collects. Every transfer ends once, also one that is refused."""

    def __init__(
        self,
        transport: Transport,
        workers: WorkerThreads,
        put: Callable[[Event[Effect]], None],
        fetches: ActiveFetches,
    ) -> None:
        self._transport, self._workers, self._put, self._fetches = transport, workers, put, fetches
        self._cancelled: set[int] = set()
        """Transfers that are not wanted any more, until they end."""
        self._is_looking = False
        """Whether an event that looks for ends is in the inbox."""
        self.must_poll = True
        """Whether nobody has ever told us of an end: then reads may advance in ``poll`` only."""
        transport.on_end(self._look)

    def post(self, post: PostReads, *, is_quick: bool = False) -> None:
        """Have slack zeroed and reads submitted, at once where that is quick; the owner's to call."""
        if is_quick:
            self._post(post)
        else:
            self._workers.submit(READS, partial(self._post, post))

    def cancel(self, transfer: int) -> None:
        """Have no more of a transfer posted; the owner's to call.

        One that a worker has not submitted yet is unknown to the transport: whoever comes last, the worker or
        this call, sees what the other one did.
        """
        self._cancelled.add(transfer)
        self._transport.cancel(transfer)

    def collect(self, now: float) -> list[Effect]:
        """Tell the machine what ended; the owner's to call."""
        self._is_looking = False
        effects: list[Effect] = []
        for end in self._transport.poll():
            effects += self._end(end.transfer, end.error, now)
        return effects

    def _end(self, transfer: int, error: str, now: float) -> list[Effect]:
        self._cancelled.discard(transfer)
        return self._fetches.ended(now, transfer, error)

    # -- in a worker, in the owner where that is quick, or in a thread of the transport -------------

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
            if refusal:  # before anything moved: that is an end, too
                self._put(partial(self._end, transfer, refusal))

    def _is_unwanted(self, post: PostReads) -> bool:
        return bool(post.reads) and self._cancelled.issuperset(post.reads)

    def _clear(self, post: PostReads) -> str:
        """Submit the zeroing of a fetch's slack; why not, if it is refused."""
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
        """Submit one read; why not, if it is refused."""
        if transfer in self._cancelled:
            return CANCELLED
        try:
            self._transport.read(transfer, remote, product, after=after, permit=permit)
        except KVFerryError as error:
            return str(error)
        except Exception:
            # A bug, which says nothing about what was posted: this read is quarantined in time, and no other.
            log.exception("a read from %s could not be submitted", remote)
        if transfer in self._cancelled:
            self._transport.cancel(transfer)
        return ""


SELECTIONS = "selections"
"""The workers' key: selecting computes, and more threads would not make it faster."""
QUICK_BLOCKS = 2048
"""Blocks of a fetch that is selected at once, a millisecond or two; and of all that are in one step."""


class Selecting:
    """Has fetches selected; what comes of it is put into the owner's inbox."""

    def __init__(self, workers: WorkerThreads, put: Callable[[Event[Effect]], None], reader: Reader) -> None:
        self._workers, self._put, self._reader = workers, put, reader
        self._room = QUICK_BLOCKS

    def step(self) -> None:
        self._room = QUICK_BLOCKS

    def start(self, wanted: Select, met: MetPeer) -> None:
        """The owner's to call."""
        job, num_blocks = partial(self._select, wanted, met), wanted.fetch.num_blocks
        if met.is_quick and num_blocks <= self._room:  # many of them would keep all others waiting
            self._room -= num_blocks
            job()
        else:
            self._workers.submit(SELECTIONS, job)

    def _select(self, wanted: Select, met: MetPeer) -> None:
        handle, fetch = wanted.handle, wanted.fetch
        try:
            selection = select(met.route, fetch.request(), slack=fetch.slack)
            num_runs = met.num_runs(selection)  # makes the lists here, not in a thread that others wait for
        except Exception as error:
            failure = failure_of(error, FailureCode.BAD_TABLES)
            self._put(lambda now: self._reader.not_selected(now, handle, failure))
        else:
            self._put(lambda now: self._reader.selected(now, handle, selection, num_runs, met.way))
