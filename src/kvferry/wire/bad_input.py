"""Where in a document something is wrong, and what was found there.

msgspec names the rule and the place, but neither the value nor the keys of objects on the way. The core
names the rule and the value, and knows of no document. Here both become a ``SpecError`` with the whole place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from types import UnionType
from typing import Any, get_args

import msgspec

from kvferry.errors import SpecError

MAX_SHOWN = 80
"""How many characters of a wrong value a message repeats."""
MAX_RULE = 400
"""How many characters of a rule a message repeats: names can be long."""

_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
"""``.field``, ``[3]``, and ``[...]``, by which msgspec means some key of an object."""

PlacedPart = tuple[str, Callable[[], object]]
"""A place in a document, and what makes the value that is described there."""


def spec_error(place: str, rule: str) -> SpecError:
    """A broken rule, with its place.

    >>> spec_error("$.views[3].axes.head", "must be positive")
    SpecError('$.views[3].axes.head: must be positive')
    """
    return SpecError(f"{place}: {clipped(rule, MAX_RULE)}")


def first_wrong(parts: Iterable[PlacedPart], error: SpecError) -> SpecError:
    """The error of the first part that cannot be made by itself; if all can, the error of the whole.

    >>> from kvferry.core.span import Span
    >>> first_wrong([(".a", lambda: Span(0, 1)), (".b", lambda: Span(2, 1))], SpecError("a and b collide"))
    SpecError('$.b: a span needs whole numbers with 0 <= start <= stop, got [2, 1)')
    """
    for place, make in parts:
        try:
            make()
        except SpecError as wrong:
            return spec_error(f"${place}", str(wrong))
    return spec_error("$", str(error))


def rule_and_path(complaint: str) -> tuple[str, str]:
    """A message of msgspec's, taken apart.

    >>> rule_and_path("Expected `int`, got `str` - at `$.states[3].name`")
    ('Expected int, got str', '$.states[3].name')
    >>> rule_and_path("Expected `str`, got `int` - at `key` in `$.axes`")
    ('a key: Expected str, got int', '$.axes')
    """
    rule, _, place = complaint.replace("`", "").partition(" - at ")
    key, _, path = place.rpartition(" in ")
    return f"a {key}: {rule}" if key else rule, path or "$"


def schema_error(document: object, schema: Any) -> SpecError | None:
    """What is wrong with an untyped document; None if it fits its schema."""
    complaint = _complaint(document, schema)
    if not complaint:
        return None
    rule, path = rule_and_path(complaint)
    value, kind, place = document, schema, "$"
    for found in _STEP.finditer(path):
        step, value, kind = _stepped(found, value, kind)
        place += step
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        rule = "must be one of " + ", ".join(f'"{member.value}"' for member in kind)
    elif "unknown field" in rule:
        rule += ", known are " + ", ".join(_fields(kind))
    return spec_error(place, f"{rule.partition(', got')[0]}, got {shown(value)}")


def _complaint(value: object, kind: Any) -> str:
    """What msgspec has to say against a value; nothing if it is fine."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _stepped(found: re.Match[str], value: Any, kind: Any) -> tuple[str, object, Any]:
    """One step further: its name, the value there, and the type that this should have."""
    if isinstance(kind, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    name, index = found.groups()
    if name:
        return found[0], value[name], _fields(kind)[name]
    if index:
        is_struct = issubclass(kind, msgspec.Struct) if isinstance(kind, type) else False
        types = [*_fields(kind).values()] if is_struct else get_args(kind)
        return found[0], value[int(index)], types[int(index) if is_struct else 0]
    kind = get_args(kind)[1]
    key = next(key for key, child in value.items() if _complaint(child, kind))
    return key_step(key), value[key], kind


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def key_step(key: str) -> str:
    """The step of a path into an object.

    >>> key_step("head"), key_step("layers.0/k")
    ('.head', '["layers.0/k"]')
    """
    return f".{key}" if key.isidentifier() else f"[{clipped(json.dumps(key), MAX_SHOWN)}]"


def shown(value: object) -> str:
    """A wrong value as a message repeats it: whole if it is small, else what it is.

    >>> shown(-2), shown("x" * 1000)[:5], shown([1] * 50), shown({"a": 1, "b": 2})
    ('-2', '"xxxx', 'an array of 50', 'an object with "a", "b"')
    """
    match value:
        case list():
            return f"an array of {len(value)}"
        case dict():
            keys = ", ".join(json.dumps(key, default=repr) for key in list(value)[:8])
            return clipped(f"an object with {keys}" if keys else "an empty object", MAX_SHOWN)
        case bool() | None | str():
            return clipped(json.dumps(value), MAX_SHOWN)
        case int() if value.bit_length() > 256:
            return f"an integer of {value.bit_length()} bits"
        case _:
            return clipped(repr(value), MAX_SHOWN)


def printable(text: str, length: int = MAX_RULE) -> str:
    """Text of a peer's, fit for a log: one line, and not long.

    >>> printable("two\\nlines"), printable("x" * 1000)[-5:]
    ('two\\\\nlines', 'xxxx…')
    """
    short = clipped(text, length)
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def clipped(text: str, length: int) -> str:
    """The text, its end left out if it is longer than ``length``."""
    return text if len(text) <= length else f"{text[:length]}…"
