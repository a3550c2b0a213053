"""The short way between processes of one host: what goes by it, who gets it, and that it harms nobody."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import pytest
import zmq

from kvferry.channel import Channel, Contact, ContactChange, Received, near
from kvferry.wire.secret import Secret

HOST, ELSEWHERE = "this one", "another one"
SESAME, BARLEY = Secret(b"open sesame, now"), Secret(b"open barley, now")
LISTEN = "tcp://127.0.0.1:*"


@pytest.fixture
def opened():
    channels = []

    def channel(host=HOST, **kwargs):
        channels.append(Channel(host=host, **kwargs))
        return channels[-1]

    yield channel
    for one in channels:
        one.close()


@pytest.fixture
def dealer():
    """Calls a listener by ZeroMQ and says whatever it likes."""
    context, dealers = zmq.Context(), []

    def call(listener, *frames):
        dealers.append(context.socket(zmq.DEALER))
        dealers[-1].setsockopt(zmq.LINGER, 0)
        dealers[-1].connect(listener.address)
        if frames:
            dealers[-1].send_multipart(frames)
        return dealers[-1]

    yield call
    for one in dealers:
        one.close(0)
    context.term()


@pytest.fixture
def stranger():
    """Connects to where a listener lets its callers in."""
    with contextlib.ExitStack() as stack:

        def connect(listener, *messages):
            one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            one.settimeout(5)
            one.connect(b"\0" + listener._near._name)
            for message in messages:
                one.send(message)
            return one

        yield connect


def until(is_so, *channels, seconds=10.0):
    """Drive channels until something is so; what they heard."""
    heard: list = []
    deadline = time.monotonic() + seconds
    while not is_so(heard):
        assert time.monotonic() < deadline, [one.data[:100] for one in heard][-10:]
        for channel in channels:
            heard += [one for one in channel.wait(0.01) if isinstance(one, Received)]
    return heard


def drive(*channels, seconds=0.3):
    """Whatever they hear in a while."""
    deadline = time.monotonic() + seconds
    return until(lambda _: time.monotonic() > deadline, *channels)


def heard(channel, num=1, *others):
    return until(lambda messages: len(messages) >= num, channel, *others)


def has_wire(caller, listener):
    call = caller._calls.get(listener.address)
    return bool(call and call.wire and not call.wire._welcome)


def meet(listener, caller):
    """Where to answer to a caller, once both have a wire."""
    caller.send(listener.address, b"hello")
    (hello,) = until(lambda _: has_wire(caller, listener), listener, caller)
    return hello.reply_to


def invite(listener, caller, address=""):
    """Up to where an invitation has come to a caller, and is not taken yet."""
    address = address or listener.address
    caller.send(address, b"hello")
    contacts: list = []
    while Contact.CONNECTED not in contacts:
        contacts += [one.contact for one in caller.wait(5.0) if isinstance(one, ContactChange)]
    until(lambda messages: messages and listener._near._offers, listener)
    assert caller._calls[address].socket.poll(5000)


def deaf(channel, monkeypatch):
    """From now on it hears nothing by ZeroMQ."""
    monkeypatch.setattr(channel, "_heard", lambda socket: list(channel._taken(socket)) and [])
    monkeypatch.setattr(channel, "_answers", lambda _, call: list(channel._taken(call.socket)) and [])


def invitation(listener, caller):
    """What a caller is told that has asked."""
    until(lambda _: caller.poll(0), listener)
    first, told = caller.recv_multipart()
    assert first == b"near"
    return told


def token(told):
    return told[-2 * near.TOKEN_BYTES : -near.TOKEN_BYTES]


def num_files():
    return len(os.listdir("/proc/self/fd"))


def num_files_after(listener, caller):
    """Files that are open once both have what ZeroMQ makes at the first call."""
    caller.send(listener.address, b"hello")
    heard(listener, 1, caller)
    caller.hang_up(listener.address)
    drive(listener, caller, seconds=0.5)
    return num_files()


def is_cut(connection):
    try:
        while connection.recv(1 << 20):
            pass
    except ConnectionResetError:
        pass
    return True


def is_idle(*channels):
    """Whether nothing wakes them all the time."""
    drive(*channels, seconds=0.1)
    for channel in channels:
        started = time.monotonic()
        channel.wait(0.2)
        if time.monotonic() - started < 0.15:
            return False
    return True


@contextlib.contextmanager
def no_more_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- what goes by it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [None, SESAME])
def test_messages_go_by_the_wire_both_ways_in_full_and_in_order(opened, monkeypatch, secret):
    listener, caller = opened(listen=LISTEN, secret=secret), opened(secret=secret)
    reply_to = meet(listener, caller)
    deaf(listener, monkeypatch)
    deaf(caller, monkeypatch)
    said = [bytes([i % 251]) * (1 + 37 * i) for i in range(100)]
    for data in said:
        caller.send(listener.address, data)
    assert [(one.reply_to, one.data) for one in heard(listener, 100)] == [(reply_to, data) for data in said]
    for data in said:
        listener.send(reply_to, data)
    answers = [(one.reply_to, one.data) for one in heard(caller, 100)]
    assert answers == [(listener.address, data) for data in said]
    assert not listener.dropped
    assert not caller.dropped


def test_a_caller_has_one_name_whichever_way_it_speaks(opened):
    listener, caller, other = opened(listen=LISTEN), opened(), opened()
    names = [meet(listener, caller), meet(listener, other)]
    for one in (caller, other):
        one.send(listener.address, b"by the wire")
        one._calls[listener.address].socket.send(b"by ZeroMQ")
    messages = {(one.reply_to, one.data) for one in heard(listener, 4)}
    assert messages == {(name, data) for name in names for data in (b"by the wire", b"by ZeroMQ")}


def test_what_is_too_long_for_a_wire_arrives_anyway(opened):
    listener, caller = opened(listen=LISTEN), opened()
    reply_to = meet(listener, caller)
    sizes = [2 * near.ROOM_BYTES - 100, 2 * near.ROOM_BYTES, 4 << 20, 0]
    for size in sizes:
        caller.send(listener.address, b"q" * size)
        assert [len(one.data) for one in heard(listener)] == [size]
        listener.send(reply_to, b"a" * size)
        assert [len(one.data) for one in heard(caller)] == [size]


def test_who_does_not_read_blocks_nobody_and_gets_it_all(opened):
    listener, caller = opened(listen=LISTEN), opened()
    reply_to = meet(listener, caller)
    started = time.monotonic()
    for i in range(500):
        caller.send(listener.address, b"q%d" % i + bytes(4000))
        listener.send(reply_to, b"a%d" % i + bytes(4000))
    assert time.monotonic() - started < 5
    for channel, letter in ((listener, b"q"), (caller, b"a")):
        messages = {one.data for one in heard(channel, 500)}
        assert messages == {letter + b"%d" % i + bytes(4000) for i in range(500)}


@pytest.mark.parametrize(("host", "other"), [("", HOST), (HOST, ""), ("", ""), (HOST, ELSEWHERE)])
def test_where_not_both_want_it_all_goes_by_zeromq(opened, host, other):
    listener, caller = opened(host, listen=LISTEN), opened(other)
    caller.send(listener.address, b"hello")
    (hello,) = heard(listener)
    assert drive(listener, caller) == []
    assert not caller._calls[listener.address].wire
    assert not listener._near or not listener._near._offers
    listener.send(hello.reply_to, b"welcome")
    assert [one.data for one in heard(caller)] == [b"welcome"]
    assert not caller.dropped
    assert not listener.dropped


def test_who_finds_no_place_goes_the_long_way_and_loses_nothing(opened, monkeypatch):
    monkeypatch.setattr(near, "MAX_WIRES", 1)
    listener, caller, late = opened(listen=LISTEN), opened(), opened()
    meet(listener, caller)
    messages = []
    for i in range(100):
        late.send(listener.address, b"%d" % i)
        messages += drive(late, listener, seconds=0.002)
    messages += drive(listener)
    assert sorted(int(one.data) for one in messages) == list(range(100))
    assert not late._calls[listener.address].wire
    assert len(listener._near._wires) == 1
    assert is_idle(listener, caller, late)


def test_nothing_is_told_by_a_wire_before_the_listener_has_taken_it(opened):
    listener, caller = opened(listen=LISTEN), opened()
    invite(listener, caller)
    listener._near._offers.clear()  # as if too many others had asked
    assert drive(caller) == []
    caller.send(listener.address, b"hello again")
    assert [one.data for one in heard(listener)] == [b"hello again"]
    drive(caller, listener)
    assert not caller._calls[listener.address].wire


# -- who gets it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [b""],
        [b"x"],
        [bytes(near.TOKEN_BYTES), b"let me in"],
        [b"x" * 10_000, b"let me in"],
    ],
)
def test_who_shows_no_token_of_an_offer_is_cut_off(opened, dealer, stranger, messages):
    listener = opened(listen=LISTEN)
    invitation(listener, dealer(listener, b"near", HOST.encode()))
    one = stranger(listener, *messages)
    assert drive(listener) == []
    assert is_cut(one)
    assert not listener._near._wires
    assert not listener._near._strangers
    assert is_idle(listener)


def test_a_token_is_good_for_one(opened, dealer, stranger):
    listener = opened(listen=LISTEN)
    told = invitation(listener, dealer(listener, b"near", HOST.encode()))
    first = stranger(listener, token(told), b"first")
    assert [one.data for one in heard(listener)] == [b"first"]
    assert first.recv(100) == told[-near.TOKEN_BYTES :]
    second = stranger(listener, token(told), b"second")
    assert drive(listener) == []
    assert is_cut(second)
    first.send(b"still here")
    assert [one.data for one in heard(listener)] == [b"still here"]


def test_a_token_is_good_for_a_while(opened, dealer, stranger, monkeypatch):
    monkeypatch.setattr(near, "OFFER_S", 0.05)
    listener = opened(listen=LISTEN)
    told = invitation(listener, dealer(listener, b"near", HOST.encode()))
    time.sleep(0.1)
    one = stranger(listener, token(told), b"late")
    assert drive(listener) == []
    assert is_cut(one)
    assert not listener._near._wires


def test_the_last_wire_of_a_caller_counts(opened, dealer, stranger):
    """It asks again after its connection broke; the listener may hear of the end of the old one later."""
    listener = opened(listen=LISTEN)
    caller = dealer(listener, b"hello")
    (hello,) = heard(listener)
    wires = []
    for _ in range(2):
        caller.send_multipart([b"near", HOST.encode()])
        told = invitation(listener, caller)
        wires.append(stranger(listener, token(told)))
        until(lambda _: not listener._near._strangers and not listener._near._offers, listener)
        assert wires[-1].recv(100) == told[-near.TOKEN_BYTES :]
    assert is_cut(wires[0])
    assert len(listener._near._wires) == len(listener._near._callers) == 1
    listener.send(hello.reply_to, b"welcome")
    assert wires[1].recv(100) == b"welcome"


def test_one_caller_that_asks_all_the_time_takes_no_offer_from_others(opened, dealer, stranger):
    listener = opened(listen=LISTEN)
    told = invitation(listener, dealer(listener, b"near", HOST.encode()))
    greedy = dealer(listener)
    for _ in range(near.MAX_OFFERS + 10):
        greedy.send_multipart([b"near", HOST.encode()])
    drive(listener)
    assert len(listener._near._offers) == 2
    stranger(listener, token(told), b"here I am")
    assert [one.data for one in heard(listener)] == [b"here I am"]


def test_offers_have_a_bound(opened):
    listener = opened(listen=LISTEN)
    for i in range(near.MAX_OFFERS + 10):
        listener._near.offer(b"%d" % i)
    assert len(listener._near._offers) == near.MAX_OFFERS


def test_only_who_knows_the_secret_is_invited(opened, dealer):
    listener = opened(listen=LISTEN, secret=SESAME)
    others = [opened(), opened(secret=BARLEY)]
    for other in others:
        other.send(listener.address, b"hello")
    one = dealer(listener, b"near", HOST.encode())
    drive(listener, *others)
    assert not listener._near._offers
    assert not one.poll(0)
    meet(listener, opened(secret=SESAME))


@pytest.mark.parametrize("secret", [None, SESAME])
@pytest.mark.parametrize("says", [b"", b"x", bytes(near.TOKEN_BYTES)])
def test_who_sits_at_the_name_of_a_listener_hears_nothing_and_is_not_heard(opened, secret, says):
    """Anybody of this host can see the name, and bind it once the listener is gone."""
    listener, caller = opened(listen=LISTEN, secret=secret), opened(secret=secret)
    invite(listener, caller)
    listener._near._stop_listening()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.settimeout(5)
        squatter.bind(b"\0" + listener._near._name)
        squatter.listen()
        until(lambda _: caller._calls[listener.address].wire, caller)
        connection, _ = squatter.accept()
        with connection:
            assert len(connection.recv(1 << 20)) == near.TOKEN_BYTES
            caller.send(listener.address, b"for the listener alone")
            assert [one.data for one in heard(listener)] == [b"for the listener alone"]
            connection.send(says)
            connection.send(b"I am the listener")
            assert drive(caller) == []
            assert not caller._calls[listener.address].wire
            assert is_cut(connection)


# -- strangers, junk, floods ---------------------------------------------------------------------------


def test_strangers_that_say_nothing_keep_nobody_out_and_leave_nothing(opened, stranger):
    listener, caller = opened(listen=LISTEN), opened()
    before = num_files_after(listener, caller)
    strangers = []
    for _ in range(near.MAX_STRANGERS + 5):
        strangers.append(stranger(listener))
        drive(listener, seconds=0.002)
    drive(listener)
    assert len(listener._near._strangers) == near.MAX_STRANGERS
    assert is_idle(listener)
    meet(listener, caller)
    caller.hang_up(listener.address)
    for one in strangers:
        one.close()
    until(lambda _: not listener._near._strangers and not listener._near._wires, listener)
    assert is_idle(listener)
    until(lambda _: num_files() <= before, listener, caller)


def test_many_may_call_at_once(opened, stranger):
    listener = opened(listen=LISTEN)
    for _ in range(200):  # and nobody takes the calls yet
        with stranger(listener) as one:
            one.setblocking(False)
    drive(listener)
    assert is_idle(listener)
    assert not listener._near._strangers


def test_an_invitation_to_anywhere_else_is_not_taken(opened):
    """Names of other programs' sockets, and whatever is no invitation."""
    caller = opened()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.settimeout(0)
        other.bind(b"\0somebody else " + os.urandom(8).hex().encode())
        other.listen()
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        caller.send(address, b"hello")
        until(lambda _: router.poll(0), caller)
        whom = router.recv_multipart()[0]
        tokens = bytes(2 * near.TOKEN_BYTES)
        for junk in (
            [],
            [b""],
            [b"x" * 10],
            [tokens],
            [b"x" * 100_000],
            [other.getsockname()[1:] + tokens],
            [b"kvferry-near-" + b"g" * 32 + tokens],
            [b"kvferry-near-" + b"0" * 32 + b"\n" + tokens],
            [b"kvferry-near-" + b"0" * 32 + tokens],
            [b"kvferry-near-" + b"0" * 32 + tokens, b"more"],
        ):
            router.send_multipart([whom, b"near", *junk])
        router.send_multipart([whom, b"last"])
        assert [one.data for one in heard(caller, 2)] == [b"near", b"last"]
        with pytest.raises(BlockingIOError):
            other.accept()
    assert not caller._calls[address].wire
    assert caller.dropped == {"frames": 1}
    router.close(0)
    context.term()


def test_junk_in_place_of_a_question_does_no_harm(opened, dealer):
    listener = opened(listen=LISTEN)
    caller = dealer(listener)
    for junk in ([b"near", b""], [b"near", b"x" * 100_000], [b"near", b"", b""], [b"", b""], [b"far", b"x"]):
        caller.send_multipart(junk)
    caller.send(b"near")
    assert [one.data for one in heard(listener)] == [b"near"]
    assert drive(listener) == []
    assert not caller.poll(0)
    assert not listener._near._offers
    assert listener.dropped == {"frames": 3}


def test_a_flood_over_one_wire_leaves_others_their_turn(opened, monkeypatch):
    monkeypatch.setattr(near, "MAX_AT_ONCE", 50)
    listener, flooder, caller = opened(listen=LISTEN), opened(), opened()
    meet(listener, flooder)
    meet(listener, caller)
    drive(listener)
    for _ in range(200):
        assert flooder._calls[listener.address].wire.send(b"x")
    caller.send(listener.address, b"me, too")
    assert [one.data for one in listener.wait(1.0)] == [b"x"] * 50 + [b"me, too"]
    assert [one.data for one in heard(listener, 150)] == [b"x"] * 150


def test_a_message_that_is_too_long_for_the_channel_is_not_taken(opened, dealer, stranger):
    listener = opened(listen=LISTEN, max_bytes=1000)
    one = stranger(listener, token(invitation(listener, dealer(listener, b"near", HOST.encode()))))
    one.send(b"x" * 1000)
    assert [len(message.data) for message in heard(listener)] == [1000]
    one.send(b"x" * 1001)
    assert drive(listener) == [], "nor the beginning of it"
    assert is_cut(one)
    assert not listener._near._wires


def test_no_message_is_taken_in_part(opened, dealer, stranger):
    listener = opened(listen=LISTEN)
    one = stranger(listener, token(invitation(listener, dealer(listener, b"near", HOST.encode()))))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * near.ROOM_BYTES)
    try:
        one.send(b"x" * (2 * near.ROOM_BYTES + 1))
    except OSError:
        pytest.skip("the kernel allows nobody so much")
    assert drive(listener) == []
    assert is_cut(one)


def test_two_threads_mix_nothing_up(opened):
    """Each channel has its own room for what comes, and only its own thread uses it."""
    sides = [(opened(listen=LISTEN), opened()) for _ in range(2)]
    for listener, caller in sides:
        meet(listener, caller)
    wrong: list = []

    def talk(number, listener, caller):
        for i in range(200):
            data = bytes([2 * i % 256 | number]) * (100_000 + i)
            caller.send(listener.address, data)
            messages = heard(listener)
            if [one.data for one in messages] != [data]:
                wrong.append((number, i))
            listener.send(messages[0].reply_to, data[::-1])
            if [one.data for one in heard(caller)] != [data]:
                wrong.append((number, -i))

    threads = [threading.Thread(target=talk, args=(i, *side)) for i, side in enumerate(sides)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(has_wire(caller, listener) for listener, caller in sides)


# -- how it ends ---------------------------------------------------------------------------------------


def test_after_a_listener_has_gone_the_next_one_has_a_wire_too(opened):
    listener, caller = opened(listen=LISTEN), opened()
    meet(listener, caller)
    listener.close()
    contacts: list = []
    while Contact.BROKEN not in contacts:
        contacts += [one.contact for one in caller.wait(5.0) if isinstance(one, ContactChange)]
    assert not caller._calls[listener.address].wire
    again = opened(listen=listener.address)
    until(lambda _: has_wire(caller, again), caller, again)
    caller.send(again.address, b"hello again")
    (hello,) = heard(again)
    again.send(hello.reply_to, b"welcome again")
    assert [one.data for one in heard(caller)] == [b"welcome again"]
    assert is_idle(caller, again)


class Relay:
    """Stands between two, and can cut them off from each other; who calls again gets through again."""

    def __init__(self, address):
        self._server, self._to = socket.create_server(("127.0.0.1", 0)), int(address.rpartition(":")[2])
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.ends: list = []

    def connect(self):
        """Let the next caller through."""
        self.ends = [self._server.accept()[0], socket.create_connection(("127.0.0.1", self._to))]
        for ends in (self.ends, self.ends[::-1]):
            threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    @staticmethod
    def _pass_on(one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)

    def cut(self):
        """Nobody hears any more from the other."""
        for end in self.ends:
            end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self):
        self._server.close()
        self.cut()


def test_an_invitation_of_an_earlier_connection_does_not_last(opened):
    """Under the name that it was made for, a long answer finds nobody any more."""
    listener, caller = opened(listen=LISTEN), opened()
    with contextlib.closing(Relay(listener.address)) as relay:
        caller.send(relay.address, b"hello")
        relay.connect()
        invite(listener, caller, relay.address)
        relay.cut()
        relay.connect()
        time.sleep(0.3)  # it is connected again before it looks
        drive(caller, listener)
        caller.send(relay.address, b"hello again")
        hello = heard(listener)[-1]
        listener.send(hello.reply_to, bytes(1 << 20))
        assert [len(one.data) for one in heard(caller)] == [1 << 20]
        assert [name.hex() for name in listener._near._wires] == [hello.reply_to[1:]]


def test_a_wire_ends_with_its_connection(opened):
    listener, caller = opened(listen=LISTEN), opened()
    first = meet(listener, caller)
    call = caller._calls[listener.address].socket
    call.disconnect(listener.address)
    call.connect(listener.address)
    until(lambda _: not has_wire(caller, listener), caller)
    until(lambda _: has_wire(caller, listener), listener, caller)
    caller.send(listener.address, b"hello again")
    (hello,) = heard(listener)
    assert hello.reply_to != first
    assert [wire.hex() for wire in listener._near._wires] == [hello.reply_to[1:]]
    listener.send(first, b"too late")
    assert listener.dropped["unsent"]


def test_what_a_listener_says_last_is_heard(opened):
    listener, caller = opened(listen=LISTEN), opened()
    listener.send(meet(listener, caller), b"good-bye")
    listener.close()
    assert [one.data for one in heard(caller)] == [b"good-bye"]


@pytest.mark.parametrize("way", ["hang_up", "close"])
def test_nothing_is_left_of_a_caller_that_goes(opened, way):
    listener = opened(listen=LISTEN)
    drive(listener)
    before, was_polled = num_files(), len(listener._poller.sockets)
    caller = opened()
    for _ in range(3):
        meet(listener, caller)
        caller.send(listener.address, b"good-bye")
        caller.hang_up(listener.address)
        assert [one.data for one in heard(listener)] == [b"good-bye"]
    assert len(caller._poller.sockets) == 1
    if way == "close":
        meet(listener, caller)
    caller.close()
    until(lambda _: not listener._near._wires, listener)
    assert not listener._near._callers
    assert not listener._near._strangers
    until(lambda _: num_files() <= before, listener)
    assert len(listener._poller.sockets) == was_polled
    assert is_idle(listener)


CALL = """
import sys, time
from kvferry.channel import Channel
caller = Channel(host=sys.argv[2])
caller.send(sys.argv[1], b"hello")
while True:
    caller.wait(1.0)
"""


def test_a_caller_of_another_process_has_a_wire_until_it_is_killed(opened):
    listener = opened(listen=LISTEN)
    with subprocess.Popen([sys.executable, "-c", CALL, listener.address, HOST]) as process:
        try:
            until(lambda _: listener._near._wires, listener, seconds=30)
        finally:
            process.kill()
    until(lambda _: not listener._near._wires, listener)
    assert is_idle(listener)


def test_nothing_is_left_of_a_listener_that_is_closed(opened, stranger):
    caller = opened()
    before = num_files_after(opened(listen=LISTEN), caller)
    listener = opened(listen=LISTEN)
    meet(listener, caller)
    with stranger(listener):
        drive(listener)
        listener.close()
    caller.hang_up(listener.address)
    until(lambda _: num_files() <= before, caller)


def test_a_copy_in_a_forked_process_keeps_no_wire_alive(opened):
    listener, caller = opened(listen=LISTEN), opened()
    meet(listener, caller)
    copy = os.dup(caller._calls[listener.address].wire.fileno())
    try:
        caller.hang_up(listener.address)
        until(lambda _: not listener._near._wires, listener)
    finally:
        os.close(copy)


# -- where there are no more files ---------------------------------------------------------------------


def test_a_caller_without_files_goes_the_long_way(opened):
    listener, caller = opened(listen=LISTEN), opened()
    invite(listener, caller)
    with no_more_files():
        assert drive(caller) == []
        assert is_idle(caller)
        assert not caller._calls[listener.address].wire
        caller.send(listener.address, b"hello again")
        assert heard(listener)[-1].data == b"hello again"


def test_a_listener_without_files_hears_by_the_long_way(opened, stranger):
    listener, caller, late = opened(listen=LISTEN), opened(), opened()
    meet(listener, caller)
    late.send(listener.address, b"hello")
    assert len(heard(listener)) == 1
    one = stranger(listener)
    with no_more_files():
        assert is_idle(listener, caller)
        caller.send(listener.address, b"still by the wire")
        late.send(listener.address, b"by ZeroMQ")
        assert {one.data for one in heard(listener, 2)} == {b"still by the wire", b"by ZeroMQ"}
    assert is_cut(one)
    drive(listener, late)
    assert is_idle(listener, late, caller)
    assert not late._calls[listener.address].wire
