"""Rate-limited log lines of loads and leases."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from kvferry.errors import counted
from kvferry.log import is_worth_a_line, log_of
from kvferry.runtime import FailureCode, Released, Report
from kvferry.runtime.figures import NO_WAY
from kvferry.runtime.values import Record
from kvferry.wire.messages import Denial, Message
from kvferry.wire.reading import MAX_WORDS, printable

LINES_PER_SECOND = 20
BURST_LINES = 100


class LogLimit:
    """A rate limit of log lines. Time is an argument.

    >>> limit = LogLimit()
    >>> sum(limit.take(0.0) for _ in range(1000)), limit.pop_left_out()
    (100, 900)
    >>> sum(limit.take(1.0) for _ in range(1000)), limit.pop_left_out()
    (20, 980)
    """

    def __init__(self) -> None:
        self._left, self._since = float(BURST_LINES), float("-inf")
        self._num_left_out = 0

    def take(self, now: float) -> bool:
        """Whether to write a line now; otherwise it is counted."""
        self._left = min(float(BURST_LINES), self._left + (now - self._since) * LINES_PER_SECOND)
        self._since = now
        if self._left < 1:
            self._num_left_out += 1
            return False
        self._left -= 1
        return True

    def pop_left_out(self) -> int:
        num, self._num_left_out = self._num_left_out, 0
        return num


log = log_of(__name__)


class LoadLog:
    """Writes the lines of one destination rank.

    Lines of failures are limited, and the rest is counted. Beyond their limit, successful loads are logged at
    level DEBUG.
    """

    def __init__(self) -> None:
        self._good, self._failed = LogLimit(), LogLimit()
        self._num_ended: Counter[str] = Counter()
        self._read_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.num_rejected: Mapping[str, int] = {}
        """Rejected tickets, by code. Replaced, never changed: any thread may read it."""

    def ended(self, now: float, report: Report) -> None:
        self._num_ended[" ".join(filter(None, (report.record.outcome, report.record.way)))] += 1
        if report.failure is None:
            self._read_bytes[report.record.way or NO_WAY] += report.record.num_bytes
        if report.failure is None or report.failure.code is FailureCode.ABORTED:
            _write(logging.INFO if self._good.take(now) else logging.DEBUG, report)
        elif self._failed.take(now):
            _write(logging.WARNING, report)
            if num := self._failed.pop_left_out():
                log.warning("%d more failed loads were not logged", num)

    def status(self) -> dict[str, object]:
        """Ended loads by outcome and way; bytes of successful ones by way."""
        return {"ended": dict(self._num_ended), "read_bytes": dict(self._read_bytes)}

    def rejected(self, report: Report) -> None:
        """Log a rejected ticket; from any thread."""
        code = report.record.outcome
        with self._lock:
            self.num_rejected = {**self.num_rejected, code: self.num_rejected.get(code, 0) + 1}
            number = sum(self.num_rejected.values())
        if is_worth_a_line(number):
            log.warning("rejected ticket number %d: %s", number, log_line(report))


def _write(level: int, report: Report) -> None:
    if log.isEnabledFor(level):
        log.log(level, "%s", log_line(report), extra={"kvferry": asdict(report.record)})


def log_line(report: Report) -> str:
    record, failure = report.record, report.failure
    name, engine = printable(record.request_id), printable(record.engine)
    head = f"load of {name} from {engine} at {printable(record.address)}"
    in_all = f"{record.total_seconds * 1e3:.1f} ms in all"
    if failure is None:
        without = f"; without {printable(record.detail, MAX_WORDS)}" if record.detail else ""
        return f"{head}: {_moved(record)}; {in_all}{without}"
    read = f"{_moved(record)}, discarded" if record.way else "nothing was read"
    what = "was aborted by this engine" if failure.code is FailureCode.ABORTED else "failed"
    return f"{head} {what}: {printable(str(failure), MAX_WORDS)}; {read}; {in_all}"


def _moved(record: Record) -> str:
    digest = f", digest {record.digest}" if record.digest else ""
    return (
        f"{counted(record.num_bytes, 'byte')} in {counted(record.num_runs, 'run')} from"
        f" {counted(record.num_sources, 'rank')}, {record.way or 'no mode'},"
        f" in {record.move_seconds * 1e3:.1f} ms{digest}"
    )


_TROUBLES = {
    "expired": "its lease expired: no reader acquired or renewed it in time",
    "failed": "its reader reported a failure",
}
"""Why a released request was not read."""


class LeaseLog:
    """Writes the lines of one source engine."""

    def __init__(self, engine: str) -> None:
        self._engine, self._limit = engine, LogLimit()

    def released(self, now: float, released: Released) -> None:
        if trouble := _TROUBLES.get(released.reason):
            self._warn(now, f"{printable(released.request_id)} of {self._engine} was not read: {trouble}")

    def sent(self, now: float, message: Message) -> None:
        if isinstance(message, Denial):
            what = f"{message.code}: {message.detail}" if message.detail else message.code
            self._warn(now, f"{self._engine} denied a lease for its ticket {message.ticket_id}: {what}")

    def _warn(self, now: float, line: str) -> None:
        if self._limit.take(now):
            log.warning("%s", line)
            if num := self._limit.pop_left_out():
                log.warning("%d more such lines of %s were not logged", num, self._engine)
