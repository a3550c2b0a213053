"""Engines that are looked at again and again: what they said last, and how fast their counts grow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.cli.status.reported import ReportedEngine

WINDOW_SECONDS = 10.0
"""Rates are those of so long, or of the time since the engine was first seen: short enough to follow, long
enough not to flicker."""
LATE_SECONDS = 4.0
"""How long an answer may take before that is worth a word."""
FORGET_SECONDS = 60.0
"""How long an engine that is gone stays on the screen."""


@dataclass(frozen=True, slots=True)
class Look:
    """What came of asking one engine: how it stands, or why there is no answer."""

    engine: ReportedEngine | None = None
    error: str = ""
    is_gone: bool = False
    """Nobody is there any more, as opposed to somebody who does not answer."""
    is_late: bool = False
    """It has been asked, and may still answer."""


ENDED = Look(error="it has ended", is_gone=True)


@dataclass(frozen=True, slots=True)
class WatchedEngine:
    """One engine, found at one place (a socket's file, or an address)."""

    history: tuple[ReportedEngine, ...]
    """Of this life of the engine, oldest first; at least one."""
    answered_at: float
    """When it answered last."""
    error: str = ""
    """Why it did not answer when it was asked last; empty: it did."""
    is_gone: bool = False

    @property
    def last(self) -> ReportedEngine:
        """How it stood when it answered last."""
        return self.history[-1]

    @property
    def per_second(self) -> dict[str, float]:
        """How fast each of its counts grows."""
        return self._rates(self.history[0].counts, self.last.counts)

    @property
    def bytes_per_second(self) -> dict[str, float]:
        """How fast each of its counts of bytes grows."""
        return self._rates(self.history[0].byte_counts, self.last.byte_counts)

    def grown(self, name: str) -> float:
        """By how much a count has grown within the window."""
        return self.last.counts.get(name, 0) - self.history[0].counts.get(name, 0)

    def _rates(self, before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
        # By the engine's own clock: it says when it counted, however late the answer came.
        seconds = self.last.up_seconds - self.history[0].up_seconds
        if self.error or seconds <= 0:
            return {}
        return {name: (number - before.get(name, 0)) / seconds for name, number in now.items()}

    def then(self, now: float, look: Look) -> WatchedEngine:
        """The same, asked once more."""
        if look.is_late and now - self.answered_at < LATE_SECONDS:
            return self  # a busy machine is no news
        if look.engine is None:
            return replace(self, error=look.error, is_gone=look.is_gone)
        if _is_another_life(self.last, look.engine):
            return WatchedEngine((look.engine,), now)
        begin = look.engine.up_seconds - WINDOW_SECONDS
        return WatchedEngine((*_since(begin, self.history), look.engine), now)


def _is_another_life(before: ReportedEngine, now: ReportedEngine) -> bool:
    """Whether the engine was started anew, so that its counts began at 0 again."""
    same = (before.title, before.host, before.pid) == (now.title, now.host, now.pid)
    return not same or now.up_seconds < before.up_seconds


def _since(begin: float, history: tuple[ReportedEngine, ...]) -> tuple[ReportedEngine, ...]:
    """What is not older than a time, and one more, so that the whole window is covered."""
    num_old = sum(each.up_seconds <= begin for each in history)
    return history[max(0, num_old - 1) :]


@dataclass(frozen=True, slots=True)
class Watched:
    """Everything that is looked at, by place."""

    engines: Mapping[str, WatchedEngine] = field(default_factory=dict)
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Places where nobody has ever answered, and why."""

    def then(self, now: float, looks: Mapping[str, Look]) -> Watched:
        """What is known after all places were looked at once more. A place that is not among them is gone."""
        found = {place: each.then(now, looks.get(place, ENDED)) for place, each in self.engines.items()}
        for place, look in looks.items():
            if place not in found and look.engine is not None:
                found[place] = WatchedEngine((look.engine,), now)
        alive = {each.last.title for each in found.values() if not each.is_gone}
        kept = {
            place: each
            for place, each in sorted(found.items())
            if not each.is_gone or (now - each.answered_at <= FORGET_SECONDS and each.last.title not in alive)
        }
        silent = {place: look.error for place, look in looks.items() if place not in found}
        return Watched(kept, silent)
