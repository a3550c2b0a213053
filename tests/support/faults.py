"""Bad weather for the embedded transport: reads that are late, stuck, cut short, refused or wrong.

Delays are counted in polls of the reader, never in seconds, so that no test sleeps.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvferry.transport.memory import Copies, Hub
from kvferry.transport.reads import Read

EVERYONE = ""


@dataclass(frozen=True, slots=True)
class Move:
    """So many more runs arrive in this step; ``None`` is all that are left."""

    num_runs: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The read ends here; the runs that have not arrived never will."""

    error: str


@dataclass(frozen=True, slots=True)
class Hang:
    """All that is left is under way, and neither arrives nor ends: not even a cancelled read ends now."""


@dataclass(frozen=True, slots=True)
class Spoil:
    """All that is left arrives, one bit of each run wrong, and nobody is told."""


Step = Move | Fail | Hang | Spoil


class Weather(Protocol):
    """What the fabric does with each read."""

    def step(self, peer: str, transfer: int) -> Step:
        """The next step of a read from ``peer``: asked once per poll of the reader, until the read ends."""
        ...


class FaultyHub(Hub):
    def __init__(self, weather: Weather) -> None:
        super().__init__()
        self._weather = weather

    def step(self, copies: Copies, read: Read) -> str:
        match self._weather.step(copies.peer.places.whose, copies.transfer):
            case Hang():
                copies.is_posted = True
            case Move(num_runs):
                copies.move(read, num_runs)
            case Spoil():
                copies.move(read)
                _spoil(copies)
            case Fail(error):
                return error
        return ""


def _spoil(copies: Copies) -> None:
    """Flip a bit in the middle of each run: their ends may be slack."""
    for address, num_bytes in zip(copies.dst, copies.num_bytes, strict=True):
        ctypes.c_uint8.from_address(address + num_bytes // 2).value ^= 0x10


T = TypeVar("T")
D = TypeVar("D")


class Faults:
    """For a ``FaultyHub``; turn its knobs while reads are under way. A knob is for a peer, or for everyone.

    >>> faults = Faults()
    >>> hub = FaultyHub(faults)
    >>> faults.delay(2)                # two polls bring nothing
    >>> faults.trickle(1)              # then one run arrives per poll
    >>> faults.stall("prefill")        # nothing of this peer arrives or ends …
    >>> faults.resume("prefill")       # … until now: the late bytes do arrive
    >>> faults.fail("cable cut", num_runs=3)   # whoever has three runs gets no more, and ends with an error
    >>> faults.spoil()                 # one bit of each run is wrong, and nobody is told
    """

    def __init__(self) -> None:
        self._stalled: set[str] = set()
        self._spoiled: set[str] = set()
        self._delays: dict[str, int] = {}
        self._trickles: dict[str, int] = {}
        self._failures: dict[str, tuple[str, int]] = {}
        self._polls: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._moved: defaultdict[tuple[str, int], int] = defaultdict(int)

    def stall(self, peer: str = EVERYONE) -> None:
        """Nothing moves, nothing ends. What was polled once is with the fabric: it cannot be cancelled."""
        self._stalled.add(peer)

    def resume(self, peer: str = EVERYONE) -> None:
        """What was stalled goes on."""
        self._stalled.discard(peer)

    def delay(self, num_polls: int, peer: str = EVERYONE) -> None:
        """The first polls of each read bring nothing."""
        self._delays[peer] = num_polls

    def trickle(self, num_runs: int, peer: str = EVERYONE) -> None:
        """So many runs per poll."""
        self._trickles[peer] = num_runs

    def fail(self, error: str, *, num_runs: int = 0, peer: str = EVERYONE) -> None:
        """Reads end with an error once so many of their runs have arrived."""
        self._failures[peer] = (error, num_runs)

    def spoil(self, peer: str = EVERYONE) -> None:
        """Reads end well, and one bit of each run is wrong."""
        self._spoiled.add(peer)

    def calm(self) -> None:
        """All knobs back: whatever is under way arrives."""
        for knob in (self._stalled, self._spoiled, self._delays, self._trickles, self._failures):
            knob.clear()

    @property
    def num_under_way(self) -> int:
        """Reads that were polled and have not ended."""
        return len(self._polls)

    def step(self, peer: str, transfer: int) -> Step:
        """What happens to a read at this poll."""
        read = (peer, transfer)
        self._polls[read] += 1
        if self._stalled & {peer, EVERYONE}:
            return Hang()
        if self._polls[read] <= _knob(self._delays, peer, 0):
            return Move(0)
        if self._spoiled & {peer, EVERYONE}:
            self._drop(read)
            return Spoil()
        trickle = _knob(self._trickles, peer, None)
        failure = _knob(self._failures, peer, None)
        if failure is not None:
            error, num_runs = failure
            left = num_runs - self._moved[read]
            if left <= 0:
                self._drop(read)
                return Fail(error)
            trickle = left if trickle is None else min(trickle, left)
        if trickle is None:
            self._drop(read)
            return Move()
        self._moved[read] += trickle
        return Move(trickle)

    def _drop(self, read: tuple[str, int]) -> None:
        self._polls.pop(read, None)
        self._moved.pop(read, None)


def _knob(knob: Mapping[str, T], peer: str, default: D) -> T | D:
    return knob.get(peer, knob.get(EVERYONE, default))
