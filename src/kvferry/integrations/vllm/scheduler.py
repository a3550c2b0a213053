"""The connector's part in vLLM's scheduler: which requests are offered, and which are fetched."""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.request import Request, RequestStatus

from kvferry.core.request import HOLE, BlockTable, need_of
from kvferry.core.span import Span, Spans
from kvferry.endpoint import SourceEngine
from kvferry.errors import SpecError
from kvferry.integrations.vllm.describe import _group, group_name
from kvferry.integrations.vllm.options import Options
from kvferry.wire.messages import Join
from kvferry.wire.ticket import Ticket, from_text, to_text

TICKET = "kvferry_ticket"
"""The key of ``kv_transfer_params`` that carries the ticket."""
NULL_BLOCK = 0
"""vLLM's own null block: a hole in a block table."""
IDLE_SECONDS = 0.005


@dataclass(frozen=True)
class Load:
    """A request that a worker must fetch."""

    request_id: str
    ticket: Ticket | None
    """None: it cannot be fetched, for ``reason``; the worker reports it as failed."""
    tables: dict[str, BlockTable]
    need: dict[str, Spans]
    kept: dict[str, Spans]
    reason: str = ""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler tells every worker in one step."""

    loads: list[Load] = field(default_factory=list)
    released: list[str] = field(default_factory=list)


class SchedulerSide:
    """Offers finished prefills, and turns tickets of new requests into loads."""

    def __init__(self, vllm_config: VllmConfig, config: KVCacheConfig, options: Options) -> None:
        self._vllm_config, self._config, self._options = vllm_config, config, options
        transfer = vllm_config.kv_transfer_config
        self._engine_id: str = transfer.engine_id or secrets.token_hex(8)
        self._source: SourceEngine | None = None
        self._loads: list[Load] = []
        self._computed: dict[str, int] = {}

    # -- as a producer -----------------------------------------------------------------------------

    def admit(self, joins: Sequence[Join]) -> None:
        """Every worker's memory is known: readers may come."""
        if self._source is None and self._vllm_config.kv_transfer_config.is_kv_producer:
            self._source = SourceEngine(
                self._engine_id,
                len(joins),
                listen=self._options.listen,
                advertise=self._options.advertise,
                secret=self._options.secret,
                timing=self._options.timing,
            )
            for join in joins:
                self._source.admit(join)

    def new_request(self, request: Request) -> None:
        """A prefill for somebody else leaves out the tokens that the other side computes anyway."""
        params = request.kv_transfer_params
        backoff = self._backoff()
        if not params or not params.get("do_remote_decode") or not backoff or params.get("_truncated"):
            return
        if request.num_prompt_tokens > backoff and request.prompt_token_ids is not None:
            del request.prompt_token_ids[-backoff:]
            del request._all_token_ids[-backoff:]
            request.num_prompt_tokens -= backoff
            request.max_tokens = 1
            params["_truncated"] = True

    def finished(
        self, request: Request, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: if somebody else is to decode it, keep its blocks and hand out a ticket."""
        self._computed.pop(request.request_id, None)
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode") or self._source is None:
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if not num_tokens or not any(block_ids):
            return False, None
        tables = self._tables(block_ids)
        ticket = self._source.offer(
            request.request_id, tables, num_tokens, digest=digest(request.prompt_token_ids or [], num_tokens)
        )
        return True, self._params(request, block_ids, ticket)

    def _params(self, request: Request, block_ids: Sequence[list[int]], ticket: Ticket) -> dict[str, Any]:
        host, _, port = ticket.authority.removeprefix("tcp://").rpartition(":")
        parallel = self._vllm_config.parallel_config
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(ids) for ids in block_ids],
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": parallel.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": parallel.pipeline_parallel_size,
            "remote_num_tokens": ticket.num_tokens,
            TICKET: to_text(ticket),
        }

    @property
    def must_step(self) -> bool:
        """Whether blocks are pinned, whose release the engine has to notice."""
        return self._source is not None and self._source.num_leases > 0

    # -- as a consumer -----------------------------------------------------------------------------

    def matched(self, request: Request, num_computed: int) -> tuple[int, bool]:
        """How many tokens a ticket brings beyond those that are here already."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        num_tokens = self._num_loadable(request, params)
        self._computed[request.request_id] = num_computed
        count = num_tokens - num_computed
        return (count, True) if count > 0 else (0, False)

    def _num_loadable(self, request: Request, params: dict[str, Any]) -> int:
        prompt = request.num_prompt_tokens
        backoff = self._backoff()
        most = prompt - backoff if prompt > backoff else prompt
        ticket = _ticket(params)
        return most if ticket is None else min(most, ticket.num_tokens)

    def allocated(self, request: Request, block_ids: Sequence[list[int]], num_external: int) -> None:
        """The request has blocks to load into."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # a ticket is good for one load
        num_computed = self._computed.pop(request.request_id, 0)
        if num_external > 0:
            self._loads.append(self._load(request, params, block_ids, num_computed, num_external))

    def _load(
        self,
        request: Request,
        params: dict[str, Any],
        block_ids: Sequence[list[int]],
        num_computed: int,
        num_external: int,
    ) -> Load:
        ticket = _ticket(params)
        reason = ""
        if ticket is None:
            reason = f"kv_transfer_params carry no ticket ({TICKET})"
        elif ticket.digest != digest(request.prompt_token_ids or [], ticket.num_tokens):
            reason = "the ticket is for another prompt"
        num_tokens = num_computed + num_external
        groups = {i: _group(self._config, i) for i in self._config.transfer_group_ids}
        need = {g.name: need_of(g, num_tokens, num_computed) for g in groups.values()}
        kept: dict[str, Spans] = {g.name: (Span(0, num_computed),) for g in groups.values() if num_computed}
        tables = self._tables(block_ids)
        return Load(request.request_id, None if reason else ticket, tables, need, kept, reason)

    # -- both --------------------------------------------------------------------------------------

    def step(self, *, is_idle: bool) -> StepMetadata:
        """What happened since the last step."""
        if is_idle and self.must_step and not self._loads:
            time.sleep(IDLE_SECONDS)  # steps are made only to notice releases: no need to hurry
        released = [r.request_id for r in self._source.poll()] if self._source else []
        loads, self._loads = self._loads, []
        return StepMetadata(loads, released)

    def close(self) -> None:
        """Stop listening."""
        if self._source is not None:
            self._source.close()

    def _tables(self, block_ids: Sequence[list[int]]) -> dict[str, BlockTable]:
        """Block tables by group: null blocks are holes, a state is its one slot."""
        tables = {}
        for index in self._config.transfer_group_ids:
            spec = self._config.kv_cache_groups[index].kv_cache_spec
            ids = list(block_ids[index])
            if isinstance(spec, MambaSpec):
                scratch = min(spec.num_speculative_blocks, len(ids) - 1)
                ids = ids[: len(ids) - scratch][-1:]
            holes = [HOLE if block == NULL_BLOCK else block for block in ids]
            tables[group_name(index)] = BlockTable.of(holes)
        return tables

    def _backoff(self) -> int:
        """How many last tokens of a prompt the decoding side computes itself."""
        recurrent = 1 if self._config.has_mamba_layers else 0
        return max(recurrent, self._vllm_config.num_prefill_lookahead_tokens - 1)


def _ticket(params: dict[str, Any]) -> Ticket | None:
    try:
        return from_text(params[TICKET]) if isinstance(params.get(TICKET), str) else None
    except SpecError:
        return None


def digest(token_ids: Sequence[int], num_tokens: int) -> bytes:
    """What a ticket says of its prompt."""
    return hashlib.blake2b(array("q", token_ids[:num_tokens]).tobytes(), digest_size=16).digest()
