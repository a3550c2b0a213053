"""What a rank that gathers hears of its engine's starts and releases, in whatever order; and junk."""

import socket
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

from kvferry.channel import Received
from kvferry.core.manifest import Region
from kvferry.core.owned import BlockBytes
from kvferry.endpoint.edges import ControlChannel
from kvferry.endpoint.gather_service import GatherService
from kvferry.errors import SpecError, TransportError
from kvferry.runtime.ticket_guard import Admitted, GatherRefusal, Refusal, TicketGuard
from kvferry.testing.packed import OpenGuard
from kvferry.transport.chunk_copier import HostChunkCopier
from kvferry.transport.gather_line import GatherMemory
from kvferry.transport.places import Places
from kvferry.transport.staging_ring import LentChunks, StagingRing, StagingSize
from kvferry.transport.stream_frames import HELLO, MAGIC
from kvferry.wire.gather import Gather, GiveBack, decode_from_rank, encode_rank_message
from tests.runtime.test_ticket_guard import KEY, SRC, permit, ticket


class SilentChannel(ControlChannel):
    """Nobody calls, and nobody listens."""

    address = "tcp://127.0.0.1:1"
    refused: ClassVar = {}
    dropped: ClassVar = {}

    def start(self, name, receive, is_behind, turn=float):
        self.sent, self._turn = [], turn

    def wake(self):
        self._turn()

    def send(self, to, data):
        self.sent.append(decode_from_rank(data))

    def hang_up(self, address):
        pass

    def close(self):
        pass


def by(copier, ring):
    return GatherMemory(copier, ring, copier)


@pytest.fixture
def guard():
    return TicketGuard(KEY, BlockBytes(SRC, SRC.ranks[0]))


@pytest.fixture
def service(guard):
    ring = StagingRing(StagingSize(4, 4096))
    memory = by(HostChunkCopier(Places("ours", ()), 4096), ring)
    service = GatherService(memory, guard, SilentChannel(), time.monotonic)
    yield service
    service.close()
    ring.close()


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


class FailingOnce(HostChunkCopier):
    """Fails in a way that nobody thought of."""

    has_failed = False

    def gather(self, sides, chunk):
        if not self.has_failed:
            self.has_failed = True
            raise MemoryError("no room for a list")


def test_an_ask_that_fails_unexpectedly_is_answered_and_takes_no_other_with_it():
    memory, ring, channel = np.zeros(4096, np.uint8), StagingRing(StagingSize(1, 4096)), SilentChannel()
    copier = FailingOnce(Places("ours", [Region("kv", 4096, memory.ctypes.data)]), 4096)
    service = GatherService(by(copier, ring), OpenGuard(), channel, time.monotonic)
    zero, length = (np.array([n], "<i8").tobytes() for n in (0, 64))
    for nonce in (1, 2):
        ask = Gather(nonce, b"", ((zero, length, zero),), ring.ring_id)
        service._receive(Received("@00", encode_rank_message(ask)))
    for _ in range(3):
        channel.wake()
    assert [type(answer).__name__ for answer in channel.sent] == ["NotGathered", "Gathered"]
    assert "MemoryError" in channel.sent[0].detail
    assert service.status()["lent"] == 1
    service.close()
    ring.close()


def test_a_ring_of_an_earlier_start_is_not_gathered_into():
    """Its reader would look for the bytes in a ring that nobody fills any more."""
    memory, ring, channel = np.zeros(4096, np.uint8), StagingRing(StagingSize(1, 4096)), SilentChannel()
    copier = HostChunkCopier(Places("ours", [Region("kv", 4096, memory.ctypes.data)]), 4096)
    service = GatherService(by(copier, ring), OpenGuard(), channel, time.monotonic)
    zero, length = (np.array([n], "<i8").tobytes() for n in (0, 64))
    earlier = Gather(1, b"", ((zero, length, zero),), StagingRing(StagingSize(1, 4096)).ring_id)
    service._receive(Received("@00", encode_rank_message(earlier)))
    deadline = time.monotonic() + 60
    while not channel.sent and time.monotonic() < deadline:
        channel.wake()
        time.sleep(1e-3)
    (answer,) = channel.sent
    assert "there is no such stream or ring, or not any more" in answer.detail
    service.close()
    ring.close()


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


@pytest.mark.parametrize("who", [("@X", 1), ("@A", 999)], ids=["another reader", "another ask"])
def test_a_chunk_is_given_back_by_who_borrowed_it_alone(who):
    """A reader that is through in time does not ask whether its chunk stood: nobody else may free it."""
    memory = np.repeat(np.array([1, 2], np.uint8), 2048)
    ring, channel = StagingRing(StagingSize(1, 4096)), SilentChannel()
    copier = HostChunkCopier(Places("ours", [Region("kv", 4096, memory.ctypes.data)]), 4096)
    service = GatherService(by(copier, ring), OpenGuard(), channel, time.monotonic)

    def say(to, message):
        service._receive(Received(to, encode_rank_message(message)))
        for _ in range(3):
            channel.wake()

    def ask(to, nonce, place):
        at, length, zero = (np.array([number], "<i8").tobytes() for number in (place, 64, 0))
        say(to, Gather(nonce, b"", ((at, length, zero),), ring.ring_id))

    ask("@A", 1, 0)
    told = channel.sent[-1]
    to, nonce = who
    say(to, GiveBack(nonce, told.chunk, told.generation, is_asking=False))
    ask("@B", 1, 2048)
    assert ring._memory[:64] == b"\1" * 64, "it is still the first reader's"
    say("@A", GiveBack(1, told.chunk, told.generation, is_asking=True))
    assert channel.sent[-2].is_valid
    assert ring._memory[:64] == b"\2" * 64
    service.close()
    ring.close()


def test_a_late_release_of_an_earlier_start_frees_no_chunk_of_this_one():
    """Each start counts its tickets anew."""
    chunks = LentChunks(1, 1.0)
    assert chunks.take((8, 1), "reader", 0.0)
    chunks.take_all_from((7, 1))
    assert chunks.num_lent == 1
    chunks.take_all_from((8, 1))
    assert chunks.num_lent == 0


def test_a_stream_that_finds_no_memory_says_so(guard):
    memory = np.zeros(4096, np.uint8)

    class NoRoom(HostChunkCopier):
        def new_chunk(self):
            raise TransportError("cuda", "cuMemHostAlloc: OUT_OF_MEMORY")

    copier = NoRoom(Places("ours", [Region("kv", 4096, memory.ctypes.data)]), 4096)
    ring, channel = StagingRing(StagingSize(1, 4096)), SilentChannel()
    service = GatherService(by(copier, ring), OpenGuard(), channel, time.monotonic)
    offers: list = []
    service._streams.open("tcp://127.0.0.1:1", offers.append)
    deadline = time.monotonic() + 60
    while not offers and time.monotonic() < deadline:
        time.sleep(1e-3)
    with socket.create_connection(("127.0.0.1", service._streams.port)) as reader:
        reader.sendall(HELLO.pack(MAGIC, offers[0].stream_id))
        zero, length = (np.array([number], "<i8").tobytes() for number in (0, 64))
        ask = Gather(1, b"", ((zero, length, zero),), offers[0].stream_id)
        service._receive(Received("@A", encode_rank_message(ask)))
        while not channel.sent and time.monotonic() < deadline:
            channel.wake()
            time.sleep(1e-3)
    assert (channel.sent[0].code, service.status()["refused"]) == ("cannot", {"cannot": 1})
    assert "OUT_OF_MEMORY" in channel.sent[0].detail
    service.close()
    ring.close()


class BrokenDevice(HostChunkCopier):
    """A device that copies nothing any more."""

    def views(self, sides):
        return []

    def gather(self, sides, chunk):
        raise TransportError("cuda", "the device is lost")


def test_a_rank_whose_device_fails_says_so_and_keeps_its_chunks():
    memory, ring, channel = np.zeros(4096, np.uint8), StagingRing(StagingSize(4, 4096)), SilentChannel()
    region = Region("kv", 4096, memory.ctypes.data, "cuda:0")
    copier = BrokenDevice(Places("ours", [region]), 4096)
    service = GatherService(by(copier, ring), OpenGuard(), channel, time.monotonic)
    zero, length = (np.array([n], "<i8").tobytes() for n in (0, 64))
    ask = Gather(1, b"", ((zero, length, zero),), ring.ring_id)
    service._receive(Received("@00", encode_rank_message(ask)))
    released = []
    service.revoke(7, 1, lambda: released.append(1))
    channel.wake()
    (answer,) = channel.sent
    assert answer.code == "cannot"
    assert "the device is lost" in answer.detail
    assert service.status()["lent"] == 0
    service.close()
    assert released == [1]
    ring.close()
