"""Orders, digits and pages are made in one room."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "kvferry"
FILES = sorted(path for room in ("models", "integrations") for path in (PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_descriptions_leave_the_making_of_axes_to_the_layout_room(path: Path) -> None:
    """Built twice, the two would drift apart: a config's view of a layout, and an engine's."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported.isdisjoint({"AxisMap", "Digit", "held", "turn", "with_turns"})
