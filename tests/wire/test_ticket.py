"""Tickets prove themselves: whatever is changed in one, it is no ticket any more."""

import base64

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.request import HOLE, BlockTable
from kvferry.errors import SpecError
from kvferry.wire.ticket import (
    MAX_TICKET_BYTES,
    TableDoc,
    Ticket,
    from_text,
    is_proved,
    sign,
    tables_to_wire,
    to_text,
)

KEY = b"a key made at start"
TABLES = {"full": TableDoc((3, 4, -1), 16), "window": TableDoc((9,))}


def signed(digest=b"digest", key=KEY):
    return sign(Ticket("prefill", 7, 1, "req-1", "tcp://127.0.0.1:5555", 300, TABLES, 30_000, digest), key)


@pytest.mark.parametrize("length", range(3))
def test_any_bit_flipped_in_the_text_is_noticed(length):
    """Also those that base64 does not use: one ticket, one text. Three lengths, for each padding."""
    text = to_text(signed(b"d" * length))
    data = text.encode()
    for at in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        try:
            ticket = from_text(flipped.decode("latin-1"))
        except SpecError:
            continue
        assert not is_proved(ticket, KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "prefil"},
        {"generation": 8},
        {"ticket_id": 2},
        {"request_id": "req-2"},
        {"authority": "tcp://127.0.0.1:5556"},
        {"num_tokens": 301},
        {"tables": {}},
        {"tables": {**TABLES, "window": TableDoc((8,))}},
        {"tables": dict(reversed(TABLES.items()))},
        {"lease_ms": 30_001},
        {"digest": b""},
        {"held_from": 0},
        {"mac": b""},
    ],
    ids=str,
)
def test_any_field_changed_is_noticed(change):
    assert is_proved(signed(), KEY)
    assert not is_proved(msgspec.structs.replace(signed(), **change), KEY)


def test_another_key_proves_nothing():
    assert not is_proved(signed(key=b"another start"), KEY)


@pytest.mark.parametrize(
    "spell",
    [
        lambda text: text + "=",
        lambda text: text + "\n",
        lambda text: " " + text,
        lambda text: text.rstrip("="),
        lambda text: text[:8] + "!" + text[8:],
        lambda text: base64.urlsafe_b64encode(base64.urlsafe_b64decode(text) + b"\0").decode(),
        lambda text: text[: len(text) // 2],
        lambda text: "ü" + text,
        lambda text: "",
    ],
)
def test_a_ticket_has_one_text(spell):
    text = to_text(signed(b"d"))
    assert text.endswith("=")
    assert from_text(text) == signed(b"d")
    with pytest.raises(SpecError):
        from_text(spell(text))


@given(st.text() | st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_junk_is_a_spec_error_and_nothing_else(text):
    with pytest.raises(SpecError):
        from_text(text)


def test_too_long_is_refused_unread():
    with pytest.raises(SpecError, match="at most"):
        from_text("A" * (MAX_TICKET_BYTES + 1))


def test_tables_come_back_as_they_were():
    tables = {"full": BlockTable.of([3, HOLE, 4], 32), "empty": BlockTable.of([])}
    ticket = msgspec.structs.replace(signed(), tables=tables_to_wire(tables))
    back = from_text(to_text(ticket)).block_tables()
    assert {name: (t.block_ids.tolist(), t.first_token) for name, t in back.items()} == {
        "full": ([3, HOLE, 4], 32),
        "empty": ([], 0),
    }


def test_a_table_that_is_none_is_refused_by_the_name_of_its_group():
    """A plain list does not say where it starts."""
    with pytest.raises(SpecError, match="offered table of group window: expected a BlockTable"):
        tables_to_wire({"full": BlockTable.of([3]), "window": [4, 5]})  # type: ignore[dict-item]


@pytest.mark.parametrize("table", [TableDoc((-2,)), TableDoc((1,), -1)])
def test_senseless_tables_are_a_spec_error(table):
    with pytest.raises(SpecError):
        msgspec.structs.replace(signed(), tables={"full": table}).block_tables()


def test_a_ticket_of_protocol_3_keeps_its_text_and_its_proof():
    """It says nothing of ``held_from``: an upgraded reader must hand it back as it was written."""
    text = to_text(signed())
    assert b"held_from" not in base64.urlsafe_b64decode(text)
    assert is_proved(from_text(text), KEY)
