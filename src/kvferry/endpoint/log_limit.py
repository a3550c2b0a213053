"""Lines of the log that others cause: some each second, and a count of the rest."""

from __future__ import annotations

LINES_PER_SECOND = 20
BURST_LINES = 100


class LogLimit:
    """Whether one more line may be written. Time is an argument.

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
        """Whether a line may be written now; if not, it is counted."""
        self._left = min(float(BURST_LINES), self._left + (now - self._since) * LINES_PER_SECOND)
        self._since = now
        if self._left < 1:
            self._num_left_out += 1
            return False
        self._left -= 1
        return True

    def pop_left_out(self) -> int:
        """How many lines were left out since this was asked last."""
        num, self._num_left_out = self._num_left_out, 0
        return num
