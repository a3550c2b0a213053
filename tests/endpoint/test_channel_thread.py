"""Whoever rides on a channel's thread: called when woken, in time, and until all is done; sends at once."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.channel import Channel, Received
from kvferry.endpoint.edges import WAIT_SECONDS, ChannelThread
from kvferry.endpoint.owner import MAX_AT_ONCE, Owner

LONG = 1e9


@pytest.fixture
def riding() -> Iterator[ChannelThread]:
    channel = ChannelThread(Channel(listen="tcp://127.0.0.1:*"))
    yield channel
    channel.close()


def soon(look, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not look():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def ride(channel: ChannelThread, turn, receive=lambda received: None) -> None:
    channel.start("riding", receive, lambda: False, turn)


class Turns:
    """Counts them."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.num = seconds, 0

    def __call__(self) -> float:
        self.num += 1
        return self.seconds


@pytest.mark.timed
def test_it_is_called_when_it_is_woken(riding: ChannelThread) -> None:
    turns = Turns(LONG)
    ride(riding, turns)
    time.sleep(0.1)
    for _ in range(20):
        number, started = turns.num, time.monotonic()
        riding.wake()
        soon(lambda number=number: turns.num > number)
        assert time.monotonic() - started < WAIT_SECONDS / 2


@pytest.mark.timed
def test_it_is_called_when_its_time_has_come(riding: ChannelThread) -> None:
    turns = Turns(0.02)
    ride(riding, turns)
    time.sleep(0.5)
    assert turns.num > 8


def test_what_it_raises_ends_nothing(riding: ChannelThread, caplog) -> None:
    turns: list[int] = []

    def turn() -> float:
        turns.append(1)
        if len(turns) == 1:
            raise ValueError("unexpected")
        return LONG

    ride(riding, turn)
    riding.wake()
    soon(lambda: len(turns) >= 2)
    assert "unexpected" in caplog.text


def test_what_it_sends_goes_out_while_it_is_busy(riding: ChannelThread) -> None:
    """An answer that is handed over to another thread waits until that one gets the interpreter."""
    hold = threading.Event()

    def receive(received) -> None:
        if isinstance(received, Received):
            riding.send(received.reply_to, b"at once")
            hold.wait(60)

    ride(riding, lambda: LONG, receive)
    caller = Channel()
    caller.send(riding.address, b"hello")
    heard: list = []
    deadline = time.monotonic() + 20
    while not heard and time.monotonic() < deadline:
        heard += [one.data for one in caller.wait(0.1) if isinstance(one, Received)]
    hold.set()
    caller.close()
    assert heard == [b"at once"]


@pytest.mark.timed
def test_many_events_are_done_without_a_pause_and_all_of_them_before_the_end() -> None:
    channel = ChannelThread(Channel())
    done: list[int] = []
    owner: Owner[None] = Owner("owner", lambda _: None, lambda now: now + LONG, time.monotonic)
    hold = threading.Event()
    owner.put(lambda _: (hold.wait(60), ())[1])
    ride(channel, owner.turn)

    def event(_: float) -> tuple[()]:
        done.append(1)
        return ()

    for _ in range(3 * MAX_AT_ONCE):
        owner.put(event)
    started = time.monotonic()
    hold.set()
    soon(lambda: len(done) == 3 * MAX_AT_ONCE)
    assert time.monotonic() - started < WAIT_SECONDS
    hold.clear()
    owner.put(lambda _: (hold.wait(60), ())[1])
    channel.wake()
    for _ in range(3 * MAX_AT_ONCE):
        owner.put(event)
    closing = threading.Thread(target=channel.close)
    closing.start()
    time.sleep(0.1)
    hold.set()
    closing.join(60)
    assert len(done) == 6 * MAX_AT_ONCE
