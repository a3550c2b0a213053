"""From bytes to structs: quick, bounded, and with an account of what is wrong.

A good document costs one typed decode (and, for JSON, a look for keys given twice). Only a bad one is decoded
again without types, to find the innermost place that does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin

import msgspec

from kvferry.errors import SpecError
from kvferry.wire.misfit import Misfit, key_step, shown

MAX_JSON_BYTES = 64 << 20
MAX_JSON_ITEMS = 1 << 21
"""Commas in a JSON input: bounds what it can grow to in memory, whatever it says."""
MAX_MSGPACK_BYTES = 8 << 20
"""Less than for JSON, since a byte of msgpack can stand for a whole item."""
MAX_LOCATED_BYTES = 1 << 20
"""Longer bad inputs are not decoded a second time: their message gives the decoder's own, coarser path."""

Doc = TypeVar("Doc", bound=msgspec.Struct)
Decode = Callable[..., Any]
"""``msgspec.json.decode`` or ``msgspec.msgpack.decode``."""


class VersionTag(msgspec.Struct):
    """All that is read of a document before its version is known to be ours."""

    version: int


def read_json(data: bytes, kind: type[Doc], *, version: int | None = None) -> Doc:
    """Decode JSON as ``kind``; ``version`` names the one that its version tag must state."""
    _check_length(data, MAX_JSON_BYTES)
    num_items = data.count(b",") + 1
    if num_items > MAX_JSON_ITEMS:
        raise SpecError(f"$: at most {MAX_JSON_ITEMS} items are read, got {num_items}")
    doc = _read(msgspec.json.decode, data, kind, version)
    _check_keys(data)
    return doc


def read_msgpack(data: bytes, kind: type[Doc], *, version: int | None = None) -> Doc:
    """Decode msgpack as ``kind``; ``version`` names the one that its version tag must state."""
    _check_length(data, MAX_MSGPACK_BYTES)
    return _read(msgspec.msgpack.decode, data, kind, version)


def _check_length(data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise SpecError(f"$: at most {limit} bytes are read, got {len(data)}")


def _read(decode: Decode, data: bytes, kind: type[Doc], version: int | None) -> Doc:
    """The one seam at which the decoder's exceptions become ours."""
    try:
        if version is not None:
            _check_version(_typed(decode, data, VersionTag).version, version)
        return _typed(decode, data, kind)
    except Misfit as misfit:
        raise misfit.spec_error() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"$: not well formed: {error}") from None
    except RecursionError:
        raise SpecError("$: not well formed: nested too deeply") from None


def _check_version(theirs: int, ours: int) -> None:
    if theirs != ours:
        raise Misfit(
            ".version", f"this kvferry reads version {ours}, the document is version {shown(theirs)}"
        )


def _typed(decode: Decode, data: bytes, kind: type[Doc]) -> Doc:
    try:
        return cast(Doc, decode(data, type=kind))
    except msgspec.ValidationError as error:
        if len(data) > MAX_LOCATED_BYTES:
            raise Misfit("", str(error)) from None
        document = decode(data)
        raise _innermost(document, kind) or Misfit("", str(error)) from None


# ------------------------------------------------------------------------ the place of what is wrong


def _innermost(value: object, kind: Any) -> Misfit | None:
    """The deepest part of an untyped document that does not fit its type; None if all of it fits."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        for step, child, child_kind in _children(value, kind):
            if misfit := _innermost(child, child_kind):
                return misfit.under(step)
        return Misfit("", _explained(error, value, kind))
    return None


def _children(value: object, kind: Any) -> Iterator[tuple[str, object, Any]]:
    """The parts of a value, each with its step and the type that it should have."""
    if get_origin(kind) is UnionType:
        kind = next(part for part in get_args(kind) if part is not type(None))
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    fields = msgspec.structs.fields(kind) if is_struct else ()
    match value:
        case dict() if is_struct and not kind.__struct_config__.array_like:
            for field in fields:
                if field.name in value:
                    yield key_step(field.name), value[field.name], field.type
        case list() if is_struct and kind.__struct_config__.array_like:
            for i, (child, field) in enumerate(zip(value, fields, strict=False)):
                yield f"[{i}]", child, field.type
        case dict() if get_origin(kind) is dict:
            for key, child in value.items():
                yield key_step(key), child, get_args(kind)[1]
        case list() if get_origin(kind) is tuple:
            for i, child in enumerate(value):
                yield f"[{i}]", child, get_args(kind)[0]


def _explained(error: msgspec.ValidationError, value: object, kind: Any) -> str:
    rule = str(error).partition(" - at ")[0].replace("`", "")
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        rule = "must be one of " + ", ".join(f'"{member.value}"' for member in kind)
    elif "unknown field" in rule:
        rule += ", known are " + ", ".join(field.name for field in msgspec.structs.fields(kind))
    return f"{rule.partition(', got')[0]}, got {shown(value)}"


# --------------------------------------------------------------------------------- keys given twice


def _check_keys(data: bytes) -> None:
    """Refuse a key that one object has twice: the decoder would take the last, a person might mean the first.

    Written anew, a document has as many colons as before unless the decoder dropped a key. Only if some are
    missing, or if escapes make the count uncertain, a slower decoder is asked which.
    """
    if b"\\" in data or data.count(b":") != msgspec.json.encode(msgspec.json.decode(data)).count(b":"):
        path = _twice(json.loads(data, object_pairs_hook=_object))
        if path is not None:
            raise SpecError(f"${path}: this key is given twice in one object")


class _Twice(str):
    """Stands for an object in which this key is given twice."""


def _object(members: list[tuple[str, object]]) -> object:
    made: dict[str, object] = {}
    for key, value in members:
        if key in made:
            return _Twice(key)
        made[key] = value
    return made


def _twice(document: object) -> str | None:
    """The path of the first key that is given twice."""
    if isinstance(document, _Twice):
        return key_step(str(document))
    steps: Iterator[tuple[str, object]] = iter(())
    if isinstance(document, dict):
        steps = ((key_step(key), child) for key, child in document.items())
    elif isinstance(document, list):
        steps = ((f"[{i}]", child) for i, child in enumerate(document))
    for step, child in steps:
        if (path := _twice(child)) is not None:
            return step + path
    return None
