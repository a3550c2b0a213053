"""Admission of packed reads at a source rank: checks permit, lease and bytes before memory is touched."""

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
    """Why a rank rejects a packed read."""

    NOT_GRANTED = "not-granted"
    """The permit was not issued by the rank's authority."""
    ENDED = "ended"
    """The ticket was read or withdrawn, its lease is over, or its engine has restarted."""
    NOT_ITS_BYTES = "not-its-bytes"
    """Bytes outside the ticket's blocks."""
    TOO_MUCH = "too-much"
    """More than fits into a chunk, or too many waiting requests of one ticket."""
    CANNOT = "cannot"
    """The rank's device failed, or it has no memory to gather into."""


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


class EndedTickets:
    """The numbers of ended tickets. Numbers are issued in order, and all end."""

    MAX_KEPT = 200_000
    """More than an engine has on offer at once; beyond this, the lowest gap counts as ended."""

    def __init__(self) -> None:
        self._below = 1
        """All lower numbers have ended."""
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
    """For one thread. Each permit is verified once, and remembered until its ticket ends."""

    MAX_ADMITTED = 4096
    """Remembered permits; the oldest is forgotten, and verified again."""

    def __init__(self, rank_key: bytes, blocks: BlockBytes) -> None:
        self._rank_key, self._blocks = rank_key, blocks
        self._admitted: dict[bytes, Admitted] = {}
        self._ended = EndedTickets()
        self._generation = 0
        self._past: set[int] = set()
        """Earlier generations of the engine."""
        self._refused: Counter[str] = Counter()

    @property
    def refused(self) -> Mapping[str, int]:
        return self._refused

    def begin(self, generation: int) -> None:
        """The engine has restarted: tickets of earlier generations are over."""
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
        """Why these bytes must not be gathered for a ticket; None if they may."""
        if admitted.ticket_id in self._ended:
            return self.refuse(GatherRefusal.ENDED, "its lease is over")
        for term in terms:
            if why := admitted.owned.refusal(*term):
                return self.refuse(GatherRefusal.NOT_ITS_BYTES, why)
        return None

    def refuse(self, code: GatherRefusal, detail: str) -> Refusal:
        self._refused[code.value] += 1
        return Refusal(code, detail)
