"""The boards of simulated authorities: seen by every process of the world, or by none."""

from __future__ import annotations

from itertools import count
from typing import Protocol

from kvferry.endpoint.edges import LeaseBoard


class BoardHolder(Protocol):
    """The process that a board belongs to, and goes with."""

    name: str
    is_alive: bool


class SimulatedBoard(LeaseBoard):
    """Which leases of one authority stand."""

    def __init__(self, holder: BoardHolder, place: str) -> None:
        self.holder, self.place = holder, place
        self.marks: dict[int, bytes] = {}

    def show(self, number: int, mark: bytes) -> None:
        """A lease stands."""
        self.marks[number] = mark

    def strike(self, number: int) -> None:
        """It stands no more."""
        self.marks.pop(number, None)

    def close(self) -> None:
        """None stands any more."""
        self.marks.clear()


class SimulatedBoards:
    """All boards of a world. ``are_seen``: whether its engines share a host."""

    def __init__(self, *, are_seen: bool) -> None:
        self._are_seen = are_seen
        self._boards: dict[str, SimulatedBoard] = {}
        self._numbers = count(1)

    def make(self, holder: BoardHolder) -> SimulatedBoard | None:
        """A board for an authority, if anybody could see it."""
        if not self._are_seen:
            return None
        board = SimulatedBoard(holder, f"{holder.name}/{next(self._numbers)}")
        self._boards[board.place] = board
        return board

    def is_shown(self, place: str, number: int, mark: bytes) -> bool:
        """Whether a lease is seen to stand."""
        board = self._boards.get(place)
        return board is not None and board.holder.is_alive and board.marks.get(number) == mark
