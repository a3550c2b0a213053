"""Virtual time: what happens next, one thing after the other, and clocks that do not agree."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], object]


class Timeline:
    """Things to come, in the order of their time; what is due at one time happens in the order of planning.

    >>> timeline, seen = Timeline(), []
    >>> timeline.after(2.0, lambda: seen.append(timeline.now))
    >>> timeline.after(1.0, lambda: timeline.after(0.5, lambda: seen.append(timeline.now)))
    >>> timeline.run_until(10.0)
    >>> seen, timeline.now
    ([1.5, 2.0], 10.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._actions: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, when: float, action: Action) -> None:
        """Have something happen; what should have happened already happens now."""
        heappush(self._actions, (max(when, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        """Have something happen in so many seconds."""
        self.at(self.now + seconds, action)

    def run_until(self, when: float) -> None:
        """Let everything happen that is due until then."""
        actions = self._actions
        while actions and actions[0][0] <= when:
            self.now, _, action = heappop(actions)
            action()
        self.now = when


class SimulatedClock:
    """The clock of one host: it began anywhere, runs at a rate of its own, and may stand still.

    >>> timeline = Timeline()
    >>> clock = SimulatedClock(timeline, start=100.0, rate=2.0)
    >>> timeline.run_until(3.0)
    >>> clock.read(), clock.time_of(110.0)
    (106.0, 5.0)
    """

    def __init__(self, timeline: Timeline, start: float, rate: float = 1.0) -> None:
        self._timeline = timeline
        self._shown, self._since, self.rate = start, timeline.now, rate

    def read(self) -> float:
        """What it shows now."""
        return self._shown + (self._timeline.now - self._since) * self.rate

    def run_at(self, rate: float) -> None:
        """Go on at another rate; 0 stops it."""
        self._shown, self._since, self.rate = self.read(), self._timeline.now, rate

    def time_of(self, shown: float) -> float:
        """The true time at which it will show this, if its rate stays."""
        return self._timeline.now + (shown - self.read()) / self.rate if self.rate else float("inf")
