"""One run of the simulation: a seed in, what was broken out, with the trace that led to it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.runtime import fetch_job
from tests.support.simulation.growing import PART_TOKENS
from tests.support.simulation.laws import LAW_BROKEN, Law, Violation
from tests.support.simulation.trace import Happening, Trace
from tests.support.simulation.troubles import Trouble
from tests.support.simulation.world import SimulatedWorld

NUM_SHOWN = 40
"""How many of the last events a failing run shows."""


@dataclass(frozen=True, eq=False)
class SimulatedRun:
    """How a run went."""

    seed: int
    num_requests: int
    troubles: frozenset[Trouble]
    is_drawn: bool
    """Whether the seed chose the troubles."""
    violations: tuple[Violation, ...]
    trace: Trace
    num_good: int
    num_failed: int
    num_early: int
    num_cells: int
    seconds: float
    """Of virtual time."""

    @property
    def is_good(self) -> bool:
        """Whether every law held."""
        return not self.violations

    def command(self) -> str:
        """What plays it again."""
        troubles = "" if self.is_drawn else f" --troubles {','.join(sorted(self.troubles)) or 'none'}"
        program = "python -m tests.support.simulation"
        return f"{program} --seed {self.seed} --requests {self.num_requests}{troubles}"

    def summary(self) -> str:
        """In a line."""
        return (
            f"seed {self.seed}, {self.num_requests} requests: {self.num_good} loads good, {self.num_failed}"
            f" failed, {self.num_cells} cells written, {len(self.violations)} laws broken;"
            f" troubles: {', '.join(sorted(self.troubles)) or 'none'}"
        )

    def story(self) -> str:
        """What was broken first, what led to it, and how to see it again."""
        if self.is_good:
            return self.summary()
        first = self.violations[0]
        events = self.trace.events
        at = next(
            i
            for i, event in enumerate(events)
            if isinstance(event, Happening) and event.who == LAW_BROKEN and event.when >= first.when
        )
        lines = Trace(self.trace.timeline, events[max(0, at - NUM_SHOWN) : at + 1]).lines()
        return "\n".join(
            [self.summary(), *map(str, self.violations), "the last events:", *lines, self.command()]
        )


class _Watch(logging.Handler):
    """Sees what the endpoints log: an unexpected error is a finding."""

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text = f"{record.getMessage()}: {type(error).__name__}: {error}"
            self._world.laws.broken(Law.LIVENESS, text)


@contextmanager
def _watched(world: SimulatedWorld) -> Iterator[None]:
    log = logging.getLogger("kvferry")
    before = (log.propagate, log.level, log.handlers)
    log.propagate, log.handlers = False, [_Watch(world)]
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.propagate, log.handlers = before[0], before[2]
        log.setLevel(before[1])


@contextmanager
def _short_parts() -> Iterator[None]:
    before = fetch_job.PART_TOKENS
    fetch_job.PART_TOKENS = PART_TOKENS
    try:
        yield
    finally:
        fetch_job.PART_TOKENS = before


def run(seed: int, num_requests: int, troubles: Collection[Trouble] | None = None) -> SimulatedRun:
    """Let a world live; ``troubles`` are drawn from the seed unless they are given."""
    wanted = None if troubles is None else frozenset(troubles)
    world = SimulatedWorld(seed, num_requests, wanted)
    with _watched(world), _short_parts():
        world.run()
    laws = world.laws
    return SimulatedRun(
        seed,
        num_requests,
        world.troubles,
        troubles is None,
        tuple(laws.violations),
        world.trace,
        laws.num_good,
        laws.num_failed,
        laws.num_early,
        laws.num_cells,
        world.timeline.now,
    )


def smaller(failing: SimulatedRun) -> SimulatedRun:
    """A run that breaks the same law with fewer requests and fewer troubles, if there is one."""
    best, law = failing, failing.violations[0].law
    step = best.num_requests // 2
    while step:
        found = run(best.seed, best.num_requests - step, None if best.is_drawn else best.troubles)
        best, step = (found, step) if _breaks(found, law) else (best, step // 2)
        step = min(step, best.num_requests - 1)
    for trouble in sorted(best.troubles):
        found = run(best.seed, best.num_requests, best.troubles - {trouble})
        best = found if _breaks(found, law) else best
    return best


def _breaks(found: SimulatedRun, law: Law) -> bool:
    return any(violation.law is law for violation in found.violations)
