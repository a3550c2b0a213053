"""The control channel, between two channels of this process."""

import contextlib
import resource
import socket
import time

import pytest

from kvferry.channel import Channel, Contact, ContactChange, Received, connections
from kvferry.channel.zmq import MAX_CALLS
from kvferry.errors import ChannelError
from kvferry.wire.secret import Secret

SESAME, BARLEY = Secret(b"open sesame, now"), Secret(b"open barley, now")


@pytest.fixture
def opened():
    channels = []

    def channel(**kwargs):
        channels.append(Channel(**kwargs))
        return channels[-1]

    yield channel
    for one in channels:
        one.close()


def heard(channel, num=1, seconds=10):
    received: list = []
    deadline = time.monotonic() + seconds
    while len(received) < num and time.monotonic() < deadline:
        received += [one for one in channel.wait(0.05) if isinstance(one, Received)]
    return received


@pytest.mark.parametrize("secret", [None, SESAME])
def test_there_and_back(opened, secret):
    listener, caller = opened(listen="tcp://127.0.0.1:*", secret=secret), opened(secret=secret)
    caller.send(listener.address, b"hello")
    (received,) = heard(listener)
    assert received.data == b"hello"
    listener.send(received.reply_to, b"welcome")
    (answer,) = heard(caller)
    assert (answer.reply_to, answer.data) == (listener.address, b"welcome")


def test_strangers_do_not_take_the_place_of_peers(opened, monkeypatch):
    """Connections that said nothing once had a listener hang up on readers that were idle."""
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 16)
    monkeypatch.setattr(connections, "MAX_STRANGERS", 8)
    listener, caller = opened(listen="tcp://127.0.0.1:*"), opened()
    caller.send(listener.address, b"hello")
    (first,) = heard(listener)
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection((host, int(port)), 10))
            listener.wait(0.01)
        assert listener.dropped["silent"] >= 30
        assert len(listener._callers) <= 16
        caller.send(listener.address, b"hello again")
        (second,) = heard(listener)
        assert second.reply_to == first.reply_to, "over the same connection"


def test_strangers_leave_files_to_the_process(opened, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (80, 80))
    listener = opened(listen="tcp://127.0.0.1:*")
    host, _, port = listener.address.removeprefix("tcp://").rpartition(":")
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection((host, int(port)), 10))
            listener.wait(0.01)
        assert len(listener._callers) <= 12


def test_a_route_ends_with_its_connection(opened):
    """No caller names itself: under a name, another one could take its place."""
    listener, caller = opened(listen="tcp://127.0.0.1:*"), opened()
    caller.send(listener.address, b"hello")
    (first,) = heard(listener)
    # Disconnecting and calling again is what ZeroMQ does by itself when a peer was silent for too long.
    call = caller._calls[listener.address].socket
    call.disconnect(listener.address)
    call.connect(listener.address)
    caller.send(listener.address, b"hello again")
    (second,) = heard(listener)
    assert second.reply_to != first.reply_to
    listener.send(first.reply_to, b"too late")
    listener.send(second.reply_to, b"still there")
    assert [answer.data for answer in heard(caller)] == [b"still there"]


def test_any_number_of_dead_addresses_leaves_room_for_a_living_one(opened):
    listener, caller = opened(listen="tcp://127.0.0.1:*"), opened()
    for port in range(1, 1100):
        caller.send(f"tcp://127.0.0.1:{port}", b"anybody?")
    assert len(caller._calls) == MAX_CALLS
    assert not caller.dropped
    caller.send(listener.address, b"hello")
    assert [received.data for received in heard(listener)] == [b"hello"]


def test_nobody_is_called_after_hanging_up(opened):
    listener, caller = opened(listen="tcp://127.0.0.1:*"), opened()
    caller.send(listener.address, b"hello")
    (first,) = heard(listener)
    caller.send(listener.address, b"good-bye")
    caller.hang_up(listener.address)
    caller.hang_up("tcp://127.0.0.1:1")
    assert [received.data for received in heard(listener)] == [b"good-bye"], "what was said last is sent"
    assert not caller._calls
    deadline = time.monotonic() + 10
    while not listener.dropped and time.monotonic() < deadline:
        listener.send(first.reply_to, b"are you there?")
        time.sleep(0.01)
    assert listener.dropped["unsent"], "the connection is closed"
    caller.send(listener.address, b"hello again")
    assert [received.data for received in heard(listener)] == [b"hello again"]


def test_an_address_that_makes_no_sense_costs_nothing(opened):
    listener, caller = opened(listen="tcp://127.0.0.1:*"), opened()
    for _ in range(300):
        for address in ("", "tcp://", "tcp://127.0.0.1:port", "tcp://127.0.0.1;5555", "inproc://wake", "@zz"):
            caller.send(address, b"anybody?")
    assert not caller._calls
    assert caller.dropped == {"unsent": 900, "address": 600}
    caller.send(listener.address, b"hello")
    assert [received.data for received in heard(listener)] == [b"hello"]


def test_who_does_not_know_the_secret_gets_nowhere(opened):
    # RB-8
    listener = opened(listen="tcp://127.0.0.1:*", secret=SESAME)
    strangers = [opened(), opened(secret=BARLEY)]
    friend = opened(secret=SESAME)
    for channel in (*strangers, friend):
        channel.send(listener.address, b"hello")
    (received,) = heard(listener)
    listener.send(received.reply_to, b"welcome")
    assert [answer.data for answer in heard(friend)] == [b"welcome"]
    assert not heard(listener, seconds=0.5)
    assert not any(heard(stranger, seconds=0.1) for stranger in strangers)


def test_a_message_that_is_too_long_is_not_taken(opened):
    listener, caller = opened(listen="tcp://127.0.0.1:*", max_bytes=1000), opened()
    caller.send(listener.address, bytes(1001))
    assert not heard(listener, seconds=0.3)
    caller.send(listener.address, bytes(1000))
    assert [len(received.data) for received in heard(listener)] == [1000]


def test_an_address_that_is_taken_is_an_error(opened):
    listener = opened(listen="tcp://127.0.0.1:*")
    with pytest.raises(ChannelError, match="cannot listen at"):
        opened(listen=listener.address)


@pytest.mark.timed
def test_no_call_to_wake_up_is_lost(opened):
    """A message that waits for one that is lost waits for a whole second."""
    channel, started = opened(), time.monotonic()
    for _ in range(300):
        channel.wake()
        assert channel.wait(10.0) == []
    assert time.monotonic() - started < 5


def test_waking_a_closed_channel_does_nothing(opened):
    """Its thread is alive for a moment after it has closed it."""
    channel = opened()
    channel.close()
    channel.wake()


def news(channel, *wanted, seconds=10):
    """What happened to connections, until the last of these did."""
    contacts: list = []
    deadline = time.monotonic() + seconds
    while wanted[-1] not in contacts:
        assert time.monotonic() < deadline, contacts
        contacts += [one.contact for one in channel.wait(0.05) if isinstance(one, ContactChange)]
    return contacts


@pytest.mark.timed
def test_a_caller_hears_who_is_there_and_who_is_not_any_more(opened):
    listener, caller = opened(listen="tcp://127.0.0.1:*"), opened(silence_seconds=30)
    caller.send(listener.address, b"hello")
    assert news(caller, Contact.CONNECTED) == [Contact.CALLING, Contact.CONNECTED]
    listener.close()
    started = time.monotonic()
    assert news(caller, Contact.BROKEN)[0] is Contact.BROKEN
    assert time.monotonic() - started < 5, "it is told at once, not by silence"
    again = opened(listen=listener.address)
    assert news(caller, Contact.CONNECTED)[-1] is Contact.CONNECTED
    again.close()


def test_where_nobody_listens_a_connection_is_refused(opened):
    caller = opened()
    caller.send("tcp://127.0.0.1:9", b"anybody?")
    assert news(caller, Contact.BROKEN) == [Contact.CALLING, Contact.BROKEN]


def test_a_port_of_something_else_is_no_connection(opened):
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = opened()
        caller.send(f"tcp://127.0.0.1:{server.getsockname()[1]}", b"anybody?")
        stranger, _ = server.accept()
        stranger.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        stranger.close()
        assert news(caller, Contact.BROKEN) == [Contact.CALLING, Contact.BROKEN]


def test_who_is_hung_up_on_is_called_again_when_something_is_sent(opened):
    listener, caller = opened(listen="tcp://127.0.0.1:*"), opened()
    caller.send(listener.address, b"hello")
    assert len(heard(listener)) == 1
    caller.hang_up(listener.address)
    caller.hang_up("tcp://127.0.0.1:9")  # nobody: nothing happens
    assert not caller._calls
    caller.send(listener.address, b"hello again")
    assert [received.data for received in heard(listener)] == [b"hello again"]


def test_a_call_that_makes_room_for_another_is_told(opened, monkeypatch):
    monkeypatch.setattr("kvferry.channel.zmq.MAX_CALLS", 1)
    caller = opened()
    caller.send("tcp://127.0.0.1:9", b"anybody?")
    caller.send("tcp://127.0.0.1:10", b"anybody?")
    assert ContactChange("tcp://127.0.0.1:9", Contact.CLOSED) in caller.wait(1.0)
