"""``make gpu``: real vLLM engines on this machine's GPU, or on its CPU, kvferry between them.

    python -m tests.gpu run      [--device cuda|cpu] [--budget SECONDS] [--only PATTERN …] [--jobs N]
    python -m tests.gpu list     which cases there are
    python -m tests.gpu merge    FILE …     several files of results as one
    python -m tests.gpu report   text, JSON and a plot of what is there

docs/lab/gpu.md says what it proves and how to run it in pieces.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

# Only what needs no package: a machine without them is to hear a sentence.
from tests.gpu.cases import Case, all_cases
from tests.gpu.machine import NoMachine, commit, look
from tests.gpu.report import plot, text
from tests.gpu.results import Outcome, Results, ResultsError, merge, read, write

RESERVE_SECONDS = 30.0
"""Of the budget: for ending engines, and the report."""


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    path: Path = options.results or Path("build", "gpu", f"{options.device}.json")
    try:
        match options.verb:
            case "list":
                print("\n".join(case.name for case in chosen(options.only)))
                return 0
            case "merge":
                write(path, merge(options.files))
                return report(path)
            case "report":
                return report(path)
            case _:
                return run(options, path)
    except (NoMachine, ResultsError) as problem:
        print(f"make gpu: {problem}", file=sys.stderr)
        return 1


def chosen(patterns: list[str]) -> list[Case]:
    """The cases of the table whose names match one of the patterns; all if there are none."""
    cases = all_cases()
    return [
        case
        for case in cases
        if not patterns or any(fnmatchcase(case.name, f"*{pattern}*") for pattern in patterns)
    ]


def run(options: argparse.Namespace, path: Path) -> int:
    """What is not done yet, within the budget; then the report."""
    started = time.time()
    machine = look(options.device, sys.executable)
    from tests.e2e.devices import device_named
    from tests.gpu.run import Run, run_on, to_do

    results = Results(machine)
    if path.exists():
        results = _continued(read(path), machine, path)
    due = to_do(chosen(options.only), results, again=options.again, again_failed=options.again_failed)
    print(
        f"{len(due)} of {len(all_cases())} cases to do on {machine['device']}; results are in {path}",
        flush=True,
    )
    write(path, results)
    going = Run(path, results, commit(), say=lambda line: print(line, flush=True))
    if due:
        deadline = started + options.budget - RESERVE_SECONDS if options.budget else float("inf")
        jobs = options.jobs or (1 if options.device == "cpu" else 6)
        device = device_named(options.device)
        left = run_on(device, going, due, jobs=jobs, deadline=deadline, logs=path.with_suffix(".logs"))
        if left:
            print(f"{len(left)} cases are left: the same command goes on with them", flush=True)
    return report(path)


def _continued(results: Results, machine: dict[str, str], path: Path) -> Results:
    """What is there already, if it is of this machine."""
    if results.machine.get("device") != machine["device"]:
        raise ResultsError(
            f"{path} has results of {results.machine.get('device')}, and this is {machine['device']}:"
            " name another file (RESULTS=FILE)"
        )
    return results


def report(path: Path) -> int:
    """Text beside the results, a plot, the manifests; 1 if a case failed."""
    results = read(path)
    whole = text(results, all_cases())
    path.with_suffix(".txt").write_text(whole, encoding="utf-8")
    print(whole, end="")
    names = [path.with_suffix(".txt"), path]
    if plot(results, path.with_suffix(".svg")):
        names.append(path.with_suffix(".svg"))
    if any("manifest" in result.found for result in results.by_case.values()):
        from tests.gpu.describe import save_manifests

        names.append(path.with_suffix(".manifests"))
        save_manifests(results, names[-1])
    print(f"\nThis report is in {', '.join(map(str, names))}.")
    return int(any(result.outcome is Outcome.FAILED for result in results.by_case.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description="Real vLLM engines, kvferry between."
    )
    parser.add_argument("verb", choices=("run", "list", "merge", "report"))
    parser.add_argument("files", nargs="*", type=Path, help="for merge: files of results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--results", type=Path, help="the file of results (build/gpu/DEVICE.json)")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds after which nothing runs any more")
    parser.add_argument(
        "--only", action="append", default=[], help="part of a case's name; * stands for anything"
    )
    parser.add_argument("--jobs", type=int, default=0, help="cases side by side (6 on a GPU, 1 on a CPU)")
    parser.add_argument("--again", action="store_true", help="also what is done already")
    parser.add_argument("--again-failed", action="store_true", help="also what failed")
    return parser


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # cases that the budget ended may still wait for engines that are gone
