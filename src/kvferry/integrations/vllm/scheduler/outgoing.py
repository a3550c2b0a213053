"""As a producer: finished prefills are offered, and their blocks stay pinned until a reader is through."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.request import Request, RequestStatus

from kvferry.endpoint import SourceEngine
from kvferry.endpoint.invitation import Invitation
from kvferry.errors import SpecError
from kvferry.integrations.vllm.scheduler.tables import Adapters, BlockIds, Groups, digest, is_identified
from kvferry.integrations.vllm.shared.options import Options
from kvferry.log import log_of
from kvferry.runtime import Released
from kvferry.runtime.figures import Figures
from kvferry.wire.messages import Join
from kvferry.wire.ticket import Ticket, to_text

log = log_of(__name__)

TICKET = "kvferry_ticket"
"""The key of ``kv_transfer_params`` that carries the ticket; the others are vLLM's own."""


class Outgoing:
    """The lease authority of a vLLM engine."""

    def __init__(
        self, vllm_config: VllmConfig, groups: Groups, options: Options, engine: str, adapters: Adapters
    ) -> None:
        self._parallel, self._adapters = vllm_config.parallel_config, adapters
        self._groups, self._options, self._engine = groups, options, engine
        self._source: SourceEngine | None = None
        self._cut: set[str] = set()
        """Requests whose prompts were cut."""
        self._prefilling: set[str] = set()
        """Requests for other engines that are being computed."""
        self._invitation: Invitation | None = None
        """What the workers have not been told yet."""
        self._ending: set[str] = set()
        """Requests whose release was told to the workers, and not yet by all of them to vLLM."""

    def admit(self, joins: Sequence[Join]) -> None:
        """Every worker's memory is known: readers may come."""
        if self._source is not None:
            return
        options = self._options
        self._source = SourceEngine(
            self._engine,
            len(joins),
            listen=options.listen,
            advertise=options.advertise,
            trust=options.trust,
            timing=options.timing,
        )
        for join in joins:
            self._source.admit(join, joins_later=True)
        self._invitation = self._source.invitation
        log.info("%s: requests can be fetched from %s", self._engine, self._source.address)

    def new_request(self, request: Request) -> None:
        """A prefill for somebody else leaves out the tokens that the other side computes anyway."""
        num_left_out = self._groups.num_left_out
        if not _is_for_others(request.kv_transfer_params):
            return
        self._prefilling.add(request.request_id)
        if not is_identified(request) or request.resumable:
            return  # a prompt that is not all tokens, or goes on later, cannot be cut
        if num_left_out and request.num_prompt_tokens > num_left_out:
            # The list may be the caller's own, who will use it again: it is not changed but replaced.
            request.prompt_token_ids = request.prompt_token_ids[:-num_left_out]
            del request._all_token_ids[-num_left_out:]
            request.num_prompt_tokens -= num_left_out
            request.max_tokens = 1
            self._cut.add(request.request_id)

    def finished(
        self, request: Request, block_ids: BlockIds, loaded_from: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: if somebody else is to decode it, keep its blocks and hand out a ticket.

        ``loaded_from``: the blocks may lack tokens before this one, because a load did not bring them.
        """
        is_cut = request.request_id in self._cut
        self._cut.discard(request.request_id)
        self._prefilling.discard(request.request_id)
        if self._source is None or not _is_for_others(request.kv_transfer_params):
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        try:
            self._check(request, block_ids, num_tokens, is_cut=is_cut)
            tables = self._groups.tables(block_ids, num_tokens)
            ticket = self._source.offer(
                request.request_id,
                tables,
                num_tokens,
                digest=digest(request, num_tokens, self._adapters),
                held_from=max(loaded_from, self._groups.held_from(tables, num_tokens)),
            )
        except SpecError as refusal:
            log.warning("%s is not offered: %s", request.request_id, refusal)
            return False, self._no_ticket(request)
        return True, self._params(request, block_ids, ticket)

    def _check(self, request: Request, block_ids: BlockIds, num_tokens: int, *, is_cut: bool) -> None:
        """Raise if what is in the blocks could not be used."""
        if not num_tokens or not any(block_ids):
            raise SpecError("it has no blocks in the cache")
        if not is_identified(request):
            raise SpecError(
                "its prompt has parts without token ids: a reader could not check that it is the same prompt"
            )
        if self._groups.has_state and request.num_computed_tokens != num_tokens:
            raise SpecError(
                f"its recurrent state includes {request.num_computed_tokens} tokens, but its prompt has only"
                f" {num_tokens}: request the prefill with max_tokens=1"
            )
        if self._groups.num_left_out and not is_cut:
            count = self._groups.num_left_out
            raise SpecError(
                f"its prompt was not trimmed by {count} token{'s' * (count > 1)} before prefill, which this"
                " model needs: it is too short, or is sent in pieces"
            )

    def is_prefilling(self, request_ids: Collection[str]) -> bool:
        """Whether one of these requests is computed for another engine."""
        return not self._prefilling.isdisjoint(request_ids)

    def take_back(self, ticket: Ticket) -> bool:
        """Whether a ticket is one of our own; then it pins nothing more."""
        return self._source is not None and self._source.take_back(ticket)

    def _params(self, request: Request, block_ids: BlockIds, ticket: Ticket) -> dict[str, Any]:
        """What a router hands to the decoding engine; vLLM's own keys keep their meaning."""
        host, _, port = ticket.authority.removeprefix("tcp://").rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": int(port) if port.isdigit() else 0,
            "tp_size": self._parallel.tensor_parallel_size,
            "dcp_size": self._parallel.decode_context_parallel_size,
            "pp_size": self._parallel.pipeline_parallel_size,
            "remote_num_tokens": ticket.num_tokens,
            TICKET: to_text(ticket),
        }

    def _no_ticket(self, request: Request) -> dict[str, Any]:
        """For a router that expects an answer: whoever decodes computes the whole prompt itself."""
        return {
            "do_remote_prefill": False,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
        }

    @property
    def num_leases(self) -> int:
        """How many requests are pinned, whose release the engine has to notice."""
        return self._source.num_leases if self._source is not None else 0

    @property
    def has_pinned(self) -> bool:
        """Whether blocks are not the engine's own yet: it has to make steps until they are."""
        return self.num_leases > 0 or bool(self._ending)

    @property
    def generation(self) -> int:
        """Which start of the lease authority this is; 0 if there is none."""
        return self._source.generation if self._source is not None else 0

    @property
    def figures(self) -> Figures:
        return self._source.figures if self._source is not None else {}

    def released(self) -> list[Released]:
        """The requests that are read, or whose lease is over, each once, for the workers."""
        released = self._source.poll() if self._source is not None else []
        self._ending.update(each.request_id for each in released)
        return released

    def freed(self, request_ids: Iterable[str]) -> None:
        """Every worker is through with these requests: vLLM has their blocks back."""
        self._ending.difference_update(request_ids)

    def take_invitation(self) -> Invitation | None:
        """Where the workers join, once. They are part of the engine without it, but take no digests."""
        invitation, self._invitation = self._invitation, None
        return invitation

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _is_for_others(params: dict[str, Any] | None) -> bool:
    return bool(params and params.get("do_remote_decode"))
