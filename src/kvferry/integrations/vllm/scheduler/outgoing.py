"""The producer: offers finished prefills, and pins their blocks until a reader is done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.endpoint import SourceEngine
from kvferry.endpoint.invitation import Invitation
from kvferry.endpoint.source import GrowingOffer
from kvferry.errors import SpecError
from kvferry.integrations.vllm.scheduler.growing import GrowingPrefills
from kvferry.integrations.vllm.scheduler.soft import SoftOffers
from kvferry.integrations.vllm.scheduler.tables import (
    UNIDENTIFIED,
    Adapters,
    BlockIds,
    Groups,
    digest,
    is_identified,
)
from kvferry.integrations.vllm.shared.options import Options
from kvferry.integrations.vllm.shared.step import StepMetadata
from kvferry.log import log_of
from kvferry.runtime.figures import Figures
from kvferry.wire.messages import Join
from kvferry.wire.ticket import Ticket, to_text

log = log_of(__name__)

TICKET, TICKETS = "kvferry_ticket", "kvferry_tickets"
TRANSFER, OVERLAP = "kvferry_transfer", "kvferry_overlap"
"""Keys of ``kv_transfer_params`` besides vLLM's own. ``TRANSFER``: a router's name for a prefill whose decode
it sends at once. ``OVERLAP``: whether an engine's prefills can be read while it computes them."""
MAX_TRANSFER = 64
"""Maximum length of a router's name for a prefill, in characters."""


class Outgoing:
    """The lease authority of a vLLM engine."""

    def __init__(
        self, vllm_config: VllmConfig, groups: Groups, options: Options, engine: str, adapters: Adapters
    ) -> None:
        parallel = vllm_config.parallel_config
        self._groups, self._options, self._adapters = groups, options, adapters
        self._ours = {
            "remote_engine_id": engine,
            "tp_size": parallel.tensor_parallel_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
        }
        """This engine in answers, under vLLM's own keys."""
        self._source: SourceEngine | None = None
        self.soft = SoftOffers(groups, adapters, vllm_config)
        self.growing = GrowingPrefills(groups, adapters, is_alone=parallel.data_parallel_size == 1)
        self._prefilling: dict[str, bool] = {}
        """Prefills for other engines, and whether their prompts were trimmed."""
        self._invitation: Invitation | None = None
        """Not sent to the workers yet."""
        self._ending: set[str] = set()
        """Released requests that not all workers have reported to vLLM yet."""

    def admit(self, joins: Sequence[Join]) -> None:
        if self._source is not None:
            return
        options = self._options
        self._source = SourceEngine(
            self._ours["remote_engine_id"],
            len(joins),
            listen=options.listen,
            advertise=options.advertise,
            trust=options.trust,
            timing=options.timing,
        )
        for join in joins:
            self._source.admit(join, joins_later=True)
        self._invitation = self._source.invitation
        log.info("%s: requests can be fetched from %s", self._source.engine, self._source.address)

    def new_request(self, request: Request) -> None:
        """Trim a prefill for another engine by the tokens that the other engine computes itself."""
        num_left_out = self._groups.num_left_out
        if not _is_for_others(request.kv_transfer_params):
            return
        self._prefilling[request.request_id] = False
        if not is_identified(request) or request.resumable:
            return  # prompts with embeddings and streamed prompts cannot be trimmed
        if num_left_out and request.num_prompt_tokens > num_left_out:
            # The caller may reuse the list: replace it, do not change it.
            request.prompt_token_ids = request.prompt_token_ids[:-num_left_out]
            del request._all_token_ids[-num_left_out:]
            request.num_prompt_tokens -= num_left_out
            request.max_tokens = 1
            self._prefilling[request.request_id] = True
        transfer, is_cut = _transfer(request), self._prefilling[request.request_id]
        if transfer and (is_cut or not num_left_out):
            self.growing.new_request(request, transfer)

    def finished(
        self, request: Request, block_ids: BlockIds, loaded_from: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: if another engine decodes it, pin its blocks and issue a ticket.

        ``loaded_from``: the blocks may lack tokens before this one, because a load did not fill them.
        """
        is_cut = self._prefilling.pop(request.request_id, False)
        if self._source is None or not request.kv_transfer_params:
            return False, None
        is_good = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not _is_for_others(request.kv_transfer_params):
            ticket = self._soft_offer(self._source, request) if is_good else None
            return False, self._params(request, block_ids, ticket) if ticket else None
        is_declined = self.growing.is_declined(request.request_id)
        growing = self.growing.take(request.request_id)
        why = "its reader does not need it" if is_declined else "the prefill was aborted"
        if is_good and not is_declined:
            try:
                ticket = self._offer(self._source, request, block_ids, loaded_from, growing, is_cut=is_cut)
            except SpecError as refusal:
                why = str(refusal)
                log.warning("%s is not offered: %s", request.request_id, why)
            else:
                return True, self._params(request, block_ids, ticket)
        if growing:
            growing.revoke()
        if transfer := _transfer(request):
            self._source.refuse(transfer, why)
        return False, self._no_ticket(request) if is_good else None

    def _offer(
        self,
        source: SourceEngine,
        request: Request,
        block_ids: BlockIds,
        loaded_from: int,
        growing: GrowingOffer | None,
        *,
        is_cut: bool,
    ) -> Ticket:
        """Offer a finished prefill, or close the offer that grew with it; raises SpecError."""
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._check(request, block_ids, num_tokens, is_cut=is_cut)
        tables = self._groups.tables(block_ids, num_tokens)
        held_from = max(loaded_from, self._groups.held_from(tables, num_tokens))
        if growing is not None:
            if growing.ticket.num_tokens == num_tokens:
                return self.growing.close(request.request_id, growing, tables, held_from)
            growing.revoke()  # opened for another number of tokens
        return source.offer(
            request.request_id,
            tables,
            num_tokens,
            digest=digest(request, num_tokens, self._adapters),
            held_from=held_from,
            transfer=_transfer(request),
        )

    def _soft_offer(self, source: SourceEngine, request: Request) -> Ticket | None:
        try:
            return self.soft.offer(source, request)
        except SpecError as refusal:
            log.warning("%s is not offered for the next turn: %s", request.request_id, refusal)
            return None

    def _check(self, request: Request, block_ids: BlockIds, num_tokens: int, *, is_cut: bool) -> None:
        """Raise SpecError if a reader could not use the blocks."""
        if not num_tokens or not any(block_ids):
            raise SpecError("it has no blocks in the KV cache")
        if not is_identified(request):
            raise SpecError(UNIDENTIFIED)
        if self._groups.has_state and request.num_computed_tokens != num_tokens:
            raise SpecError(
                f"its recurrent state includes {request.num_computed_tokens} tokens, but its prompt has only"
                f" {num_tokens}: request the prefill with max_tokens=1"
            )
        if self._groups.num_left_out and not is_cut:
            count = self._groups.num_left_out
            raise SpecError(
                f"this model needs prompts trimmed by {count} token{'s' * (count > 1)} before prefill, but"
                " this prompt is too short, or is streamed"
            )

    def is_prefilling(self, request_ids: Collection[str]) -> bool:
        return not self._prefilling.keys().isdisjoint(request_ids)

    def take_back(self, ticket: Ticket) -> bool:
        return self._source is not None and self._source.take_back(ticket)

    def _params(self, request: Request, block_ids: BlockIds, ticket: Ticket) -> dict[str, Any]:
        """Parameters for a router to pass to the decoding engine; vLLM's own keys keep their meaning."""
        host, _, port = ticket.authority.removeprefix("tcp://").rpartition(":")
        return {
            "do_remote_prefill": not ticket.is_soft,
            "do_remote_decode": ticket.is_soft,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": int(port) if port.isdigit() else 0,
            **self._ours,
            "remote_num_tokens": ticket.num_tokens,
            TICKET: to_text(ticket),
            OVERLAP: self.growing.is_able,
        }

    def _no_ticket(self, request: Request) -> dict[str, Any]:
        """An answer for a router: the decoding engine computes the whole prompt itself."""
        return {
            "do_remote_prefill": False,
            "do_remote_decode": False,
            "remote_engine_id": self._ours["remote_engine_id"],
            "remote_request_id": request.request_id,
        }

    @property
    def num_leases(self) -> int:
        return self._source.num_leases if self._source is not None else 0

    @property
    def has_pinned(self) -> bool:
        """Whether blocks are pinned: the engine must step until they are free."""
        return self.num_leases > 0 or bool(self._ending) or self.soft.must_step

    @property
    def generation(self) -> int:
        return self._source.generation if self._source is not None else 0

    @property
    def figures(self) -> Figures:
        return self._source.figures if self._source is not None else {}

    def tell(self, step: StepMetadata, scheduled: SchedulerOutput) -> None:
        """Report requests that were read, or whose lease is over, to the workers, each once."""
        if self._source is None:
            return
        step.number = self.growing.step(self._source, scheduled)
        self.soft.serve(self._source)
        for released in self._source.poll():
            request_id = self.growing.released(released)
            if self.soft.is_claim(released.request_id) or not request_id:
                step.unclaimed.append(released)
            else:
                step.released.append(replace(released, request_id=request_id))
                self._ending.add(request_id)

    def freed(self, request_ids: Iterable[str]) -> None:
        self._ending.difference_update(request_ids)

    def take_invitation(self) -> Invitation | None:
        """The workers' invitation, once. They are admitted without it, but join to compute digests."""
        invitation, self._invitation = self._invitation, None
        return invitation

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _transfer(request: Request) -> str:
    """A router's name for a prefill, under which it can be read before its end."""
    name = (request.kv_transfer_params or {}).get(TRANSFER)
    return name if isinstance(name, str) and 0 < len(name) <= MAX_TRANSFER else ""


def _is_for_others(params: dict[str, Any] | None) -> bool:
    return bool(params and params.get("do_remote_decode"))
