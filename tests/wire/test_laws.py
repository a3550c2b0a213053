"""Laws of the wire room that hold for every document."""

import json
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import SpecError
from kvferry.wire import reading, request_from_json
from kvferry.wire.reading import WIDTH, check_json_keys, check_msgpack_keys, laid_out, write_json
from kvferry.wire.request import MAX_BLOCK_ID, MAX_SPANS, MAX_TOKENS

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 31), 1 << 31) | st.text(max_size=50)
KEYS = st.text(st.sampled_from("abcdefgh"), min_size=1, max_size=8)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


# -- JSON for people -------------------------------------------------------------------------------


def broken_up(value: object, depth: int, indent: int) -> Iterator[tuple[object, int]]:
    """What a document is written in lines of: a container that fits is one of them, others are opened."""
    fits = depth * indent + len(json.dumps(value, ensure_ascii=False)) < WIDTH
    if fits or not isinstance(value, dict | list):
        yield value, depth
        return
    for child in value.values() if isinstance(value, dict) else value:
        yield from broken_up(child, depth + 1, indent)


@given(DOCUMENTS, st.integers(1, 4))
def test_what_fits_on_a_line_stays_on_a_line_and_nothing_else_does(document, indent):
    text = laid_out(document, indent)
    assert json.loads(text) == document
    lines = text.split("\n")
    whole = list(broken_up(document, 0, indent))
    brackets = [line for line in lines if line.strip().rstrip(",") in ("]", "}") or line[-1] in "[{"]
    assert len(lines) - len(brackets) == len(whole)
    for line, (value, depth) in zip((line for line in lines if line not in brackets), whole, strict=True):
        assert len(line) - len(line.lstrip(" ")) == depth * indent
        assert line.rstrip(",").endswith(json.dumps(value, ensure_ascii=False))


def test_a_line_is_as_long_as_it_may_be_and_no_longer():
    """The comma behind it counts."""
    fits = ["x" * (WIDTH - 5)]
    assert len(laid_out(fits)) == WIDTH - 1
    assert laid_out(["x" * (WIDTH - 4)]).count("\n") == 2
    assert laid_out([fits], indent=2).split("\n")[1] == "  ["


class _Doc(msgspec.Struct):
    names: list[str]


def test_without_an_indent_a_document_is_one_line_without_blanks_and_with_one_it_ends_a_line():
    doc = _Doc(["a", "b"])
    assert write_json(doc, 0) == b'{"names":["a","b"]}'
    assert write_json(doc, 2) == b'{"names": ["a", "b"]}\n'


# -- keys given twice ------------------------------------------------------------------------------


def objects(value: object) -> Iterator[dict[str, object]]:
    """Every object with a key in a document."""
    if isinstance(value, dict) and value:
        yield value
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        yield from objects(child)


def as_json(value: object, doubled: dict[str, object] | None) -> str:
    """JSON in which one object has its last key twice."""
    if isinstance(value, dict):
        members = [f"{json.dumps(key)}:{as_json(child, doubled)}" for key, child in value.items()]
        return "{" + ",".join(members + (members[-1:] if value is doubled else [])) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_json(child, doubled) for child in value) + "]"
    return json.dumps(value)


def as_msgpack(value: object, doubled: dict[str, object]) -> bytes:
    """The same in msgpack; no container has more than 15 members, so its header is one byte."""
    if isinstance(value, dict):
        pairs = [(msgspec.msgpack.encode(k), as_msgpack(v, doubled)) for k, v in value.items()]
        pairs += pairs[-1:] if value is doubled else []
        return bytes([0x80 + len(pairs)]) + b"".join(k + v for k, v in pairs)
    if isinstance(value, list):
        return bytes([0x90 + len(value)]) + b"".join(as_msgpack(child, doubled) for child in value)
    return msgspec.msgpack.encode(value)


@given(st.dictionaries(KEYS, DOCUMENTS, min_size=1, max_size=3), st.data())
def test_a_key_given_twice_is_refused_wherever_it_is_and_nothing_else_is(document, data):
    check_json_keys(as_json(document, None).encode())
    check_msgpack_keys(msgspec.msgpack.encode(document))
    doubled = data.draw(st.sampled_from(list(objects(document))))
    key = json.dumps([*doubled][-1])
    with pytest.raises(SpecError) as refused:
        check_json_keys(as_json(document, doubled).encode())
    assert str(refused.value) == f"$: duplicate key {key} in one object"
    with pytest.raises(SpecError, match="duplicate key in one object"):
        check_msgpack_keys(as_msgpack(document, doubled))


# -- bounds ----------------------------------------------------------------------------------------


def request(**changes: object) -> bytes:
    tables = {"src": {"g": {"block_ids": [0]}}, "dst": {"g": {"block_ids": [0]}}, "need": {"g": [[0, 1]]}}
    return json.dumps(tables | changes).encode()


@pytest.mark.parametrize(
    ("most", "more", "place"),
    [
        (
            {"src": {"g": {"block_ids": [MAX_BLOCK_ID]}}},
            {"src": {"g": {"block_ids": [MAX_BLOCK_ID + 1]}}},
            "$.src.g.block_ids[0]",
        ),
        (
            {"dst": {"g": {"block_ids": [0], "first_token": MAX_TOKENS}}},
            {"dst": {"g": {"block_ids": [0], "first_token": MAX_TOKENS + 1}}},
            "$.dst.g",
        ),
        ({"need": {"g": [[0, MAX_TOKENS]]}}, {"need": {"g": [[0, MAX_TOKENS + 1]]}}, "$.need.g[0]"),
        (
            {"kept": {"g": [[2 * i, 2 * i + 1] for i in range(MAX_SPANS)]}},
            {"kept": {"g": [[2 * i, 2 * i + 1] for i in range(MAX_SPANS + 1)]}},
            "$.kept.g",
        ),
    ],
)
def test_the_largest_request_is_read_and_one_more_is_refused_with_its_place(most, more, place):
    request_from_json(request(**most))
    with pytest.raises(SpecError) as refused:
        request_from_json(request(**more))
    assert str(refused.value).startswith(f"{place}: ")


class _Any(msgspec.Struct):
    names: list[int]


@pytest.mark.parametrize(("limit", "what"), [("MAX_JSON_BYTES", "bytes"), ("MAX_JSON_ITEMS", "items")])
def test_the_longest_json_is_read_and_one_more_is_not_looked_at(limit, what, monkeypatch):
    data = b'{"names":[1,2,3]}'
    size = len(data) if what == "bytes" else 3
    monkeypatch.setattr(reading, limit, size)
    assert reading.read_json(data, _Any).names == [1, 2, 3]
    monkeypatch.setattr(reading, limit, size - 1)
    with pytest.raises(SpecError, match=rf"\$: at most {size - 1} {what} are allowed, got {size}"):
        reading.read_json(data, _Any)


def test_the_longest_msgpack_is_read_and_one_more_byte_is_not_looked_at(monkeypatch):
    data = msgspec.msgpack.encode({"names": [1, 2, 3]})
    monkeypatch.setattr(reading, "MAX_MSGPACK_BYTES", len(data))
    assert reading.read_msgpack(data, _Any).names == [1, 2, 3]
    monkeypatch.setattr(reading, "MAX_MSGPACK_BYTES", len(data) - 1)
    with pytest.raises(SpecError, match="bytes are allowed"):
        reading.read_msgpack(data, _Any)
