"""From bytes to structs: quick, bounded, and with an account of what is wrong.

A good document costs one typed decode and a look for keys given twice. Only a bad one is decoded again
without types, to say what was found where.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec

from kvferry.core.span import Spans
from kvferry.errors import SpecError
from kvferry.wire.bad_input import rule_and_path, schema_error, shown, spec_error
from kvferry.wire.repeated_keys import check_json_keys, check_msgpack_keys

MAX_JSON_BYTES = 64 << 20
MAX_JSON_ITEMS = 1 << 21
"""Commas in a JSON input: bounds what it can grow to in memory, whatever it says."""
MAX_MSGPACK_BYTES = 8 << 20
"""Less than for JSON, since a byte of msgpack can stand for a whole item."""
MAX_LOCATED_BYTES = 1 << 20
"""Longer bad inputs are not decoded a second time: their message has neither keys nor the value."""

Doc = TypeVar("Doc", bound=msgspec.Struct)
Decode = Callable[..., Any]
"""``msgspec.json.decode`` or ``msgspec.msgpack.decode``."""


SpanDoc = tuple[int, int]
"""``[start, stop]``: the integers from start up to, not including, stop."""


def span_docs(spans: Spans) -> tuple[SpanDoc, ...]:
    """Spans as they are written."""
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
        raise TypeError(f"a document is read from bytes, got {type(data).__name__}{mend}")
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
        raise SpecError(f"$.version: {rule}, the document is version {shown(theirs)}")


def _typed(decode: Decode, data: bytes, schema: type[Doc]) -> Doc:
    try:
        return cast(Doc, decode(data, type=schema))
    except msgspec.ValidationError as error:
        found = schema_error(decode(data), schema) if len(data) <= MAX_LOCATED_BYTES else None
        rule, path = rule_and_path(str(error))
        raise found or spec_error(path, rule) from None
