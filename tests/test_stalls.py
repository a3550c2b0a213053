"""Run again is a test that fails while the machine stands still, or that has a limit of time; no other."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import stalls
from tests.stalls import StallWatch

ROOT = Path(__file__).parents[1]

TESTS = """
import os, signal, time
from pathlib import Path
import pytest

from tests import stalls
from tests.stalls import StallWatch
from tests.conftest import WATCH

runs = Path(__file__).with_suffix(".runs")

def count():
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    return len(runs.read_text())

@pytest.fixture
def fresh():
    return []

{marked}
def test_it(request, fresh):
    assert fresh == []
    fresh.append(1)
    number = count()
    watch = request.config.stash[WATCH].process.pid
    if {is_stalled} and number == 1:
        os.kill(watch, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(watch, signal.SIGCONT)
    assert number > {num_failures}
"""


@pytest.mark.parametrize(
    ("is_stalled", "marked", "num_failures", "expected", "num_runs"),
    [
        (True, "", 1, 0, 2),
        (False, "", 1, 1, 1),
        (True, "", 9, 1, 2),
        (True, "", 0, 0, 1),
        (False, "@pytest.mark.timed", 2, 0, 3),
        (False, "@pytest.mark.timed", 9, 1, 3),
    ],
    ids=[
        "a stall",
        "no stall",
        "fails without a stall, too",
        "a stall and no failure",
        "in time at last",
        "never in time",
    ],
)
def test_which_tests_are_run_again(tmp_path, is_stalled, marked, num_failures, expected, num_runs):
    folder = tmp_path / "tests"
    folder.mkdir()
    file = folder / "test_made.py"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = timed: has a limit\n", encoding="utf-8")
    made = TESTS.format(is_stalled=is_stalled, marked=marked, num_failures=num_failures)
    file.write_text(made, encoding="utf-8")
    for name in ("conftest.py", "stalls.py"):
        text = (ROOT / "tests" / name).read_text(encoding="utf-8")
        text = text.replace(f"CALM_SECONDS = {stalls.CALM_SECONDS}", "CALM_SECONDS = 1.0")
        (folder / name).write_text(text, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == expected, ran.stdout + ran.stderr
    assert len(file.with_suffix(".runs").read_text()) == num_runs, ran.stdout
    assert ("stood still for" in ran.stdout) == (is_stalled and num_runs > 1)
    assert ran.stdout.count("has a limit of time: once more") == (num_runs - 1 if marked else 0)


def test_the_watch_ends_with_the_tests_however_these_end():
    made = "import os; from tests.stalls import StallWatch; print(StallWatch().process.pid, flush=True)"
    told = subprocess.run(
        [sys.executable, "-c", f"{made}; os._exit(1)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout
    deadline = time.monotonic() + 60
    while Path(f"/proc/{int(told)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_machine_is_waited_for_until_it_runs_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(stalls, "CALM_SECONDS", 0.5)
    monkeypatch.setattr(stalls, "PATIENCE", 3.0)
    watch = StallWatch()
    try:
        assert watch.wait_for_calm() < 3.0
        lost = iter([1.0, 2.0])
        monkeypatch.setattr(watch, "lost_since", lambda _: next(lost, 0.0))
        assert watch.wait_for_calm() >= 1.5, "two stalls, then none"
        monkeypatch.setattr(watch, "lost_since", lambda _: 1.0)
        watch.wait_for_calm()
        assert watch.wait_for_calm() < 0.5, "patience is at its end"
    finally:
        watch.close()
