"""Status answers of engines as values: a single answer, and the history of all. Pure.

Unknown fields are dropped; invalid ones raise SpecError.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.errors import SpecError
from kvferry.wire.reading import printable

StatusJson = Mapping[str, Any]

MAX_NAME = 64
"""Maximum characters of a name on a screen with many engines."""


Reported = Mapping[str, Any]
"""State of an engine, or of one of its ranks: the fields that ``status --watch --json`` prints.

Both sides have a name, a process, and counts that only grow. ``counts`` of a destination are ended loads by
outcome and way (``read direct``); of a source, offered requests and ended leases by reason (``ended:
expired``). ``byte_counts`` of a destination are bytes of successful loads by way; of a source, granted bytes.
"""

OFFERED = "offered"
GRANTED = "granted"
ENDED = "ended: "
READ = "read"
"""Prefix of the counts of successful loads; the way follows."""


def reported(answer: StatusJson) -> Reported:
    """An engine's answer, checked; raises SpecError if this version cannot parse it."""
    try:
        both = {"host": _text(answer["host"]), "pid": int(answer["pid"])}
        both["up_seconds"] = float(answer["up_seconds"])
        return both | (_source(answer) if answer["side"] == "source" else _destination(answer))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = printable(f"{type(error).__name__}: {error}", MAX_NAME)
        version = printable(str(answer.get("kvferry", "unknown")), MAX_NAME)
        raise SpecError(
            f"cannot parse its answer ({what}): it runs kvferry {version}; use `kvferry status` of that"
            " version"
        ) from None


def _destination(answer: StatusJson) -> dict[str, Any]:
    name, rank = _text(answer["reader"]), int(answer["rank"])
    return {
        "side": "destination",
        "title": f"destination {name} rank {rank}",
        "name": name,
        "rank": rank,
        "phases": {_text(phase): int(number) for phase, number in answer["fetches"].items()},
        "num_reads": int(answer["in_flight"]),
        "num_quarantined": int(answer["quarantined"]),
        "sources": [
            {key: _text(each[key]) for key in ("engine", "address", "state", "way", "why")}
            for each in answer["sources"]
        ],
        "loads": [
            {key: _text(each[key]) for key in ("request_id", "engine", "phase")}
            | {"seconds": float(each["seconds"])}
            for each in answer["loads"]
        ],
        "counts": {_text(name): float(number) for name, number in answer["ended"].items()},
        "byte_counts": {_text(way): float(number) for way, number in answer["read_bytes"].items()},
    }


def _source(answer: StatusJson) -> dict[str, Any]:
    figures: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for each in answer["figures"]:
        label = _text(" ".join(map(str, each["labels"].values())))
        figures[each["metric"]][label] = float(each["value"])
    total = {metric: sum(values.values()) for metric, values in figures.items()}
    ended = figures["kvferry_leases_ended_total"]
    name = _text(answer["engine"])
    return {
        "side": "source",
        "title": f"source {name}",
        "name": name,
        "address": _text(answer["address"]),
        "ranks": _text(answer["ranks"]),
        "num_offered": int(answer["offered"]),
        "num_being_read": int(answer["being_read"]),
        "pinned_bytes": total.get("kvferry_pinned_bytes", 0.0),
        "leases": [_lease(each) for each in answer["leases"]],
        "counts": {
            OFFERED: total.get("kvferry_offers_total", 0.0),
            **{f"{ENDED}{reason}": number for reason, number in ended.items()},
        },
        "byte_counts": {GRANTED: total.get("kvferry_granted_bytes_total", 0.0)},
    }


def _lease(each: StatusJson) -> dict[str, Any]:
    left = each["seconds_left"]
    return {
        "request_id": _text(each["request_id"]),
        "num_tokens": int(each["num_tokens"]),
        "reader": _text(each["reader"]),
        "seconds_left": None if left is None else float(left),  # None: no end
    }


def _text(value: object) -> str:
    """A peer's name: truncated, on one line, without control characters."""
    return printable(str(value), MAX_NAME)


# -- history ---------------------------------------------------------------------------------------


WINDOW_SECONDS = 10.0
"""Rates are averages over this window, or since the first answer."""
LATE_SECONDS = 4.0
"""How long an answer may take before a warning."""
FORGET_SECONDS = 60.0
"""How long an ended engine stays on the screen."""


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one query: the engine's state, or an error."""

    engine: Reported | None = None
    error: str = ""
    is_gone: bool = False
    """Whether the engine has ended, rather than just not answered."""
    is_late: bool = False
    """Whether the query is still open."""


HAS_ENDED = Look(error="it has ended", is_gone=True)


@dataclass(frozen=True, slots=True)
class WatchedEngine:
    """One engine at one place (a socket file or an address)."""

    history: tuple[Reported, ...]
    """Answers of this process, oldest first; at least one."""
    answered_at: float
    error: str = ""
    """Why the last query failed; empty if it succeeded."""
    is_gone: bool = False

    @property
    def last(self) -> Reported:
        return self.history[-1]

    @property
    def per_second(self) -> dict[str, float]:
        return self._rates("counts")

    @property
    def bytes_per_second(self) -> dict[str, float]:
        return self._rates("byte_counts")

    def grown(self, name: str) -> float:
        """Growth of a count within the window."""
        before, now = (each["counts"].get(name, 0.0) for each in (self.history[0], self.last))
        return float(now - before)

    def _rates(self, counts: str) -> dict[str, float]:
        before, now = self.history[0], self.last
        # The engine's clock tells when it counted, even if the answer came late.
        seconds = now["up_seconds"] - before["up_seconds"]
        if self.error or seconds <= 0:
            return {}
        return {
            name: (number - before[counts].get(name, 0)) / seconds for name, number in now[counts].items()
        }

    def then(self, now: float, look: Look) -> WatchedEngine:
        """This engine after one more query."""
        if look.is_late and now - self.answered_at < LATE_SECONDS:
            return self  # the machine may just be busy
        if look.engine is None:
            return replace(self, error=look.error, is_gone=look.is_gone)
        last, engine = self.last, look.engine
        is_same = all(last[key] == engine[key] for key in ("title", "host", "pid"))
        if not is_same or engine["up_seconds"] < last["up_seconds"]:
            return WatchedEngine((engine,), now)  # restarted: its counts began at 0 again
        begin = engine["up_seconds"] - WINDOW_SECONDS
        num_old = sum(each["up_seconds"] <= begin for each in self.history)
        recent = self.history[max(0, num_old - 1) :]  # with one older answer, to cover the whole window
        return WatchedEngine((*recent, engine), now)


@dataclass(frozen=True, slots=True)
class Watched:
    """All watched engines, by place."""

    engines: Mapping[str, WatchedEngine] = field(default_factory=dict)
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Places that have never answered, with the error."""

    def then(self, now: float, looks: Mapping[str, Look]) -> Watched:
        """The state after one more query of every place. An engine that is not in ``looks`` has ended."""
        found = {place: each.then(now, looks.get(place, HAS_ENDED)) for place, each in self.engines.items()}
        for place, look in looks.items():
            if place not in found and look.engine is not None:
                found[place] = WatchedEngine((look.engine,), now)
        alive = {each.last["title"] for each in found.values() if not each.is_gone}
        kept = {
            place: each
            for place, each in sorted(found.items())
            if not each.is_gone
            or (now - each.answered_at <= FORGET_SECONDS and each.last["title"] not in alive)
        }
        silent = {place: look.error for place, look in looks.items() if place not in found}
        return Watched(kept, silent)
