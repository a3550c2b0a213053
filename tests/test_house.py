"""What holds for all modules of the package together: no circle of imports, no class name twice."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"


def module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_bytes()) for path in sorted(SRC.rglob("*.py"))}


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything in a file but what is there for the type checker alone, and is never loaded."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from nodes(child)


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """The modules of ours that a module names in an import, wherever in its file."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import, line {node.lineno}"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in MODULES or node.module in MODULES:
                    yield whole if whole in MODULES else str(node.module)


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_a_circle_is_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_no_module_imports_itself_by_a_detour():
    """Imports inside functions count: they only hide a circle."""
    imports = {name: set(imported(name, tree)) for name, tree in MODULES.items()}
    assert sum(map(len, imports.values())) > 300
    assert " -> ".join(circle(imports)) == ""


def test_no_two_public_classes_have_one_name():
    """One word, one meaning: whoever reads a name need not ask which one."""
    homes: dict[str, list[str]] = {}
    for name, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert len(homes) > 150
    twice = {name: modules for name, modules in homes.items() if len(modules) > 1}
    assert twice == {}
