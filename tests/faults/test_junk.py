"""Junk on the control port: nothing dies, it is counted, and fetches go on."""

import random
import socket
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from kvferry.wire.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Hello,
    Join,
    RankDescription,
    ReleaseAck,
    Renew,
    encode,
)
from tests.support.fleet import until

TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + bytes(160)
NUM_EACH = 50


def port_of(source):
    return urlsplit(source.fleet.address).port


def throw_bytes(port, data):
    """Over a plain connection; whether and how the other side hangs up does not matter."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as thrown:
        try:
            thrown.sendall(data)
            thrown.settimeout(0.05)
            thrown.recv(1024)
        except OSError:
            pass


class Stranger:
    """Somebody who speaks ZeroMQ, but says what he likes."""

    def __init__(self, address, kind=zmq.DEALER):
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 5000)
        self._socket.setsockopt(zmq.SNDTIMEO, 5000)
        self._socket.connect(address)

    def say(self, *frames):
        self._socket.send_multipart(frames)

    def hear(self, seconds):
        return self._socket.recv() if self._socket.poll(seconds * 1000) else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()
        self._context.term()


def wrong_shapes():
    """Messages that are msgpack, and wrong."""
    yield from (b"", b"\xc0", b"\x01", b"\x80", b"\xc1", b"\x93\x01\x02\x03", b"\xdd\xff\xff\xff\xff")
    yield b"\x91" * 100_000
    for doc in (
        {"type": "Nonsense"},
        {"type": "Hello"},
        {"type": "Hello", "protocol": "one", "reader": "x"},
        {"type": "Hello", "protocol": PROTOCOL, "reader": "x", "more": 1},
        {"type": "Acquire", "nonce": 1, "ticket": {}},
        {"type": "Renew", "nonce": 1, "generation": 2**63, "reader": "x", "reader_rank": 0, "tickets": "all"},
        {"type": "Settle", "outcome": "splendid"},
        {"type": ["Hello"]},
        [1, 2, 3],
        "Hello",
    ):
        yield msgspec.msgpack.encode(doc)
    chance = random.Random(1)
    good = encode(Hello(PROTOCOL, "reader"))
    for at in range(len(good)):
        yield good[:at]
        yield good[:at] + bytes([chance.randrange(256)]) + good[at + 1 :] + b"!"


def test_bytes_that_are_not_zeromq(harbour, source, one):
    harbour.serves(source, one)
    chance = random.Random(2)
    with harbour.level(source, one):
        for _ in range(NUM_EACH):
            throw_bytes(port_of(source), chance.randbytes(chance.randrange(1, 5000)))
        for data in (TLS_HELLO, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", b"\xff" + bytes(63)):
            throw_bytes(port_of(source), data)
        harbour.serves(source, one)


def test_messages_of_the_wrong_shape_are_counted(harbour, source, one):
    harbour.serves(source, one)
    chance = random.Random(3)
    shapes = [*wrong_shapes(), *(chance.randbytes(chance.randrange(1, 2000)) for _ in range(NUM_EACH))]
    before = source.status()
    with harbour.level(source, one):
        with Stranger(source.fleet.address) as stranger:
            for shape in shapes:
                stranger.say(shape)
            for _ in range(NUM_EACH):
                stranger.say(*(chance.randbytes(20) for _ in range(chance.randrange(2, 6))))

            def counted(kind, what):
                return source.status()[kind].get(what, 0) - before[kind].get(what, 0)

            # A shape that happens to be right is answered; a handful of the random ones may be.
            until(lambda: counted("refused", "SpecError") > len(shapes) - 10, "junk was counted")
            until(lambda: counted("dropped", "frames") == NUM_EACH, "frames were counted")
            assert "unexpected" not in source.status()["refused"]
        harbour.serves(source, one)


def test_a_message_that_is_too_long(harbour, source, one):
    harbour.serves(source, one)
    with harbour.level(source, one):
        with Stranger(source.fleet.address) as stranger:
            stranger.say(bytes(MAX_MESSAGE_BYTES + 1))
            harbour.serves(source, one)
        harbour.serves(source, one)


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.PUSH, zmq.PUB, zmq.SUB, zmq.ROUTER, zmq.PAIR])
def test_sockets_of_another_kind(harbour, source, one, kind):
    harbour.serves(source, one)
    with harbour.level(source, one):
        with Stranger(source.fleet.address, kind) as stranger:
            if kind in (zmq.REQ, zmq.PUB):
                stranger.say(b"hello")
            harbour.serves(source, one)
        harbour.serves(source, one)


def test_strangers_cannot_join_renew_or_hear(harbour, source, one):
    harbour.serves(source, one)
    before = source.status()
    ticket = harbour.offer(source, is_filled=True)
    source.fleet.ranks[0].stop()
    load = one.fetch(ticket)
    harbour.in_flight(one, 1)
    with Stranger(source.fleet.address) as stranger:
        for rank in (0, 2, 7, -1, 2**40):  # the first is taken, the others do not exist
            stranger.say(
                encode(
                    Join(PROTOCOL, "prefill", rank, "nixl", b"manifest", RankDescription(b"", (), b"card"))
                )
            )
            answer = stranger.hear(5)
            assert answer is not None
            assert b"Rejected" in answer
        stranger.say(encode(Join(PROTOCOL, "another engine", 0, "nixl", b"", RankDescription(b"", (), b""))))
        assert b"Rejected" in (stranger.hear(5) or b"")
        stranger.say(encode(Renew(1, before["generation"], "stranger", 0, ((ticket.ticket_id, b""),))))
        renewal = msgspec.msgpack.decode(stranger.hear(5) or b"")
        assert (renewal["kept"], renewal["ended"]) == ([], [ticket.ticket_id])
        for rank in (0, 5, -3):
            stranger.say(encode(ReleaseAck(before["generation"], rank, 2**50)))
        until(lambda: source.status()["being_read"] == 1, "the lease stands")
    source.fleet.ranks[0].resume()
    assert one.wait(load) == [""]
    assert one.num_wrong(load) == 0
    assert source.reason(ticket.request_id) == "read"
    harbour.serves(source, one)


@pytest.mark.slow
def test_without_the_secret_a_channel_gets_nowhere(harbour, one):
    source = harbour.source("vault", tp=1, secret=b"open sesame, now")
    friend = harbour.destination("friend", tp=1, secret=b"open sesame, now")
    stranger = harbour.destination("stranger", tp=1, secret=b"open barley, now")
    harbour.serves(source, friend)
    with harbour.level(source, friend):
        ticket = harbour.offer(source, is_filled=True)
        loads = [(account, account.fetch(ticket)) for account in (stranger, one)]
        with Stranger(source.fleet.address) as plain:
            plain.say(encode(Hello(PROTOCOL, "plain")))
            assert plain.hear(1) is None
        codes = [account.wait(load) for account, load in loads]
        assert codes[0] == ["forged"], "its seal is of another fleet: nobody is called"
        assert codes[1] in (["no-answer"], ["source-gone"]), "without a secret, the channel is closed"
        assert source.reason(ticket.request_id) == "expired"
        harbour.serves(source, friend)
