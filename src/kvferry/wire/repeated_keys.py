"""Keys that one object has twice: a decoder takes the last, a person may mean the first. Refused.

msgspec drops the first without a word. So a document that was read is written anew: if it comes out as long
as it was, nothing was lost. Only otherwise a slower look finds out what was lost, and where.
"""

from __future__ import annotations

import json

import msgspec

from kvferry.errors import SpecError
from kvferry.wire.bad_input import key_step

ARRAY_32 = b"\xdd"

_RAW_ITEMS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TEXT = msgspec.msgpack.Decoder(str)


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
