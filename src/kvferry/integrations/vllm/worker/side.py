"""The connector in a vLLM worker: registers memory, fetches loads, and reports results."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry.core.manifest import Manifest
from kvferry.endpoint import Destination
from kvferry.endpoint.gathering import RankGathering, open_gathering
from kvferry.endpoint.invitation import Invitation
from kvferry.endpoint.load_digest import default_digest_every
from kvferry.endpoint.metric_table import Changes
from kvferry.endpoint.source_rank import MemberThread
from kvferry.integrations.known_vllm import Standing, standing_of
from kvferry.integrations.vllm.shared.dump import dump_refusal
from kvferry.integrations.vllm.shared.identity import engine_identity
from kvferry.integrations.vllm.shared.options import Options
from kvferry.integrations.vllm.shared.stats import LoadStats
from kvferry.integrations.vllm.shared.step import Load, StepMetadata, StepNews
from kvferry.integrations.vllm.worker.describe import WorkerRank, describe
from kvferry.integrations.vllm.worker.layout_check import LayoutCheck
from kvferry.log import log_of
from kvferry.runtime import Failure, FailureCode, Released, Report
from kvferry.transport.base import Transport
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import Expose
from kvferry.wire.messages import Join
from kvferry.wire.outline import join_of
from kvferry.wire.reading import printable
from kvferry.wire.ticket import Ticket

log = log_of(__name__)


@dataclass(slots=True)
class _Ongoing:
    """A request whose tickets are held, or that is being loaded."""

    tickets: tuple[Ticket, ...]
    handle: int
    is_awaited: bool = False
    """Whether vLLM waits for it, because it has blocks."""
    lost: Failure | None = None
    """Why its ticket could not be held; reported when vLLM waits for the load."""
    mark: torch.cuda.Event | None = None
    """The event that the load waits for; kept alive until the load ends."""


class WorkerSide:
    """One worker's memory, and the loads in progress into it."""

    def __init__(self, vllm_config: VllmConfig, config: KVCacheConfig, options: Options) -> None:
        self._vllm_config, self._config, self._options = vllm_config, config, options
        self._destination: Destination | None = None
        self._manifest: Manifest | None = None
        self.join: Join | None = None
        """This worker's registration with the lease authority."""
        self._member: MemberThread | None = None
        """Computes the digests that readers request."""
        self._gathering: RankGathering | None = None
        self._ongoing: dict[str, _Ongoing] = {}
        """Requests that are held or loading, or could not be held."""
        self._requests: dict[int, str] = {}
        """Handle -> request."""
        self._failed: set[str] = set()
        self._sent: deque[str] = deque()
        """Requests that are no longer sent to readers; other threads append."""
        self._unclaimed: deque[str] = deque()
        """The same for claims."""
        self._stats, self._changes = LoadStats(), Changes()
        self._device: torch.device | None = None
        """The caches' GPU; None for the CPU."""
        self._mark: torch.cuda.Event | None = None
        self._step_number = 0
        """The current step's number, if the scheduler needs to know its end; else 0."""
        self._is_for_others = False
        """Whether another engine may read the step's output as soon as the step ends."""
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        self._is_recomputing = policy == "recompute"
        """Whether vLLM recomputes failed loads, so that their tickets are no longer needed."""

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        tp, pp = get_tp_group(), get_pp_group()
        engine = self._vllm_config.kv_transfer_config.engine_id or "vllm"
        rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
        place = WorkerRank(engine, rank, tp.rank_in_group, tp.world_size)
        identity = engine_identity(self._vllm_config, self._options)
        check = LayoutCheck.of(
            self._vllm_config,
            is_tested=standing_of(vllm.__version__) is Standing.TESTED,
            is_required=self._options.is_layout_required,
        )
        manifest = describe(self._vllm_config, self._config, caches, place, check)
        manifest = replace(manifest, identity=identity)
        _wake_up_amx(caches)
        self._device = next((tensor.device for tensor in caches.values() if tensor.is_cuda), None)
        options, digest_every = self._options, self._options.digest_every
        if digest_every is None:
            digest_every = default_digest_every(manifest.rank(rank))
        transport = ProcessTransport(way=options.way, expose=options.expose, backend=options.backend)
        self._destination = Destination(
            manifest,
            rank,
            transport,
            reader=f"{engine}#{self._vllm_config.instance_id}",
            num_ranks=tp.world_size * pp.world_size,
            trust=options.trust,
            timing=options.timing,
            on_refusal=lambda source, why: dump_refusal(options.dump, source, manifest, rank, str(why)),
            digest_every=digest_every,
            accept_unknown_identity=options.is_identity_unchecked,
        )
        self._manifest = manifest
        if self._vllm_config.kv_transfer_config.is_kv_producer:
            self._gathering = self._open_gathering(manifest, transport)
        rank_key = self._gathering.rank_key if self._gathering else b""
        if self._gathering or options.expose is not Expose.NOTHING:  # else it cannot serve reads
            self.join = join_of(manifest, transport.kind, transport.card(), rank_key=rank_key)

    def _open_gathering(self, manifest: Manifest, transport: Transport) -> RankGathering | None:
        listen, advertise, trust = self._options.rank_listen, self._options.advertise, self._options.trust
        gathering = open_gathering(manifest, transport, listen=listen, advertise=advertise, trust=trust)
        if gathering is not None:
            log.info("rank %d serves packed reads at %s", manifest.ranks[0].rank, gathering.address)
        return gathering

    def mark(self, step: StepMetadata) -> None:
        """Record a CUDA event that the step's loads wait for: vLLM has zeroed their blocks, but not yet
        launched the forward pass, for which they need not wait.
        """
        self._mark, self._is_for_others, self._step_number = None, step.is_for_others, step.number
        if step.loads and self._device is not None:
            self._mark = torch.cuda.Event()
            self._mark.record(torch.cuda.current_stream(self._device))

    def finish_step(self) -> None:
        """Wait for the step's draft model if another engine may read its output: vLLM returns a step when the
        sampled tokens are available, before the draft model has finished.
        """
        is_drafting = self._vllm_config.speculative_config is not None
        if self._is_for_others and is_drafting and self._device is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def start(self, step: StepMetadata) -> None:
        if step.invitation is not None:
            self._join_authority(step.invitation)
        for released in step.released:
            self._end(released, step.generation, self._sent)
        for released in step.unclaimed:
            self._end(released, step.generation, self._unclaimed)
        for request_id, unused in step.dropped:
            self._drop(request_id, unused)
        for request_id, tickets in step.known:
            self._hold(request_id, tickets)
        for load in step.loads:
            self._load(load)

    def _end(self, released: Released, generation: int, ended: deque[str]) -> None:
        """Stop serving a request to readers; vLLM frees its blocks once this is reported.

        A gather in progress ends first, so the report may go out with a later step.
        """
        then = partial(ended.append, released.request_id)
        if self._gathering is not None:
            self._gathering.service.revoke(generation, released.ticket_id, then)
        else:
            then()

    def _join_authority(self, invitation: Invitation) -> None:
        """Join the lease authority, to compute digests. Releases arrive with vLLM's steps and do not wait for
        digests; a late digest is not used.
        """
        if self.join is not None and self._manifest is not None and self._member is None:
            join = self.join.invited(invitation.credential)
            trust, timing = self._options.trust, self._options.timing
            self._member = MemberThread(invitation.address, self._manifest, join, trust=trust, timing=timing)

    def _hold(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        if self._destination is not None:
            handle = self._destination.hold(tickets)
            self._ongoing[request_id], self._requests[handle] = _Ongoing(tickets, handle), request_id

    def _load(self, load: Load) -> None:
        request_id, destination = load.request_id, self._destination
        ongoing = self._ongoing.pop(request_id, None)
        lost = ongoing.lost if ongoing else None
        if not load.tickets or load.refusal or lost or destination is None:
            if why := load.refusal or lost:
                log.error("%s cannot be loaded: %s", request_id, why)
            self._fail(request_id, load.tickets)
            return
        handle = destination.fetch(
            load.tickets,
            load.tables,
            load.need,
            kept=load.kept,
            held=ongoing.handle if ongoing else None,
            after=self._mark.cuda_event if self._mark else None,
            num_tokens=load.num_tokens,
        )
        self._ongoing[request_id] = _Ongoing(load.tickets, handle, is_awaited=True, mark=self._mark)
        self._requests[handle] = request_id

    def _fail(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Report a load as failed, and decline its tickets if vLLM recomputes the prompt. If vLLM fails the
        request instead, a router may retry on another engine with the same ticket.
        """
        self._failed.add(request_id)
        if self._is_recomputing and self._destination is not None:
            for ticket in tickets:
                self._destination.decline(ticket)

    def _drop(self, request_id: str, unused: tuple[Ticket, ...]) -> None:
        """Abort a load or hold. vLLM keeps a load's blocks until the load is reported; a hold has none."""
        ongoing, destination = self._ongoing.get(request_id), self._destination
        if destination is None:
            return
        if ongoing is not None and ongoing.lost is None:
            destination.abort(ongoing.handle)
        else:
            for ticket in unused:
                destination.decline(ticket)
        if ongoing is not None and not ongoing.is_awaited:
            self._requests.pop(ongoing.handle, None)
            del self._ongoing[request_id]

    def results(self) -> KVConnectorTransferResults:
        done: set[str] = set()
        for report in self._destination.poll() if self._destination else ():
            request_id = self._requests.pop(report.handle, None)
            if request_id is not None and self._is_end(request_id, report):
                done.add(request_id)
        failed, self._failed = self._failed, set()
        sent = {self._sent.popleft() for _ in range(len(self._sent))}
        done |= failed
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=done, failed_recving=failed)

    def news(self) -> StepNews | None:
        """The worker's report for the step's output: its number, and the claims that ended since the last."""
        ended = Counter(self._unclaimed.popleft() for _ in range(len(self._unclaimed)))
        number, self._step_number = self._step_number, 0
        return StepNews(number, ended) if number or ended else None

    def _is_end(self, request_id: str, report: Report) -> bool:
        """Whether to report to vLLM: loads that it waits for, each of them once."""
        ongoing = self._ongoing[request_id]
        if not ongoing.is_awaited:
            ongoing.lost = report.failure
            return False
        del self._ongoing[request_id]
        self._stats.add(report.record)
        if report.failure is not None:
            is_given_up = report.failure.code is FailureCode.ABORTED
            if not is_given_up:
                # vLLM reports no cause to the client, so it is logged here with the request's id.
                log.error("%s cannot be loaded: %s", request_id, printable(str(report.failure)))
            self._fail(request_id, () if is_given_up else ongoing.tickets)
        return True

    def stats(self) -> LoadStats | None:
        stats, self._stats = self._stats, LoadStats()
        if self._destination is not None:
            stats.change(self._changes.since(self._destination.figures))
        return None if stats.is_empty() else stats

    def status(self) -> dict[str, object]:
        """Connections, holds and loads; and packed reads, if this rank serves them."""
        gathered = {"gathering": self._gathering.service.status()} if self._gathering else {}
        return (self._destination.status() if self._destination else {}) | gathered

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
        if self._gathering is not None:
            self._gathering.service.close()  # before the memory that it reads from
        if self._destination is not None:
            self._destination.close()


def _wake_up_amx(caches: Mapping[str, torch.Tensor]) -> None:
    """Enable AMX now: vLLM does so only in its first long step, and a worker whose first step is short, as
    after a load, would die of an illegal instruction.
    """
    is_on_cpu = all(tensor.device.type == "cpu" for tensor in caches.values())
    if is_on_cpu and torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
