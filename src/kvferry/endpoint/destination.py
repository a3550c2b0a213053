"""The destination side: one rank that fetches requests into its own blocks."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from queue import SimpleQueue

from kvferry.channel import Channel, Received
from kvferry.core.lower import Route, lower
from kvferry.core.manifest import Manifest
from kvferry.core.plan import plan
from kvferry.core.prove import prove
from kvferry.core.request import BlockTable
from kvferry.core.select import Slack, select
from kvferry.core.span import Spans
from kvferry.endpoint.lines import Lines
from kvferry.endpoint.loop import Loop, clock, log
from kvferry.endpoint.metrics import FetchMetrics, account
from kvferry.errors import KVFerryError, Refused, RequestError, SpecError, TransportError
from kvferry.runtime import Failure, Fetch, Reader, Report, Timing
from kvferry.runtime.values import Build, Clear, Drop, Effect, Peer, Post, Select, Send
from kvferry.transport.base import Transport
from kvferry.wire import manifest_from_msgpack
from kvferry.wire.messages import MAX_MESSAGE_BYTES, decode_from_authority
from kvferry.wire.ticket import Ticket

POLL_SECONDS = 0.001
"""How often the ends of reads are looked for while some are in flight."""


class Destination:
    """One rank of a destination engine. Every call returns at once; ``poll`` says what happened."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        transport: Transport,
        *,
        reader: str = "",
        num_ranks: int = 0,
        secret: bytes = b"",
        timing: Timing | None = None,
        metrics: FetchMetrics | None = None,
        on_refusal: Callable[[Manifest, Failure], None] | None = None,
    ) -> None:
        """``reader`` names this *start* of the engine, the same on all of its ranks.

        It must change with every start: a late message of an earlier one must not pass for one of this.
        An engine of one rank may leave it out. ``on_refusal`` is called with the manifest of a source engine
        that cannot be read from, and why, in a thread of its own.
        """
        num_ranks = num_ranks or len(manifest.ranks)
        if not reader and num_ranks > 1:
            raise SpecError("name this start of the engine (reader=…), the same on all of its ranks")
        reader = reader or f"{manifest.engine}#{secrets.token_hex(8)}"
        self._manifest, self._rank, self._transport = manifest, rank, transport
        transport.register(manifest.rank(rank).regions)
        self._reader = Reader(reader, rank, num_ranks, timing)
        self._metrics, self._on_refusal = metrics, on_refusal
        self._timing = timing or Timing()
        self._lock = threading.Lock()
        self._routes: dict[Peer, Route] = {}
        self._reports: deque[Report] = deque()
        self._handles = count(1)
        self._next_tick = 0.0
        self._desk: SimpleQueue[Callable[[], list[Effect]] | None] = SimpleQueue()
        self._clerk = threading.Thread(target=self._serve_desk, name=f"kvferry-desk-{rank}", daemon=True)
        self._meetings = Lines("kvferry-meet")
        self._selector = ThreadPoolExecutor(1, "kvferry-select")
        self._loop = Loop(
            f"kvferry-dst-{rank}",
            Channel(secret=secret, max_bytes=MAX_MESSAGE_BYTES),
            self._receive,
            self._tick,
        )
        transport.on_end(self._loop.wake)
        self._clerk.start()
        self._loop.start()

    def fetch(
        self,
        ticket: Ticket,
        tables: Mapping[str, BlockTable],
        need: Mapping[str, Spans],
        *,
        kept: Mapping[str, Spans] | None = None,
        slack: Slack = Slack.CLEAR,
        held: int | None = None,
    ) -> int:
        """Start reading a ticket's request into these blocks; the handle is what ``poll`` reports.

        ``held``: the handle of a ``hold`` of the same ticket, which goes on under it.
        """
        _check(ticket)
        wanted = Fetch(ticket, tables, need, kept or {}, slack)
        if held is not None:
            self._desk.put(partial(self._reader.supply, clock(), held, wanted))
            return held
        handle = next(self._handles)
        self._desk.put(partial(self._reader.fetch, clock(), handle, wanted))
        return handle

    def hold(self, ticket: Ticket) -> int:
        """Keep a ticket's blocks pinned, and meet its engine, until ``fetch`` says where the bytes go.

        For requests that wait in a queue. A ticket that cannot be held is reported by ``poll``, once, and
        then needs no ``fetch``.
        """
        _check(ticket)
        handle = next(self._handles)
        self._desk.put(partial(self._reader.hold, clock(), handle, ticket))
        return handle

    def abort(self, handle: int) -> None:
        """Give a fetch up; it is reported when nothing of it is in flight any more."""
        self._desk.put(partial(self._reader.abort, clock(), handle))

    def poll(self) -> list[Report]:
        """The fetches that are over, each once: loaded (no failure), or failed with its reason."""
        reports = []
        while self._reports:
            reports.append(self._reports.popleft())
        return reports

    def status(self) -> dict[str, object]:
        """Who is connected, what is in flight, what was refused."""
        with self._lock:
            status = self._reader.status() | {"quarantined": self._reader.num_quarantined}
        return status | {"refused": dict(self._loop.refused), "dropped": dict(self._loop.channel.dropped)}

    def close(self) -> None:
        """Stop: no fetch is started or reported any more; the transport waits for what is in flight."""
        self._desk.put(None)
        self._clerk.join()
        self._meetings.close()
        self._selector.shutdown(wait=True, cancel_futures=True)
        self._loop.close()
        self._transport.close()

    # -- events ------------------------------------------------------------------------------------

    def _serve_desk(self) -> None:
        """Take in what the engine asks for.

        The caller only leaves it at the desk. Whoever lets go of the interpreter, for a lock or a socket, may
        get it back milliseconds later while other threads compute: an engine's step loop must not be there.
        """
        while ask := self._desk.get():
            try:
                with self._lock:
                    effects = ask()
                self._carry_out(effects)
            except Exception:
                log.exception("the desk goes on after an unexpected error")

    def _receive(self, received: Received) -> None:
        message = decode_from_authority(received.data)
        with self._lock:
            effects = self._reader.receive(clock(), received.route, message)
        self._carry_out(effects)

    def _tick(self) -> float:
        effects: list[Effect] = []
        ends = self._transport.poll()
        with self._lock:
            now = clock()
            for end in ends:
                effects += self._reader.ended(now, end.transfer, end.error)
            # The machine looks at every fetch when it ticks, and callers wait meanwhile: not too often.
            is_time = now >= self._next_tick
            if is_time:
                effects += self._reader.tick(now)
                self._next_tick = now + self._timing.retry / 4
            in_flight = self._reader.num_in_flight
        self._carry_out(effects)
        if is_time and self._metrics:
            refused = self._loop.refused.total() + self._loop.channel.dropped.total()
            self._metrics.gauge(in_flight, self._reader.num_quarantined, refused)
        return POLL_SECONDS if in_flight else self._timing.retry / 4

    # -- effects -----------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        unclear = ""  # why the slack of the fetch that is being posted could not be cleared
        for effect in effects:
            match effect:
                case Send():
                    self._loop.send(effect.to, effect.message)
                case Build():
                    self._meetings.submit(effect.peer, partial(self._build, effect))
                case Select():
                    self._selector.submit(self._select, effect)
                case Clear():
                    unclear = self._clear(effect)
                case Post():
                    self._post(effect, unclear)
                case Drop():
                    self._meetings.submit(effect.peer, partial(self._drop, effect.peer))
                case Report():
                    self._reports.append(effect)
                    account(effect, self._metrics)

    def _build(self, build: Build) -> None:
        """Everything that is done once per peer. Slow, so in a thread of its own."""
        connected: list[str] = []
        source: Manifest | None = None
        try:
            if build.transport != self._transport.kind:
                kinds = f"source has {build.transport}, destination has {self._transport.kind}"
                raise TransportError("kind", f"both sides must use one transport: {kinds}")
            source = manifest_from_msgpack(build.manifest)
            started = clock()
            route = lower(prove(plan(source, self._manifest, self._rank)))
            plan_seconds = clock() - started
            for src_rank in sorted({piece.src_rank for piece in route.plan.pieces}):
                name = _peer_name(build.peer, src_rank)
                self._transport.connect(name, build.cards[src_rank], source.rank(src_rank).regions)
                connected.append(name)
        except Exception as error:
            failure = _failure(error)
            for name in connected:  # a peer is built whole, or not at all
                self._transport.forget(name)
            with self._lock:
                effects = self._reader.not_built(clock(), build.peer, failure)
            self._explain(source, failure)
        else:
            with self._lock:
                self._routes[build.peer] = route
                effects = self._reader.built(clock(), build.peer, plan_seconds)
        self._carry_out(effects)

    def _explain(self, source: Manifest | None, failure: Failure) -> None:
        if self._on_refusal is None or source is None:
            return
        try:
            self._on_refusal(source, failure)
        except Exception:
            log.exception("a refusal could not be explained")

    def _select(self, wanted: Select) -> None:
        try:
            route = self._routes[wanted.peer]
            selection = select(route, wanted.fetch.request(), slack=wanted.fetch.slack)
        except Exception as error:
            with self._lock:
                effects = self._reader.not_selected(clock(), wanted.handle, _failure(error))
        else:
            with self._lock:
                effects = self._reader.selected(clock(), wanted.handle, selection)
        self._carry_out(effects)
        self._loop.wake()
        time.sleep(0)  # a caller may be waiting for the interpreter: let it in between two selections

    def _clear(self, clear: Clear) -> str:
        """Zero the slack of a fetch; why not, if it cannot be done."""
        try:
            self._transport.clear(clear.selection.zeros)
        except Exception as error:
            return f"its slack could not be cleared: {error}"
        return ""

    def _post(self, post: Post, unclear: str) -> None:
        refusal = unclear
        if not refusal:
            try:
                self._transport.read(post.transfer, _peer_name(post.peer, post.src_rank), post.runs)
            except KVFerryError as error:
                refusal = str(error)
        if refusal:  # refused before anything moved: that is an end, too
            with self._lock:
                effects = self._reader.ended(clock(), post.transfer, refusal)
            self._carry_out(effects)

    def _drop(self, peer: Peer) -> None:
        route = self._routes.pop(peer, None)
        if route is not None:
            for src_rank in sorted({piece.src_rank for piece in route.plan.pieces}):
                self._transport.forget(_peer_name(peer, src_rank))


def _check(ticket: Ticket) -> None:
    if not isinstance(ticket, Ticket):
        raise SpecError(f"a Ticket is wanted, got {type(ticket).__name__}: read text with from_text")


def _peer_name(peer: Peer, src_rank: int) -> str:
    return f"{peer.engine}#{peer.generation}@{peer.authority}/{src_rank}"


def _failure(error: Exception) -> Failure:
    match error:
        case Refused():
            return Failure("refused", str(error))
        case RequestError():
            return Failure(error.code, str(error))
        case KVFerryError():
            return Failure(type(error).__name__, str(error))
        case _:
            log.exception("unexpected", exc_info=error)
            return Failure("unexpected", f"{type(error).__name__}: {error}")
