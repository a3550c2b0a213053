"""Texts of peers are short, and stay on their line of the log."""

import msgspec
import pytest

from kvferry.core.request import BlockTable
from kvferry.endpoint.logs import log_line
from kvferry.errors import SpecError
from kvferry.runtime import Failure, FailureCode, Offers, Reader, Report
from kvferry.runtime.values import Record
from kvferry.wire.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Denial,
    Hello,
    Join,
    RankDescription,
    Rejected,
    Welcome,
    decode_from_authority,
    decode_to_authority,
    encode,
    too_long,
)
from kvferry.wire.ticket import Ticket, from_text, to_text

LONG = "x" * 5000
RANK = RankDescription(b"", (), b"")


@pytest.mark.parametrize(
    "message",
    [
        Hello(PROTOCOL, LONG),
        Join(PROTOCOL, LONG, 0, "memory", b"", RANK),
        Join(PROTOCOL, "prefill", 0, LONG, b"", RANK),
        Rejected(LONG),
        Rejected("join", LONG),
        Denial(1, 1, LONG),
        Denial(1, 1, "ended", LONG),
        Welcome(PROTOCOL, LONG, 1, "memory", b""),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_long_text_is_not_read(message):
    decode = decode_to_authority if isinstance(message, Hello | Join) else decode_from_authority
    with pytest.raises(SpecError, match="length"):
        decode(encode(message))


def test_a_long_name_in_a_ticket_is_not_read():
    ticket = Ticket("prefill", 7, 1, "req-1", "tcp://127.0.0.1:5555", 3, {}, 30_000)
    for field in ("engine", "request_id", "authority", "host"):
        with pytest.raises(SpecError, match="length"):
            from_text(to_text(msgspec.structs.replace(ticket, **{field: LONG})))


def test_names_of_our_own_that_nobody_would_read_are_refused_at_once():
    with pytest.raises(SpecError, match="the name of an engine has 1 to 256 characters, got 5000"):
        Offers(LONG, 7, b"key", "tcp://127.0.0.1:5555", 30_000)
    with pytest.raises(SpecError, match="the name of a reader"):
        Reader(LONG, 0, 1, key=bytes(16))
    offers = Offers("prefill", 7, b"key", "tcp://127.0.0.1:5555", 30_000)
    with pytest.raises(SpecError, match="the name of a request has 1 to 1024 characters"):
        offers.make(LONG, {"full": BlockTable.of([1])}, 3)


def test_what_a_peer_says_stays_on_one_line_of_the_log():
    evil = "good\nkvferry: fetched all\r\x1b[2J\u2028"
    record = Record(evil, evil, outcome="denied", detail=evil)
    line = log_line(Report(1, Failure(FailureCode.DENIED, evil), record))
    assert line.isprintable()
    assert line.count("good\\nkvferry") == 3
    assert len(log_line(Report(1, Failure(FailureCode.DENIED, LONG * 9), record))) < 5000


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", ""),
        (encode(Hello(PROTOCOL, "a")), ""),
        (encode(Hello(PROTOCOL, "a" * 66_000)), "Hello"),
        (b"\x90" * 66_000, "unknown"),
        (b"\x82\xa4type\xa4Join" + bytes(MAX_MESSAGE_BYTES), "Join"),
        (b"\x82\xa4type\xa4Join" + bytes(MAX_MESSAGE_BYTES - 11), ""),
        (b"\xde\x00\x02\xa4type\xa5Renew" + bytes(300 << 10), "Renew"),
        (b"\xde\x00\x02\xa4type\xa5Renew" + bytes(200 << 10), ""),
    ],
)
def test_a_length_is_judged_by_the_kind_of_a_message(data, kind):
    assert (f"kind {kind} " in too_long(data)) if kind else too_long(data) == ""
