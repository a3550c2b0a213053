"""What holds for all modules together: no circle of imports, no name twice, a reason for what is large."""

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


MANY_IMPORTS, MANY_ATTRIBUTES = 15, 10

MANY_COLLABORATORS = {
    "kvferry.endpoint.destination": "an edge: it puts the parts of a destination rank together",
    "kvferry.endpoint.gathering": "both ends of the packed way's messages, with what each checks",
    "kvferry.endpoint.load_digest": "what a digest needs of plan, memory, device and machine",
    "kvferry.endpoint.meeting": "from messages to a plan: each step is another module's",
    "kvferry.endpoint.source": "an edge: it puts the parts of a source engine together",
    "kvferry.endpoint.source_rank": "an edge: it puts the parts of a source rank together",
    "kvferry.integrations.vllm.worker.side": "an edge: vLLM's worker on one side, an endpoint on the other",
    "kvferry.transport.process": "an edge: it puts the ways together",
}
"""Modules that import more of ours, and why: a file follows an idea, and knows few others."""

LARGE_OBJECTS = {
    "Observed": "a document: all that a doctor saw, a part for each subject",
    "ActiveFetches": "one machine: fetches by three keys, and the machines that each of them waits for",
    "AgentThread": "a thread: its queue, its agent, its peers and what it has posted",
    "Authority": "one machine: leases by three keys, ranks and notices; their parts are values of their own",
    "Channel": "ZeroMQ's sockets, by address and by where they are polled, and their bounds",
    "DemoResult": "one account: each attribute is a line of what the demonstration prints",
    "Destination": "an edge: one attribute for each part that it puts together, half of them its arguments",
    "FetchJob": "a record in the making: when each phase began, and what each brought",
    "Incoming": "what the scheduler knows of requests with a ticket, until the next step tells the workers",
    "ProcessTransport": "an edge: its settings, and what is made once",
    "Options": "the options of the connector: one field for each",
    "ProxyMetrics": "one attribute for each metric",
    "Reader": "one machine: its parts (meetings, questions, settlements) are machines already",
    "Record": "the account of a load: each field is a column",
    "TcpConnections": "one table: connections in three orders, and the bounds of all of them",
    "RequestAccount": "the account of a request through the proxy: each attribute is measured or told",
    "SourceEngine": "an edge: one attribute for each part that it puts together, half of them its arguments",
    "SourceRank": "an edge: its machine, its channels, and what it does for readers (digests, gathering)",
    "Ticket": "a message: each field is on the wire",
    "Topology": "the options of one side of `kvferry plan`",
    "_Stream": "one reader of a rank: its socket, what waits, what is on its way, and its memory",
    "WorkerSide": "vLLM's view of a rank: requests by name and by handle, and what is to be reported",
}
"""Classes of more attributes, and why that is one thing."""


def attributes(node: ast.ClassDef) -> set[str]:
    """What an object of a class has: its fields, and whatever a method sets on ``self``."""
    fields = {
        line.target.id
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return fields | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


def test_attributes_are_fields_and_what_methods_set():
    tree = ast.parse("class A:\n    x: int\n    def f(self, other):\n        self.y, other.z = 1, self.w")
    assert attributes(next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))) == {"x", "y"}


def imports(tree: ast.Module) -> set[str]:
    """The modules of ours that a module names."""
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name for name in found if name.startswith("kvferry")}


def test_a_module_that_knows_many_others_has_a_reason():
    counts = {name: len(imports(tree)) for name, tree in MODULES.items()}
    too_many = {name for name, number in counts.items() if number > MANY_IMPORTS}
    assert too_many == MANY_COLLABORATORS.keys()


def test_an_object_of_many_attributes_has_a_reason():
    classes = [node for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    counts = {node.name: len(attributes(node)) for node in classes}
    assert {name: n for name, n in counts.items() if n > MANY_ATTRIBUTES and name not in LARGE_OBJECTS} == {}
    assert LARGE_OBJECTS.keys() <= counts.keys()
