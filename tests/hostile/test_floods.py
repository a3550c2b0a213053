"""Bounds: what strangers say costs a source engine little memory and no hearing.

The numbers of each attack on the code before these bounds stand beside it.
"""

import time

import msgspec
import pytest

from kvferry.wire.messages import (
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    DescribeRanks,
    Hello,
    RankDescriptions,
    Rejected,
    Renew,
    Renewal,
    Welcome,
)

HELLO = Hello(PROTOCOL, "stranger")


def test_questions_whose_answers_nobody_reads(victim_of, stranger_at):
    """61 KiB of hellos, each worth a welcome of 700 KiB with the card in it, once cost 1.4 GB."""
    victim = victim_of(card_bytes=700 << 10)
    deaf, friend = stranger_at(victim.address, RCVHWM=1, RCVBUF=4096), stranger_at(victim.address)
    question = DescribeRanks(1, friend.ask(HELLO, Welcome).generation, (0,))
    for _ in range(2000):
        deaf.say(question)
    friend.ask(HELLO, Welcome)
    assert len(friend.ask(question, RankDescriptions).ranks[0].card) == 700 << 10
    time.sleep(1.0)
    grown = victim.state()["peak"] - victim.before["peak"]
    print(f"2,000 questions for a rank of 700 KiB: {grown} MiB")
    assert grown < 100


@pytest.mark.timed
def test_messages_that_are_too_long_for_what_they_are(victim_of, stranger_at):
    """40 renewals of 8 MiB once made an authority deaf for 25 s, and its process stall with it."""
    victim = victim_of()
    huge = msgspec.msgpack.encode(Renew(1, 0, "stranger", 0, ((1, b""),) * ((8 << 18) - 100)))
    stranger, friend = stranger_at(victim.address, SNDHWM=0), stranger_at(victim.address)
    friend.say(HELLO)
    friend.hear()
    for _ in range(40):
        stranger.say(huge)
    deadline, slowest = time.monotonic() + 3, 0.0
    while time.monotonic() < deadline:
        asked = time.monotonic()
        friend.say(HELLO)
        friend.hear(60)
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.02)
    state = victim.state()
    grown = state["peak"] - victim.before["peak"]
    print(f"40 renewals of 8 MiB: deaf for {slowest:.2f} s, stalled for {state['stall']:.2f} s, {grown} MiB")
    assert slowest < 2
    assert state["stall"] < 1
    answer = stranger.hear()
    assert isinstance(answer, Rejected)
    assert (answer.code, "Renew" in answer.detail) == ("too-long", True)
    good = Renew(2, 0, "stranger", 0, tuple((number, bytes(16)) for number in range(MAX_BATCH)))
    stranger_at(victim.address)
    friend.say(good)
    answer = friend.hear()
    while isinstance(answer, Welcome):
        answer = friend.hear()
    assert isinstance(answer, Renewal)


@pytest.mark.parametrize("length", [70_000, 1 << 20, MAX_MESSAGE_BYTES + 1])
def test_what_is_too_long_is_answered_by_name(victim_of, stranger_at, length):
    """Once there was no answer at all."""
    victim = victim_of()
    stranger = stranger_at(victim.address)
    stranger.say(msgspec.msgpack.encode(Hello(PROTOCOL, "x" * length)))
    answer = stranger.hear(10)
    assert isinstance(answer, Rejected)
    assert answer.code == "too-long"
    assert "Hello" in answer.detail
