"""Bounded reading and writing of documents.

A valid document costs one typed decode and a check for duplicate keys. An invalid one raises a ``SpecError``
with the place and the rule.
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
"""A name that a peer has chosen."""
RequestId = Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)]
"""An engine's id of a request; its clients may have chosen it."""
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
"""A peer's text for people."""


def check_name(what: str, text: str, longest: int = MAX_NAME) -> None:
    """Raise if peers would reject this name."""
    if not text or len(text) > longest:
        raise SpecError(f"{what} has 1 to {longest} characters, got {len(text)}")


WIDTH = 120


def write_json(doc: msgspec.Struct, indent: int) -> bytes:
    """A struct as JSON: compact if ``indent`` is 0, otherwise in lines, with a final newline."""
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
"""Characters of a rule or key that an error message includes."""

Made = TypeVar("Made")


def at(place: str, make: Callable[..., Made], *arguments: object) -> Made:
    """Call ``make``; a SpecError gets the prefix ``place``, relative to the enclosing document."""
    try:
        return make(*arguments)
    except SpecError as error:
        text = str(error)  # begins with "$" if it has a place
        inner = text[1:] if text.startswith("$") else f": {clipped(text, MAX_RULE)}"
        raise SpecError(f"${place}{inner}") from None


def key_step(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{clipped(json.dumps(key), MAX_RULE)}]"


def printable(text: str, length: int = MAX_RULE) -> str:
    """A peer's text for the log: one line, truncated.

    >>> printable("two\\nlines"), printable("x" * 1000)[-5:]
    ('two\\\\nlines', 'xxxx…')
    """
    short = clipped(text, length)
    if short.isprintable():
        return short
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def clipped(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


# Duplicate keys are rejected. msgspec silently drops the first of two, so a decoded document is encoded
# again: if the length is unchanged, no key was dropped.


def check_json_keys(data: bytes) -> None:
    """Raise for a duplicate key in well-formed JSON."""
    # Blanks and numbers can differ in length, so colons are counted; escapes may hide or spell one.
    if b"\\" in data or data.count(b":") != msgspec.json.encode(msgspec.json.decode(data)).count(b":"):
        json.loads(data, object_pairs_hook=_without_repeats)


def _without_repeats(members: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for key, _ in members:
        if key in seen:
            raise SpecError(f"$: duplicate key {clipped(json.dumps(key), MAX_RULE)} in one object")
        seen.add(key)


def check_msgpack_keys(data: bytes) -> None:
    """Raise for a duplicate key in well-formed msgpack without floats."""
    if len(msgspec.msgpack.encode(msgspec.msgpack.decode(data))) != len(data):
        raise SpecError("$: duplicate key in one object, or a value not in its shortest encoding")


MAX_JSON_BYTES = 64 << 20
MAX_JSON_ITEMS = 1 << 21
"""Commas in a JSON input: bounds its size in memory."""
MAX_MSGPACK_BYTES = 8 << 20
"""Less than for JSON, since one byte of msgpack can be a whole item."""

Doc = TypeVar("Doc", bound=msgspec.Struct)
Decode = Callable[..., Any]
"""``msgspec.json.decode`` or ``msgspec.msgpack.decode``."""


SpanDoc = tuple[int, int]
"""``[start, stop]``, without ``stop`` itself."""


def span_docs(spans: Spans) -> tuple[SpanDoc, ...]:
    return tuple((span.start, span.stop) for span in spans)


class VersionTag(msgspec.Struct, frozen=True):
    """The part of a document that is read first."""

    version: int


def read_json(data: bytes, schema: type[Doc], *, versions: range | None = None) -> Doc:
    """Decode JSON; ``versions`` are the accepted values of its version tag."""
    _check_length(data, MAX_JSON_BYTES)
    num_items = data.count(b",") + 1
    if num_items > MAX_JSON_ITEMS:
        raise SpecError(f"$: at most {MAX_JSON_ITEMS} items are allowed, got {num_items}")
    doc = _decoded(msgspec.json.decode, data, schema, versions)
    check_json_keys(data)
    return doc


def read_msgpack(data: bytes, schema: type[Doc], *, versions: range | None = None) -> Doc:
    """Decode msgpack; ``versions`` are the accepted values of its version tag."""
    doc = decode_msgpack(data, schema, versions=versions)
    check_msgpack_keys(data)
    return doc


def decode_msgpack(data: bytes, schema: type[Doc], *, versions: range | None = None) -> Doc:
    """Like ``read_msgpack``, without the check for duplicate keys."""
    _check_length(data, MAX_MSGPACK_BYTES)
    return _decoded(msgspec.msgpack.decode, data, schema, versions)


def _check_length(data: bytes, limit: int) -> None:
    if not isinstance(data, bytes | bytearray | memoryview):
        mend = ": encode it first (text.encode())" if isinstance(data, str) else ""
        raise TypeError(f"expected a document as bytes, got {type(data).__name__}{mend}")
    if len(data) > limit:
        raise SpecError(f"$: at most {limit} bytes are allowed, got {len(data)}")


def _decoded(decode: Decode, data: bytes, schema: type[Doc], versions: range | None) -> Doc:
    """Translates the decoder's exceptions."""
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
        rule, _, place = str(error).replace("`", "").partition(" - at ")
        key, _, path = place.rpartition(" in ")
        rule = clipped(f"a {key}: {rule}" if key else rule, MAX_RULE)
        raise SpecError(f"{path or '$'}: {rule}") from None
