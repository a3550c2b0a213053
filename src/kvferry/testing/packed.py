"""The packed way between two transports alone, without engines: whoever asks is let in."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.owned import BlockBytes
from kvferry.core.view import Ints
from kvferry.endpoint.edges import open_channel
from kvferry.endpoint.gathering import GatherCalls, GatherService
from kvferry.endpoint.secret_source import secret_from_environment
from kvferry.runtime.ticket_guard import Admitted, TicketGuard
from kvferry.transport.nixl import NixlTransport


class OpenGuard(TicketGuard):
    """Lets everybody have everything."""

    def __init__(self) -> None:
        nothing = BlockBytes(Manifest("open", (), (), ()), Rank(0, (), ()))
        super().__init__(b"", nothing)
        self._everybody = Admitted(1, nothing.of_blocks({}))

    def admit(self, permit: bytes) -> Admitted:
        return self._everybody

    def check(self, admitted: Admitted, terms: Sequence[tuple[Ints, Ints, Ints]]) -> None:
        return None


def gather_openly(transport: NixlTransport, listen: str = "tcp://127.0.0.1:*") -> GatherService:
    """Have a transport that is registered send to everybody who knows the environment's secret, if any."""
    secret = secret_from_environment()
    channel, is_sealed = open_channel(listen, secret), secret is not None
    service = GatherService(transport.sender(), OpenGuard(), channel, time.monotonic, is_sealed=is_sealed)
    transport.gather_at(service.address)
    return service


class AskingTransport(NixlTransport):
    """A transport that asks others to send as soon as it is registered, as a ``Destination`` would."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.ask_by(GatherCalls(open_channel("", secret_from_environment()), "kvferry-gather-calls"))
