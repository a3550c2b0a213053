"""The import rule: arrows point inward, and each foreign package has one door.

``make imports`` checks directions and chains; here stands the exact table of who may import whom.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "kvferry"
FILES = sorted(PACKAGE.rglob("*.py"))

ROOMS = {
    "": {"core", "errors", "models"},  # kvferry/__init__.py: the public names
    "errors": set(),
    "core": {"errors"},
    "wire": {"core", "errors"},
    "models": {"core", "errors"},
    "transport": {"core", "errors"},
    "runtime": {"core", "errors", "wire"},
    "channel": {"core", "errors", "wire"},
    "endpoint": {"core", "errors", "wire", "transport", "channel", "runtime"},
    "testing": {"core", "errors", "models", "transport", "wire", "runtime", "endpoint"},
    "integrations": {"core", "errors", "models", "wire", "transport", "channel", "runtime", "endpoint"},
    "cli": {
        *("", "core", "errors", "models", "wire", "transport", "channel", "runtime", "endpoint"),
        *("testing", "integrations"),
    },
    "__main__": {"cli"},
}
"""Room -> the other rooms it may import ('' is the public names). Each room is listed."""

DOORS = {
    "numpy": ("",),
    "hypothesis": ("testing/",),
    "msgspec": ("wire/",),
    "nixl": ("transport/nixl.py",),
    "prometheus_client": ("endpoint/metrics.py", "integrations/vllm/stats.py"),
    "rich": ("cli/", "cli.py"),
    "tokenizers": ("testing/vllm/",),
    "torch": ("integrations/", "testing/vllm/"),
    "transformers": ("testing/vllm/",),
    "typer": ("cli/", "cli.py"),
    "vllm": ("integrations/",),
    "zmq": ("channel/",),
}
"""Foreign package -> where, as a prefix of the path inside the package, it may be imported."""

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


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Every absolute name that a file imports, wherever in the file, with its line."""
    package = ("kvferry", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            # `from kvferry import core` imports a room; `from kvferry import Plan` does not.
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}" if stem == "kvferry" else stem


def room_of(path: Path) -> str:
    """The room a file belongs to; '' is the package's own ``__init__.py``."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def label(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


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
        for room in ("models", "wire", "transport", "runtime", "testing", "cli")
        if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()
    ],
)
def test_rooms_load_nothing_heavy(module):
    assert asked_for(module).isdisjoint(HEAVY)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_a_file_imports_only_what_its_room_may(path):
    room = room_of(path)
    assert room in ROOMS, f"{room!r} is a new room: say in ROOMS what it may import"
    may = ROOMS[room] | {room}
    for line, name in imported_names(path):
        top, _, rest = name.partition(".")
        if top == "kvferry":
            target = rest.partition(".")[0]
            target = target if target in ROOMS else ""
            assert target in may, f"{label(path)}:{line} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=label)
def test_a_foreign_package_comes_in_by_its_door(path):
    for line, name in imported_names(path):
        top = name.partition(".")[0]
        if top != "kvferry" and top not in sys.stdlib_module_names:
            doors = DOORS.get(top, ())
            assert label(path).startswith(doors), f"{label(path)}:{line} imports {top}"
