"""The public API: small, complete, and each name shown at work."""

from __future__ import annotations

import ast
import inspect
from enum import Enum
from pathlib import Path

import pytest

import kvferry

START = Path(__file__).parents[1] / "docs" / "start.md"
MOST_NAMES = 40


def test_the_list_is_sorted_complete_and_small() -> None:
    assert sorted(kvferry.__all__, key=lambda n: (not n.isupper(), n)) == list(kvferry.__all__)
    found = {name: getattr(kvferry, name) for name in dir(kvferry) if name != "TYPE_CHECKING"}
    public = {n for n, v in found.items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(kvferry.__all__)
    assert len(kvferry.__all__) <= MOST_NAMES


def test_what_type_checkers_see_is_what_is_loaded() -> None:
    (block,) = (node for node in ast.parse(inspect.getsource(kvferry)).body if isinstance(node, ast.If))
    seen = {
        node.module: " ".join(a.name for a in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == kvferry._HOMES
    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        kvferry.plann  # noqa: B018


@pytest.mark.parametrize("name", [n for n in kvferry.__all__ if not n.isupper()])
def test_every_name_but_enums_and_exceptions_has_a_doctest(name: str) -> None:
    found = getattr(kvferry, name)
    is_plain = inspect.isclass(found) and issubclass(found, Enum | Exception)
    assert is_plain or ">>>" in (found.__doc__ or "")


def test_plan_prove_select_is_under_ten_lines() -> None:
    """The first example of a newcomer's page: two manifests in, runs out."""
    block = next(b for b in START.read_text(encoding="utf-8").split("```") if b.startswith("python"))
    statements = ast.parse(block.removeprefix("python")).body
    assert len(statements) < 10
    assert "kvferry.select(" in block
