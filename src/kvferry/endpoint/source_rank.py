"""The source side: the ranks that hold the memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from kvferry.channel import ContactChange, Received
from kvferry.core.manifest import Manifest
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.gathering import GatherService, open_gathering
from kvferry.endpoint.invitation import Invitation
from kvferry.endpoint.load_digest import DigestService
from kvferry.endpoint.owner import Owner
from kvferry.errors import SpecError
from kvferry.log import log_of
from kvferry.runtime import Member, Released, Timing
from kvferry.runtime.member import Membership
from kvferry.runtime.values import AnswerDigest, MemberEffect, Send
from kvferry.transport.base import Transport
from kvferry.wire.messages import DigestResult, Join, ReleaseAck, decode_from_authority, encode
from kvferry.wire.outline import join_of
from kvferry.wire.secret import Trust

log = log_of(__name__)

MANY_UNANSWERED = 20
"""Requests to join, after which a rank says that nobody answers: 10 s."""
UNANSWERED = "rank %d: %s does not answer: is it a source engine with the same secret?"


class MemberThread:
    """Owns the membership of one rank (``kvferry.runtime.Member``)."""

    def __init__(
        self,
        authority: str,
        manifest: Manifest,
        join: Join,
        *,
        service: GatherService | None = None,
        released: Callable[[Released], None] = lambda _: None,
        trust: Trust = Trust(),  # noqa: B008  (it is frozen)
        timing: Timing | None = None,
        edges: Edges | None = None,
    ) -> None:
        """``manifest``: of this rank's memory, for digests.

        ``service``: of packed reads; it learns of restarts of the engine, and of each release before
        ``released`` is called and the authority gets the acknowledgement. ``edges`` are for simulations.
        """
        edges, rank = edges or Edges(), join.rank
        self._rank, self._authority = rank, authority
        self._service, self._released = service, released
        self._state = Membership.JOINING
        self._generation = 0
        """The last one that the service was told."""
        self._member = Member(authority, join, timing)  # used by the owner thread only
        self._owner = Owner(f"kvferry-src-{rank}", self._carry_out, self._tick, edges.clock)
        workers = edges.make_workers(f"kvferry-src-{rank}-work")
        self._digests = DigestService(manifest, rank, workers, self._say)
        self._channel = edges.open_channel("", trust.secret)
        edges.start_owner(self._owner)
        self._channel.start(f"kvferry-src-{rank}-channel", self._receive, lambda: self._owner.is_behind)

    @property
    def state(self) -> Membership:
        return self._state

    @property
    def is_joined(self) -> bool:
        """Whether this rank has joined. Raises SpecError if the authority rejected it."""
        if self._state is Membership.REFUSED:
            raise SpecError(f"rank {self._rank} was rejected by {self._authority}: {self._member.refusal}")
        return self._state is Membership.JOINED

    def close(self) -> None:
        """Stop, and touch no more memory."""
        self._owner.close()
        self._digests.close()
        self._channel.close()

    def _receive(self, received: Received | ContactChange) -> None:
        if isinstance(received, ContactChange):
            return  # the member checks its authority periodically
        message, reply_to = decode_from_authority(received.data), received.reply_to
        self._owner.put(lambda now: self._member.receive(now, reply_to, message), len(received.data))

    def _say(self, result: DigestResult) -> None:
        """Send a digest to the authority; called in a worker."""
        self._owner.put(lambda _: [Send(self._authority, result)])

    # -- in the owner thread -----------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(to, ReleaseAck() as ack) if self._service:
                    # The engine may reuse the blocks as soon as its authority receives this.
                    self._service.when_revoked(partial(self._channel.send, to, encode(ack)))
                case Send():
                    self._channel.send(effect.to, encode(effect.message))
                    if self._member.num_unanswered == MANY_UNANSWERED:
                        log.warning(UNANSWERED, self._rank, self._authority)
                case Released():
                    self._release(effect)
                case AnswerDigest():
                    self._digests.take(effect.task)

    def _release(self, released: Released) -> None:
        self._digests.release(released.ticket_id)
        if self._service:
            then = partial(self._released, released)
            self._service.revoke(self._member.generation, released.ticket_id, then)
        else:
            self._released(released)

    def _tick(self, now: float) -> float:
        self._carry_out(self._member.tick(now))
        if self._member.generation != self._generation:
            self._generation = self._member.generation
            if self._service:
                self._service.begin(self._generation)
        if self._member.state is not self._state:
            self._state, refusal = self._member.state, self._member.refusal
            if self._state is Membership.REFUSED:
                log.error("rank %d was rejected by %s: %s", self._rank, self._authority, refusal)
            else:
                log.info("rank %d of %s: %s", self._rank, self._authority, self._state.value)
        return self._member.next_deadline()


class SourceRank:
    """One rank of a source engine: makes its memory readable, and reports every release.

    It joins its authority, and joins again if that restarts at its address, which ends all earlier offers.
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
        """``invitation``: of its ``SourceEngine``. ``edges`` are for simulations.

        ``listen``: the address for packed reads, if the transport has them; ``advertise``: the host that
        readers call, if another one.
        """
        if len(manifest.ranks) != 1:
            detail = f"got {len(manifest.ranks)} ranks"
            raise SpecError(f"a source rank needs a manifest of its own rank only, {detail}")
        (rank,) = manifest.ranks
        transport.register(rank.regions)
        edges = edges or Edges()
        self.rank, self._transport = rank.rank, transport
        self._released: deque[Released] = deque()
        gathering = open_gathering(
            manifest, transport, listen=listen, advertise=advertise, trust=trust, edges=edges
        )
        self._service = gathering.service if gathering else None
        rank_key = gathering.rank_key if gathering else b""
        join = join_of(manifest, transport.kind, transport.card(), invitation.credential, rank_key)
        self._member = MemberThread(
            invitation.address,
            manifest,
            join,
            service=self._service,
            released=self._released.append,
            trust=trust,
            timing=timing,
            edges=edges,
        )

    @property
    def is_joined(self) -> bool:
        """Whether this rank has joined. Raises SpecError if the authority rejected it."""
        return self._member.is_joined

    def poll(self) -> list[Released]:
        """The released requests, each once."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def status(self) -> dict[str, object]:
        """Its membership, and its counts of served and rejected packed reads."""
        return {"state": self._member.state.value} | (self._service.status() if self._service else {})

    def close(self) -> None:
        """Stop serving; the transport releases the memory."""
        self._member.close()
        if self._service:
            self._service.close()
        self._transport.close()
