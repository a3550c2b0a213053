"""Writes the tables of docs/errors.md: every error by its code, from the code.

What a code means is its docstring (``kvferry.errors.Code``, ``kvferry.runtime.FailureCode``); what to do is
in ``error_advice`` and ``kvferry.cli.output``. tests/test_error_page.py fails while a code is missing, or
the page is old. Then:

    python tools/error_page.py
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from error_advice import (
    ANSWERS,
    FAILURES,
    TICKETS,
    TRANSPORT,
    Explained,
)

from kvferry.cli.output import BY_CODE, BY_FIELD
from kvferry.errors import Code
from kvferry.runtime import FailureCode

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errors.md"
_TABLE = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def meanings(codes: type[StrEnum]) -> dict[str, str]:
    """Code -> the docstring under it."""
    (node,) = ast.parse(inspect.getsource(codes)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for line, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            assert isinstance(after, ast.Expr), f"{line.value.value} has no docstring"
            assert isinstance(after.value, ast.Constant)
            found[str(line.value.value)] = " ".join(str(after.value.value).replace("``", "`").split())
    return found


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def explained(codes: Mapping[str, Explained]) -> str:
    """Codes that are plain words where they are raised."""
    rows = ((f"`{code}`", each.meaning, each.cure) for code, each in codes.items())
    return table(("code", "meaning", "fix"), rows)


def tables() -> dict[str, str]:
    """Every table of the page, by its name."""
    failed, refused = meanings(FailureCode), meanings(Code)

    failures = ((f"`{code}`", failed[code], advice.again, advice.cure) for code, advice in FAILURES.items())
    refusals = [(f"`{code}`", refused[code], cure) for code, cure in BY_CODE.items()]
    refusals += [(f"`state-differs`, field `{name}`", "", cure) for name, cure in BY_FIELD.items()]
    return {
        "failures": table(("code", "meaning", "retry", "fix"), failures),
        "refusals": table(("code", "meaning", "fix"), refusals),
        "transport": explained(TRANSPORT),
        "answers": explained(ANSWERS),
        "tickets": explained(TICKETS),
    }


def page(text: str) -> str:
    """The page with its tables as the code has them today."""
    made = tables()
    filled = _TABLE.sub(lambda match: f"{match[1]}{made.pop(match[2])}", text)
    assert not made, f"the page has no place for {', '.join(made)}"
    return filled


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
