"""A rank that gathers for its readers: its socket, its key, and the service behind them, opened together."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.core.manifest import Manifest
from kvferry.core.owned import BlockBytes
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.gather_service import GatherService
from kvferry.endpoint.listening import advertised, check_listen
from kvferry.runtime.ticket_guard import TicketGuard
from kvferry.transport.base import Transport
from kvferry.transport.stream_frames import GatheringTransport
from kvferry.wire.permit import RANK_KEY_BYTES
from kvferry.wire.trust import Trust


@dataclass(frozen=True, eq=False, slots=True)
class RankGathering:
    """What a rank has, once it gathers."""

    address: str
    """Where readers ask."""
    service: GatherService
    rank_key: bytes = field(repr=False)
    """For the rank's own authority, and nobody else."""


def open_gathering(
    manifest: Manifest,
    transport: Transport,
    *,
    listen: str,
    advertise: str = "",
    trust: Trust = Trust(),  # noqa: B008  (it is frozen)
    edges: Edges | None = None,
) -> RankGathering | None:
    """Have the one rank of a manifest gather for readers; None if its transport, now registered, does not.

    ``listen``, ``advertise``: where readers ask, and the host that they call, if it is another one. The
    transport's card says so from now on.
    """
    if not isinstance(transport, GatheringTransport) or not transport.is_gathering:
        return None
    check_listen(listen, advertise, trust)
    edges, (rank,) = edges or Edges(), manifest.ranks
    rank_key = edges.random_bytes(RANK_KEY_BYTES)
    guard = TicketGuard(rank_key, BlockBytes(manifest, rank))
    channel = edges.open_channel(listen, trust.secret)
    service = GatherService(
        transport.sender(),
        guard,
        channel,
        edges.clock,
        advertise=advertise,
        is_sealed=trust.secret is not None,
    )
    address = advertised(channel.address, advertise)
    transport.gather_at(address)
    return RankGathering(address, service, rank_key)
