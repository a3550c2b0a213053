"""JSON as people like to read it: what fits on a line stays on a line."""

from __future__ import annotations

import json
from typing import Any

import msgspec

WIDTH = 120


def write_json(doc: msgspec.Struct, indent: int) -> bytes:
    """A struct as JSON: without a space if ``indent`` is 0, else in lines, and with a last newline."""
    if not indent:
        return msgspec.json.encode(doc)
    return (laid_out(msgspec.to_builtins(doc), indent) + "\n").encode()


def laid_out(value: Any, indent: int = 2, depth: int = 0) -> str:
    """The JSON text of plain data.

    >>> print(laid_out({"digits": [[4, 1024], [4, 64]], "name": "x" * 90}))
    {
      "digits": [[4, 1024], [4, 64]],
      "name": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
    }
    """
    line = json.dumps(value, ensure_ascii=False)
    if depth * indent + len(line) <= WIDTH - 1 or not isinstance(value, dict | list | tuple):
        return line
    if isinstance(value, dict):
        inner = [
            f"{json.dumps(k, ensure_ascii=False)}: {laid_out(v, indent, depth + 1)}" for k, v in value.items()
        ]
        brackets = "{}"
    else:
        inner = [laid_out(v, indent, depth + 1) for v in value]
        brackets = "[]"
    pad = "\n" + " " * indent * (depth + 1)
    return brackets[0] + pad + f",{pad}".join(inner) + "\n" + " " * indent * depth + brackets[1]
