"""What the breaks on purpose are made of keeps up with the code."""

import ast
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[1]

LAWS = mutants.laws()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.law)
def test_a_law_is_kept_by_a_line_that_is_there(law):
    text = mutants.text_of(law.file)
    assert text.count(law.old) == 1
    assert law.broken() != text
    ast.parse(law.broken())


def test_every_test_that_must_notice_is_collected():
    nodes = sorted({law.test for law in LAWS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.parametrize("each", mutants.equivalents(), ids=lambda each: f"{each.file}: {each.old}")
def test_a_judged_break_is_of_code_that_is_there(each):
    lines = " ".join(line.strip() for line in mutants.text_of(each.file).splitlines())
    assert each.old in lines, "the code has changed: judge it anew, or drop the entry"
    assert len(each.why.split()) > 3


def test_each_room_has_tests_of_its_own():
    for room, tests in mutants.ROOMS.items():
        assert (mutants.PACKAGE / room).is_dir()
        assert all((ROOT / test).exists() for test in tests)


def test_a_sample_is_seeded_and_takes_one_break_of_a_line_before_a_second():
    breaks = [mutants.Break("core/span.py", line, "AddNot", i) for i, line in enumerate((1, 1, 1, 2, 2, 3))]
    for seed in range(20):
        chosen = mutants.sample(breaks, 3, seed)
        assert {one.line for one in chosen} == {1, 2, 3}
        assert chosen == mutants.sample(breaks, 3, seed)
    assert set(mutants.sample(breaks, 0, 1)) == set(breaks)
    assert len({tuple(mutants.sample(breaks, 3, seed)) for seed in range(20)}) > 1
