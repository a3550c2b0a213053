"""Two processes of one kind of memory, and the rivals in them, turn by turn.

A rival whose threads never rest has two processes of its own, with the same contents, which are stopped while
others read.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.cli.bench.grid import BenchCase, BlockOrder, Medium, largest
from kvferry.cli.bench.memory import BenchSetup
from kvferry.cli.bench.reader import BenchReader
from kvferry.cli.bench.report import BenchReport, NotRun, RivalTimes
from kvferry.cli.bench.rivals import Rival, Turn
from kvferry.cli.bench.source import BenchSource
from kvferry.cli.output import num_bytes
from kvferry.cli.progress import Step
from kvferry.errors import KVFerryError
from kvferry.testing.fleet import Worker
from kvferry.transport.settings import WAY_SETTING
from kvferry.transport.ucx import CUDA_ENVIRONMENT, FABRICS, GPU_DRIVER, QUIET, UCX_EMULATES, UCX_TRANSPORTS

MIN_TURNS = 3
CASE_SECONDS = 4.0
"""What the turns of one case may take; slow cases have fewer."""
CALL_SECONDS = 300.0


TCP_ALONE = {UCX_TRANSPORTS: "tcp,self,cuda_copy" if GPU_DRIVER.exists() else "tcp,self", UCX_EMULATES: "y"}
"""Of vLLM's own worker, so that it uses TCP between two processes of one host."""


def environment(medium: Medium) -> dict[str, str]:
    """What the processes of a kind of memory find in their environment; NIXL's where they need it."""
    quiet = {name: os.environ.get(name, value) for name, value in QUIET.items()}
    if not medium.uses_nixl:
        return {**quiet, **FABRICS["tcp"]}
    fabric = {name: value for name, value in FABRICS["cma"].items() if name != WAY_SETTING}
    return {**quiet, **fabric, **(CUDA_ENVIRONMENT if medium.device != "cpu" else {})}


def environment_of(rival: Rival, medium: Medium) -> dict[str, str]:
    """What the processes of a rival that has its own find in their environment."""
    tcp = TCP_ALONE if rival is Rival.VLLM and not medium.uses_nixl else {}
    return {**environment(medium), **tcp}


def measure(
    medium: Medium,
    shapes: Sequence[Sequence[BenchCase]],
    rivals: Sequence[Rival],
    num_turns: int,
    report: BenchReport,
    step: Step,
    *,
    with_calls: bool,
) -> None:
    """Run all cases, then time calls if asked to; what was found is added to the report."""
    apart = [rival for rival in rivals if rival.is_apart]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        setup = BenchSetup(medium.device, largest(shapes), folder)
        shared = _Pair.start(stack, setup, environment(medium))
        pairs = {rival: _Pair.start(stack, setup, environment_of(rival, medium)) for rival in apart}
        contest = _Contest(medium, shared, pairs, report)
        contest.enter(rivals)
        for cases in shapes:
            contest.lay_out(cases)
            for case in cases:
                contest.run(case, num_turns)
                step(f"{medium.name}: {shown(case)}")
        if with_calls:
            contest.time_calls(case for cases in shapes for case in cases)


@dataclass(frozen=True)
class _Pair:
    """A source process and a reader process."""

    source: Worker
    reader: Worker

    @classmethod
    def start(cls, stack: ExitStack, setup: BenchSetup, env: Mapping[str, str]) -> _Pair:
        """Both end with the stack."""
        source = stack.enter_context(closing(Worker("bench-src", BenchSource, setup, env=env)))
        card = source.call("card", timeout=CALL_SECONDS)
        reader = stack.enter_context(closing(Worker("bench-dst", BenchReader, setup, card, env=env)))
        reader.wait_ready(CALL_SECONDS)
        return cls(source, reader)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let both run for a while; before and after it they are stopped, and take no time from others."""
        for worker in (self.source, self.reader):
            worker.resume()
        try:
            yield
        finally:
            for worker in (self.source, self.reader):
                worker.stop()


class _Contest:
    """Who still takes part, and what each has done."""

    def __init__(
        self, medium: Medium, shared: _Pair, pairs: Mapping[Rival, _Pair], report: BenchReport
    ) -> None:
        """``pairs``: of those who do not share the processes of the others."""
        self._medium, self._shared, self._pairs, self._report = medium, shared, pairs, report
        self._rivals: list[Rival] = []

    def _source(self, rival: Rival) -> Worker:
        return self._pairs.get(rival, self._shared).source

    def _reader(self, rival: Rival) -> Worker:
        return self._pairs.get(rival, self._shared).reader

    def enter(self, rivals: Sequence[Rival]) -> None:
        """Make those ready that can take part."""
        for rival in rivals:
            self._rivals.append(rival)
            self._try(rival, partial(self._add, rival))

    def _add(self, rival: Rival) -> None:
        card = self._ask(self._source(rival), "gathering_card") if rival is Rival.PACKED else None
        self._ask(self._reader(rival), "add", rival, card)

    def lay_out(self, cases: Sequence[BenchCase]) -> None:
        """Get everybody ready for caches of another shape; first contact is over then."""
        for rival in [*self._rivals]:
            self._try(rival, partial(self._lay_out, rival, cases[0]))

    def _lay_out(self, rival: Rival, case: BenchCase) -> None:
        if rival.needs_offer:
            self._ask(self._source(rival), "lay_out", rival, case.shape)
        self._ask(self._reader(rival), "lay_out", rival, case.shape)
        self._turn(rival, case)

    def run(self, case: BenchCase, num_turns: int) -> None:
        """Every rival in each turn, not always the same one first; the last turn's bytes are looked at."""
        warm_up = sum(turn.seconds for turn in self._round(case, self._rivals).values())
        num_turns = max(MIN_TURNS, min(num_turns, int(CASE_SECONDS / max(warm_up, 1e-9))))
        turns: dict[Rival, list[Turn]] = {}
        for number in range(num_turns):
            first = number % max(1, len(self._rivals))
            order = self._rivals[first:] + self._rivals[:first]
            done = self._round(case, order, is_checked=number == num_turns - 1)
            for rival, turn in done.items():
                turns.setdefault(rival, []).append(turn)
        for rival in self._rivals:
            last = turns[rival][-1]
            seconds = tuple(turn.seconds for turn in turns[rival])
            self._report.add(RivalTimes(self._medium.name, case, rival, last.way, last.num_runs, seconds))

    def time_calls(self, cases: Iterable[BenchCase]) -> None:
        """What a call costs while the largest of these reads are under way."""
        if Rival.DIRECT in self._rivals:
            scattered = [case for case in cases if case.order is BlockOrder.SCATTERED]
            largest_case = max(scattered, key=lambda case: case.total_bytes)
            found = self._ask(self._shared.reader, "call_times", self._medium.name, largest_case)
            self._report.calls.append(found)

    def _round(
        self, case: BenchCase, rivals: Sequence[Rival], *, is_checked: bool = False
    ) -> dict[Rival, Turn]:
        """One read of each."""
        done: dict[Rival, Turn] = {}
        for rival in [*rivals]:
            turn = self._try(rival, partial(self._turn, rival, case))
            if turn is None:
                continue
            done[rival] = turn
            if is_checked:
                self._check(rival, case)
        return done

    def _turn(self, rival: Rival, case: BenchCase) -> Turn:
        if rival.is_apart:  # its processes were just woken up, which is not to count
            self._read(rival, case)
        return self._read(rival, case)

    def _read(self, rival: Rival, case: BenchCase) -> Turn:
        offer = self._ask(self._source(rival), "offer", rival, case) if rival.needs_offer else None
        turn: Turn = self._ask(self._reader(rival), "turn", rival, case, offer)
        return turn

    def _check(self, rival: Rival, case: BenchCase) -> None:
        self._report.checked_bytes += case.total_bytes
        with self._awake(rival):
            wrong = self._ask(self._reader(rival), "first_wrong", rival, case)
        if wrong:
            self._report.wrong.append(f"{self._named(rival)}, {shown(case)}: {wrong}")

    def _try(self, rival: Rival, do: Callable[[], Any]) -> Any:
        """Do something of a rival's; one that fails is out, and why is told."""
        try:
            with self._awake(rival):
                return do()
        except KVFerryError:  # a process is gone, and with it everybody
            raise
        except Exception as error:
            why = str(error).strip().splitlines()[-1]
            self._rivals.remove(rival)
            if rival is Rival.VLLM:
                self._report.not_run.append(NotRun(self._medium.name, rival.value, why))
            else:
                self._report.failures.append(f"{self._named(rival)}: {why}")
            with self._awake(rival):
                self._ask(self._reader(rival), "drop", rival)
            return None

    def _awake(self, rival: Rival) -> AbstractContextManager[None]:
        pair = self._pairs.get(rival)
        return pair.awake() if pair else nullcontext()

    def _named(self, rival: Rival) -> str:
        return f"{self._medium.name}, {rival.value}"

    def _ask(self, worker: Worker, method: str, *args: Any) -> Any:
        return worker.call(method, *args, timeout=CALL_SECONDS)


def shown(case: BenchCase) -> str:
    """A case in words."""
    return f"{case.num_pages:,} runs of {num_bytes(case.shape.run_bytes)}, {case.order.value}"
