"""The destination side: one rank that fetches requests into its own blocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from kvferry.channel import Contact, ContactChange, Received
from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable, check_spans, check_tables
from kvferry.core.select import Slack
from kvferry.core.span import MAX_STOP, Span, Spans, normal
from kvferry.core.state import Addressing, check_range, one_of
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.gathering import ask_to_gather
from kvferry.endpoint.load_digest import TakenDigests, check_digest_every
from kvferry.endpoint.logs import LoadLog
from kvferry.endpoint.meeting import (
    MetPeer,
    NotMet,
    SharedPlan,
    SharedPlans,
    failure_of,
    meet,
    remote_name,
    source_shown,
)
from kvferry.endpoint.metric_table import REJECTED_TICKETS, MetricSide, refused_messages
from kvferry.endpoint.owner import Owner
from kvferry.endpoint.posted_reads import PostedReads, Selecting
from kvferry.endpoint.status import status_report
from kvferry.errors import SpecError
from kvferry.host.threads import quietly
from kvferry.log import log_of
from kvferry.runtime import Failure, FailureCode, Fetch, Reader, Report, Timing
from kvferry.runtime.failure import refusal
from kvferry.runtime.fetch_job import groups_in_parts
from kvferry.runtime.figures import Figures, by_label
from kvferry.runtime.joint_loads import JointLoads
from kvferry.runtime.values import (
    FAR,
    AllRead,
    Build,
    Cancel,
    Drop,
    Effect,
    FindRanks,
    HangUp,
    LookUp,
    Peer,
    PostReads,
    Record,
    Select,
    Send,
    TakeDigest,
)
from kvferry.transport.base import Transport
from kvferry.wire.messages import decode_from_authority, encode
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import Ticket, check_ticket

if TYPE_CHECKING:
    from kvferry.endpoint.metrics import EngineMetrics  # needs Prometheus' package, which may be absent

log = log_of(__name__)

POLL_SECONDS = 0.001
"""Polling interval for transports that do not signal the ends of reads."""
MAX_SOURCES_SHOWN = 100
"""Source engines that `kvferry status` lists."""
CLOSE_SECONDS = 5.0
"""How long ``close`` waits for running meetings and selections."""


class Destination:
    """One rank of a destination engine. Calls do not block; ``poll`` reports the results.

    One thread owns the state machine (``kvferry.runtime.Reader``). Calls, messages, ends of reads and results
    of slow work are put into its inbox.
    """

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        transport: Transport,
        *,
        reader: str = "",
        num_ranks: int = 0,
        trust: Trust = Trust(),  # noqa: B008  (it is frozen)
        timing: Timing | None = None,
        metrics: EngineMetrics | None = None,
        on_refusal: Callable[[Manifest, Failure], None] | None = None,
        digest_every: int = 0,
        accept_unknown_identity: bool = False,
        edges: Edges | None = None,
    ) -> None:
        """``reader`` names this *start* of the engine: the same on all ranks, new at each start.

        An engine of one rank may leave it out. ``num_ranks``: of the engine, if the manifest does not contain
        all of them. ``on_refusal`` is called in a worker thread with the manifest of an incompatible source
        engine, and the reason. ``trust``: whose tickets are accepted. ``digest_every``: compare digests of
        every n-th load before it counts; 0: of none. ``accept_unknown_identity``: accept models that are only
        partly identified. ``edges`` are for simulations.
        """
        check_digest_every(digest_every, manifest.rank(rank))
        num_ranks = num_ranks or len(manifest.ranks)
        if rank >= num_ranks:
            raise SpecError(
                f"rank {rank} of {num_ranks}: pass the manifest of the whole engine (other ranks need no"
                " addresses), or num_ranks=…"
            )
        if not reader and num_ranks > 1:
            raise SpecError(
                "reader is missing: pass the same reader=… on all ranks of the engine, and a new one at"
                " each start"
            )
        self._timing = timing or Timing()
        edges = edges or Edges.of(self._timing)
        reader = reader or f"{manifest.engine}#{edges.random_bytes(8).hex()}"
        self._plans = SharedPlans(manifest, rank, accept_unknown_identity=accept_unknown_identity)
        self._transport, self._metrics, self._on_refusal = transport, metrics, on_refusal
        self._trust, self._host, self._clock = trust, edges.host(), edges.clock
        self._log, self._started, self._is_shown = LoadLog(), self._clock(), edges.is_shown
        self._figures: Figures = {}
        self._handles = count(1)
        self._slots = {group.name for group in manifest.groups if group.addressing is Addressing.SLOT}
        self._early = groups_in_parts(manifest, rank)
        self._reports: deque[Report] = deque()
        transport.register(manifest.rank(rank).regions)
        ask_to_gather(transport, lambda: edges.open_channel("", trust.secret))
        # Used by the owner thread only.
        key = edges.random_bytes(32)
        unmet = Reader.MAX_UNMET_HERE if trust.is_one_host else Reader.MAX_UNMET
        limits = {"digest_every": digest_every, "max_unmet": unmet}
        self._reader = Reader(reader, rank, num_ranks, timing, key=key, **limits)
        self._loads = JointLoads(self._reader, self._handles)
        self._found: dict[Peer, tuple[SharedPlan, float]] = {}
        """The plans of peers in first contact, and the time that each took."""
        self._met: dict[Peer, MetPeer] = {}
        self._next_tick = float("-inf")

        self._owner = Owner(f"kvferry-dst-{rank}", self._carry_out, self._tick, edges.clock)
        self._workers = edges.make_workers(f"kvferry-work-{rank}")
        self._channel = edges.open_channel("", trust.secret)
        self._reads = PostedReads(transport, self._workers, self._owner.put, self._reader.fetches)
        self._selecting = Selecting(self._workers, self._owner.put, self._reader)
        if metrics:
            metrics.watch(self, lambda: self.figures)
        steps = self._workers, self._owner.put, self._reader.fetches, edges.random_bytes
        self._digests = TakenDigests(manifest, rank, *steps)
        edges.start_owner(self._owner)
        self._channel.start(f"kvferry-channel-{rank}", self._receive, lambda: self._owner.is_behind)
        name = f"destination-{manifest.engine}-{rank}"
        self._open_status = edges.open_status(name, lambda: self._owner.ask(self._report))

    # -- the engine's calls, from any thread -------------------------------------------------------

    def fetch(
        self,
        ticket: Ticket | Sequence[Ticket],
        tables: Mapping[str, BlockTable],
        need: Mapping[str, Spans],
        *,
        kept: Mapping[str, Spans] | None = None,
        slack: Slack = Slack.CLEAR,
        held: int | None = None,
        after: object | None = None,
        num_tokens: int | None = None,
    ) -> int:
        """Start reading a ticket's request into these blocks; returns the handle that ``poll`` reports.

        Several tickets, in order of preference, make one load: each token is read from the first ticket that
        has it, and from the next if that fails. ``held``: the handle of a ``hold`` of the same tickets, which
        is continued. ``after``: a CUDA driver event, or its address; nothing is written before the device
        reaches it. ``num_tokens``: how many tokens are there afterwards, which a ticket must cover; by
        default as many as ``need`` says and, with a recurrent state, ``kept``. Groups without a window that
        need one interval of tokens can be read in parts, from several sources and during the prefill.
        """
        tickets, tables = _checked(ticket), dict(tables)
        check_tables("dst", tables)
        need, kept = _checked_spans("need", need), _checked_spans("kept", kept or {})
        if held is not None:
            check_range("held", held, 1, MAX_STOP)
        if num_tokens is not None:
            check_range("num_tokens", num_tokens, 0, FAR)
        slack, full = one_of("slack", Slack, slack), self._full(tickets, need, kept, num_tokens)
        wanted = Fetch(tickets[0], tables, need, kept, slack, after, self._early, full=full)
        now = self._clock()
        if held is not None:
            self._owner.put(lambda _: self._loads.supply(now, held, wanted, tickets))
            return held
        return self._begin(tickets, lambda handle, good: self._loads.fetch(now, handle, wanted, good))

    def _full(
        self,
        tickets: Sequence[Ticket],
        need: Mapping[str, Spans],
        kept: Mapping[str, Spans],
        num_tokens: int | None,
    ) -> Span:
        """``Fetch.full``: a recurrent state is that of exactly these tokens."""
        has_state = any(need.get(name, (Span(0, 1),)) for name in self._slots)
        named = [*need.items(), *(kept.items() if has_state else ())]
        ends = {span.stop for name, spans in named if name not in self._slots for span in spans}
        said = {min(FAR, max(0, each.num_tokens)) for each in tickets}
        if num_tokens is None and not ends and has_state and len(said) > 1:
            return Span(0, 0)  # nothing tells which of the states it is
        last = num_tokens if num_tokens is not None else max(ends or said)
        return Span(last, last + 1 if has_state else MAX_STOP)

    def hold(self, ticket: Ticket | Sequence[Ticket]) -> int:
        """Keep a ticket's lease alive, and connect to its engine, until ``fetch`` supplies the blocks.

        For queued requests. If no ticket can be held, ``poll`` reports that once; do not ``fetch`` then.
        """
        now = self._clock()
        return self._begin(_checked(ticket), lambda handle, good: self._loads.hold(now, handle, good))

    def _begin(
        self, tickets: Sequence[Ticket], begin: Callable[[int, Sequence[Ticket]], list[Effect]]
    ) -> int:
        """Begin a load of the acceptable tickets, if there are any."""
        handle = next(self._handles)
        failures = [(ticket, refusal(ticket, self._trust, self._host)) for ticket in tickets]
        good = [ticket for ticket, failure in failures if failure is None]
        refused = [self._refuse(handle, ticket, failure) for ticket, failure in failures if failure]
        if good:
            self._owner.put(lambda _: begin(handle, good))
            return handle
        self._reports.append(refused[0])
        if self._metrics:
            self._metrics.count(refused[0])
        return handle

    def _refuse(self, handle: int, ticket: Ticket, failure: Failure) -> Report:
        """Reject a ticket without involving the owner thread, so that a flood of them costs little."""
        record = Record(
            ticket.request_id,
            ticket.engine,
            address=ticket.authority,
            outcome=failure.code.value,
            detail=failure.detail,
        )
        report = Report(handle, failure, record)
        self._log.rejected(report)
        return report

    def abort(self, handle: int) -> None:
        """Abort a fetch; it is reported once none of its reads is in flight.

        Its ticket is not needed: the source releases it once every rank of this engine has given it up.
        """
        self._owner.put(lambda now: self._loads.abort(now, handle))

    def decline(self, ticket: Ticket) -> None:
        """Return a ticket that this engine does not need and has not held; nothing is reported.

        Every rank of the engine must do it: the source waits for all of them.
        """
        _checked(ticket)
        handle = next(self._handles)
        if refusal(ticket, self._trust, self._host) is None:
            self._owner.put(lambda now: self._reader.decline(now, handle, ticket))

    def poll(self) -> list[Report]:
        """The finished fetches, each once: loaded (no failure), or failed with the reason."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    @property
    def figures(self) -> Figures:
        """Its counters and gauges, possibly slightly old; never blocks."""
        rejected = by_label(REJECTED_TICKETS.name, self._log.num_rejected)
        messages = refused_messages(MetricSide.DESTINATION, self._channel.refused, self._channel.dropped)
        return {**self._figures, **rejected, **messages}

    def status(self) -> dict[str, object]:
        """Connections, fetches in flight, refused messages. Waits for the owner thread."""
        return self._owner.ask(self._status)

    def close(self) -> None:
        """Stop: no fetch is started or reported any more; the transport waits for reads in flight.

        It waits a few seconds at most for a peer that does not answer.
        """
        if self._open_status is not None:
            self._open_status.close()
        self._digests.close()
        self._owner.close()
        if self._metrics:
            self._metrics.forget(self)
        self._workers.close(CLOSE_SECONDS)
        self._channel.close()
        self._transport.close()

    def _report(self) -> dict[str, object]:
        """The answer to `kvferry status`."""
        now, found = self._clock(), self._reader.sources()
        sources = [
            source_shown(peer, state, why, self._met.get(peer))
            for peer, (state, why) in islice(found.items(), MAX_SOURCES_SHOWN)
        ]
        status = self._status() | self._log.status()
        status |= {"sources": sources, "num_sources": len(found), "loads": self._reader.shown_loads(now)}
        del status["peers"], status["ways"]  # contained in sources
        self._figures = self._reader.figures()
        return status_report(MetricSide.DESTINATION, status, self.figures, now - self._started)

    def _status(self) -> dict[str, object]:
        ways = {
            remote_name(peer, src_rank): str(link)
            for peer, met in self._met.items()
            for src_rank, link in met.links.items()
        }
        return self._reader.status() | {
            "ways": ways,
            "plans": len(self._plans),
            "refused": dict(self._channel.refused),
            "dropped": dict(self._channel.dropped),
        }

    # -- in the owner thread -----------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in self._loads.through(self._clock(), effects):
            quietly(self._carry, effect)  # an error concerns one load, not the others

    def _carry(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._channel.send(effect.to, encode(effect.message))
            case FindRanks():
                self._workers.submit(effect.peer, partial(self._find, effect))
            case Build():
                self._workers.submit(effect.peer, partial(self._build, effect, *self._found[effect.peer]))
            case Select():
                self._selecting.start(effect, self._met[effect.peer])
            case PostReads():
                self._reads.post(effect, is_quick=self._met[effect.peer].is_quick)
            case TakeDigest():
                self._digests.take(effect, self._met.get(effect.peer))
            case LookUp():
                if self._is_shown(effect.board, effect.ticket_id, effect.mark):
                    self._carry_out(self._reader.fetches.stood(self._clock(), effect.handle))
            case Cancel():
                self._reads.cancel(effect.transfer)
            case Drop():
                self._drop(effect.peer)
            case HangUp():
                self._channel.hang_up(effect.address)
            case AllRead():
                pass  # handled by the joint loads
            case Report():
                self._log.ended(self._clock(), effect)  # before the engine can reuse the blocks
                self._reports.append(effect)
                if self._metrics:
                    self._metrics.count(effect)

    def _tick(self, now: float) -> float:
        """Collect ends and, less often, step all fetches; returns the time of the next call."""
        self._selecting.step()
        if self._reads.must_poll and self._reader.num_in_flight:
            self._carry_out(self._reads.collect(now))
        pause = self._timing.retry / 4
        if now >= self._next_tick:
            self._carry_out(self._reader.tick(now))
            self._figures = self._reader.figures()
            self._next_tick = max(self._reader.next_deadline(), now + pause)
        else:  # an event may have set a nearer deadline
            self._next_tick = min(self._next_tick, now + pause)
        must_poll = self._reads.must_poll and self._reader.num_in_flight > 0
        return min(self._next_tick, now + POLL_SECONDS) if must_poll else self._next_tick

    def _ranks_found(self, peer: Peer, shared: SharedPlan, seconds: float, now: float) -> list[Effect]:
        self._found[peer] = shared, seconds
        return self._reader.meetings.found(now, peer, shared.ranks)

    def _built(self, peer: Peer, met: MetPeer, now: float) -> list[Effect]:
        self._found.pop(peer, None)
        self._met[peer] = met
        log.log(logging.WARNING if met.identity.unknown else logging.INFO, "%s", met.summary(peer))
        return self._reader.built(now, peer, met.plan_seconds)

    def _contact(self, change: ContactChange, now: float) -> list[Effect]:
        connections = self._reader.connections
        match change.contact:
            case Contact.CALLING:
                connections.calling(now, change.address)
            case Contact.CONNECTED:
                connections.connected(change.address)
            case Contact.BROKEN:
                connections.broken(now, change.address)
            case Contact.CLOSED:
                connections.closed(change.address)
        return []

    def _drop(self, peer: Peer) -> None:
        self._found.pop(peer, None)
        met = self._met.pop(peer, None)
        for src_rank in met.links if met else ():
            self._workers.submit(peer, partial(self._transport.forget, remote_name(peer, src_rank)))

    # -- in other threads --------------------------------------------------------------------------

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, ContactChange):
            self._owner.put(partial(self._contact, received))
            return
        message, reply_to = decode_from_authority(received.data), received.reply_to
        self._owner.put(lambda now: self._reader.receive(now, reply_to, message), len(received.data))

    def _find(self, find: FindRanks) -> None:
        peer, started = find.peer, self._clock()
        try:
            shared = self._plans.find(peer.engine, find.outline)
        except Exception as error:
            failure = failure_of(error, FailureCode.BAD_MANIFEST)
            self._owner.put(lambda now: self._reader.not_built(now, peer, failure))
        else:
            self._owner.put(partial(self._ranks_found, peer, shared, self._clock() - started))

    def _build(self, build: Build, shared: SharedPlan, seconds: float) -> None:
        result = meet(build, shared, self._transport, self._clock, seconds)
        match result:
            case MetPeer():
                self._owner.put(partial(self._built, build.peer, result))
            case NotMet():
                self._owner.put(lambda now: self._reader.not_built(now, build.peer, result.failure))
                if self._on_refusal is not None and result.source is not None:
                    self._on_refusal(result.source, result.failure)


def _checked_spans(what: str, by_group: Mapping[str, Spans]) -> dict[str, Spans]:
    """A copy: the caller may change its own."""
    check_spans(what, by_group)
    return {group: normal(spans) for group, spans in by_group.items()}


def _checked(ticket: Any) -> Sequence[Ticket]:
    tickets = tuple(ticket) if isinstance(ticket, Iterable) else (ticket,)
    for each in tickets:
        check_ticket(each)
    if not tickets:
        raise SpecError("expected a Ticket, got none")
    return tickets
