"""The source side: the lease authority of an engine."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from hmac import compare_digest
from typing import TYPE_CHECKING

from kvferry.channel import ContactChange, Received
from kvferry.core.manifest import Outline
from kvferry.core.request import BlockTable
from kvferry.core.span import MAX_STOP
from kvferry.core.state import check_range
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.invitation import Invitation, advertised, check_listen
from kvferry.endpoint.logs import LeaseLog
from kvferry.endpoint.metric_table import MetricSide, refused_messages
from kvferry.endpoint.owner import Owner
from kvferry.endpoint.status import status_report
from kvferry.errors import KVFerryError, SpecError
from kvferry.log import log_of
from kvferry.runtime import Authority, Offers, Released, Timing
from kvferry.runtime.authority import CLAIM_SECONDS
from kvferry.runtime.claims import MAX_CLAIMS
from kvferry.runtime.figures import Figures, block_bytes_of
from kvferry.runtime.values import Merge, Send, Show, SourceEffect, Strike, Wanted
from kvferry.wire.messages import (
    TOO_LONG,
    AskStatus,
    DigestResult,
    DigestTask,
    Join,
    JoinAck,
    Message,
    Rejected,
    ReleaseAck,
    ReleaseNotice,
    StatusAnswer,
    decode_to_authority,
    encode,
    too_long,
)
from kvferry.wire.outline import manifest_of_joins, outline_to_msgpack
from kvferry.wire.reading import check_name, printable
from kvferry.wire.secret import Trust, is_loopback
from kvferry.wire.ticket import NOT_SAID, NotSaid, Ticket

if TYPE_CHECKING:
    from kvferry.endpoint.metrics import EngineMetrics  # needs Prometheus' package, which may be absent

log = log_of(__name__)

HERE = "here/"
"""Prefix of the reply addresses of admitted ranks."""
ADMIT_SECONDS = 120.0
"""How long ``admit`` waits for the merge of all ranks."""
CLOSE_SECONDS = 5.0
SHOW_SECONDS = 0.25
"""Maximum age of the figures."""


class GrowingOffer:
    """A request that is offered during its prefill. No call blocks.

    Its tables only grow. Readers read complete tokens in parts, as one load that ends after ``close``.
    """

    def __init__(self, engine: SourceEngine, ticket: Ticket) -> None:
        self._engine, self.ticket = engine, ticket
        """The ticket of the newest stage."""

    def grow(self, tables: Mapping[str, BlockTable], num_complete: int) -> None:
        """The first ``num_complete`` tokens are written, on the device too.

        Pass the tables of groups that keep all tokens; the others follow in ``close``.
        """
        check_range("num_complete", num_complete, 0, MAX_STOP)
        if num_complete > self.ticket.num_complete:
            self._next(self._engine._offers.stage(self.ticket, tables, num_complete))

    def close(self, tables: Mapping[str, BlockTable], *, held_from: int | NotSaid = NOT_SAID) -> Ticket:
        """All tokens are written: from now on it is like any other offer, under the returned ticket."""
        self._next(self._engine._offers.stage(self.ticket, tables, held_from=held_from))
        return self.ticket

    def revoke(self) -> None:
        """Take the blocks back: no read counts that ends after this call."""
        name = self.ticket.request_id
        self._engine._owner.put(lambda now: self._engine._authority.revoke(now, name))

    def _next(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self._engine._owner.put(lambda now: self._engine._authority.grow(now, ticket))


class SourceEngine:
    """The lease authority of a source engine: offers requests, and reports when their blocks are released.

    One thread owns the machine that keeps the leases (``kvferry.runtime.Authority``); calls and messages are
    put into its inbox. ``offer`` creates the ticket in the calling thread and never blocks.
    """

    def __init__(
        self,
        engine: str,
        num_ranks: int,
        *,
        listen: str = "tcp://127.0.0.1:*",
        advertise: str = "",
        credential: bytes = b"",
        trust: Trust = Trust(),  # noqa: B008  (it is frozen)
        timing: Timing | None = None,
        metrics: EngineMetrics | None = None,
        edges: Edges | None = None,
    ) -> None:
        """``advertise``: the host that readers call, if not the one in ``listen``.

        ``credential``: of ranks (``invitation``); by default new at each start. Pass the same each time if
        ranks may outlive it. ``trust``: who may read. ``edges`` are for simulations.
        """
        if type(num_ranks) is not int or num_ranks < 1:
            raise SpecError(f"num_ranks must be a number of ranks, got {num_ranks!r}")
        check_listen(listen, advertise, trust)
        if trust.insecure:
            log.warning(
                "insecure: every host that reaches %s can read and write this engine's caches; set a secret",
                listen,
            )
        edges, timing = edges or Edges(), timing or Timing()
        self._clock, self._trust = edges.clock, trust
        self._released: deque[Released] = deque()
        self._wanted: deque[Wanted] = deque()
        self.num_ranks = num_ranks
        self._looked_at = float("-inf")
        """The time of the last call of ``claims``."""
        self._channel = edges.open_channel(listen, trust.secret)
        self._credential = credential or edges.random_bytes(16)
        address = advertised(self._channel.address, advertise)
        self._offers = Offers(
            engine,
            generation=int.from_bytes(edges.random_bytes(8)) >> 2,
            key=edges.random_bytes(32),
            address=address,
            lease_ms=int(timing.lease * 1000),
            host=edges.host() if trust.is_one_host or is_loopback(address) else "",
            fleet_key=trust.ticket_key,
        )
        self._is_whole, self._log, self._started = False, LeaseLog(engine), self._clock()
        self._may_tell = not trust.insecure or is_loopback(self._channel.address)
        self._metrics = metrics
        self._figures: Figures = {}
        self._shown_at = float("-inf")
        # Used by the owner thread only.
        self._told, self._told_until = StatusAnswer(b""), float("-inf")
        self._board = edges.make_board()
        self._authority = Authority(self._offers, num_ranks, timing, self._board.place if self._board else "")
        self._admitting: dict[str, Future[str]] = {}
        """Calls of ``admit`` in progress, by reply address."""
        self._expected: set[str] = set()
        """Admitted ranks that will join by themselves."""

        self._owner = Owner(f"kvferry-{engine}", self._carry_out, self._tick, edges.clock)
        self._workers = edges.make_workers(f"kvferry-{engine}-work")
        if metrics:
            metrics.watch(self, lambda: self.figures)
        edges.start_owner(self._owner)
        self._channel.start(f"kvferry-{engine}-channel", self._receive, lambda: self._owner.is_behind)
        self._open_status = edges.open_status(f"source-{engine}", lambda: self._owner.ask(self._report))

    # -- the engine's calls, from any thread -------------------------------------------------------

    @property
    def address(self) -> str:
        """The address for ranks and readers."""
        return self._offers.address

    @property
    def invitation(self) -> Invitation:
        """For ranks to join this engine. A secret of this engine and its ranks."""
        return Invitation(self.address, self._credential)

    @property
    def engine(self) -> str:
        return self._offers.engine

    @property
    def generation(self) -> int:
        """Identifies this process lifetime of the engine."""
        return self._offers.generation

    @property
    def is_whole(self) -> bool:
        return self._is_whole

    @property
    def num_leases(self) -> int:
        """Requests pinned, or released and not yet polled."""
        return len(self._offers)

    def admit(self, join: Join, *, joins_later: bool = False) -> None:
        """Add a rank that was described elsewhere; ``poll`` reports its releases.

        Waits until the rank is merged or rejected. ``joins_later``: it will also join by itself
        (``MemberThread``), and computes digests from then on.
        """
        reply_to, answer = f"{HERE}{join.rank}", Future[str]()
        if joins_later:
            self._expected.add(reply_to)
        self._owner.put(partial(self._admit, reply_to, join, answer))
        try:
            refusal = answer.result(ADMIT_SECONDS)
        except TimeoutError:
            refusal = f"the engine did not answer within {ADMIT_SECONDS:g} s"
        if refusal:
            raise SpecError(f"rank {join.rank} cannot join: {refusal}")

    def offer(
        self,
        request_id: str,
        tables: Mapping[str, BlockTable],
        num_tokens: int,
        *,
        digest: bytes = b"",
        held_from: int | NotSaid = NOT_SAID,
        transfer: str = "",
    ) -> Ticket:
        """Pin a request's blocks until its lease ends, and return the ticket to hand to the destination.

        The device must have finished writing the blocks. A name can be offered again after ``poll`` has
        reported its release. ``held_from``: every table has the cells of all tokens from this one on
        (``core.request``), so that a destination can fill whole blocks. ``transfer``: the router's name of
        the prefill, if a reader waits for it (``open``).
        """
        ticket = self._offers.make(request_id, tables, num_tokens, digest, held_from)
        now = self._clock()
        self._owner.put(lambda _: self._authority.offer(now, ticket, transfer))
        return ticket

    def refuse(self, transfer: str, why: str) -> None:
        """Reject a prefill by the router's name for it: engines that wait for it get the reason."""
        self._owner.put(lambda _: self._authority.refuse(transfer, why))

    def open(
        self,
        request_id: str,
        tables: Mapping[str, BlockTable],
        num_tokens: int,
        *,
        transfer: str,
        num_complete: int = 0,
        digest: bytes = b"",
    ) -> GrowingOffer:
        """Offer a request whose prompt of ``num_tokens`` is still being computed.

        ``transfer``: the router's name of the prefill, by which a reader finds it; it must be unguessable.
        """
        check_name("the name of a transfer", transfer)
        ticket = self._offers.make(request_id, tables, num_tokens, digest, complete=num_complete)
        now = self._clock()
        self._owner.put(lambda _: self._authority.offer(now, ticket, transfer))
        return GrowingOffer(self, ticket)

    def offer_soft(self, request_id: str, num_tokens: int, parts: bytes) -> Ticket:
        """Offer what this engine's prefix cache has of a request. It pins nothing.

        ``parts``: ``digest_parts`` of its tokens. A reader's claim of it appears in ``claims``.
        """
        ticket = self._offers.make_soft(request_id, num_tokens, parts)
        self._owner.put(lambda _: self._authority.count_soft())
        return ticket

    def claims(self, most: int = MAX_CLAIMS) -> list[Wanted]:
        """Claims of soft offers, each once: answer with ``grant`` or ``deny`` within a second.

        Claims that were denied by then are left out.
        """
        self._looked_at = now = self._clock()
        while self._wanted and self._wanted[0].until <= now:
            self._wanted.popleft()
        return [self._wanted.popleft() for _ in range(min(most, len(self._wanted)))]

    def grant(self, claim: Wanted, ticket: Ticket) -> None:
        """Grant a claim: the remaining blocks are pinned under a ticket that ``offer`` has returned.

        If the grant is too late, the offer is withdrawn, and ``poll`` reports it.
        """
        self._owner.put(lambda now: self._authority.claimed(now, claim.number, ticket, ""))

    def deny(self, claim: Wanted, why: str) -> None:
        """Deny a claim: the blocks were evicted, or cannot be pinned."""
        self._owner.put(lambda now: self._authority.claimed(now, claim.number, None, why))

    def withdraw(self, request_id: str) -> None:
        """Withdraw an offer. Its blocks are free when ``poll`` reports it."""
        self._owner.put(lambda now: self._authority.withdraw(now, request_id))

    def take_back(self, ticket: Ticket) -> bool:
        """Withdraw the offer of a returned ticket; False if this start of the engine did not issue it."""
        is_own = self._offers.is_own(ticket)
        if is_own and not ticket.is_soft:
            name, number = ticket.request_id, ticket.ticket_id
            self._owner.put(lambda now: self._authority.withdraw(now, name, number))
        return is_own

    def poll(self) -> list[Released]:
        """The released requests, each once: their blocks belong to the engine again."""
        released = [self._released.popleft() for _ in range(len(self._released))]
        for one in released:
            self._offers.forget(one.request_id)
        return released

    @property
    def figures(self) -> Figures:
        """Its counters and gauges, possibly slightly old; never blocks."""
        messages = refused_messages(MetricSide.SOURCE, self._channel.refused, self._channel.dropped)
        return {**self._figures, **messages}

    def status(self) -> dict[str, object]:
        """Ranks, pinned requests, refused messages. Waits for the owner thread."""
        return self._owner.ask(self._status)

    def _status(self) -> dict[str, object]:
        counts = {"refused": dict(self._channel.refused), "dropped": dict(self._channel.dropped)}
        return self._authority.status() | counts

    def _report(self) -> dict[str, object]:
        """The answer to `kvferry status`."""
        now = self._clock()
        status = self._status() | {"address": self.address, "leases": self._authority.shown_leases(now)}
        self._figures = self._authority.figures()
        return status_report(MetricSide.SOURCE, status, self.figures, now - self._started)

    def close(self) -> None:
        """Stop listening."""
        if self._open_status is not None:
            self._open_status.close()
        try:
            self._owner.close()
        finally:  # the leases stand no more
            if self._board is not None:
                self._board.close()
        if self._metrics:
            self._metrics.forget(self)
        self._workers.close(CLOSE_SECONDS)
        self._channel.close()

    # -- in the owner thread -----------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[SourceEffect]) -> None:
        for effect in effects:
            match effect:
                case Send() if effect.to.startswith(HERE):
                    self._tell_ourselves(effect)
                case Send():
                    self._log.sent(self._clock(), effect.message)
                    self._send(effect.to, effect.message)
                case Show():
                    if self._board is not None:
                        self._board.show(effect.ticket_id, effect.mark)
                case Strike():
                    if self._board is not None:
                        self._board.strike(effect.ticket_id)
                case Merge():
                    self._workers.submit("merge", partial(self._merge, effect.joins))
                case Wanted() if self._clock() > self._looked_at + CLAIM_SECONDS:
                    self.deny(effect, "the engine is idle")  # a reader need not wait to hear that
                case Wanted():
                    self._wanted.append(effect)
                case Released():
                    self._log.released(self._clock(), effect)
                    self._released.append(effect)

    def _send(self, to: str, message: Message) -> None:
        """Send a message; instead of one above the size limit, an error, so that the reader need not wait."""
        data = encode(message)
        if complaint := too_long(data):
            log.error("%s", complaint)
            data = encode(Rejected(TOO_LONG, complaint))
        self._channel.send(to, data)

    def _tell_status(self, to: str) -> list[SourceEffect]:
        """Answer a status request, unless insecure. Reports are cached: one takes milliseconds."""
        if self._may_tell:
            if self._clock() >= self._told_until:
                self._told = StatusAnswer(json.dumps(self._report()).encode())
                self._told_until = self._clock() + SHOW_SECONDS
            return [Send(to, self._told)]
        detail = "status over the network is disabled on an insecure engine: run kvferry status on its host"
        return [Send(to, Rejected("status", detail))]

    def _tick(self, now: float) -> float:
        self._carry_out(self._authority.tick(now))
        self._is_whole = self._authority.is_whole
        self._offers.refusal = self._authority.overload
        self._offers.fleet_key = self._trust.ticket_key  # it may change
        deadline, show_at = self._authority.next_deadline(), self._shown_at + SHOW_SECONDS
        if now < show_at:
            return min(deadline, show_at)
        # Not after every message: it counts all leases.
        self._shown_at, self._figures = now, self._authority.figures()
        return deadline

    def _admit(self, reply_to: str, join: Join, answer: Future[str], now: float) -> list[SourceEffect]:
        self._admitting[reply_to] = answer
        return self._authority.receive(now, reply_to, join)

    def _tell_ourselves(self, send: Send) -> None:
        """A message for an admitted rank; ``poll`` delivers releases, so they are acknowledged here."""
        match send.message:
            case JoinAck() if answer := self._admitting.pop(send.to, None):
                self._is_whole = self._authority.is_whole  # before ``admit`` returns
                answer.set_result("")
            case Rejected() if answer := self._admitting.pop(send.to, None):
                answer.set_result(send.message.detail)
            case ReleaseNotice(generation, first, requests):
                rank = int(send.to.removeprefix(HERE))
                ack = ReleaseAck(generation, rank, first + len(requests) - 1)
                self._carry_out(self._authority.receive(self._clock(), send.to, ack))
            case DigestTask() if send.to in self._expected:
                pass  # the reader repeats it until the rank has joined
            case DigestTask(generation, number):
                rank = int(send.to.removeprefix(HERE))
                why = "the rank has joined, but runs no SourceRank to compute a digest"
                result = DigestResult(generation, rank, number, detail=why)
                self._carry_out(self._authority.receive(self._clock(), send.to, result))
            case _:
                pass

    # -- in other threads --------------------------------------------------------------------------

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, ContactChange):
            return
        if complaint := too_long(received.data):
            self._channel.send(received.reply_to, encode(Rejected(TOO_LONG, complaint)))
            raise SpecError(complaint)
        message = decode_to_authority(received.data)
        if isinstance(message, AskStatus):
            self._owner.put(lambda _: self._tell_status(received.reply_to), len(received.data))
            return
        if isinstance(message, Join) and not compare_digest(message.credential, self._credential):
            refusal = Rejected("join", "it does not have the credential of this engine's ranks")
            self._channel.send(received.reply_to, encode(refusal))
            return
        self._owner.put(
            lambda now: self._authority.receive(now, received.reply_to, message), len(received.data)
        )

    def _merge(self, joins: Mapping[int, Join]) -> None:
        try:
            manifest = manifest_of_joins(joins)
            outline, block_bytes = outline_to_msgpack(Outline.of(manifest)), block_bytes_of(manifest)
        except Exception as error:
            if not isinstance(error, KVFerryError):
                log.exception("the descriptions of the ranks could not be merged")
            detail = printable(str(error) or type(error).__name__)
            self._owner.put(lambda now: self._authority.not_merged(now, detail))
        else:
            self._owner.put(lambda now: self._authority.merged(now, outline, block_bytes))
