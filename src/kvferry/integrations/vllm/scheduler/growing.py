"""Prefills that are read chunk by chunk while vLLM still computes them.

A step's tokens are complete when vLLM returns its output: the device has then ended the step on every worker.
Only a draft model may still run; the worker waits for it (``WorkerSide.finish_step``).

vLLM has no hook for preemption. The output of ``schedule`` lists preempted requests before any worker writes
to their blocks: the offer is revoked there, and made anew when the request resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvferry.core.request import BlockTable
from kvferry.endpoint import SourceEngine
from kvferry.endpoint.source import GrowingOffer
from kvferry.errors import SpecError
from kvferry.integrations.vllm.scheduler.tables import Adapters, Groups, digest
from kvferry.log import log_of
from kvferry.runtime.fetch_job import PART_TOKENS
from kvferry.runtime.values import Released
from kvferry.wire.ticket import Ticket

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

log = log_of(__name__)


@dataclass(slots=True)
class _Prefill:
    request: Request
    transfer: str
    digest: bytes
    num_offers: int = 0
    num_scheduled: int = 0
    """Tokens that its steps have computed or will compute."""
    offer: GrowingOffer | None = None
    """None before the prefill is scheduled, and while it is preempted."""


@dataclass(frozen=True, slots=True)
class _Computed:
    step: int
    request_id: str
    offer: GrowingOffer
    num_complete: int


class GrowingPrefills:
    """The prefills of an engine that a router has named, until they end."""

    def __init__(self, groups: Groups, adapters: Adapters, *, is_alone: bool) -> None:
        """``is_alone``: the server has no other engine, so a router knows which one runs a prefill."""
        self._groups, self._adapters, self._is_alone = groups, adapters, is_alone
        self._manager: KVCacheManager | None = None
        self._prefills: dict[str, _Prefill] = {}
        self._names: dict[str, str] = {}
        """Offer name -> request, until the offer is released."""
        self._closed: dict[str, int] = {}
        """Ended request -> ticket, until its offer is released."""
        self._computed: deque[_Computed] = deque()
        self._step = 0
        self._declined: set[str] = set()
        """Requests that their readers no longer need."""

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def is_able(self) -> bool:
        """Whether prefills can be read while they are computed."""
        return self._is_alone and self._manager is not None and bool(self._groups.early)

    def new_request(self, request: Request, transfer: str) -> None:
        """The prefill is offered when first scheduled, so a reader's blocks do not wait for the queue."""
        if not self.is_able or request.num_prompt_tokens <= PART_TOKENS:
            return
        try:
            found = digest(request, request.num_prompt_tokens, self._adapters)
        except SpecError as refusal:
            log.warning("%s is not offered for overlap: %s", request.request_id, refusal)
            return
        self._prefills[request.request_id] = _Prefill(request, transfer, found)

    def step(self, source: SourceEngine, scheduled: SchedulerOutput) -> int:
        """Offer prefills that a scheduled step starts, and revoke those that it preempted.

        Returns the step's number, with which its workers report its end; 0 if no offer grows in it.
        """
        for request_id in scheduled.preempted_req_ids or ():
            self._revoke(self._prefills.get(request_id))
        if not self._prefills:
            return 0
        self._step += 1
        cached = scheduled.scheduled_cached_reqs
        before = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in self._prefills.keys() & before.keys():
            num_complete = before[request_id] + scheduled.num_scheduled_tokens[request_id]
            prefill = self._prefills[request_id]
            if before[request_id] < prefill.num_scheduled:
                self._revoke(prefill)  # another connector's load failed: vLLM recomputes tokens
            prefill.num_scheduled = num_complete
            if offer := self._offer(source, prefill):
                self._computed.append(_Computed(self._step, request_id, offer, num_complete))
        return self._step if self._computed else 0

    @staticmethod
    def _revoke(prefill: _Prefill | None) -> None:
        if prefill is not None and prefill.offer is not None:
            prefill.offer.revoke()
            prefill.offer, prefill.num_scheduled = None, 0

    def _offer(self, source: SourceEngine, prefill: _Prefill) -> GrowingOffer | None:
        if prefill.offer is None:
            request, prefill.num_offers = prefill.request, prefill.num_offers + 1
            name = f"prefill {prefill.num_offers} of {request.request_id}"[:200]
            tables = self._tables(request)
            try:
                prefill.offer = source.open(
                    name,
                    tables,
                    request.num_prompt_tokens,
                    transfer=prefill.transfer,
                    digest=prefill.digest,
                )
            except SpecError as refusal:
                log.warning("%s is not offered for overlap: %s", request.request_id, refusal)
                del self._prefills[request.request_id]
                return None
            self._names[name] = request.request_id
        return prefill.offer

    def _tables(self, request: Request) -> dict[str, BlockTable]:
        """The request's current blocks of the groups that keep all of their tokens."""
        if self._manager is None:
            return {}
        block_ids = self._manager.get_block_ids(request.request_id)
        tables = self._groups.tables(block_ids, request.num_prompt_tokens)
        return {name: table for name, table in tables.items() if name in self._groups.early}

    def computed(self, step: int) -> None:
        """The output of a step has arrived: its tokens become readable."""
        while self._computed and self._computed[0].step <= step:
            done = self._computed.popleft()
            prefill = self._prefills.get(done.request_id)
            if prefill is None or prefill.offer is not done.offer:
                continue  # ended or preempted since
            known = done.offer.ticket.num_complete
            most = prefill.request.num_prompt_tokens - 1  # its end brings the last stage
            num_complete = min(done.num_complete - self._groups.num_unfinished, most)
            if num_complete // PART_TOKENS > known // PART_TOKENS:
                try:
                    done.offer.grow(self._tables(prefill.request), num_complete)
                except SpecError as error:  # its blocks were replaced
                    log.warning("%s is not read during its prefill: %s", done.request_id, error)
                    self._revoke(prefill)

    def take(self, request_id: str) -> GrowingOffer | None:
        """Remove a request that ends; returns its offer, if it has one."""
        self._declined.discard(request_id)
        prefill = self._prefills.pop(request_id, None)
        return prefill.offer if prefill else None

    def is_declined(self, request_id: str) -> bool:
        return request_id in self._declined

    def close(
        self, request_id: str, offer: GrowingOffer, tables: Mapping[str, BlockTable], held_from: int
    ) -> Ticket:
        """Close the offer of a request that has ended. Its blocks stay pinned until the offer is released."""
        ticket = offer.close(tables, held_from=held_from)
        self._closed[request_id] = ticket.ticket_id
        return ticket

    def released(self, released: Released) -> str:
        """The request whose blocks vLLM may free now; empty if the offer ended before its prefill."""
        request_id = self._names.pop(released.request_id, "")
        if not request_id:
            return released.request_id
        if self._closed.get(request_id) == released.ticket_id:
            del self._closed[request_id]
            return request_id
        prefill = self._prefills.get(request_id)
        if prefill and prefill.offer and prefill.offer.ticket.ticket_id == released.ticket_id:
            # Its reader failed or never came: the finished prefill is offered like any other.
            del self._prefills[request_id]
            if released.reason in ("declined", "withdrawn"):  # withdrawn: this engine is its own reader
                self._declined.add(request_id)
        return ""
