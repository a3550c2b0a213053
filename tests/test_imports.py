"""The import rule: pyproject.toml states all of it, CONTRIBUTING.md says the same, and imports are light.

``make imports`` checks the code against the statement.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvferry"

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]
MAY_IMPORT = {
    module: contract["allowed_importers"]
    for contract in CONTRACTS
    if contract["type"] == "protected"
    for module in contract["protected_modules"]
}
"""What is imported -> who may import it."""

HEAVY = ("torch", "nixl", "zmq", "vllm")
LIGHT_IMPORT_SKIPS = (*HEAVY, "msgspec", "rich", "typer", "hypothesis", "pytest")

PROBE = """
import importlib, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        tried.add(name.partition(".")[0])

tried = set()
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
print(*sorted(tried))
"""
"""Imports one module and prints every top-level name it asked for, installed or not."""


def asked_for(module: str) -> set[str]:
    """The top-level packages that importing ``module`` in a fresh interpreter asks for."""
    done = subprocess.run([sys.executable, "-c", PROBE, module], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_probe_sees_what_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "sly.py").write_text("try:\n    import nixl.sub\nexcept ImportError:\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "nixl" in asked_for("sly")


@pytest.mark.parametrize("module", ["kvferry", "kvferry.core"])
def test_import_is_light(module):
    assert asked_for(module).isdisjoint(LIGHT_IMPORT_SKIPS)


@pytest.mark.parametrize(
    "module",
    [
        f"kvferry.{room}"
        for room in ("layout", "models", "wire", "transport", "runtime", "testing", "cli")
        if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()
    ],
)
def test_rooms_load_nothing_heavy(module):
    assert asked_for(module).isdisjoint(HEAVY)


def rooms() -> set[str]:
    """Every module and package right below kvferry, but for the entry point that nobody imports."""
    found = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    return found - {"__init__", "__main__"}


def test_the_rule_names_every_room():
    """A new room starts with a line in pyproject.toml that says who may import it."""
    assert {f"kvferry.{room}" for room in rooms()} == {
        name for name in MAY_IMPORT if name.startswith("kvferry.")
    }


def test_the_rule_names_every_foreign_package():
    """A new dependency starts with a line in pyproject.toml that says by which door it comes in."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("kvferry", include_external_packages=True, cache_dir=None)
    outside = {name for name in graph.modules if not name.startswith("kvferry")} - sys.stdlib_module_names
    assert outside == {name for name in MAY_IMPORT if not name.startswith("kvferry")}


def test_the_table_for_people_says_the_same():
    """CONTRIBUTING.md turns the rule round: what each room may import, beside errors."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \| .* \| (.*) \|$", text, re.MULTILINE)
    said = {room: set(re.findall(r"\w+", cell)) - {"nothing"} for room, cell in rows}
    ruled = {
        room: {
            other
            for other in rooms() - {"errors", room}
            if f"kvferry.{room}" in MAY_IMPORT[f"kvferry.{other}"]
        }
        for room in rooms()
    }
    assert said == ruled
