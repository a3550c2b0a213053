"""Documents and messages, read and written: bounded, quick, and with an account of what is wrong.

A good document costs one typed decode and a look for keys given twice. Only a bad one is decoded again
without types, to say what was found where: msgspec names the rule and the place, but neither the value nor
the keys of objects on the way. Here both become a ``SpecError`` with the whole place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, TypeVar, cast, get_args

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
    return text if len(text) <= length else f"{text[:length]}…"


ARRAY_32 = b"\xdd"

_RAW_ITEMS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TEXT = msgspec.msgpack.Decoder(str)


# Keys that one object has twice: a decoder takes the last, a person may mean the first. Refused.
#
# msgspec drops the first without a word. So a document that was read is written anew: if it comes out as long
# as it was, nothing was lost. Only otherwise a slower look finds out what was lost, and where.


class _Members(list[tuple[str, object]]):
    """An object with every member that was written."""


def check_json_keys(data: bytes) -> None:
    """Refuse a key given twice, in JSON that is well formed."""
    # What can differ in length is blanks and numbers, so colons are counted; escapes may hide or spell one.
    if b"\\" in data or data.count(b":") != msgspec.json.encode(msgspec.json.decode(data)).count(b":"):
        _refuse_repeated(json.loads(data, object_pairs_hook=_Members))


def check_msgpack_keys(data: bytes) -> None:
    """Refuse a key given twice, in msgpack that is well formed and has no floats."""
    # msgspec writes the shortest form: what comes out shorter has lost a key, or was written in long forms.
    if len(msgspec.msgpack.encode(msgspec.msgpack.decode(data))) != len(data):
        _refuse_repeated(_with_all_members(data))


def _with_all_members(data: bytes) -> object:
    """Containers of a msgpack value; everything else is None."""
    first = data[0]
    if 0x80 <= first <= 0x8F:
        return _members(first & 0x0F, data[1:])
    if first in (0xDE, 0xDF):
        body = 3 if first == 0xDE else 5
        return _members(int.from_bytes(data[1:body], "big"), data[body:])
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        return [_with_all_members(item) for item in _items(data)]
    return None


def _members(num_members: int, body: bytes) -> _Members:
    """The members of a map. With an array's header its body is an array: keys and values in turns."""
    array = ARRAY_32 + (2 * num_members).to_bytes(4, "big") + body
    items = _items(array)
    keys = map(_TEXT.decode, items[::2])
    return _Members(zip(keys, map(_with_all_members, items[1::2]), strict=True))


def _items(array: bytes) -> list[bytes]:
    return [bytes(item) for item in _RAW_ITEMS.decode(array)]


def _refuse_repeated(document: object) -> None:
    path = _repeated(document)
    if path is not None:
        raise SpecError(f"${path}: this key is given twice in one object")


def _repeated(value: object) -> str | None:
    """The path of the first key that is given twice."""
    steps: list[tuple[str, object]] = []
    if isinstance(value, _Members):
        seen = set()
        for key, child in value:
            if key in seen:
                return key_step(key)
            seen.add(key)
            steps.append((key_step(key), child))
    elif isinstance(value, list):
        steps = [(f"[{i}]", child) for i, child in enumerate(value)]
    return next((step + path for step, child in steps if (path := _repeated(child)) is not None), None)


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
