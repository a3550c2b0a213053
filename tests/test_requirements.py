"""The table of requirements: complete, and each test that it names is there, runs, and carries the number."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "lab" / "requirements.md"

DEMANDS = {"R003": 8, "R004": 5, "R002": 16, "R000": 10, "R001": 8, "RB": 9, "RA": 9}
"""How many demands each document has."""
NUMBERS = [f"{document}-{i}" for document, count in DEMANDS.items() for i in range(1, count + 1)]

LATER = "later: "
"""How the part of a demand begins that is still open."""

_NUMBER = re.compile(r"\b(?:R00[0-4]|RB|RA)-\d+\b")
_TEST = re.compile(r"`([\w.]+\.py)::(\w+)`")


def table() -> list[tuple[str, str, list[str]]]:
    """(number, demand, entries of the last column) of every row."""
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if _NUMBER.fullmatch(cells[0]):
            assert len(cells) == 3, line
            rows.append((cells[0], cells[1], [entry for entry in cells[2].split("<br>") if entry]))
    return rows


ROWS = table()


def test_every_demand_is_in_the_table_once():
    assert Counter(number for number, _, _ in ROWS) == Counter(NUMBERS)


@pytest.mark.parametrize(("number", "demand", "entries"), ROWS, ids=[number for number, _, _ in ROWS])
def test_a_demand_is_tested_or_says_what_it_waits_for(number, demand, entries):
    assert demand
    assert entries, f"{number} has neither a test nor a status"
    for entry in entries:
        if match := _TEST.fullmatch(entry):
            assert number in numbers_of(*match.groups()), f"{entry} does not carry {number}"
        else:
            assert entry.startswith(LATER), entry
            assert len(entry.split()) > 3, f"{number}: what is for later?"


def test_every_number_in_a_test_is_a_demand():
    for path in sorted((TESTS / "requirements").glob("test_*.py")):
        for name in functions(path):
            found = numbers_of(path.name, name)
            assert found, f"{path.name}::{name} settles no demand"
            assert found <= set(NUMBERS), f"{path.name}::{name}"


def test_every_test_of_a_demand_is_in_the_table():
    """A test that carries a number, in the tests of the requirements, stands in that number's row."""
    listed = {(number, *match) for number, _, entries in ROWS for e in entries for match in _TEST.findall(e)}
    carried = {
        (number, path.name, name)
        for path in (TESTS / "requirements").glob("test_*.py")
        for name in functions(path)
        for number in numbers_of(path.name, name)
    }
    assert carried - listed == set()


def numbers_of(file_name: str, test: str) -> set[str]:
    """The numbers in a test's name, docstring or comments. The test must be where pytest collects it."""
    (path,) = (p for p in TESTS.rglob(file_name))
    assert test in functions(path), f"{file_name} has no test {test} at its top level"
    return set(_NUMBER.findall(functions(path)[test]))


@cache
def functions(path: Path) -> dict[str, str]:
    """The source of every test at the top level of a module or of a test class: nested ones never run."""
    text = path.read_text(encoding="utf-8")
    found = {}
    tree = ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    for body in (tree.body, *(node.body for node in classes)):
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert node.name not in found, f"{path.name} has two tests {node.name}: the first never runs"
                found[node.name] = ast.get_source_segment(text, node) or ""
    return found
