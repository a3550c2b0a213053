"""Bounds: what strangers say costs a source engine little memory and no hearing.

The numbers of each attack on the code before these bounds stand beside it.
"""

import contextlib
import socket
import threading
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
    encode,
)
from tests.hostile import zmtp

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


SECONDS = 4


def pour(address, data, until):
    """Send the same bytes as fast as they are taken; connect again when hung up on."""
    while time.monotonic() < until:
        with contextlib.suppress(OSError), zmtp.connected(address) as caller:
            caller.settimeout(1)
            while time.monotonic() < until:
                caller.sendall(data)


RENEWAL = Renew(1, 0, "stranger", 0, tuple((number, bytes(16)) for number in range(MAX_BATCH)))
POURED = {
    "renewals": (zmtp.frame(encode(RENEWAL)) * 8, 1, 200),
    "too long": (zmtp.frame(bytes(MAX_MESSAGE_BYTES)), 1, 200),
    "short": (zmtp.frame(b"?") * 50_000, 1, 200),
    "hellos": (zmtp.frame(encode(HELLO)) * 1000, 4, 200),
    "endless": (zmtp.frame(bytes(60_000), has_more=True), 1, 200),
    "endless and short": (zmtp.frame(b"", has_more=True) * 50_000, 1, 600),
    "frames": ((zmtp.frame(b"", has_more=True) * 999 + zmtp.frame(b"")) * 50, 1, 300),
}
"""Bytes, over how many connections, and how many MiB they may cost."""


@pytest.mark.timed
@pytest.mark.parametrize("name", POURED)
def test_a_flood(victim_of, stranger_at, name):
    """A good peer is served meanwhile, and after it at once."""
    data, num_callers, most = POURED[name]
    victim, until = victim_of(), time.monotonic() + SECONDS
    friend = stranger_at(victim.address)
    friend.ask(HELLO, Welcome)
    callers = [threading.Thread(target=pour, args=(victim.address, data, until)) for _ in range(num_callers)]
    for caller in callers:
        caller.start()
    times = []
    while time.monotonic() < until:
        asked = time.monotonic()
        friend.ask(HELLO, Welcome)
        times.append(time.monotonic() - asked)
        time.sleep(0.02)
    for caller in callers:
        caller.join()
    asked = time.monotonic()
    friend.ask(HELLO, Welcome)
    after, state = time.monotonic() - asked, victim.state()
    grown = state["peak"] - victim.before["peak"]
    slowest = max(times)
    print(f"{name}: {grown} MiB; {len(times)} hellos, slowest {slowest:.2f} s, then {after:.2f} s")
    print(state["dropped"])
    assert grown < most
    assert slowest < 3
    assert after < 1


@pytest.mark.timed
def test_many_callers_that_do_not_read(victim_of, stranger_at):
    """60 of them once cost 1.9 GB."""
    victim = victim_of(card_bytes=700 << 10)
    friend = stranger_at(victim.address)
    question = DescribeRanks(1, friend.ask(HELLO, Welcome).generation, (0,))
    with contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(zmtp.connected(victim.address)) for _ in range(60)]
        for _ in range(3):
            for caller in deaf:
                with contextlib.suppress(OSError):
                    caller.sendall(zmtp.frame(encode(question)) * 20)
            assert len(friend.ask(question, RankDescriptions).ranks[0].card) == 700 << 10
            time.sleep(1.0)
        grown = victim.state()["peak"] - victim.before["peak"]
    print(f"60 callers that do not read: {grown} MiB")
    assert grown < 300


@pytest.mark.timed
def test_many_messages_that_do_not_end(victim_of, stranger_at):
    """100 of them, each but for its last byte."""
    victim = victim_of()
    friend = stranger_at(victim.address)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            caller = stack.enter_context(zmtp.connected(victim.address))
            caller.settimeout(5)
            with contextlib.suppress(OSError):
                caller.sendall(zmtp.frame(bytes(8 << 20))[:-1])
        friend.ask(HELLO, Welcome)
        grown = victim.state()["peak"] - victim.before["peak"]
    print(f"100 messages of 8 MiB that do not end: {grown} MiB")
    assert grown < 300


def test_messages_of_an_old_zmtp_end_nothing(victim_of, stranger_at):
    """They say nothing of their connection."""
    victim = victim_of()
    host, _, port = victim.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(b"\x01\x00" + b"\x02\x00?" * 1000)
        time.sleep(0.5)
    stranger_at(victim.address).ask(HELLO, Welcome)
    state = victim.state()
    assert set(state["refused"]) == {"SpecError"}
