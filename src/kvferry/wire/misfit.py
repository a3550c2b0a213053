"""Where in a document something is wrong, found out on the way from the inside to the outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from kvferry.errors import SpecError

Given = TypeVar("Given")
Made = TypeVar("Made")

MAX_SHOWN = 80
"""How many characters of a wrong value a message repeats."""
MAX_DETAIL = 400
"""How many characters of an explanation a message repeats: names can be long."""


class Misfit(Exception):
    """A part of a document that breaks a rule. Never leaves this room: it ends as a ``SpecError``.

    >>> print(Misfit(".axes.head", "must be positive").under(".views[3]").spec_error())
    $.views[3].axes.head: must be positive
    """

    def __init__(self, path: str, detail: str) -> None:
        self.path, self.detail = path, detail
        super().__init__(path, detail)

    def under(self, step: str) -> Misfit:
        """The same misfit, seen from one level further out."""
        return Misfit(step + self.path, self.detail)

    def spec_error(self) -> SpecError:
        """What the caller gets to see."""
        return SpecError(f"${self.path}: {clipped(self.detail, MAX_DETAIL)}")


def key_step(key: object) -> str:
    """The step of a path into an object.

    >>> key_step("head"), key_step("layers.0/k"), key_step(7)
    ('.head', '["layers.0/k"]', '[7]')
    """
    if not isinstance(key, str):
        return f"[{clipped(repr(key), MAX_SHOWN)}]"
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


def clipped(text: str, length: int) -> str:
    """The text, its end left out if it is longer than ``length``."""
    return text if len(text) <= length else f"{text[:length]}…"


def make(step: str, build: Callable[[Given], Made], given: Given) -> Made:
    """Build a value; if a rule is broken, say that it was at this step."""
    try:
        return build(given)
    except Misfit as misfit:
        raise misfit.under(step) from None
    except SpecError as error:
        raise Misfit(step, str(error)) from None


def make_all(step: str, build: Callable[[Given], Made], given: Iterable[Given]) -> tuple[Made, ...]:
    """Build one value per element of an array."""
    made: list[Made] = []
    try:
        for each in given:
            made.append(build(each))
    except Misfit as misfit:
        raise misfit.under(f"{step}[{len(made)}]") from None
    except SpecError as error:
        raise Misfit(f"{step}[{len(made)}]", str(error)) from None
    return tuple(made)


def make_each(step: str, build: Callable[[Given], Made], given: Mapping[str, Given]) -> dict[str, Made]:
    """Build one value per member of an object."""
    return {key: make(step + key_step(key), build, each) for key, each in given.items()}


def require(rule_holds: bool, path: str, detail: str) -> None:
    """Raise a misfit unless the rule holds."""
    if not rule_holds:
        raise Misfit(path, detail)
