"""The source side: the ranks that hold the memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

from kvferry.channel import ContactChange, Received
from kvferry.core.manifest import Manifest
from kvferry.core.owned import BlockBytes
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.gather_service import GatherService
from kvferry.endpoint.invitation import Invitation
from kvferry.endpoint.listening import advertised, check_listen
from kvferry.endpoint.load_digest import DigestService
from kvferry.endpoint.owner import Owner
from kvferry.errors import SpecError
from kvferry.log import log_of
from kvferry.runtime import Member, Released, Timing
from kvferry.runtime.member import Membership
from kvferry.runtime.ticket_guard import TicketGuard
from kvferry.runtime.values import AnswerDigest, MemberEffect, Send
from kvferry.transport.base import Transport
from kvferry.transport.gather_line import GatheringTransport
from kvferry.transport.staging import PackedReads
from kvferry.wire.messages import DigestResult, decode_from_authority, encode
from kvferry.wire.outline import join_of
from kvferry.wire.permit import RANK_KEY_BYTES
from kvferry.wire.trust import Trust

log = log_of(__name__)


class SourceRank:
    """One rank of a source engine: its memory can be read, and it hears of every release.

    It joins its authority, and joins it again if that has started anew at its address. What the earlier start
    had on offer is over then.
    """

    def __init__(
        self,
        invitation: Invitation,
        manifest: Manifest,
        transport: Transport,
        *,
        listen: str = "tcp://127.0.0.1:*",
        advertise: str = "",
        trust: Trust = Trust(),  # noqa: B008  (it is frozen)
        timing: Timing | None = None,
        edges: Edges | None = None,
    ) -> None:
        """``invitation``: of its engine's authority. ``edges`` are for simulations.

        ``listen``, ``advertise``: where readers ask this rank to gather, if its transport does that, and the
        host that they call, where it is another one.
        """
        (rank,) = manifest.ranks
        transport.register(rank.regions)
        edges = edges or Edges()
        self.rank, self._transport, self._authority = rank.rank, transport, invitation.address
        self._released: deque[Released] = deque()
        self._state, self._refusal = Membership.JOINING, ""
        self._service: GatherService | None = None
        self._generation = 0
        """The start of its engine that the service knows of."""
        rank_key, credential = b"", invitation.credential
        if isinstance(transport, GatheringTransport) and transport.packed_reads is PackedReads.REQUIRE:
            check_listen(listen, advertise, trust)
            rank_key = edges.random_bytes(RANK_KEY_BYTES)
            guard = TicketGuard(rank_key, BlockBytes(manifest, rank))
            channel = edges.open_channel(listen, trust.secret)
            self._service = GatherService(
                *transport.gather_memory(),
                guard,
                channel,
                edges.clock,
                advertise=advertise,
                are_streams_proved=trust.secret is not None,
            )
            transport.gather_at(advertised(channel.address, advertise))
        join = join_of(manifest, transport.kind, transport.card(), credential, rank_key)
        self._member = Member(invitation.address, join, timing)  # the owner's alone
        self._owner = Owner(f"kvferry-src-{rank.rank}", self._carry_out, self._tick, edges.clock)
        workers = edges.make_workers(f"kvferry-src-{rank.rank}-work")
        self._digests = DigestService(manifest, rank.rank, workers, self._say)
        self._channel = edges.open_channel("", trust.secret)
        edges.start_owner(self._owner)
        self._channel.start(f"kvferry-src-{rank.rank}-channel", self._receive, lambda: self._owner.is_behind)

    @property
    def is_joined(self) -> bool:
        """Whether the authority knows this rank. Raises SpecError if it turned the rank away."""
        if self._state is Membership.REFUSED:
            raise SpecError(f"rank {self.rank} was turned away by {self._authority}: {self._refusal}")
        return self._state is Membership.JOINED

    def poll(self) -> list[Released]:
        """The requests that were released, by the source's own names, each once."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def status(self) -> dict[str, object]:
        """Whether it has joined; and, if it gathers for readers, what it gathered and refused."""
        return {"state": self._state.value} | (self._service.status() if self._service else {})

    def close(self) -> None:
        """Stop serving; the memory is given back by the transport."""
        self._owner.close()
        self._digests.close()
        self._channel.close()
        if self._service:
            self._service.close()
        self._transport.close()

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, ContactChange):
            return  # the authority is asked now and then, wherever it went
        message, reply_to = decode_from_authority(received.data), received.reply_to
        self._owner.put(lambda now: self._member.receive(now, reply_to, message))

    # -- the owner's -------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._channel.send(effect.to, encode(effect.message))
                case Released() if self._service:
                    # The engine may use the blocks as soon as it hears of it: nothing is gathered then.
                    then = partial(self._released.append, effect)
                    self._service.revoke(self._member.generation, effect.ticket_id, then)
                case Released():
                    self._released.append(effect)
                case AnswerDigest():
                    self._digests.take(effect.task)

    def _say(self, result: DigestResult) -> None:
        """Have a digest sent to the authority; called in a worker."""
        self._owner.put(lambda _: [Send(self._authority, result)])

    def _tick(self, now: float) -> float:
        self._carry_out(self._member.tick(now))
        if self._service and self._member.generation != self._generation:
            self._generation = self._member.generation
            self._service.begin(self._generation)
        if self._member.state is not self._state:
            self._refusal, self._state = self._member.refusal, self._member.state
            if self._state is Membership.REFUSED:
                log.error("rank %d was turned away by %s: %s", self.rank, self._authority, self._refusal)
            else:
                log.info("rank %d of %s: %s", self.rank, self._authority, self._state.value)
        return self._member.next_deadline()
