"""What a rank that gathers hears of its engine's starts and releases, in whatever order; and junk."""

import socket
import threading
import time

import numpy as np
import pytest

from kvferry.channel import Received
from kvferry.cli.processes import OpenGuard
from kvferry.core.manifest import Region
from kvferry.core.owned import BlockBytes
from kvferry.endpoint.edges import ChannelThread
from kvferry.endpoint.gathering import GatherService
from kvferry.errors import SpecError, TransportError
from kvferry.runtime.ticket_guard import Admitted, GatherRefusal, Refusal, TicketGuard
from kvferry.transport.pack import ChunkCopier
from kvferry.transport.places import Places
from kvferry.transport.stream_frames import HEAD, HELLO, MAGIC, TAIL
from kvferry.wire.rank_asks import Gather, OpenStream, decode_from_rank, encode_rank_message
from tests.runtime.test_ticket_guard import KEY, SRC, permit, ticket


class SilentChannel(ChannelThread):
    """Nobody calls, and nobody listens."""

    def __init__(self):
        self.address = "tcp://127.0.0.1:1"

    def start(self, name, receive, is_behind):
        self.sent, self.is_behind = [], is_behind

    def send(self, to, data):
        self.sent.append(decode_from_rank(data))

    def hang_up(self, address):
        pass

    def close(self):
        pass


@pytest.fixture
def guard():
    return TicketGuard(KEY, BlockBytes(SRC, SRC.ranks[0]))


@pytest.fixture
def service(guard):
    copier = ChunkCopier(Places("ours", ()), 4096)
    service = GatherService(copier, guard, SilentChannel())
    yield service
    service.close()


def test_a_release_that_is_heard_before_the_start_it_is_of_is_not_forgotten(service, guard):
    """The rank's owner hears of both in one batch of messages, and says so in this order."""
    released = []
    service.revoke(7, 1, lambda: released.append(1))
    service.begin(7)
    service.close()
    assert released == [1]
    refusal = guard.admit(permit(ticket(1)))
    assert isinstance(refusal, Refusal)
    assert refusal.code is GatherRefusal.ENDED
    assert isinstance(guard.admit(permit(ticket(2))), Admitted)


@pytest.mark.parametrize(
    "columns", [(b"123", bytes(8), bytes(8)), (b"", b"", b""), (bytes(24), bytes(16), bytes(8))]
)
def test_an_ask_that_makes_no_sense_is_refused_where_junk_is_counted(service, columns):
    """It once got a line of the log each time."""
    with pytest.raises(SpecError, match="gather: "):
        service._receive(Received("@00", encode_rank_message(Gather(1, b"", (columns,), bytes(16)))))


class Rank:
    """A service with a reader of one stream, both driven by the test."""

    def __init__(self, make_copier=ChunkCopier, guard=None, num_bytes=4096):
        self.memory = np.full(num_bytes, 1, np.uint8)
        region = Region("kv", num_bytes, self.memory.ctypes.data)
        self.channel = SilentChannel()
        copier = make_copier(Places("ours", [region]), num_bytes)
        self.service = GatherService(copier, guard or OpenGuard(), self.channel)
        self.known = ((region.address, region.num_bytes),)

    def hear(self, message, to="@A"):
        self.service._receive(Received(to, encode_rank_message(message)))

    def answer(self):
        """The next one that the rank sends."""
        deadline = time.monotonic() + 60
        while not self.channel.sent:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        return self.channel.sent.pop(0)

    def open_stream(self, permit=b""):
        self.hear(OpenStream(1, permit, self.known))
        offer = self.answer()
        reader = socket.create_connection(("127.0.0.1", self.service._streams.port), timeout=60)
        reader.sendall(HELLO.pack(MAGIC, offer.stream_id))
        take(reader, HEAD.size + TAIL.size)
        return offer.stream_id, reader

    def ask(self, stream_id, nonce, place=0, num_bytes=64, permit=b""):
        at, length, zero = (np.array([n], "<i8").tobytes() for n in (place, num_bytes, 0))
        self.hear(Gather(nonce, permit, ((at, length, zero),), stream_id))


def take(reader, num_bytes):
    data = b""
    while len(data) < num_bytes:
        data += reader.recv(num_bytes - len(data))
    return data


def test_messages_wait_in_the_channel_while_many_bytes_of_them_wait_for_the_thread():
    """It may be at a long copy, and asks are kept decoded."""
    rank, busy, done = Rank(), threading.Event(), threading.Event()
    rank.service._streams.put(lambda: (busy.wait(60), None)[1])
    many = bytes(1 << 20)
    ask = Gather(1, b"", ((many, many, bytes(8)),), bytes(16))
    rank.hear(ask)
    assert not rank.channel.is_behind()
    rank.hear(ask)
    rank.hear(ask)
    assert rank.channel.is_behind()
    rank.service.when_revoked(done.set)
    busy.set()
    assert done.wait(60)
    assert not rank.channel.is_behind()
    rank.service.close()


class FailingOnce(ChunkCopier):
    """Fails in a way that nobody thought of."""

    has_failed = False

    def views(self, sides):
        return []

    def gather(self, sides, chunk):
        if not self.has_failed:
            self.has_failed = True
            raise MemoryError("no room for a list")
        super().gather(sides, chunk)


def test_an_ask_that_fails_unexpectedly_is_answered_and_takes_no_other_with_it():
    rank = Rank(FailingOnce)
    stream_id, reader = rank.open_stream()
    for nonce in (1, 2):
        rank.ask(stream_id, nonce)
    answer = rank.answer()
    assert (answer.nonce, "MemoryError" in answer.detail) == (1, True)
    assert HEAD.unpack(take(reader, HEAD.size)) == (2, 64)
    reader.close()
    rank.service.close()


def test_a_stream_that_is_not_there_is_named_as_that():
    rank = Rank()
    rank.ask(bytes(16), 1)
    assert "the stream is unknown or closed" in rank.answer().detail
    rank.service.close()


def test_who_has_no_permit_gets_no_stream(guard):
    """It once could take all of them, and no reader got one."""
    rank = Rank(guard=guard)
    for permit_shown in (b"", permit(ticket(1))[:-1] + b"?"):
        rank.hear(OpenStream(1, permit_shown, rank.known))
        assert rank.answer().code == "not-granted"
    rank.hear(OpenStream(1, permit(ticket(1)), rank.known))
    assert rank.answer().stream_id
    rank.service.close()


def test_what_waits_for_an_earlier_start_of_the_engine_is_not_sent():
    """Its blocks may be another request's by now: the new start has never heard of that ticket.

    The reader takes nothing at first, so that the second frame waits behind the first.
    """

    class OfStart(OpenGuard):
        def admit(self, permit):
            return Admitted(int(permit), self._everything.owned, generation=7)

    rank = Rank(guard=OfStart(), num_bytes=4 << 20)
    rank.service.begin(7)
    stream_id, reader = rank.open_stream(b"1")
    for nonce in range(1, 9):
        rank.ask(stream_id, nonce, 0, 4 << 20, permit=b"%d" % nonce)
    deadline = time.monotonic() + 60
    while not rank.service._streams._streams[stream_id].is_full:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    rank.service.begin(8)
    quiet = threading.Event()
    rank.service.when_revoked(quiet.set)
    assert quiet.wait(60)
    rank.memory[:] = 2  # another request's, of the new start
    is_good = True
    while is_good:
        _, num_bytes = HEAD.unpack(take(reader, HEAD.size))
        data = take(reader, num_bytes)
        (is_good,) = TAIL.unpack(take(reader, TAIL.size))
        assert 2 not in data
    assert rank.answer().detail == "its lease is over"
    reader.close()
    rank.service.close()


def test_what_was_revoked_before_is_quiet_when_somebody_asks_for_that(service):
    """Streams have a thread of their own, which may be busy."""
    said: list[str] = []
    busy = threading.Event()
    service._streams.put(lambda: busy.wait(60))
    service.revoke(7, 1, lambda: said.append("revoked"))
    service.when_revoked(lambda: said.append("quiet"))
    assert said == []
    busy.set()
    service.close()
    assert said == ["revoked", "quiet"]


def test_a_stream_that_finds_no_memory_says_so():
    class NoRoom(ChunkCopier):
        def new_chunk(self):
            raise TransportError("cuda", "cuMemHostAlloc: OUT_OF_MEMORY")

    rank = Rank(NoRoom)
    stream_id, reader = rank.open_stream()
    rank.ask(stream_id, 1)
    answer = rank.answer()
    assert (answer.code, rank.service.status()["refused"]) == ("cannot", {"cannot": 1})
    assert "OUT_OF_MEMORY" in answer.detail
    reader.close()
    rank.service.close()
