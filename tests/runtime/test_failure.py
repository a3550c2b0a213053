"""The codes of failures are one closed list."""

import ast
import re
from pathlib import Path

import pytest

import kvferry
from kvferry.endpoint.meeting import failure_of
from kvferry.errors import RequestError
from kvferry.runtime import FailureCode

CORE = Path(kvferry.__file__).parent / "core"


def raised():
    """The codes that the core gives to requests that do not fit, as they stand in its source."""
    for path in sorted(CORE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            code = ast.unparse(node.args[0])
            if name == "RequestError" and "self.side" not in code and "self._side" not in code:
                yield code
            elif name == "_error":  # of one side's table
                yield "f'{side}-" + code.strip("'") + "'"


def spelled(code):
    if not code.startswith("f"):
        return {code.strip("'")}
    words = {"{side}": ("src", "dst"), "{what}": ("need", "kept")}
    (variable,) = re.findall(r"{\w+}", code)
    return {code[2:-1].replace(variable, word) for word in words[variable]}


def test_every_code_that_the_core_gives_to_a_request_is_in_the_list():
    codes = set().union(*map(spelled, raised()))
    assert len(codes) > 20
    assert codes <= set(FailureCode)


@pytest.mark.parametrize("code", ["dst-table-short", "too-many-runs", "never-heard-of"])
def test_a_code_is_said_once(code):
    said = str(failure_of(RequestError(code, "full", "so it is"), FailureCode.BAD_TABLES))
    assert said.count(code) == 1
