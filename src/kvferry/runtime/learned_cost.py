"""What moving from one peer really costs: a first guess, corrected by the loads that ended.

Each coefficient of the first guess gets a factor. The factors are those with the smallest squared relative
errors over the last loads, held back a little, so that what the loads do not tell apart stays as it was
guessed. All that is kept of the loads that count is a few sums.

Relative errors are of the measured time, so a load that was held up by something else hardly counts, and a
quick one counts much: nothing moves faster than it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from kvferry.core.cost import Cost, Estimate, Traffic
from kvferry.errors import SpecError

MEMORY = 50.0
"""About how many of the last loads count."""
HOLD_BACK = 0.02
"""How strongly a factor is held back, in loads: as if loads were off by a fifth, guesses by twice or so."""
NUM_BEFORE_TRUST = 10
"""After so many loads, what was learned takes the place of the guess that holds back."""
LEAST, MOST = 0.05, 100.0
"""Between these a factor stays, whatever is measured."""
NUM_HELD_UP = 20
"""Of so many loads that had to share or to wait, the quickest counts like one that had not."""
NUM_ROUNDS = 30
"""How often loads that are fitted at once are gone through: what holds back counts less each time."""
NUM_SWEEPS = 12
"""Each goes on from where the one before ended, also from load to load."""


class LearnedCost:
    """The cost of one way to one peer, as far as it is known.

    >>> learned = LearnedCost(Cost(seconds_per_read=0, seconds_per_run=1e-6, bytes_per_second=1e9))
    >>> for num_runs in (10, 1000, 100_000) * 10:
    ...     learned.learn(Traffic(1, num_runs, num_bytes=10**8), 0.1 + num_runs * 4e-6)
    >>> f"{learned.cost.seconds_per_run:.1e}, {learned.cost.bytes_per_second:.1e}"
    '4.0e-06, 1.0e+09'
    """

    def __init__(self, first: Cost, memory: float = MEMORY) -> None:
        if not memory > 1:
            raise SpecError(f"more than one load must count, got {memory}")
        self.first = first
        self.cost = first
        """What is known now."""
        self.num_loads = 0
        """Loads that it was learned from."""
        self._fading = 1 - 1 / memory
        self._factors = [1.0, 1.0, 1.0]
        self._held_to = [1.0, 1.0, 1.0]
        self._products = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._log_error = 0.0
        self._held_up: list[tuple[float, Traffic, float]] = []
        """Loads that had to share or to wait: measured over expected, what, and how long."""

    @property
    def usual_error(self) -> float:
        """By how much predictions were off, in the middle of the last loads: 0.1 is a tenth."""
        return exp(self._log_error) - 1

    def learn(self, traffic: Traffic, seconds: float, *, is_alone: bool = True) -> None:
        """A load took so long; what moved nothing teaches nothing.

        One that was not alone would have taken less by itself: it counts if it was quicker than expected all
        the same, and of many that were not, the quickest counts.
        """
        expected = self.cost.of(traffic).seconds
        if seconds <= 0 or expected <= 0:
            return
        if is_alone or seconds < expected:
            self._count(traffic, seconds)
            return
        self._held_up.append((seconds / expected, traffic, seconds))
        if len(self._held_up) == NUM_HELD_UP:
            _, what, least = min(self._held_up, key=lambda load: load[0])
            self._held_up.clear()
            self._count(what, least)

    def _count(self, traffic: Traffic, seconds: float) -> None:
        self._note_error(abs(log(seconds / self.cost.of(traffic).seconds)))
        self.num_loads += 1
        guessed = self.first.of(traffic)
        parts = [part / seconds for part in guessed.parts.values()]
        for i, part in enumerate(parts):
            self._sums[i] = self._fading * self._sums[i] + part
            row = self._products[i]
            row[:] = [self._fading * old + part * other for old, other in zip(row, parts, strict=True)]
        self._solve()

    def predict(self, traffic: Traffic) -> Estimate:
        """What traffic will take, if nothing else is under way."""
        return self.cost.of(traffic)

    def _note_error(self, log_error: float) -> None:
        weight = max(1 / (self.num_loads + 1), 1 - self._fading)
        self._log_error += weight * (log_error - self._log_error)

    def _solve(self) -> None:
        """One factor after the other, the others as they are: three numbers need no more."""
        factors = self._factors
        for _ in range(NUM_SWEEPS):
            for i, row in enumerate(self._products):
                rest = self._sums[i] - row[0] * factors[0] - row[1] * factors[1] - row[2] * factors[2]
                best = (HOLD_BACK * self._held_to[i] + rest + row[i] * factors[i]) / (HOLD_BACK + row[i])
                factors[i] = min(MOST, max(LEAST, best))
        if self.num_loads % NUM_BEFORE_TRUST == 0:
            self._held_to[:] = factors
        first = self.first
        self.cost = Cost(
            first.seconds_per_read * factors[0],
            first.seconds_per_run * factors[1],
            first.bytes_per_second / factors[2],
            first.is_by_words,
        )


def fitted(first: Cost, loads: Sequence[tuple[Traffic, float]]) -> Cost:
    """The cost that tells best what loads took, all of them counted alike.

    >>> truth = Cost(seconds_per_read=1e-3, seconds_per_run=4e-6, bytes_per_second=1e9)
    >>> sizes = [Traffic(1, num_runs, num_bytes) for num_runs in (1, 9999) for num_bytes in (10**4, 10**8)]
    >>> cost = fitted(Cost(1e-4, 1e-6, 5e9), [(size, truth.of(size).seconds) for size in sizes])
    >>> f"{cost.seconds_per_read:.2e} {cost.seconds_per_run:.2e} {cost.bytes_per_second:.2e}"
    '1.00e-03 4.00e-06 1.00e+09'
    """
    learned = LearnedCost(first, memory=float("inf"))
    for _ in range(NUM_ROUNDS):
        for traffic, seconds in loads:
            learned.learn(traffic, seconds)
    return learned.cost
