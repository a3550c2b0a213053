"""Control messages: they arrive as they were sent, and whatever else arrives is a SpecError."""

from typing import get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.errors import SpecError
from kvferry.wire.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Acquire,
    AskStatus,
    Claimed,
    ClaimOffer,
    Denial,
    DescribeRanks,
    DigestAnswer,
    DigestRequest,
    DigestResult,
    DigestTask,
    FindTransfer,
    FromAuthority,
    Grant,
    Grown,
    Hello,
    Join,
    JoinAck,
    Outcome,
    RankDescription,
    RankDescriptions,
    Rejected,
    ReleaseAck,
    ReleaseNotice,
    Renew,
    Renewal,
    Settle,
    SettleAck,
    StatusAnswer,
    ToAuthority,
    Watch,
    Welcome,
    decode_from_authority,
    decode_to_authority,
    encode,
)
from kvferry.wire.ticket import TableDoc, Ticket

TICKET = Ticket("prefill", 7, 1, "r", "tcp://x", 20, {"full": TableDoc((3, -1), 16)}, 30_000, b"d", b"m")
DESCRIBED = RankDescription(b"layout", ((4096, "cuda:0"), (0, "cpu")), b"\xff")
TO = (
    Hello(PROTOCOL, "A"),
    AskStatus(PROTOCOL),
    DescribeRanks(4, 7, (0, 5)),
    Acquire(1, TICKET, "A", 0, 2, 5, b"token"),
    ClaimOffer(5, TICKET, 512),
    FindTransfer(6, "5f" * 16),
    Watch(8, 7, 1, "decode#1", 0, b"\x00" * 16, 512),
    Renew(2, 7, "A", 0, ((1, b"a token"), (2, b""), (3, b"another"))),
    Settle(7, 1, "A", 0, 5, b"token", Outcome.UNREAD),
    DigestRequest(3, 7, 1, "A", 0, b"token", 1, b"question"),
    Join(PROTOCOL, "prefill", 0, "memory", b"\x00", DESCRIBED),
    ReleaseAck(7, 0, 12),
    DigestResult(7, 1, 4, b"\x00" * 16),
)
FROM = (
    Welcome(PROTOCOL, "prefill", 7, "memory", b"o"),
    RankDescriptions(4, 7, {0: DESCRIBED, 5: RankDescription(b"", (), b"")}),
    Rejected("not-ready", "1 of 2"),
    Grant(1, 1, 30_000),
    Claimed(5, TICKET),
    Claimed(5, detail="evicted"),
    Claimed(6, is_pending=True),
    Grown(8, TICKET, {0: b"\x00" * 32}),
    Denial(1, 1, "taken"),
    Renewal(2, 30_000, (1,), (2, 3)),
    SettleAck(1, 0, 5),
    SettleAck(1, 0, 5, "lease-ended", "too late"),
    DigestAnswer(3, b"\x00" * 16),
    DigestAnswer(3, detail="only host memory can be digested"),
    ReleaseNotice(7, 3, (("r", "read"), ("s", "expired"))),
    JoinAck("prefill", 7),
    StatusAnswer(b"{}"),
    DigestTask(7, 4, {"full": TableDoc((3, -1), 16)}, b"question"),
)
DECODERS = [decode_to_authority, decode_from_authority]


def test_every_message_is_tried_here():
    assert {type(message) for message in TO} == set(get_args(ToAuthority))
    assert {type(message) for message in FROM} == set(get_args(FromAuthority))


@pytest.mark.parametrize("message", [*TO, *FROM, TICKET], ids=lambda message: type(message).__name__)
def test_a_message_is_a_value_of_known_fields(message):
    config = type(message).__struct_config__
    assert config.frozen
    # A ticket is proved as a whole; of a message, what a newer peer adds may be ignored.
    assert config.forbid_unknown_fields == (message is TICKET)


@pytest.mark.parametrize("message", [*TO, *FROM], ids=lambda message: type(message).__name__)
def test_what_the_next_version_adds_is_ignored(message):
    """So that a fleet can be upgraded engine by engine."""
    newer = msgspec.msgpack.decode(encode(message)) | {"added": {"in": ["version", PROTOCOL + 1]}}
    decode = decode_to_authority if message in TO else decode_from_authority
    assert decode(msgspec.msgpack.encode(newer)) == message


@pytest.mark.parametrize("message", TO, ids=lambda message: type(message).__name__)
def test_to_an_authority_and_not_from_it(message):
    assert decode_to_authority(encode(message)) == message
    with pytest.raises(SpecError):
        decode_from_authority(encode(message))


@pytest.mark.parametrize("message", FROM, ids=lambda message: type(message).__name__)
def test_from_an_authority_and_not_to_it(message):
    assert decode_from_authority(encode(message)) == message
    with pytest.raises(SpecError):
        decode_to_authority(encode(message))


@pytest.mark.parametrize("decode", DECODERS)
@given(st.binary())
@example(b"\x91" * 100_000)
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(msgspec.msgpack.encode({"type": "Renew", "nonce": 2**64 - 1}))
@example(b"\x81\xa4type\xa5\xff\xff\xff\xff\xff")
def test_junk_is_a_spec_error_and_nothing_else(decode, data):
    with pytest.raises(SpecError):
        decode(data)


@given(st.sampled_from(TO + FROM), st.data())
def test_a_spoiled_message_is_a_spec_error_or_another_message(message, data):
    spoiled = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(spoiled[: data.draw(st.integers(0, len(spoiled)))])
    for decode in DECODERS:
        for bad in (bytes(spoiled), cut, bytes(spoiled) + b"\x00"):
            try:
                encode(decode(bad))
            except SpecError:
                continue


@pytest.mark.parametrize("decode", DECODERS)
def test_too_long_is_refused_unread(decode):
    with pytest.raises(SpecError, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("message", TO + FROM, ids=lambda message: type(message).__name__)
def test_a_field_less_or_another_tag_is_refused(message):
    decode = decode_to_authority if message in TO else decode_from_authority
    fields = msgspec.msgpack.decode(encode(message))
    required = next(name for name in fields if name != "type")
    less = {name: value for name, value in fields.items() if name != required}
    for bad in (less, {**fields, "type": "Hallo"}, {**fields, required: None}):
        with pytest.raises(SpecError, match="message: "):
            decode(msgspec.msgpack.encode(bad))


@pytest.mark.parametrize("value", [1.5, True, "1", -(2**63), 2**64 - 1, None])
def test_numbers_are_whole_numbers(value):
    fields = {**msgspec.msgpack.decode(encode(ReleaseAck(7, 0, 12))), "number": value}
    if type(value) is int:  # out of any sane range, but a number: for the authority to judge
        assert decode_to_authority(msgspec.msgpack.encode(fields)) == ReleaseAck(7, 0, value)
    else:
        with pytest.raises(SpecError, match="number"):
            decode_to_authority(msgspec.msgpack.encode(fields))
