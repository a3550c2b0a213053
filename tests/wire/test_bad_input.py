"""Whatever is wrong with an input: a SpecError with the place, at once, and without much memory."""

import copy
import json
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import KVFerryError, SpecError
from kvferry.wire import manifest as manifest_module
from kvferry.wire import manifest_from_json, manifest_from_msgpack, reading, request_from_json

MAP = {"digits": [[4, 64]]}
GOOD: dict[str, Any] = {
    "version": 2,
    "engine": "e",
    "states": [
        {"name": "a/k", "axes": {"head": 2, "channel": 8}, "item_bytes": 2, "dtype": "bf16"},
        {"name": "a/v", "axes": {"head": 2, "channel": 8}, "item_bytes": 2, "dtype": "bf16"},
    ],
    "groups": [{"name": "full", "num_blocks": 4, "tokens_per_block": 4}],
    "ranks": [
        {
            "rank": 0,
            "regions": [{"name": "k", "num_bytes": 2048}, {"name": "v", "num_bytes": 2048}],
            "views": [
                {
                    "state": f"a/{name}",
                    "group": "full",
                    "region": name,
                    "block_stride": 256,
                    "axes": {"token": MAP, "head": {"digits": [[2, 16]]}, "channel": {"digits": [[8, 2]]}},
                }
                for name in "kv"
            ],
        }
    ],
}
REQUEST = {
    "src": {"full": {"block_ids": [0, None, 1], "first_token": 4}},
    "dst": {"full": {"block_ids": [0, 1]}},
    "need": {"full": [[0, 8]]},
    "kept": {"full": [[8, 9]]},
    "slack": "leave",
}

HEAD = ("ranks", 0, "views", 1, "axes", "head")
DIGIT = (*HEAD, "digits", 0)
AT_HEAD = "$.ranks[0].views[1].axes.head"
AT_VIEW = "$.ranks[0].views[1]"
MISSING = object()


def changed(document, place, value):
    """The document with one value set, or removed."""
    document = copy.deepcopy(document)
    parent = document
    for step in place[:-1]:
        parent = parent[step]
    if value is MISSING:
        del parent[place[-1]]
    else:
        parent[place[-1]] = value
    return document


def refused(read, data):
    """The message of the SpecError that reading ends in; quick, and in little memory."""
    start = time.thread_time()
    with pytest.raises(SpecError) as caught:
        read(data)
    assert time.thread_time() - start < 1.0
    tracemalloc.start()
    with pytest.raises(SpecError):
        read(data)
    assert tracemalloc.get_traced_memory()[1] < 32 * len(data) + (8 << 20)
    tracemalloc.stop()
    assert len(str(caught.value)) < 1000
    return str(caught.value)


TABLE = [
    # what is put where, the path in the message, what else it must say
    (("version",), MISSING, "$: ", "missing required field version"),
    (("version",), 3, "$.version: ", "reads version 1 and 2, the document is version 3"),
    (("version",), 10**30, "$.version: ", "reads version 1 and 2"),
    (("identity",), {"known": {"a": ""}}, "$.identity: ", "1 to 512 characters are allowed, got 0"),
    (("identity",), {"known": {"a": "1"}, "unknown": {"a": "?"}}, "$.identity: ", "a part is given twice"),
    (("identity",), {"known": {"a": 1}}, "$.identity.known", "Expected str, got int"),
    (("version",), "1", "$.version: ", "Expected int, got str"),
    (("version",), 1.0, "$.version: ", "Expected int, got float"),
    (("version",), True, "$.version: ", "Expected int, got bool"),
    (("engine",), MISSING, "$: ", "missing required field engine"),
    (("engine",), 7, "$.engine: ", "Expected str, got int"),
    (("enginee",), "x", "$: ", "Object contains unknown field enginee"),
    (("states",), {}, "$.states: ", "Expected array, got object"),
    (("states", 1), None, "$.states[1]: ", "Expected object, got null"),
    (("states", 1, "item_byte"), 2, "$.states[1]: ", "Object contains unknown field item_byte"),
    (("states", 1, "item_bytes"), -2, "$.states[1]: ", "item_bytes must be an integer from 1"),
    (("states", 1, "item_bytes"), 10**30, "$.states[1]: ", "got 10000000000"),
    (("states", 1, "name"), "", "$.states[1]: ", "a state needs a name"),
    (("states", 1, "name"), "a/k", "$: ", "state 'a/k' is given twice"),
    (("states", 1, "aliases"), ["a/k"], "$: ", "state 'a/k' is given twice"),
    (("states", 1, "aliases"), "a/x", "$.states[1].aliases: ", "Expected array, got str"),
    (("states", 1, "kind"), "page", "$.states[1].kind: ", "Invalid enum value 'page'"),
    (("states", 1, "kind"), "recurrent", "$: ", "a recurrent state in a group with table"),
    (("states", 1, "axes", "head"), 0, "$.states[1].axes.head: ", "from 1 to 1048576, got 0"),
    (("states", 1, "axes", "head"), 10**9, "$.states[1].axes.head: ", "from 1 to 1048576, got 1000000000"),
    (("states", 1, "axes", "head"), 2.5, "$.states[1].axes[...]: ", "Expected int, got float"),
    (("states", 1, "axes", "a b"), None, "$.states[1].axes[...]: ", "Expected int, got null"),
    (("states", 1, "axes", "token"), 4, "$.states[1].axes.token: ", "a name other than 'token'"),
    (
        ("states", 1, "axes", "row"),
        4,
        "$: ",
        "but the state has ['channel', 'head', 'row', 'token']",
    ),
    (("states", 1, "axes", "head"), 1, "$: ", "axis head reaches 2, but the state has 1"),
    (("groups", 0, "num_blocks"), 0, "$.groups[0]: ", "num_blocks must be"),
    (("groups", 0, "num_blocks"), 1e3, "$.groups[0].num_blocks: ", "Expected int, got float"),
    (("groups", 0, "tokens_per_block"), 10**9, "$.groups[0]: ", "from 1 to 1048576"),
    (("groups", 0, "addressing"), "paged", "$.groups[0].addressing: ", "Invalid enum value 'paged'"),
    (("groups", 0, "name"), "other", "$: ", "unknown group 'full'"),
    (("groups", 0, "tokens_per_block"), 8, "$: ", "but a block of 8 tokens has 8/1"),
    (("groups",), GOOD["groups"] * 2, "$: ", "group 'full' is given twice"),
    (("ranks",), GOOD["ranks"] * 2, "$: ", "rank '0' is given twice"),
    (("ranks", 0, "rank"), -1, "$: ", "from 0 to"),
    (("ranks", 0, "rank"), 1 << 70, "$: ", "from 0 to"),
    (("ranks", 0, "regions", 1, "name"), "k", "$: ", "region 'k' is given twice"),
    (("ranks", 0, "regions", 1, "num_bytes"), 1 << 60, "$.ranks[0].regions[1]: ", "num_bytes must be"),
    (("ranks", 0, "regions", 1, "address"), -1, "$.ranks[0].regions[1]: ", "address must be"),
    (("ranks", 0, "regions", 1, "device"), "gpu 0", "$.ranks[0].regions[1]: ", "like 'cuda:0', got 'gpu 0'"),
    (("ranks", 0, "regions", 1, "device"), None, "$.ranks[0].regions[1].device: ", "Expected str, got null"),
    (("ranks", 0, "views", 1, "state"), "a/k", "$: ", "view of state 'a/k' is given twice"),
    (("ranks", 0, "views", 1, "state"), "b", "$: ", "unknown state 'b'"),
    (("ranks", 0, "views", 1, "region"), "b", "$: ", "unknown region 'b'"),
    (("ranks", 0, "views", 1, "block_stride"), 0, f"{AT_VIEW}: ", "block_stride must be"),
    (
        ("ranks", 0, "views", 1, "block_stride"),
        MISSING,
        f"{AT_VIEW}: ",
        "missing required field block_stride",
    ),
    (("ranks", 0, "views", 1, "offset"), -1, f"{AT_VIEW}: ", "offset must be"),
    (("ranks", 0, "views", 1, "axes"), [], f"{AT_VIEW}.axes: ", "Expected object, got array"),
    (HEAD, [[2, 16]], "$.ranks[0].views[1].axes[...]: ", "Expected object, got array"),
    (HEAD, MISSING, "$: ", "axes ['channel', 'token'], but the state has"),
    ((*HEAD, "start"), -1, f"{AT_HEAD}: ", "start must be an integer from 0"),
    ((*HEAD, "start"), 1, "$: ", "axis head reaches 3"),
    ((*HEAD, "strat"), 1, "$.ranks[0].views[1].axes[...]: ", "Object contains unknown field strat"),
    ((*HEAD, "digits"), MISSING, "$.ranks[0].views[1].axes[...]: ", "missing required field digits"),
    ((*HEAD, "digits"), [[1 << 20, 1]] * 2, f"{AT_HEAD}: ", "1099511627776 coordinates, at most 1048576"),
    (
        (*HEAD, "digits"),
        [[1, 1]] * 17,
        f"{AT_HEAD}.digits: ",
        "at most 16 digits of an axis are allowed, got 17",
    ),
    (DIGIT, [2], "$.ranks[0].views[1].axes[...].digits[0]: ", "Expected array of at least length 2, got 1"),
    (DIGIT, [2, 16, None], "$.ranks[0].views[1].axes[...].digits[0][2]: ", "Expected array, got null"),
    (DIGIT, [2, 16, [0, 2], 1], "$: ", "Expected array of at most length 3"),
    (DIGIT, {"size": 2}, "$.ranks[0].views[1].axes[...].digits[0]: ", "Expected array"),
    (DIGIT, [-2, 16], f"{AT_HEAD}.digits[0]: ", "size must be an integer from 1 to 1048576, got -2"),
    (DIGIT, [2, -16], f"{AT_HEAD}.digits[0]: ", "stride must be an integer from 0"),
    (DIGIT, [2, 1 << 64], f"{AT_HEAD}.digits[0]: ", "got 18446744073709551616"),
    (DIGIT, [2, 16.0], "$.ranks[0].views[1].axes[...].digits[0][1]: ", "Expected int, got float"),
    (DIGIT, [True, 16], "$.ranks[0].views[1].axes[...].digits[0][0]: ", "Expected int, got bool"),
    (
        DIGIT,
        [2, 16, [1, 0]],
        f"{AT_HEAD}.digits[0]: ",
        "a span needs whole numbers with 0 <= start <= stop, got [1, 0)",
    ),
    (DIGIT, [2, 16, [0, 3]], f"{AT_HEAD}.digits[0]: ", "holds [0, 3) of 2 values"),
    (DIGIT, [2, 16, [1]], "$.ranks[0].views[1].axes[...].digits[0][2]: ", "Expected array of length 2"),
    (DIGIT, [2, 16, [0, 1.5]], "$.ranks[0].views[1].axes[...].digits[0][2][1]: ", "Expected int, got float"),
]


@pytest.mark.parametrize(("place", "value", "path", "says"), TABLE)
def test_a_wrong_value_is_named_with_its_place(place, value, path, says):
    message = refused(manifest_from_json, json.dumps(changed(GOOD, place, value)).encode())
    assert message.startswith(path), message
    assert says in message


@pytest.mark.parametrize(("place", "value", "path", "says"), TABLE)
def test_msgpack_is_refused_at_the_same_place(place, value, path, says):
    document = changed(GOOD, place, value)
    try:
        data = msgspec.msgpack.encode(document)
    except OverflowError:
        pytest.skip("msgpack has no integers beyond 64 bits")
    assert refused(manifest_from_msgpack, data).startswith(path.removesuffix(": "))


@pytest.mark.parametrize(
    ("place", "value", "path", "says"),
    [
        (("src",), MISSING, "$: ", "missing required field src"),
        (("src", "full", "block_ids", 1), -1, "$.src.full.block_ids[1]: ", "null for a hole"),
        (("src", "full", "block_ids", 1), 1 << 64, "$.src.full.block_ids[1]: ", "from 0 to"),
        (("src", "full", "block_ids", 1), 1.0, "$.src[...].block_ids[1]: ", "Expected int | null, got float"),
        (
            ("src", "full", "block_ids", 1),
            False,
            "$.src[...].block_ids[1]: ",
            "Expected int | null, got bool",
        ),
        (("src", "full", "block_ids"), None, "$.src[...].block_ids: ", "Expected array, got null"),
        (("src", "full", "first_token"), -1, "$.src.full: ", "first_token must be"),
        (("src", "a.b"), {}, "$.src[...]: ", "missing required field block_ids"),
        (("need",), [[0, 8]], "$.need: ", "Expected object, got array"),
        (("need", "full", 0), [8, 0], "$.need.full[0]: ", "0 <= start <= stop, got [8, 0)"),
        (("need", "full", 0), [-8, 0], "$.need.full[0]: ", "0 <= start <= stop"),
        (("need", "full", 0), [0, 10**9], "$.need.full[0]: ", "from 0 to 67108864, got 1000000000"),
        (("need", "full", 0), [0, 8, 9], "$.need[...][0]: ", "Expected array of length 2"),
        (("need", "full"), [[i, i + 1] for i in range(1025)], "$.need.full: ", "at most 1024 intervals"),
        (("kept", "full", 0, 1), "9", "$.kept[...][0][1]: ", "Expected int, got str"),
        (("slack",), "zero", "$.slack: ", "Invalid enum value 'zero'"),
        (("tokens",), 300, "$: ", "Object contains unknown field tokens"),
    ],
)
def test_a_wrong_request_is_named_with_its_place(place, value, path, says):
    message = refused(request_from_json, json.dumps(changed(REQUEST, place, value)).encode())
    assert message.startswith(path), message
    assert says in message


TEXT = json.dumps(GOOD).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (TEXT[:-1], "truncated"),
        (TEXT[:200], "truncated"),
        (TEXT + b"}", "trailing"),
        (TEXT.replace(b"256", b"NaN"), "malformed"),
        (TEXT.replace(b"256", b"Infinity"), "malformed"),
        (TEXT.replace(b"256", b"1e999"), "Number out of range"),
        (TEXT.replace(b"256", b"9" * 100_000), "range"),
        (TEXT.replace(b"a/k", b"\xff\xfe"), "utf-8"),
        (TEXT.replace(b"a/k", rb"\ud800"), "not well formed"),
        (b"\xef\xbb\xbf" + TEXT, "malformed"),
        (b"[" * 1_000_000, "Expected object, got array"),
        (b'{"version": 1, "x": ' + b"[" * 1_000_000, "nested too deeply"),
        (b'{"version": 1, "x": ' + b'{"a":' * 1_000_000, "nested too deeply"),
        (b"null", "Expected object, got null"),
        (b"[]", "Expected object, got array"),
        (b'"' + b"x" * 2_000_000 + b'"', "$: Expected object, got str"),
        (b"[" + b"1," * reading.MAX_JSON_ITEMS + b"1]", "at most 2097152 items"),
    ],
)
def test_what_is_no_json_is_refused(data, says):
    message = refused(manifest_from_json, data)
    assert message.startswith("$"), message
    assert says in message


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (b'"engine": "e"', b'"engine": "e", "engine": "f"', "engine"),
        (b'"version": 2', b'"version": 2, "version": 2', "version"),
        (b'"head": 2', b'"head": 2, "head": 4', "head"),
        (b'"head": 2', b'"head": 2, "h\\u0065ad": 4', "head"),
        (b'"name": "a/k"', b'"name": "a\\u003ak", "name": "a/k"', "name"),
        (b'"start": 0, "digits"', b'"digits"', None),
        (b'"a/v"', b'"a\\/v"', None),
        (b'"e"', b'"cuda:0 \\":"', None),
    ],
)
def test_a_key_given_twice_is_refused_and_nothing_else_is(old, new, key):
    data = TEXT.replace(old, new)
    if key is None:
        manifest_from_json(data)
    else:
        assert refused(manifest_from_json, data) == f'$: duplicate key "{key}" in one object'


class Twice(str):
    """A key that is not equal to its like, so that a dict can hold both."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("engine",), "f"),
        (("version",), 2),
        (("states", 0, "axes", "head"), 4),
        (("states", 1, "name"), "a/v"),
        (("ranks", 0, "views", 1, "axes", "head"), {"digits": [[2, 32]]}),
        (("ranks", 0, "views", 1, "axes", "head", "digits"), [[2, 16]]),
    ],
)
def test_a_key_given_twice_is_refused_in_msgpack_too(place, value):
    """Peers send msgpack, and the page says that it is the same document, field for field."""
    document = changed(GOOD, (*place[:-1], Twice(place[-1])), value)
    message = refused(manifest_from_msgpack, msgspec.msgpack.encode(document))
    assert message.startswith("$: duplicate key in one object")


def test_a_key_given_twice_and_wrong_once_is_refused():
    data = TEXT.replace(b'"engine": "e"', b'"engine": 7, "engine": "e"')
    assert refused(manifest_from_json, data) == "$.engine: Expected str, got int"


def test_a_msgpack_key_that_is_no_text_is_refused_at_its_object():
    document = changed(GOOD, ("states", 1, "axes", 3), 4)
    message = refused(manifest_from_msgpack, msgspec.msgpack.encode(document))
    assert message.startswith("$.states[1].axes: a key: Expected str"), message


def test_too_long_an_input_is_not_looked_at():
    # Nothing but zeros: the pages of such a buffer are never touched.
    assert "at most 67108864 bytes" in refused(manifest_from_json, bytes(reading.MAX_JSON_BYTES + 1))
    assert "at most 8388608 bytes" in refused(manifest_from_msgpack, bytes(reading.MAX_MSGPACK_BYTES + 1))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "truncated"),
        (b"\xdd\xff\xff\xff\xff\x01", "Expected object, got array"),
        (b"\x81\xa7version\xdd\xff\xff\xff\xff", "Expected int, got array"),
        (b"\x91" * 1_000_000, "Expected object, got array"),
        (
            b"\x82\xa7version\x01\xa6states" + b"\xdd\x00\x7a\x12\x00" + b"\x90" * 8_000_000,
            "$.states[0]: Expected object, got array",
        ),
        (b"\xc1", "not well formed"),
        (b"\x81\x01\x02", "Expected str"),
    ],
)
def test_what_is_no_msgpack_is_refused(data, says):
    message = refused(manifest_from_msgpack, data)
    assert message.startswith("$"), message
    assert says in message


def test_a_small_document_cannot_count_through_much():
    views = [
        changed(GOOD["ranks"][0]["views"][0], ("axes", "head", "digits"), [[1 << 20, stride]])
        for stride in range(1, 10)
    ]
    document = changed(GOOD, ("ranks", 0, "views"), views)
    message = refused(manifest_from_json, json.dumps(document).encode())
    assert message.startswith("$.ranks[0].views[7].axes.head: "), message
    assert f"{manifest_module.MAX_COORDINATES} coordinates" in message


def test_many_states_times_many_ranks_are_refused_before_they_are_multiplied():
    states = [{"name": str(i), "item_bytes": 1, "dtype": "u8"} for i in range(5000)]
    ranks = [{"rank": i, "regions": [], "views": []} for i in range(5000)]
    document = GOOD | {"states": states, "ranks": ranks}
    assert "states times ranks" in refused(manifest_from_json, json.dumps(document).encode())


def message_of(read, data):
    """What is said of the data; a place and nothing more if they were read."""
    try:
        read(data)
    except KVFerryError as error:
        return str(error)
    return "$"


@given(st.data())
def test_a_spoiled_document_is_read_or_refused_and_nothing_else(data):
    text = bytearray(TEXT)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for read in (manifest_from_json, manifest_from_msgpack, request_from_json):
        assert message_of(read, bytes(text)).startswith("$")


PACKED = msgspec.msgpack.encode(GOOD)


@given(st.integers(0, len(PACKED) - 1), st.binary(max_size=4))
def test_spoiled_msgpack_is_read_or_refused_and_nothing_else(at, patch):
    spoiled = PACKED[:at] + patch + PACKED[at + len(patch) :]
    assert message_of(manifest_from_msgpack, spoiled).startswith("$")


@pytest.mark.parametrize("read", [manifest_from_json, manifest_from_msgpack])
def test_text_is_not_bytes(read):
    with pytest.raises(
        TypeError, match=r"expected a document as bytes, got str: encode it first \(text.encode\(\)\)"
    ):
        read("{}")
