"""What a source engine has to say of leases that did not end well. Readers cause it, so it is limited."""

from __future__ import annotations

from kvferry.endpoint.log_limit import LogLimit
from kvferry.log import log_of
from kvferry.runtime import Released
from kvferry.wire.bad_input import printable
from kvferry.wire.messages import Denial, Message

log = log_of(__name__)

_TROUBLES = {
    "expired": "its lease expired: no reader asked for it, or kept it alive, in time",
    "failed": "its reader could not read it, and said so",
}
"""Why a released request was not read; whoever withdraws one knows why."""


class LeaseLog:
    """Writes the lines of one source engine. Time is an argument."""

    def __init__(self, engine: str) -> None:
        self._engine, self._limit = engine, LogLimit()

    def released(self, now: float, released: Released) -> None:
        """A request's blocks are the engine's own again."""
        if trouble := _TROUBLES.get(released.reason):
            self._warn(now, f"{printable(released.request_id)} of {self._engine} was not read: {trouble}")

    def sent(self, now: float, message: Message) -> None:
        """A message goes to a reader, or to a rank."""
        if isinstance(message, Denial):
            what = f"{message.code}: {message.detail}" if message.detail else message.code
            self._warn(now, f"{self._engine} denied a lease of its ticket {message.ticket_id}: {what}")

    def _warn(self, now: float, line: str) -> None:
        if self._limit.take(now):
            log.warning("%s", line)
            if num := self._limit.pop_left_out():
                log.warning("%d more lines of %s like this were left out", num, self._engine)
