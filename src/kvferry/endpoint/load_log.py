"""One line of the log for each load: what happened first, then how, and how long it took."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from kvferry.core.words import counted
from kvferry.endpoint.log_limit import LogLimit
from kvferry.log import is_worth_a_line, log_of
from kvferry.runtime import FailureCode, Report
from kvferry.runtime.figures import NO_WAY
from kvferry.runtime.values import Record
from kvferry.wire.bad_input import printable
from kvferry.wire.limits import MAX_WORDS

log = log_of(__name__)


class LoadLog:
    """Writes the lines of one destination rank. Time is an argument.

    Tickets of others cause failures, so their lines are limited, and the rest is counted. Where more loads
    end well than anybody would read, the rest of their lines are for who debugs.
    """

    def __init__(self) -> None:
        self._good, self._failed = LogLimit(), LogLimit()
        self._num_ended: Counter[str] = Counter()
        self._read_bytes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.num_rejected: Mapping[str, int] = {}
        """Tickets that were not used, by code. Never changed, but replaced: anybody may look at it."""

    def ended(self, now: float, report: Report) -> None:
        """A load has ended."""
        self._num_ended[" ".join(filter(None, (report.record.outcome, report.record.way)))] += 1
        if report.failure is None:
            self._read_bytes[report.record.way or NO_WAY] += report.record.num_bytes
        if report.failure is None or report.failure.code is FailureCode.ABORTED:
            _write(logging.INFO if self._good.take(now) else logging.DEBUG, report)
        elif self._failed.take(now):
            _write(logging.WARNING, report)
            if num := self._failed.pop_left_out():
                log.warning("%d more failed loads have no line here", num)

    def status(self) -> dict[str, object]:
        """Loads that ended, by outcome and way; the bytes of those that ended well, by way."""
        return {"ended": dict(self._num_ended), "read_bytes": dict(self._read_bytes)}

    def rejected(self, report: Report) -> None:
        """A ticket was not used; from any thread."""
        code = report.record.outcome
        with self._lock:
            self.num_rejected = {**self.num_rejected, code: self.num_rejected.get(code, 0) + 1}
            number = sum(self.num_rejected.values())
        if is_worth_a_line(number):
            log.warning("rejected ticket number %d: %s", number, log_line(report))


def _write(level: int, report: Report) -> None:
    """The line of a report, and what it says as values, if anybody listens."""
    if log.isEnabledFor(level):
        log.log(level, "%s", log_line(report), extra={"kvferry": asdict(report.record)})


def log_line(report: Report) -> str:
    """The account of a load in one readable line."""
    record, failure = report.record, report.failure
    name, engine = printable(record.request_id), printable(record.engine)
    head = f"load of {name} from {engine} at {printable(record.address)}"
    in_all = f"{record.total_seconds * 1e3:.1f} ms in all"
    if failure is None:
        return f"{head}: {_moved(record)}; {in_all}"
    read = f"{_moved(record)}, and does not count" if record.way else "nothing was read"
    what = "was given up by this engine" if failure.code is FailureCode.ABORTED else "failed"
    return f"{head} {what}: {printable(str(failure), MAX_WORDS)}; {read}; {in_all}"


def _moved(record: Record) -> str:
    digest = f", digest {record.digest}" if record.digest else ""
    return (
        f"{counted(record.num_bytes, 'byte')} in {counted(record.num_runs, 'run')} from"
        f" {counted(record.num_sources, 'rank')}, {record.way or 'no way'},"
        f" in {record.move_seconds * 1e3:.1f} ms{digest}"
    )
