"""The page of errors has every code that the package can raise, and says what to do about each."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from error_advice import ANSWERS, FAILURES, TICKETS, TRANSPORT

from kvferry.cli.output import BY_CODE, BY_FIELD
from kvferry.errors import Code
from kvferry.runtime import FailureCode
from kvferry.runtime.member import NOT_JOINED
from kvferry.transport.process import NOT_HERE
from kvferry.wire.messages import TOO_LONG

ROOT = Path(__file__).resolve().parents[1]
NAMED = {"NOT_HERE": NOT_HERE, "NOT_JOINED": NOT_JOINED, "TOO_LONG": TOO_LONG}
"""Codes that are constants where they are said."""


def codes_in(tree: ast.AST, error: str) -> Iterator[str]:
    """The codes that are given to an error of this name; one that is copied from another error is not new."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == error:
            code = node.args[0]
            choices = [code.body, code.orelse] if isinstance(code, ast.IfExp) else [code]
            for each in choices:
                match each:
                    case ast.Constant():
                        yield str(each.value)
                    case ast.Name():
                        yield NAMED[each.id]
                    case _:
                        assert ast.unparse(each).endswith(".code"), f"which code? {ast.unparse(node)}"


def codes_of(error: str) -> set[str]:
    files = sorted((ROOT / "src").rglob("*.py"))
    return {code for path in files for code in codes_in(ast.parse(path.read_bytes()), error)}


def codes_of_tickets() -> Iterator[str]:
    """What vLLM's connector gives as the reason not to use a ticket."""
    incoming = ROOT / "src" / "kvferry" / "integrations" / "vllm" / "scheduler" / "incoming.py"
    for node in ast.walk(ast.parse(incoming.read_bytes())):
        match node:
            case ast.Return(value=ast.Tuple(elts=[ast.Constant(value=str(code)), _])):
                yield code
            case _:
                pass


def test_a_code_that_nobody_can_read_is_noticed():
    tree = ast.parse("TransportError('a' if x else 'b', 'd'); TransportError(why.code, 'd')")
    assert set(codes_in(tree, "TransportError")) == {"a", "b"}
    with pytest.raises(AssertionError, match="which code"):
        list(codes_in(ast.parse("TransportError(f'{x}-late', 'd')"), "TransportError"))


def test_every_code_is_explained():
    assert set(FAILURES) == set(FailureCode)
    assert set(BY_CODE) == set(Code)
    assert set(TRANSPORT) == codes_of("TransportError")
    assert set(ANSWERS) == codes_of("Rejected")
    assert set(TICKETS) == set(codes_of_tickets())


def sentences() -> Iterator[str]:
    yield from [*BY_CODE.values(), *BY_FIELD.values()]
    yield from (advice.cure for advice in FAILURES.values())
    for each in [*TRANSPORT.values(), *ANSWERS.values(), *TICKETS.values()]:
        yield each.meaning
        yield each.cure


def test_every_explanation_is_a_sentence():
    assert [text for text in sentences() if not re.fullmatch(r"[A-Z].*\.", text)] == []


def test_the_page_is_what_the_code_says():
    spec = importlib.util.spec_from_file_location("error_page", ROOT / "tools" / "error_page.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text(encoding="utf-8")
    assert text == tool.page(text), "run: python tools/error_page.py"
    by_hand = text.replace("| `lease-ended` |", "| `leese-ended` |")
    assert text == tool.page(by_hand), "a row by hand does not stay"
