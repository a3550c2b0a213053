"""The source side: the ranks that hold the memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from kvferry.core.manifest import Manifest
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.gather_service import GatherService
from kvferry.endpoint.invitation import Invitation
from kvferry.endpoint.member_thread import MemberThread, RankDuties
from kvferry.endpoint.rank_gathering import open_gathering
from kvferry.runtime import Released, Timing
from kvferry.transport.base import Transport
from kvferry.wire.outline import join_of
from kvferry.wire.trust import Trust


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
            duties=_Duties(self._released, self._service),
            trust=trust,
            timing=timing,
            edges=edges,
        )

    @property
    def is_joined(self) -> bool:
        """Whether the authority knows this rank. Raises SpecError if it turned the rank away."""
        return self._member.is_joined

    def poll(self) -> list[Released]:
        """The requests that were released, by the source's own names, each once."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def status(self) -> dict[str, object]:
        """Whether it has joined; and, if it gathers for readers, what it gathered and refused."""
        return {"state": self._member.state.value} | (self._service.status() if self._service else {})

    def close(self) -> None:
        """Stop serving; the memory is given back by the transport."""
        self._member.close()
        if self._service:
            self._service.close()
        self._transport.close()


class _Duties(RankDuties):
    """Has releases polled, and nothing gathered for them any more."""

    def __init__(self, polled: deque[Released], service: GatherService | None) -> None:
        self._polled, self._service = polled, service

    def began(self, generation: int) -> None:
        if self._service:
            self._service.begin(generation)

    def released(self, generation: int, released: Released) -> None:
        then = partial(self._polled.append, released)
        if self._service:
            self._service.revoke(generation, released.ticket_id, then)
        else:
            then()

    def when_stopped(self, then: Callable[[], None]) -> None:
        if self._service:
            self._service.when_revoked(then)
        else:
            then()
