"""Break the code on purpose; a break that no test notices is a missing test.

Two kinds of breaks. Those of ``tools/laws.toml`` each switch off one line that keeps a law, and name the test
that must notice. The others are made by cosmic-ray's operators, and by one of our own, all over the rooms: a
seeded sample of each room is tried, against the tests of that room. What survives is shown with its diff. A
new test kills it, or it joins ``tools/equivalents.toml`` with the reason why no test can tell them apart.

    python tools/mutants.py                            the laws, then 30 breaks of each room
    python tools/mutants.py wire --sample 100 --seed 7
    python tools/mutants.py core --file core/span.py --sample 0       all breaks of one file
    python tools/mutants.py laws

cosmic-ray makes the breaks and does not run them: it has one test command for all files, and changes them in
place. Here each break happens in a copy of the package, and the tests nearest to the file run first. (mutmut
was tried beside it: 3.8 does not run under pytest 9.2; patched, it is faster, but it mutates functions only,
and forks its children from a process in which tests with threads have run.)
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from kvferry.transport.cuda import has_cuda

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools"
PACKAGE = ROOT / "src" / "kvferry"

ROOMS = {
    "core": ("tests/core", "tests/test_values.py", "tests/test_sabotage.py", "tests/requirements"),
    "layout": (
        "tests/layout",
        "tests/test_values.py",
        "tests/test_packings.py",
        "tests/requirements",
        "tests/test_vllm_corpus.py",
    ),
    "wire": ("tests/wire", "tests/test_values.py"),
    "runtime": ("tests/runtime", "tests/endpoint"),
    "transport": ("tests/transport",),
}
"""Which tests are asked of a room's breaks. Those that are named after the broken file come first."""

ON_A_DEVICE = ("transport/cuda.py", "transport/mapped.py", "transport/exports.py")
"""Files that only tests with a GPU know; they are left out where there is none."""

NEAR = {
    "ReplaceComparisonOperator": "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is",
    "ReplaceBinaryOperator": "Add_Sub Sub_Add Mul_FloorDiv Mul_Add FloorDiv_Mul FloorDiv_Mod Mod_FloorDiv "
    "LShift_RShift RShift_LShift BitOr_BitAnd BitAnd_BitOr",
    "ReplaceUnaryOperator": "Delete_USub Delete_Not Delete_Invert",
}
"""Of cosmic-ray's operators that put one sign in another's place: the mistakes that people make. ``is`` for
``<`` or ``**`` for ``+`` would be noticed by anything, and flatter the score."""

OTHERS = (
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer", "ZeroIterationForLoop"),
)


@dataclass(frozen=True)
class Break:
    """One change of one file, not made yet."""

    file: str
    """Below src/kvferry."""
    line: int
    operator: str
    occurrence: int
    """Of the operator's places in the file."""


@dataclass(frozen=True)
class Law:
    """A line that keeps a law: its text, which the file has once, what takes its place, and who notices."""

    law: str
    file: str
    old: str
    new: str
    test: str

    def broken(self) -> str:
        """The whole file, broken."""
        return (PACKAGE / self.file).read_text(encoding="utf-8").replace(self.old, self.new)


@dataclass(frozen=True)
class Equivalent:
    """A break that no test can tell from the code, by the lines that it changes."""

    file: str
    old: str
    new: str
    why: str


def laws() -> list[Law]:
    return [Law(**entry) for entry in _entries("laws.toml", "law")]


def equivalents() -> list[Equivalent]:
    return [Equivalent(**entry) for entry in _entries("equivalents.toml", "equivalent")]


def _entries(name: str, key: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads((TOOLS / name).read_text(encoding="utf-8")).get(key, [])
    return found


# ----------------------------------------------------------------------------- making breaks


@cache
def operators() -> dict[str, Any]:
    """cosmic-ray's operators that are used here, and our own."""
    from cosmic_ray.plugins import get_operator  # noqa: PLC0415  # not in the environment of the tests

    names = [f"{kind}_{signs}" for kind, pairs in NEAR.items() for signs in pairs.split()]
    return {name: get_operator(f"core/{name}")() for name in (*names, *OTHERS)} | {"Drop": DropStatement()}


class DropStatement:
    """Leave out a statement that is there for its effect: a call, or a change of a field or an item."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Where, in the way that cosmic-ray asks its operators."""
        if node.type == "simple_stmt" and _has_effect(node.children[0].get_code(include_prefix=False)):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """The statement's place, empty."""
        import parso  # noqa: PLC0415  # comes with cosmic-ray

        old = node.children[0]
        node.children[0] = parso.python.tree.Keyword("pass", old.start_pos, old.get_first_leaf().prefix)
        return node


def _has_effect(code: str) -> bool:
    try:
        (statement,) = ast.parse(code).body
    except (SyntaxError, ValueError):  # ``return`` is one by itself
        return False
    match statement:
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case _:
            return False


def breaks_of(file: str) -> list[Break]:
    """Every break of a file; some of them change nothing (see ``broken``)."""
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415

    nodes = list(ast_nodes(get_ast(text_of(file))))
    return [
        Break(file, start[0], name, i)
        for name, operator in operators().items()
        for i, (start, _) in enumerate(p for node in nodes for p in operator.mutation_positions(node))
    ]


def text_of(file: str) -> str:
    return (PACKAGE / file).read_text(encoding="utf-8")


def broken(one: Break) -> str | None:
    """The whole file, broken; None if it would not be Python, or would do the same."""
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415

    text = text_of(one.file)
    changed: str | None = mutate_code(text, operators()[one.operator], one.occurrence)
    return changed if changed and _meaning(changed) not in ("", _meaning(text)) else None


def _meaning(text: str) -> str:
    """A module without what changes nothing that it does: annotations, and whether objects have slots."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Call):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "slots"]
    return ast.dump(tree)


def sample(breaks: Sequence[Break], size: int, seed: int) -> list[Break]:
    """Breaks in an order of chance: one for each line before any line has its second. All of them for 0."""
    chance = random.Random(seed)
    lines: dict[tuple[str, int], list[Break]] = defaultdict(list)
    for one in breaks:
        lines[one.file, one.line].append(one)
    rows = sorted(lines.values(), key=lambda row: (row[0].file, row[0].line))
    for row in rows:
        chance.shuffle(row)
    chance.shuffle(rows)
    turns = (row[i] for i in range(max(map(len, rows), default=0)) for row in rows if i < len(row))
    return list(turns)[: size or None]


def changed_lines(file: str, text: str) -> tuple[str, str]:
    """The lines of a file that a break changes, as they are and as they become."""
    lines = list(difflib.ndiff(text_of(file).splitlines(), text.splitlines()))
    old, new = (
        " ".join(line[2:].strip() for line in lines if line.startswith(sign)) for sign in ("- ", "+ ")
    )
    return old, new


def is_judged(file: str, text: str, known: Sequence[Equivalent]) -> bool:
    """Whether somebody has found that this break is none, by the lines that it changes."""
    return any((each.file, each.old, each.new) == (file, *changed_lines(file, text)) for each in known)


# ---------------------------------------------------------------------------- trying breaks

GUARD = """
import importlib
import os

try:
    import kvferry
    importlib.import_module(os.environ["KVFERRY_MUTANT_MODULE"])
except Exception:
    os._exit(9)
if not kvferry.__file__.startswith(os.environ["KVFERRY_MUTANT"]):
    raise SystemExit(f"another kvferry was imported: {kvferry.__file__}")
"""
"""A pytest plugin that makes sure of whose code is tested."""


class Verdict(StrEnum):
    """What became of a break."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    NO_CODE = "not importable"
    EQUIVALENT = "equivalent"
    """It changes nothing, or ``equivalents.toml`` says so."""
    LATE = "not tried in time"


BY_STATUS = {0: Verdict.SURVIVED, 1: Verdict.KILLED, 2: Verdict.KILLED, 9: Verdict.NO_CODE}
"""What pytest's exit status says. 2: a test module could not be collected."""


class Bench:
    """A copy of the package in which one file at a time is broken."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "src" / "kvferry"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "src" / "mutant_guard.py").write_text(GUARD)

    def judge(self, file: str, text: str, tests: Sequence[str], timeout_s: float) -> Verdict:
        """What the tests say of a broken file."""
        path = self.package / file
        whole = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            status, output = self.run(file, tests, timeout_s)
        finally:
            path.write_text(whole, encoding="utf-8")
        if status < 0:  # it hangs, or crashes the interpreter
            return Verdict.KILLED
        if status not in BY_STATUS:
            raise SystemExit(f"{file}: pytest ended with {status}:\n{output[-3000:]}")
        return BY_STATUS[status]

    def run(self, file: str, tests: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """pytest's exit status and output; the status of a process that was killed if it takes too long."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=short"]
        command += ["-p", "no:cacheprovider", "-p", "mutant_guard", *tests]
        environment = os.environ | {
            "PYTHONPATH": str(self.package.parent),
            "PYTHONDONTWRITEBYTECODE": "1",  # two breaks of one second and size must not share bytecode
            "HYPOTHESIS_PROFILE": "ci",
            "KVFERRY_MUTANT": str(self.package),
            "KVFERRY_MUTANT_MODULE": "kvferry." + file.removesuffix(".py").replace("/", "."),
        }
        options: dict[str, Any] = {"cwd": ROOT, "env": environment, "text": True, "start_new_session": True}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **options, **pipes) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # what the tests have started, too
                return -signal.SIGKILL, ""
        return process.returncode, output


class Benches:
    """A few copies of the package, handed out one at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = count
        self._free: SimpleQueue[Bench] = SimpleQueue()
        for i in range(count):
            self._free.put(Bench(folder / str(i)))

    @contextmanager
    def lend(self) -> Iterator[Bench]:
        """Whichever is free, for a while."""
        bench = self._free.get()
        try:
            yield bench
        finally:
            self._free.put(bench)

    def judge(self, file: str, text: str, tests: Sequence[str], timeout_s: float) -> Verdict:
        """As a bench does."""
        with self.lend() as bench:
            return bench.judge(file, text, tests, timeout_s)

    def time_whole(self, file: str, tests: Sequence[str]) -> float:
        """How long the tests take while nothing is broken; they must pass."""
        started = time.monotonic()
        with self.lend() as bench:
            status, output = bench.run(file, tests, 1800)
        if status:
            raise SystemExit(f"fail before anything is broken: pytest {' '.join(tests)}\n{output[-3000:]}")
        return time.monotonic() - started


def tests_of(room: str, file: str) -> tuple[str, ...]:
    """The tests of a room, the nearest to the file first: one that fails ends the run."""
    stem = Path(file).stem
    near = sorted(path for path in (ROOT / "tests" / room).glob(f"test_{stem}*.py"))
    return f"src/kvferry/{file}", *(path.relative_to(ROOT).as_posix() for path in near), *ROOMS[room]


# ---------------------------------------------------------------------------------- the verbs


def try_laws(benches: Benches) -> int:
    """Break each law's line; how many breaks its test did not notice."""
    known = laws()
    benches.time_whole("errors.py", sorted({law.test for law in known}))

    def attempt(law: Law) -> Verdict:
        return benches.judge(law.file, law.broken(), [law.test], 300)

    missed = 0
    with ThreadPoolExecutor(benches.count) as pool:
        for law, verdict in zip(known, pool.map(attempt, known), strict=True):
            missed += verdict is not Verdict.KILLED
            print(f"{verdict:<9} {law.law}", flush=True)
    print(f"laws: {len(known) - missed} of {len(known)} breaks noticed\n", flush=True)
    return missed


def try_room(benches: Benches, room: str, options: argparse.Namespace) -> int:
    """Break a sample of a room; how many breaks survived that nobody has judged."""
    files = sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / room).rglob("*.py"))
    if not has_cuda():
        files = [file for file in files if file not in ON_A_DEVICE]
    every = [one for file in files if options.file in (None, file) for one in breaks_of(file)]
    whole_s = benches.time_whole(files[0], ROOMS[room])
    print(f"{room}: {len(every)} breaks; its tests take {whole_s:.0f} s", flush=True)
    known = equivalents()
    deadline = time.monotonic() + 60 * options.minutes

    def attempt(one: Break) -> tuple[Break, str, Verdict]:
        text = broken(one)
        if text is None or is_judged(one.file, text, known):
            return one, "", Verdict.EQUIVALENT
        if time.monotonic() > deadline:
            return one, text, Verdict.LATE
        return one, text, benches.judge(one.file, text, tests_of(room, one.file), 60 + 4 * whole_s)

    counts: Counter[Verdict] = Counter()
    with ThreadPoolExecutor(benches.count) as pool:
        for one, text, verdict in pool.map(attempt, sample(every, options.sample, options.seed)):
            counts[verdict] += 1
            if verdict is Verdict.SURVIVED:
                old, new = changed_lines(one.file, text)
                print(f"\n{one.file}:{one.line} {one.operator}\n    - {old}\n    + {new}", flush=True)
    killed, survived = counts[Verdict.KILLED], counts[Verdict.SURVIVED]
    score = f"{100 * killed / (killed + survived):.0f} %" if killed + survived else "no score"
    print(f"\n{room}: {score}; " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()), flush=True)
    return survived


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", help=f"laws, {', '.join(ROOMS)}; all of them by default")
    parser.add_argument("--sample", type=int, default=30, help="breaks of each room; 0: all (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="which sample (default: 1)")
    parser.add_argument("--minutes", type=float, default=15, help="at most, for each room (default: 15)")
    parser.add_argument("--workers", type=int, default=2, help="breaks at a time (default: 2)")
    parser.add_argument("--file", help="only this file of the room, as core/span.py")
    options = parser.parse_args()
    if unknown := set(options.rooms) - {"laws", *ROOMS}:
        parser.error(f"no room {', '.join(sorted(unknown))}")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        benches = Benches(Path(folder), options.workers)
        for room in options.rooms or ["laws", *ROOMS]:
            missed += try_laws(benches) if room == "laws" else try_room(benches, room, options)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
