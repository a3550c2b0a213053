"""Documents and messages, read and written: bounded, quick, and with an account of what is wrong.

A good document costs one typed decode and a look for keys given twice. What is wrong with a bad one becomes a
``SpecError`` with its place and the rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

import msgspec

from kvferry.core.span import Spans
from kvferry.errors import SpecError

MAX_NAME = 256
MAX_REQUEST_ID = 1024
MAX_WORDS = 4000

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""What a peer calls itself, or something of its own."""
RequestId = Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)]
"""What an engine calls a request; its clients may have chosen it."""
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
"""What a peer has to say to people."""


def check_name(what: str, text: str, longest: int = MAX_NAME) -> None:
    """Refuse a name of our own that no peer would read."""
    if not text or len(text) > longest:
        raise SpecError(f"{what} has 1 to {longest} characters, got {len(text)}")


WIDTH = 120


def write_json(doc: msgspec.Struct, indent: int) -> bytes:
    """A struct as JSON: without a space if ``indent`` is 0, else in lines, and with a last newline."""
    if not indent:
        return msgspec.json.encode(doc)
    return (laid_out(msgspec.to_builtins(doc), indent) + "\n").encode()


def laid_out(value: Any, indent: int = 2, depth: int = 0) -> str:
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


MAX_RULE = 400
"""How many characters of a rule, or of a key, a message repeats: names can be long."""

Made = TypeVar("Made")


def spec_error(place: str, rule: str) -> SpecError:
    return SpecError(f"{place}: {clipped(rule, MAX_RULE)}")


def at(place: str, make: Callable[..., Made], *arguments: object) -> Made:
    """What is made of the part of a document at ``place``, relative to its whole; errors say so."""
    try:
        return make(*arguments)
    except SpecError as error:
        text = str(error)  # begins with its place, if it has one further in
        inner = text[1:] if text.startswith("$") else f": {clipped(text, MAX_RULE)}"
        raise SpecError(f"${place}{inner}") from None


def rule_and_path(complaint: str) -> tuple[str, str]:
    rule, _, place = complaint.replace("`", "").partition(" - at ")
    key, _, path = place.rpartition(" in ")
    return f"a {key}: {rule}" if key else rule, path or "$"


def key_step(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{clipped(json.dumps(key), MAX_RULE)}]"


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
    return text if len(text) <= length else f"{text[:length]}…"


# Keys that one object has twice: a decoder takes the last, a person may mean the first. Refused.
#
# msgspec drops the first without a word. So a document that was read is written anew: if it comes out as long
# as it was, nothing was lost.


def check_json_keys(data: bytes) -> None:
    """Refuse a key given twice, in JSON that is well formed."""
    # What can differ in length is blanks and numbers, so colons are counted; escapes may hide or spell one.
    if b"\\" in data or data.count(b":") != msgspec.json.encode(msgspec.json.decode(data)).count(b":"):
        json.loads(data, object_pairs_hook=_without_repeats)


def _without_repeats(members: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in members:
        if key in seen:
            raise SpecError(f"$: the key {clipped(json.dumps(key), MAX_RULE)} is given twice in one object")
        seen.add(key)


def check_msgpack_keys(data: bytes) -> None:
    """Refuse a key given twice, in msgpack that is well formed and has no floats."""
    if len(msgspec.msgpack.encode(msgspec.msgpack.decode(data))) != len(data):
        raise SpecError("$: a key is given twice in one object, or a value is not in its shortest form")


MAX_JSON_BYTES = 64 << 20
MAX_JSON_ITEMS = 1 << 21
"""Commas in a JSON input: bounds what it can grow to in memory, whatever it says."""
MAX_MSGPACK_BYTES = 8 << 20
"""Less than for JSON, since a byte of msgpack can stand for a whole item."""

Doc = TypeVar("Doc", bound=msgspec.Struct)
Decode = Callable[..., Any]
"""``msgspec.json.decode`` or ``msgspec.msgpack.decode``."""


SpanDoc = tuple[int, int]
"""``[start, stop]``: the integers from start up to, not including, stop."""


def span_docs(spans: Spans) -> tuple[SpanDoc, ...]:
    return tuple((span.start, span.stop) for span in spans)


class VersionTag(msgspec.Struct, frozen=True):
    """All that is read of a document before its version is known to be ours."""

    version: int


def read_json(data: bytes, schema: type[Doc], *, versions: range | None = None) -> Doc:
    """Decode JSON; ``versions`` are those that its version tag may state."""
    _check_length(data, MAX_JSON_BYTES)
    num_items = data.count(b",") + 1
    if num_items > MAX_JSON_ITEMS:
        raise SpecError(f"$: at most {MAX_JSON_ITEMS} items are read, got {num_items}")
    doc = _decoded(msgspec.json.decode, data, schema, versions)
    check_json_keys(data)
    return doc


def read_msgpack(data: bytes, schema: type[Doc], *, versions: range | None = None) -> Doc:
    """Decode msgpack; ``versions`` are those that its version tag may state."""
    doc = decode_msgpack(data, schema, versions=versions)
    check_msgpack_keys(data)
    return doc


def decode_msgpack(data: bytes, schema: type[Doc], *, versions: range | None = None) -> Doc:
    """Like ``read_msgpack``, for callers who find keys given twice in a cheaper way of their own."""
    _check_length(data, MAX_MSGPACK_BYTES)
    return _decoded(msgspec.msgpack.decode, data, schema, versions)


def _check_length(data: bytes, limit: int) -> None:
    if not isinstance(data, bytes | bytearray | memoryview):
        mend = ": encode it first (text.encode())" if isinstance(data, str) else ""
        raise TypeError(f"expected a document as bytes, got {type(data).__name__}{mend}")
    if len(data) > limit:
        raise SpecError(f"$: at most {limit} bytes are read, got {len(data)}")


def _decoded(decode: Decode, data: bytes, schema: type[Doc], versions: range | None) -> Doc:
    """The one seam at which the decoder's exceptions become ours."""
    try:
        if versions is not None:
            _check_version(_typed(decode, data, VersionTag).version, versions)
        return _typed(decode, data, schema)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"$: not well formed: {error}") from None
    except RecursionError:
        raise SpecError("$: not well formed: nested too deeply") from None


def _check_version(theirs: int, ours: range) -> None:
    if theirs not in ours:
        rule = f"this kvferry reads version {' and '.join(map(str, ours))}"
        raise SpecError(f"$.version: {rule}, the document is version {theirs}")


def _typed(decode: Decode, data: bytes, schema: type[Doc]) -> Doc:
    try:
        return cast(Doc, decode(data, type=schema))
    except msgspec.ValidationError as error:
        rule, path = rule_and_path(str(error))
        raise spec_error(path, rule) from None
