"""What a source rank gathers, and for whom: it checks permit, lease and bytes before it touches memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.owned import BlockBytes, OwnedBytes
from kvferry.core.view import Ints
from kvferry.errors import SpecError
from kvferry.wire.ticket import read_permit


class GatherRefusal(StrEnum):
    """Why a rank does not gather: one word of a closed list, fit for a metric's label."""

    NOT_GRANTED = "not-granted"
    """The permit is not one that the rank's authority made."""
    ENDED = "ended"
    """The ticket was read or withdrawn, its lease is over, or its engine has started anew."""
    NOT_ITS_BYTES = "not-its-bytes"
    """Bytes of other blocks than the ticket's, or beyond a block."""
    TOO_MUCH = "too-much"
    """More than fits into a chunk, or more asks than one ticket may have waiting."""
    CANNOT = "cannot"
    """The rank's device failed, or there was no memory to gather into."""


@dataclass(frozen=True, slots=True)
class Refusal:
    code: GatherRefusal
    detail: str


@dataclass(frozen=True, eq=False, slots=True)
class Admitted:
    """A ticket whose blocks may be gathered until it ends."""

    ticket_id: int
    owned: OwnedBytes
    generation: int = 0
    """The start of the engine that the ticket is of: each counts its tickets anew."""


class EndedTickets:
    """The numbers of all tickets that have ended. They are given out in order, and all of them end."""

    MAX_KEPT = 200_000
    """More than an engine has on offer at once. A number that was never offered does not end, and would have
    all later ones kept: beyond this it counts as ended."""

    def __init__(self) -> None:
        self._below = 1
        """All numbers below this have ended."""
        self._later: set[int] = set()

    def __contains__(self, ticket_id: int) -> bool:
        return ticket_id < self._below or ticket_id in self._later

    @property
    def num_kept(self) -> int:
        return len(self._later)

    def add(self, ticket_id: int) -> None:
        if ticket_id >= self._below:
            self._later.add(ticket_id)
        if len(self._later) > self.MAX_KEPT:
            self._below = min(self._later)
        while self._below in self._later:
            self._later.remove(self._below)
            self._below += 1


class TicketGuard:
    """For one thread. Each permit is proved once, and remembered until its ticket ends."""

    MAX_ADMITTED = 4096
    """Permits that are remembered; the one that was shown first is proved again."""

    def __init__(self, rank_key: bytes, blocks: BlockBytes) -> None:
        self._rank_key, self._blocks = rank_key, blocks
        self._admitted: dict[bytes, Admitted] = {}
        self._ended = EndedTickets()
        self._generation = 0
        self._past: set[int] = set()
        """Starts of the engine that are over."""
        self._refused: Counter[str] = Counter()

    @property
    def refused(self) -> Mapping[str, int]:
        return self._refused

    def begin(self, generation: int) -> None:
        """The engine has started anew: tickets of its earlier starts are over."""
        if generation != self._generation:
            self._past.add(self._generation)
            self._past.discard(generation)
            self._generation = generation
            self._admitted.clear()
            self._ended = EndedTickets()

    def end(self, ticket_id: int) -> None:
        self._ended.add(ticket_id)
        for permit in [each for each, known in self._admitted.items() if known.ticket_id == ticket_id]:
            del self._admitted[permit]

    def admit(self, permit: bytes) -> Admitted | Refusal:
        if known := self._admitted.get(permit):
            return known
        try:
            ticket = read_permit(permit, self._rank_key)
            tables = ticket.block_tables()
        except SpecError as error:
            return self.refuse(GatherRefusal.NOT_GRANTED, str(error))
        if ticket.generation in self._past or ticket.ticket_id in self._ended:
            return self.refuse(GatherRefusal.ENDED, f"the lease of {ticket.request_id} is over")
        if len(self._admitted) >= self.MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        admitted = Admitted(ticket.ticket_id, self._blocks.of_blocks(tables), ticket.generation)
        self._admitted[permit] = admitted
        return admitted

    def check(self, admitted: Admitted, terms: Sequence[tuple[Ints, Ints, Ints]]) -> Refusal | None:
        """Why these bytes are not gathered for a ticket; None if they are."""
        if admitted.ticket_id in self._ended:
            return self.refuse(GatherRefusal.ENDED, "its lease is over")
        for term in terms:
            if why := admitted.owned.refusal(*term):
                return self.refuse(GatherRefusal.NOT_ITS_BYTES, why)
        return None

    def refuse(self, code: GatherRefusal, detail: str) -> Refusal:
        self._refused[code.value] += 1
        return Refusal(code, detail)
