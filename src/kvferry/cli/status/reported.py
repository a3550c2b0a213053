"""What engines said of themselves, as values: one answer, and what all said over time. Pure.

Whatever else an engine said is left out, and nonsense is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvferry.errors import SpecError
from kvferry.wire.reading import printable

StatusJson = Mapping[str, Any]
"""What an engine answered."""

N = TypeVar("N", int, float)

MAX_NAME = 64
"""Characters of a name that are shown where many engines share a screen."""


@dataclass(frozen=True, slots=True)
class SeenSource:
    """A source engine, as a destination rank sees it."""

    engine: str
    address: str
    state: str
    way: str
    why: str


@dataclass(frozen=True, slots=True)
class SeenLoad:
    """A load that has not ended."""

    request_id: str
    engine: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SeenLease:
    """A request whose blocks are pinned."""

    request_id: str
    num_tokens: int
    reader: str
    seconds_left: float | None
    """None: it has no end."""


@dataclass(frozen=True, slots=True)
class ReportedDestination:
    """How a rank of a destination engine stands."""

    name: str
    host: str
    pid: int
    up_seconds: float
    rank: int
    phases: Mapping[str, int]
    """Loads under way."""
    num_reads: int
    """In flight."""
    num_quarantined: int
    sources: tuple[SeenSource, ...]
    loads: tuple[SeenLoad, ...]
    counts: Mapping[str, float]
    """What only grows: loads that ended, by outcome and way (``read direct``)."""
    byte_counts: Mapping[str, float]
    """What only grows: bytes of loads that ended well, by way."""

    @property
    def title(self) -> str:
        """Which one it is, in a few words."""
        return f"destination {self.name} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class ReportedSource:
    """How a source engine stands."""

    name: str
    host: str
    pid: int
    up_seconds: float
    address: str
    ranks: str
    """How many of how many have joined."""
    num_offered: int
    num_being_read: int
    pinned_bytes: float
    leases: tuple[SeenLease, ...]
    counts: Mapping[str, float]
    """What only grows: requests offered, and leases that ended by why (``ended: expired``)."""
    byte_counts: Mapping[str, float]
    """What only grows: bytes that destinations began to read."""

    @property
    def title(self) -> str:
        """Which one it is, in a few words."""
        return f"source {self.name}"


ReportedEngine = ReportedDestination | ReportedSource

OFFERED = "offered"
GRANTED = "granted"
ENDED = "ended: "
READ = "read"
"""How the count of loads that ended well begins; the way follows."""


def reported(answer: StatusJson) -> ReportedEngine:
    """An engine's answer as values; raises SpecError if it is none that this version can read."""
    try:
        side = answer["side"]
        return _source(answer) if side == "source" else _destination(answer)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = printable(f"{type(error).__name__}: {error}", MAX_NAME)
        version = printable(str(answer.get("kvferry", "unknown")), MAX_NAME)
        raise SpecError(
            f"its answer cannot be read here ({what}): it is kvferry {version}; use `kvferry status` of that"
            " version"
        ) from None


def _destination(answer: StatusJson) -> ReportedDestination:
    return ReportedDestination(
        name=_text(answer["reader"]),
        host=_text(answer["host"]),
        pid=int(answer["pid"]),
        up_seconds=float(answer["up_seconds"]),
        rank=int(answer["rank"]),
        phases=_numbers(answer["fetches"], int),
        num_reads=int(answer["in_flight"]),
        num_quarantined=int(answer["quarantined"]),
        sources=tuple(
            SeenSource(*(_text(each[key]) for key in ("engine", "address", "state", "way", "why")))
            for each in answer["sources"]
        ),
        loads=tuple(
            SeenLoad(
                _text(each["request_id"]), _text(each["engine"]), _text(each["phase"]), float(each["seconds"])
            )
            for each in answer["loads"]
        ),
        counts=_numbers(answer["ended"], float),
        byte_counts=_numbers(answer["read_bytes"], float),
    )


def _source(answer: StatusJson) -> ReportedSource:
    figures = answer["figures"]
    reasons = {
        f"{ENDED}{reason}": number for reason, number in _figures(figures, "kvferry_leases_ended_total")
    }
    return ReportedSource(
        name=_text(answer["engine"]),
        host=_text(answer["host"]),
        pid=int(answer["pid"]),
        up_seconds=float(answer["up_seconds"]),
        address=_text(answer["address"]),
        ranks=_text(answer["ranks"]),
        num_offered=int(answer["offered"]),
        num_being_read=int(answer["being_read"]),
        pinned_bytes=_total(figures, "kvferry_pinned_bytes"),
        leases=tuple(
            SeenLease(
                _text(each["request_id"]),
                int(each["num_tokens"]),
                _text(each["reader"]),
                None if each["seconds_left"] is None else float(each["seconds_left"]),
            )
            for each in answer["leases"]
        ),
        counts={OFFERED: _total(figures, "kvferry_offers_total"), **reasons},
        byte_counts={GRANTED: _total(figures, "kvferry_granted_bytes_total")},
    )


def _figures(figures: list[StatusJson], metric: str) -> list[tuple[str, float]]:
    """The numbers of one metric, by the values of its labels. What is 0 is not among the figures."""
    return [
        (_text(" ".join(map(str, each["labels"].values()))), float(each["value"]))
        for each in figures
        if each["metric"] == metric
    ]


def _total(figures: list[StatusJson], metric: str) -> float:
    return sum(number for _, number in _figures(figures, metric))


def _numbers(counts: Mapping[str, Any], kind: Callable[[Any], N]) -> dict[str, N]:
    return {_text(name): kind(number) for name, number in counts.items()}


def _text(value: object) -> str:
    """What a peer may have named: short, on one line, without control characters."""
    return printable(str(value), MAX_NAME)


# -- looked at again and again ---------------------------------------------------------------------


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


HAS_ENDED = Look(error="it has ended", is_gone=True)


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
        found = {place: each.then(now, looks.get(place, HAS_ENDED)) for place, each in self.engines.items()}
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
