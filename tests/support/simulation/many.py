"""Many simulated runs, on every core."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from tests.support.simulation.run import SimulatedRun, run, smaller
from tests.support.simulation.troubles import Trouble

CHUNK = 10
"""Seeds that a process takes at a time."""
MAX_SHOWN = 3
"""Failing seeds that are shown in full."""


@dataclass(frozen=True, slots=True)
class _Tally:
    """What is known of a run that went well; of one that did not, its seed is enough."""

    seed: int
    is_good: bool
    num_good: int
    num_failed: int
    num_early: int
    num_cells: int
    seconds: float
    troubles: frozenset[Trouble]


def _tally(num_requests: int, troubles: frozenset[Trouble] | None, seed: int) -> _Tally:
    one = run(seed, num_requests, troubles)
    counts = one.num_good, one.num_failed, one.num_early, one.num_cells
    return _Tally(seed, one.is_good, *counts, one.seconds, one.troubles)


def _tallies(
    seeds: range, num_requests: int, troubles: frozenset[Trouble] | None, num_processes: int
) -> Iterator[_Tally]:
    work = partial(_tally, num_requests, troubles)
    if num_processes == 1:
        yield from map(work, seeds)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(work, seeds, chunksize=CHUNK)


def say(text: str) -> None:
    """A line of output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run_many(
    seeds: range, num_requests: int, troubles: frozenset[Trouble] | None = None, *, num_processes: int = 1
) -> list[int]:
    """Run every seed, and say what came of it; the seeds that broke a law."""
    began, bad = time.monotonic(), []
    sums: Counter[str] = Counter()
    seconds, num_with = 0.0, Counter[str]()
    for tally in _tallies(seeds, num_requests, troubles, num_processes):
        sums.update(good=tally.num_good, failed=tally.num_failed, cells=tally.num_cells)
        sums["early"] += tally.num_early
        num_with.update(tally.troubles)
        seconds += tally.seconds
        if not tally.is_good:
            bad.append(tally.seed)
            if len(bad) <= MAX_SHOWN:
                say(_story(run(tally.seed, num_requests, troubles)))
    took = time.monotonic() - began
    say(f"{len(seeds)} runs of {num_requests} requests, {seconds / 3600:.1f} h of virtual time,")
    say(f"in {took:.0f} s on {num_processes} processes: {sums['good']} loads good, {sums['cells']} cells,")
    say(f"{sums['early']} of them begun before their prompts were computed;")
    say(f"{sums['failed']} failed closed; {len(bad)} runs broke a law")
    say("runs with " + ", ".join(f"{name}: {number}" for name, number in sorted(num_with.items())))
    if bad:
        say(f"seeds that broke a law: {', '.join(map(str, bad[:50]))}")
    return bad


def _story(found: SimulatedRun) -> str:
    return found.story() if found.is_good else smaller(found).story()
