"""Who takes part on this machine, and turn after turn of all of them between two processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from platform import python_version
from typing import Any

from benchmarks.rival_cases import BenchCase, Medium
from benchmarks.rival_report import BenchReport, NotRun, RivalTimes
from benchmarks.rival_sides import BenchReader, BenchSource, Rival, Turn
from kvferry.cli.machine import describe_machine, package_versions
from kvferry.cli.output import Step, num_bytes
from kvferry.cli.processes import FABRICS, Worker, quiet_environment
from kvferry.errors import KVFerryError, SpecError, TransportError
from kvferry.transport.cuda import device_names
from kvferry.transport.nixl_agent import check_installed
from kvferry.transport.settings import CUDA_ENVIRONMENT, WAY_SETTING

MIN_TURNS = 3
CASE_SECONDS = 4.0
"""What the turns of one case may take; slow cases have fewer."""
CALL_SECONDS = 300.0
HOST, DEVICE = "host", "cuda:"
FIRST_DEVICE = "cuda:0"
NO_DEVICE = "this machine has no CUDA device that kvferry can use"


def no_nixl() -> str:
    """Why NIXL cannot be used; empty if it can."""
    try:
        check_installed()
    except TransportError as error:
        return error.detail
    return ""


def _devices() -> list[str]:
    try:
        return device_names()
    except TransportError:
        return []


def new_report() -> BenchReport:
    versions = {"python": python_version(), **package_versions()}
    return BenchReport(describe_machine(), versions)


def asked_media(asked: Sequence[str], fabrics: Sequence[str], report: BenchReport) -> list[Medium]:
    """The kinds of memory to run; those that nobody asked for by name, and that are not there, are noted."""
    media: list[Medium] = []
    if not asked:
        asked = (HOST, FIRST_DEVICE) if _devices() else (HOST,)
        if not _devices():
            report.not_run.append(NotRun(FIRST_DEVICE, "", NO_DEVICE))
    for name in dict.fromkeys(asked):
        media += [Medium.host(over) for over in fabrics] if name == HOST else [_device(name)]
    if why := no_nixl():
        report.not_run += [NotRun(medium.name, "", why) for medium in media if medium.uses_nixl]
        media = [medium for medium in media if not medium.uses_nixl]
    return media


def _device(name: str) -> Medium:
    index = name.removeprefix(DEVICE)
    if not name.startswith(DEVICE) or not index.isdecimal():
        raise SpecError(f"--memory {name}: use {HOST}, or {DEVICE}N for a GPU")
    names = _devices()
    if not names:
        raise SpecError(f"--memory {name}: {NO_DEVICE}")
    if int(index) >= len(names):
        raise SpecError(f"--memory {name}: the last device is {DEVICE}{len(names) - 1}")
    return Medium(f"{DEVICE}{int(index)}", f"{DEVICE}{int(index)}")


def asked_rivals(medium: Medium, asked: Sequence[str], report: BenchReport) -> list[str]:
    """Who takes part; for those who cannot, the report says why."""
    for name in asked:
        if name not in list(Rival):
            raise SpecError(f"--only {name}: use one of {', '.join(Rival)}")
    why_not = {
        Rival.MAPPED: "only device memory can be mapped" if medium.device == "cpu" else "",
        Rival.DIRECT: "" if medium.uses_nixl else "kvferry does not let NIXL use TCP",
    }
    rivals = [rival for rival in Rival if not asked or rival in asked]
    report.not_run += [NotRun(medium.name, rival, why_not[rival]) for rival in rivals if why_not.get(rival)]
    return [rival for rival in rivals if not why_not.get(rival)]


def environment(medium: Medium) -> dict[str, str]:
    """What the processes of a kind of memory find in their environment; NIXL's where they need it."""
    if not medium.uses_nixl:
        return {**quiet_environment(), **FABRICS["tcp"]}
    fabric = {name: value for name, value in FABRICS["cma"].items() if name != WAY_SETTING}
    return {**quiet_environment(), **fabric, **(CUDA_ENVIRONMENT if medium.device != "cpu" else {})}


def measure(
    medium: Medium,
    shapes: Sequence[Sequence[BenchCase]],
    rivals: Sequence[str],
    num_turns: int,
    report: BenchReport,
    step: Step,
    env: Mapping[str, str] | None = None,
    sides: tuple[type[BenchSource], type[BenchReader]] | None = None,
) -> None:
    """Run all cases in two processes of their own; what was found is added to the report."""
    source_type, reader_type = sides or (BenchSource, BenchReader)
    env, size = {**environment(medium), **(env or {})}, max(cases[0].shape.total_bytes for cases in shapes)
    with ExitStack() as stack:
        source, reader = (
            stack.enter_context(closing(Worker(f"bench-{name}", made, medium.device, size, env=env)))
            for name, made in (("src", source_type), ("dst", reader_type))
        )
        contest = _Contest(medium, source, reader, report, [*rivals])
        for cases in shapes:
            contest.lay_out(cases[0])
            for case in cases:
                contest.run(case, num_turns)
                step(f"{medium.name}: {shown(case)}")


class _Contest:
    """Who still takes part, and what each has done."""

    def __init__(
        self, medium: Medium, source: Worker, reader: Worker, report: BenchReport, rivals: list[str]
    ) -> None:
        self._medium, self._report, self._rivals = medium, report, rivals
        self._source = partial(source.call, timeout=CALL_SECONDS)
        self._reader = partial(reader.call, timeout=CALL_SECONDS)
        self._each(lambda rival: self._reader("add", rival, self._source("card", rival)), rivals)

    def _each(self, do: Callable[[str], Any], rivals: Sequence[str]) -> dict[str, Any]:
        """Do something of every rival's; one that fails is out, and why is told."""
        done = {}
        for rival in [*rivals]:
            try:
                done[rival] = do(rival)
            except KVFerryError:  # a process is gone, and with it everybody
                raise
            except Exception as error:
                why = str(error).strip().splitlines()[-1]
                self._rivals.remove(rival)
                self._report.failures.append(f"{self._medium.name}, {rival}: {why}")
                self._reader("drop", rival)
        return done

    def lay_out(self, case: BenchCase) -> None:
        """Get everybody ready for caches of another shape; first contact is over then."""

        def do(rival: str) -> None:
            self._source("lay_out", rival, case.shape)
            self._reader("lay_out", rival, case.shape)
            self._turn(case, rival)

        self._each(do, self._rivals)

    def run(self, case: BenchCase, num_turns: int) -> None:
        """Every rival in each turn, not always the same one first; the last turn's bytes are looked at."""
        warm_up = sum(turn.seconds for turn in self._each(partial(self._turn, case), self._rivals).values())
        num_turns = max(MIN_TURNS, min(num_turns, int(CASE_SECONDS / max(warm_up, 1e-9))))
        turns: dict[str, list[Turn]] = {}
        for number in range(num_turns):
            first = number % max(1, len(self._rivals))
            do = partial(self._checked_turn if number == num_turns - 1 else self._turn, case)
            for rival, turn in self._each(do, self._rivals[first:] + self._rivals[:first]).items():
                turns.setdefault(rival, []).append(turn)
        for rival in self._rivals:
            last = turns[rival][-1]
            seconds = tuple(turn.seconds for turn in turns[rival])
            times = RivalTimes(self._medium.name, case, rival, last.way, last.num_runs, seconds)
            self._report.times.append(times)

    def _turn(self, case: BenchCase, rival: str) -> Any:
        return self._reader("turn", rival, case, self._source("offer", rival, case))

    def _checked_turn(self, case: BenchCase, rival: str) -> Any:
        turn = self._turn(case, rival)
        self._report.checked_bytes += case.total_bytes
        if wrong := self._reader("first_wrong", rival, case):
            self._report.wrong.append(f"{self._medium.name}, {rival}, {shown(case)}: {wrong}")
        return turn


def shown(case: BenchCase) -> str:
    return f"{case.num_pages:,} runs of {num_bytes(case.shape.run_bytes)}, {case.order.value}"
