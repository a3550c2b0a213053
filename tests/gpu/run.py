"""One run: the cases that are not done yet, within a budget of seconds; each result is kept at once."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from tests.e2e.devices import Device
from tests.e2e.harness import Nursery
from tests.gpu.cases import (
    LOOK_AT_MEMORY,
    OTHER_SITE,
    Case,
    ConversationCase,
    DescribeCase,
    FaultCase,
    FullPoolCase,
    LatencyCase,
    NotHere,
    OffloadCase,
    OverlapCase,
    OverlapTimeCase,
    PairCase,
    ReuseCase,
    ServeCase,
    TimeCase,
    Timed,
    TurnsCase,
    TurnTimeCase,
)
from tests.gpu.describe import run_describe
from tests.gpu.engines import Engines
from tests.gpu.faults import run_fault
from tests.gpu.offloads import run_offload
from tests.gpu.overlaps import run_overlap, run_overlap_time
from tests.gpu.pairs import Wrong, run_pair
from tests.gpu.prefixes import run_conversation, run_reuse
from tests.gpu.results import Outcome, Result, Results, write
from tests.gpu.servers import Servers
from tests.gpu.serves import run_serve
from tests.gpu.times import run_latency, run_time
from tests.gpu.turns import run_full_pool, run_turn_times, run_turns

LOOK_SECONDS = 60.0
"""No wait is longer: a deadline may be far away, or none."""
Runner = Callable[[Case, dict[str, Any]], None]
"""Runs a case and writes down what it finds, as it finds it: what is there is kept if the case fails."""


def is_alone(case: Case) -> bool:
    """Whether nothing else may run meanwhile: what is timed, and what looks at how much memory is free."""
    if isinstance(case, FaultCase):
        return case.fault in LOOK_AT_MEMORY
    return isinstance(case, Timed | FullPoolCase)


def run_case(engines: Engines, case: Case, found: dict[str, Any]) -> None:
    """A case of whatever kind; raises Wrong, NotHere, or whatever the engines do."""
    match case:
        case DescribeCase():
            run_describe(engines, case, found)
        case PairCase():
            run_pair(engines, case, found)
        case ReuseCase():
            run_reuse(engines, case, found)
        case ConversationCase():
            run_conversation(engines, case, found)
        case OffloadCase():
            run_offload(engines, case, found)
        case TurnsCase():
            run_turns(engines, case, found)
        case FullPoolCase():
            run_full_pool(engines, case, found)
        case TurnTimeCase():
            run_turn_times(engines, case, found)
        case OverlapCase():
            run_overlap(engines, case, found)
        case OverlapTimeCase():
            run_overlap_time(engines, case, found)
        case FaultCase():
            run_fault(engines, case, found)
        case TimeCase():
            run_time(engines, case, found)
        case LatencyCase():
            run_latency(engines, case, found)
        case ServeCase():
            run_serve(engines, case, found)
        case _:
            assert_never(case)


def to_do(cases: Sequence[Case], results: Results, *, again: bool, again_failed: bool) -> list[Case]:
    """The cases that have no result yet; also those that are asked for once more."""

    def is_due(case: Case) -> bool:
        result = results.by_case.get(case.name)
        return result is None or again or (again_failed and result.outcome is Outcome.FAILED)

    return [case for case in cases if is_due(case)]


@dataclass
class Run:
    """The results so far, in memory and on disk."""

    path: Path
    results: Results
    commit: str = ""
    say: Callable[[str], None] = print
    clock: Callable[[], float] = time.time
    _begun: dict[str, float] = field(default_factory=dict)

    def judge(self, case: Case, run: Runner) -> Result:
        """Run one case; whatever happens becomes a result."""
        started = self.clock()
        outcome, why, found = Outcome.PASSED, "", dict[str, Any]()
        try:
            run(case, found)
        except NotHere as reason:
            outcome, why = Outcome.NOT_HERE, str(reason)
        except Wrong as wrong:
            outcome, why = Outcome.FAILED, str(wrong)
        except Exception as problem:
            outcome, why = Outcome.FAILED, f"{type(problem).__name__}: {problem}"
        ended = self.clock()
        return Result(case.name, outcome, why, found, ended, round(ended - started, 1), self.commit)

    def keep(self, result: Result) -> None:
        """At once: a machine may go away at any moment."""
        self.results = self.results.plus(result)
        write(self.path, self.results)
        first = result.why.splitlines()[0] if result.why else ""
        self.say(f"{result.outcome:9} {result.seconds:6.1f} s  {result.case}{f': {first}' if first else ''}")

    def run_all(self, cases: Sequence[Case], run: Runner, *, jobs: int, deadline: float) -> list[Case]:
        """Side by side, but for what must be alone; return what was not begun, or not finished, in time."""
        shared = [case for case in cases if not is_alone(case)]
        alone = [case for case in cases if is_alone(case)]
        left = self._run_some(shared, run, jobs, deadline)
        return left + self._run_some(alone, run, 1, deadline)

    def _run_some(self, cases: Sequence[Case], run: Runner, jobs: int, deadline: float) -> list[Case]:
        waiting, running = list(cases), dict[Future[Result], Case]()
        pool = ThreadPoolExecutor(jobs)
        while (waiting or running) and self.clock() < deadline:
            while waiting and len(running) < jobs:
                case = waiting.pop(0)
                running[pool.submit(self.judge, case, run)] = case
            seconds = min(max(0.0, deadline - self.clock()), LOOK_SECONDS)
            done, _ = wait(running, timeout=seconds, return_when=FIRST_COMPLETED)
            for one in done:
                del running[one]
                self.keep(one.result())
        # Those that run still are given up with their engines; they have no result.
        pool.shutdown(wait=False, cancel_futures=True)
        return [*running.values(), *waiting]


def run_on(
    device: Device, run: Run, cases: Sequence[Case], *, jobs: int, deadline: float, logs: Path
) -> list[Case]:
    """All cases on real engines of a device."""
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-gpu-")))
        nursery = ends.enter_context(Nursery(logs, device))
        servers = ends.enter_context(Servers(logs))
        other = None
        if site := os.environ.get(OTHER_SITE):
            (logs / "other").mkdir(exist_ok=True)
            other = ends.enter_context(Nursery(logs / "other", device, site=site))
        engines = Engines(nursery, device, folder, servers, other)
        try:
            return run.run_all(cases, partial(run_case, engines), jobs=jobs, deadline=deadline)
        except KeyboardInterrupt:
            print("stopped; what is done is kept", file=sys.stderr)
            return []
