"""The packed way between two transports alone, without engines: whoever asks is let in."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.owned import BlockBytes
from kvferry.core.view import Ints
from kvferry.endpoint.edges import open_channel
from kvferry.endpoint.gather_calls import GatherCalls
from kvferry.endpoint.gather_service import PATIENCE_S, GatherService
from kvferry.runtime.ticket_guard import Admitted, GatherRefusal, Refusal
from kvferry.transport.nixl import NixlTransport


class OpenGuard:
    """Lets everybody have everything. A real rank has a ``TicketGuard``."""

    def __init__(self) -> None:
        nothing = BlockBytes(Manifest("open", (), (), ()), Rank(0, (), ()))
        self._admitted = Admitted(1, nothing.of_blocks({}))
        self._refused: Counter[str] = Counter()

    @property
    def refused(self) -> Mapping[str, int]:
        return self._refused

    def begin(self, generation: int) -> None:
        """Nothing changes."""

    def end(self, ticket_id: int) -> None:
        """Nothing changes."""

    def admit(self, permit: bytes) -> Admitted:
        return self._admitted

    def check(self, admitted: Admitted, terms: Sequence[tuple[Ints, Ints, Ints]]) -> None:
        return None

    def refuse(self, code: GatherRefusal, detail: str) -> Refusal:
        self._refused[code.value] += 1
        return Refusal(code, detail)


def gather_openly(transport: NixlTransport, patience_s: float = PATIENCE_S) -> GatherService:
    """Have a transport that is registered gather for everybody."""
    channel = open_channel("tcp://127.0.0.1:*", None)
    memory = transport.gather_memory()
    service = GatherService(*memory, OpenGuard(), channel, time.monotonic, patience_s)
    transport.gather_at(service.address)
    return service


class AskingTransport(NixlTransport):
    """A transport that asks others to gather as soon as it is registered, as a ``Destination`` would."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.ask_by(GatherCalls(open_channel("", None), "kvferry-gather-calls"))
