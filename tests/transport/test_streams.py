"""Both sides of a stream over real sockets; the questions and answers between them go by the test's hand."""

import contextlib
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.transport import copy_kernel, stream_reader, stream_sender
from kvferry.transport.base import CANCELLED
from kvferry.transport.cards import GatherPoint
from kvferry.transport.copy_kernel import CopyLimits, TableKernel
from kvferry.transport.pack import ChunkCopier, src_of
from kvferry.transport.packed import DeviceChunkCopier
from kvferry.transport.places import Places
from kvferry.transport.stream_frames import HEAD, HELLO, MAGIC, SEAL_BYTES, TAIL, StreamOffer
from kvferry.transport.stream_reader import StreamLink, StreamMover
from kvferry.transport.stream_sender import StreamSender, TicketKey
from kvferry.transport.transfers import Transfers
from tests.transport.fake_cuda import FakeCuda
from tests.transport.kernel_on_cpu import kernel_on_cpu

RANK = "tcp://127.0.0.1:5"
CHUNK_BYTES = 1 << 20
POOL_BYTES = 24 << 20
HELD = np.random.default_rng(1).integers(1, 255, POOL_BYTES, np.uint8)
PATIENCE_S = 60.0
TICKET = TicketKey(1, 7)


def soon(look):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    return found


def exactly(reader, num_bytes):
    """So many bytes: a socket with a timeout gives what is there."""
    data = b""
    while len(data) < num_bytes:
        data += reader.recv(num_bytes - len(data))
    return data


class Line:
    """Hands questions to the sender, as the rank would."""

    def __init__(self, sender):
        self.sender = sender
        self.answers: Any = None
        self.address = f"tcp://127.0.0.1:{sender.port}"
        self.asked = []

    def open_stream(self, to, nonce, permit, regions):
        self.sender.put(lambda: self.answers.stream_offered(to, nonce, self.sender.open(self.address)))

    def ask(self, to, nonce, permit, terms, stream_id):
        self.asked.append(nonce)
        sides = [src_of(term) for term in terms]
        refuse = lambda why: self.answers.not_gathered(to, nonce, why)  # noqa: E731
        self.sender.put(lambda: self.sender.send(stream_id, TICKET, nonce, sides, refuse))

    def listen(self, answers):
        self.answers = answers

    def hang_up(self, address):
        pass

    def close(self):
        pass


BY_HOST = partial(ChunkCopier, chunk_bytes=CHUNK_BYTES)


class World:
    def __init__(self, *, is_sealed=False, copier=BY_HOST):
        self.src = HELD.copy()
        self.dst = np.zeros(POOL_BYTES, np.uint8)
        self.src_places, self.dst_places = (
            Places(n, [Region("kv", POOL_BYTES, a.ctypes.data)])
            for n, a in (("s", self.src), ("d", self.dst))
        )
        self.copiers = copier(self.src_places), copier(self.dst_places)
        self.sender = StreamSender(self.copiers[0], "127.0.0.1", is_sealed=is_sealed)
        self.line = Line(self.sender)
        self.transfers = Transfers()
        self.transfers.wake = self.collect
        self.mover = StreamMover(self.transfers, self.copiers[1], self.line)
        self.line.listen(self.mover)
        self.link = StreamLink(self.mover, "src", GatherPoint(RANK, CHUNK_BYTES, b""), self.src_places)
        self.ends: dict[int, str] = {}

    def read(self, transfer, runs):
        self.transfers.begin(transfer, self.link.prepare(Product.of(runs), None))

    def collect(self):
        for end in self.transfers.collect():
            assert end.transfer not in self.ends
            self.ends[end.transfer] = end.error

    def wait(self, transfer):
        return soon(lambda: transfer in self.ends and (self.ends[transfer] or "good"))

    def has_all(self, runs):
        return all((self.dst[d : d + n] == self.src[s : s + n]).all() for _, s, _, d, n in runs)

    def raw_reader(self):
        """A reader that the test drives: it named its stream, and was let in."""
        offers: list[Any] = []
        self.sender.put(lambda: offers.append(self.sender.open(self.line.address)))
        (offer,) = soon(lambda: offers)
        reader = socket.create_connection(("127.0.0.1", self.sender.port), timeout=PATIENCE_S)
        reader.sendall(HELLO.pack(MAGIC, offer.stream_id))
        assert exactly(reader, HEAD.size) == HEAD.pack(0, 0)
        exactly(reader, TAIL.size)
        return offer, reader

    def send(self, offer, nonce, runs, refuse=lambda why: None):
        sides = [src_of(term) for term in Product.of(runs).terms]
        self.sender.put(lambda: self.sender.send(offer.stream_id, TICKET, nonce, sides, refuse))

    def close(self):
        self.transfers.close()
        assert self.mover.close(PATIENCE_S)
        self.sender.close()
        for copier in self.copiers:
            copier.close()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return kernel_on_cpu(copy_kernel.source("copy"), tmp_path_factory.mktemp("kernel"))


@pytest.fixture
def cuda(kernel, monkeypatch):
    """A device whose memory is the host's, and which checks that all that it was lent comes back."""
    monkeypatch.setattr(copy_kernel, "compiled_kernel", lambda *_: b"")
    cuda = FakeCuda(1e-4, kernel)
    yield cuda
    assert not cuda.memory, "pinned memory is given back"
    assert (cuda.num_streams, cuda.num_events, cuda.faults) == (0, 0, [])


@pytest.fixture(params=["bare", "sealed", "device", "sealed device"])
def world(request, cuda):

    def by_device(places):
        return DeviceChunkCopier(cuda, TableKernel(cuda, CopyLimits()), places, CHUNK_BYTES)

    copier = by_device if "device" in request.param else BY_HOST
    world = World(is_sealed="sealed" in request.param, copier=copier)
    yield world
    world.close()


@pytest.fixture
def bare():
    world = World()
    yield world
    world.close()


def some(num_runs, run_bytes, step=None, seed=1):
    rng, step = np.random.default_rng(seed), step or 2 * run_bytes
    src, dst = (rng.permutation(POOL_BYTES // step)[:num_runs] * step for _ in range(2))
    return Runs(src, dst, np.full(num_runs, run_bytes))


def mixed(num_runs, longest, seed=1):
    runs = some(num_runs, longest, 2 * longest, seed)
    return Runs(runs.src, runs.dst, np.random.default_rng(seed).integers(1, longest, num_runs))


@pytest.mark.parametrize(
    "runs",
    [some(5000, 512), some(500, 16 << 10), some(3, 5 << 20, 5 << 20), mixed(3000, 4096), mixed(50, 200_000)],
    ids=["short", "long", "longer than a frame", "mixed short", "mixed long"],
)
def test_bytes_arrive_exactly_where_they_should(world, runs):
    world.read(1, runs)
    assert world.wait(1) == "good"
    assert world.has_all(runs)
    assert np.count_nonzero(world.dst) == runs.total_bytes


def test_a_source_that_sends_little_at_a_time_is_no_silent_one(bare, monkeypatch):
    """The kernel wakes nobody for so few bytes."""
    monkeypatch.setattr(stream_reader, "ANSWER_S", 1.0)
    bare.line.ask = lambda to, nonce, *_: bare.line.asked.append(nonce)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bare.line.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        runs = some(1, 200 << 10)
        bare.read(1, runs)
        source, _ = listener.accept()
        with source:
            source.sendall(HEAD.pack(0, 0) + TAIL.pack(True))
            (nonce,) = soon(lambda: bare.line.asked)
            source.sendall(HEAD.pack(nonce, 200 << 10))
            for _ in range(25):
                source.sendall(bytes(8 << 10))
                time.sleep(0.1)
            source.sendall(TAIL.pack(True))
            assert bare.wait(1) == "good"


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_read_after_a_pause_or_over_a_stream_that_was_lost(monkeypatch, is_lost):
    """Nothing was asked for so far, so nothing is late."""
    monkeypatch.setattr(stream_reader, "ANSWER_S", 0.5)
    world = World()
    world.read(1, some(3, 512))
    assert world.wait(1) == "good"
    if is_lost:

        def lose_all() -> None:
            for stream in [*world.sender._streams.values()]:
                world.sender._drop(stream)

        world.sender.put(lose_all)
        soon(lambda: world.link.stream is None)
    else:
        time.sleep(0.7)
    runs = some(3, 512, seed=2)
    world.read(2, runs)
    assert world.wait(2) == "good"
    assert world.has_all(runs)
    world.close()


def test_no_runs_end_too_and_what_leaves_a_region_is_refused(bare):
    bare.read(1, some(0, 512))
    assert bare.wait(1) == "good"
    with pytest.raises(TransportError, match="out-of-bounds"):
        bare.read(2, Runs(np.array([POOL_BYTES - 1]), np.array([0]), np.array([2])))


def test_a_reader_that_dies_or_receives_nothing_delays_nobody(bare):
    much = some(20, 1 << 20, 1 << 20)
    (stuck, idle), (dead, reader) = bare.raw_reader(), bare.raw_reader()
    for nonce in range(1, 21):
        one = Runs(*(column[nonce - 1 : nonce] for column in (much.src, much.dst, much.num_bytes)))
        bare.send(stuck, nonce, one)
        bare.send(dead, nonce, one)
    reader.close()
    runs = some(5000, 512)
    bare.read(1, runs)
    assert bare.wait(1) == "good"
    assert bare.has_all(runs)
    assert soon(lambda: len(bare.sender._streams) == 2)  # the dead one's is gone
    idle.close()


@pytest.mark.parametrize("run_bytes", [1 << 20, 512], ids=["straight from memory", "gathered"])
def test_a_ticket_is_revoked_at_once_though_its_reader_receives_nothing(bare, run_bytes):
    """Law 6: the engine may write to the blocks as soon as it hears so, and nothing of that is sent."""
    offer, reader = bare.raw_reader()
    refused: list[str] = []
    for nonce in range(1, 21):
        bare.send(offer, nonce, some(CHUNK_BYTES // run_bytes, run_bytes, seed=nonce), refused.append)
    soon(lambda: bare.sender._streams[offer.stream_id].is_full)
    held, revoked = bare.src.copy(), threading.Event()
    bare.sender.put(lambda: bare.sender.revoke(lambda ticket: ticket == TICKET))
    bare.sender.put(revoked.set)
    assert revoked.wait(PATIENCE_S)
    bare.src[:] = 0  # another request's
    frames = 0
    while len(refused) + frames < 20:
        nonce, num_bytes = HEAD.unpack(exactly(reader, HEAD.size))
        data = exactly(reader, num_bytes)
        (is_good,) = TAIL.unpack(exactly(reader, TAIL.size))
        frames += 1
        runs = some(CHUNK_BYTES // run_bytes, run_bytes, seed=nonce)
        want = b"".join(held[at : at + run_bytes].tobytes() for at in runs.src.tolist())
        assert (data == want) == bool(is_good)
    assert {*refused} == {"its lease is over"}
    reader.close()


def test_a_read_of_a_revoked_ticket_fails(bare, monkeypatch):
    monkeypatch.setattr(stream_reader, "ENOUGH_AT_ONCE", 1)
    bare.read(1, some(20, 1 << 20, 1 << 20))
    soon(lambda: len(bare.line.asked) > 2)
    done = threading.Event()
    bare.sender.put(lambda: bare.sender.revoke(lambda ticket: ticket == TICKET))
    bare.sender.put(done.set)
    assert done.wait(PATIENCE_S)
    assert bare.wait(1) in (
        "good",
        "src rejected the read: its lease is over",
        "src stopped sending: its lease is over",
    )


def test_nothing_of_a_cancelled_read_is_written_after_its_end(bare):
    for transfer in range(8):
        bare.read(transfer, some(20, 1 << 20, 1 << 20, seed=transfer))
        time.sleep(2e-3 * transfer)
        bare.transfers.cancel(transfer)
        assert bare.wait(transfer) in ("good", CANCELLED)
        quiet = bare.dst.copy()
        time.sleep(5e-3)
        assert (bare.dst == quiet).all()
        bare.dst[:] = 0
    runs = some(10, 1 << 20)
    bare.read(99, runs)
    assert bare.wait(99) == "good"
    assert bare.has_all(runs)


@pytest.mark.parametrize("run_bytes", [64 << 10, 512], ids=["straight to memory", "scattered"])
def test_the_rest_of_a_frame_that_was_cancelled_harms_nobody(bare, run_bytes):
    """Law 6: whoever is told of an end may use the blocks. The source, played by the test, sends on."""
    listener = socket.create_server(("127.0.0.1", 0))
    bare.line.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    bare.line.ask = lambda to, nonce, *_: bare.line.asked.append(nonce)
    cancelled, next_one = (some(4, run_bytes, seed=seed) for seed in (1, 2))
    num_bytes, good = cancelled.total_bytes, TAIL.pack(True)
    bare.read(1, cancelled)
    source, _ = listener.accept()
    source.sendall(HEAD.pack(0, 0) + good)
    (first,) = soon(lambda: bare.line.asked)
    source.sendall(HEAD.pack(first, num_bytes) + b"1" * (num_bytes // 2))
    soon(lambda: bare.link.stream.frames.nonce == first)
    bare.transfers.cancel(1)
    assert bare.wait(1) == CANCELLED
    bare.dst[:] = 0  # another request's by now
    source.sendall(b"1" * (num_bytes - num_bytes // 2) + good)
    bare.read(2, next_one)
    _, second = soon(lambda: len(bare.line.asked) == 2 and bare.line.asked)
    source.sendall(HEAD.pack(second, num_bytes) + b"2" * num_bytes + good)
    assert bare.wait(2) == "good"
    assert {*np.unique(bare.dst)} == {0, ord("2")}
    source.close()
    listener.close()


def test_a_lost_stream_fails_what_waits_and_the_next_read_opens_another(bare):
    bare.read(1, some(10, 512))
    assert bare.wait(1) == "good"
    bare.line.ask = lambda *_: None
    bare.read(2, some(10, 512))
    soon(lambda: bare.link.asks)
    bare.mover._loop.put(lambda: bare.link.stream.socket.shutdown(socket.SHUT_RDWR))
    assert bare.wait(2) == "the stream of src is lost: it was closed"
    del bare.line.ask
    runs = some(10, 512, seed=3)
    bare.read(3, runs)
    assert bare.wait(3) == "good"
    assert bare.has_all(runs)


def test_a_silent_source_fails_the_read_by_a_deadline(bare, monkeypatch):
    bare.read(1, some(1, 512))
    assert bare.wait(1) == "good"
    monkeypatch.setattr(stream_reader, "ANSWER_S", 0.2)
    bare.line.ask = lambda *_: None
    bare.read(2, some(10, 512))
    assert bare.wait(2) == "src sent nothing within 0.2 s"


def test_a_silent_source_fails_the_read_by_a_deadline_though_it_is_asked_for_more(bare, monkeypatch):
    bare.read(1, some(1, 512))
    assert bare.wait(1) == "good"
    monkeypatch.setattr(stream_reader, "ANSWER_S", 0.2)
    asked: list[int] = []
    bare.line.ask = lambda to, nonce, *_: asked.append(nonce)
    for transfer in range(2, stream_reader.MAX_ASKED):
        bare.read(transfer, some(1, 512))
        soon(lambda: len(asked) == transfer - 1 or 2 in bare.ends)  # noqa: B023
        if 2 in bare.ends:
            break
        time.sleep(0.05)
    assert bare.ends[2] == "src sent nothing within 0.2 s"


def test_a_question_that_was_lost_fails_its_read_alone_though_bytes_come_for_others(bare, monkeypatch):
    """A stream answers in the order of the questions: what comes after it is no sign of life for one."""
    bare.read(1, some(1, 512))
    assert bare.wait(1) == "good"
    monkeypatch.setattr(stream_reader, "ANSWER_S", 0.2)
    ask, bare.line.ask = bare.line.ask, lambda *_: None
    bare.read(2, some(1, 512))
    soon(lambda: bare.link.asks)
    bare.line.ask = ask
    for transfer in range(3, 40):
        bare.read(transfer, some(1, 512))
        assert bare.wait(transfer) == "good"
        if 2 in bare.ends:
            break
        time.sleep(0.05)
    assert bare.ends[2] == "src did not answer within 0.2 s"
    assert not bare.link.asks


@pytest.mark.parametrize("is_open", [False, True], ids=["being opened", "open"])
def test_a_source_that_takes_its_offer_back_leaves_no_connection(bare, is_open):
    """Each refusal once left a connection behind, and those that it was asked for without a deadline."""
    listener = socket.create_server(("127.0.0.1", 0))
    bare.line.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    asked: list[int] = []
    opened: list[int] = []
    offer = bare.line.open_stream

    def open_stream(to, nonce, *rest):
        opened.append(nonce)
        offer(to, nonce, *rest)

    bare.line.open_stream = open_stream
    bare.line.ask = lambda to, nonce, *_: asked.append(nonce)
    bare.read(1, some(1, 512))
    source, _ = listener.accept()
    source.settimeout(PATIENCE_S)
    assert len(exactly(source, HELLO.size)) == HELLO.size
    if is_open:
        source.sendall(HEAD.pack(0, 0) + TAIL.pack(True))
        soon(lambda: asked)
    bare.mover.not_gathered(RANK, 0 if is_open else opened[0], "ended: no")
    if is_open:  # no question has this number
        source.sendall(HEAD.pack(asked[0], 512) + bytes(512) + TAIL.pack(True))
        assert bare.wait(1) == "good"
        assert bare.link.stream is not None
    else:
        assert bare.wait(1) == "src rejected the stream: ended: no"
        assert source.recv(1) == b"", "it is hung up on"
    source.close()
    listener.close()


def test_a_source_that_offers_no_stream_fails_the_read_that_asked_for_it_alone(bare):
    """The next read may have a better permit."""
    offer = bare.line.open_stream
    bare.line.open_stream = lambda to, nonce, *_: bare.mover.not_gathered(to, nonce, "ended: it is over")
    bare.read(1, some(1, 512))
    assert bare.wait(1) == "src rejected the stream: ended: it is over"
    refusals = iter([True])

    def refuse_once(to, nonce, permit, regions):
        if next(refusals, False):
            bare.mover.not_gathered(to, nonce, "ended: it is over")
        else:
            offer(to, nonce, permit, regions)

    bare.line.open_stream = refuse_once
    for transfer in (2, 3):
        bare.read(transfer, some(1, 512, seed=transfer))
    assert [bare.wait(transfer) for transfer in (2, 3)] == [
        "src rejected the stream: ended: it is over",
        "good",
    ]


def test_a_source_that_answers_no_question_for_a_stream_fails_the_read_by_a_deadline(bare, monkeypatch):
    monkeypatch.setattr(stream_reader, "ANSWER_S", 0.2)
    bare.line.open_stream = lambda *_: None
    bare.read(1, some(1, 512))
    assert bare.wait(1) == "src sent nothing within 0.2 s"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", HELLO.pack(MAGIC, bytes(16)), bytes(999)])
def test_who_names_no_stream_is_cut_off(bare, said):
    with socket.create_connection(("127.0.0.1", bare.sender.port), timeout=PATIENCE_S) as stranger:
        stranger.sendall(said)
        if not said:
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    soon(lambda: not bare.sender._callers._callers)


def test_a_stream_has_one_reader(bare):
    offer, reader = bare.raw_reader()
    with socket.create_connection(("127.0.0.1", bare.sender.port), timeout=PATIENCE_S) as second:
        second.sendall(HELLO.pack(MAGIC, offer.stream_id))
        assert second.recv(1) == b""
    bare.send(offer, 5, some(1, 512))
    assert HEAD.unpack(exactly(reader, HEAD.size)) == (5, 512)
    reader.close()


class Between:
    """Somebody on the way, who changes one byte in a million."""

    def __init__(self, world):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.to, world.line.address = world.sender.port, f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        reader, _ = self.listener.accept()
        source = socket.create_connection(("127.0.0.1", self.to))
        source.sendall(reader.recv(HELLO.size, socket.MSG_WAITALL))
        reader.sendall(source.recv(HEAD.size + SEAL_BYTES + TAIL.size, socket.MSG_WAITALL))
        data = bytearray(source.recv(1000, socket.MSG_WAITALL))
        data[500] ^= 1
        reader.sendall(data)
        while more := source.recv(1 << 20):
            try:
                reader.sendall(more)
            except OSError:
                break
        source.close()
        reader.close()


@pytest.mark.parametrize("run_bytes", [512, 64 << 10])
def test_what_was_changed_on_its_way_does_not_count(run_bytes):
    world = World(is_sealed=True)
    between = Between(world)
    world.read(1, some(8, run_bytes))
    assert world.wait(1).endswith("bad-frame: it was modified in transit")
    between.listener.close()
    world.close()


def test_who_does_not_know_the_key_is_no_source():
    world = World(is_sealed=True)

    def offered(to, nonce, permit, regions):
        offer = lambda told: world.mover.stream_offered(  # noqa: E731
            to, nonce, StreamOffer(told.address, told.stream_id, b"k" * 16)
        )
        world.sender.put(lambda: offer(world.sender.open(world.line.address)))

    world.line.open_stream = offered  # type: ignore[method-assign]
    world.read(1, some(1, 512))
    assert world.wait(1).endswith("it was modified in transit")
    world.close()


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"key": b"short"}, "bad-key: a stream's key has 16 bytes, got 5"),
        ({"address": "tcp://127.0.0.1:70000"}, "tcp://127.0.0.1:70000 has no port"),
        ({"address": "tcp://127.0.0.9:5"}, "its host differs from that of the rank, tcp://127.0.0.1:5"),
        (
            {"address": "tcp://a.name.that.nobody.has:5"},
            "its host differs from that of the rank, tcp://127.0.0.1:5",
        ),
    ],
)
def test_an_offer_that_makes_no_sense_fails_its_read_at_once(caplog, lie, error):
    """A short key once kept the thread busy until the deadline, with a traceback in the log each time."""
    world = World(is_sealed=True)

    def offered(to, nonce, permit, regions):
        tell = lambda told: world.mover.stream_offered(to, nonce, replace(told, **lie))  # noqa: E731
        world.sender.put(lambda: tell(world.sender.open(world.line.address)))

    world.line.open_stream = offered  # type: ignore[method-assign]
    began = time.monotonic()
    world.read(1, some(1, 512))
    assert world.wait(1).endswith(error)
    assert time.monotonic() - began < stream_reader.ANSWER_S / 2
    assert caplog.records == []
    world.close()


def test_what_is_sealed_cannot_be_read_on_its_way():
    world = World(is_sealed=True)
    offers: list[Any] = []
    world.sender.put(lambda: offers.append(world.sender.open(world.line.address)))
    (offer,) = soon(lambda: offers)
    with socket.create_connection(("127.0.0.1", world.sender.port), timeout=PATIENCE_S) as reader:
        reader.sendall(HELLO.pack(MAGIC, offer.stream_id))
        exactly(reader, HEAD.size + SEAL_BYTES + TAIL.size)
        runs = some(1, 4096)
        world.send(offer, 5, runs)
        assert HEAD.unpack(exactly(reader, HEAD.size)) == (5, 4096)
        sealed = exactly(reader, 4096 + SEAL_BYTES)
        plain = world.src[int(runs.src[0]) :][:4096].tobytes()
        assert not any(plain[at : at + 8] in sealed for at in range(0, 4096, 8))
    world.close()


def test_the_oldest_idle_stream_loses_its_place_and_one_that_is_used_does_not(bare, monkeypatch):
    """Whoever holds all places without using them would keep every new reader out, for ever."""
    monkeypatch.setattr(stream_sender, "IDLE_S", 0.2)
    bare.sender._max_streams = 3
    held = [bare.raw_reader() for _ in range(3)]
    offers: list[Any] = []
    bare.sender.put(lambda: offers.append(bare.sender.open(bare.line.address)))
    soon(lambda: offers)
    assert offers == [None], "all of them were used just now"
    time.sleep(0.3)
    bare.send(held[0][0], 1, some(1, 512))
    exactly(held[0][1], HEAD.size + 512 + TAIL.size)
    runs = some(100, 512)
    bare.read(1, runs)
    assert bare.wait(1) == "good"
    assert held[0][0].stream_id in bare.sender._streams
    assert held[1][0].stream_id not in bare.sender._streams
    for _, reader in held:
        reader.close()


def test_what_waits_to_be_sent_is_bounded_by_its_bytes(bare, monkeypatch):
    monkeypatch.setattr(stream_sender, "MAX_QUEUED_BYTES", 100_000)
    offer, reader = bare.raw_reader()
    refused: list[str] = []
    for nonce in range(1, 200):
        bare.send(offer, nonce, some(1000, 512, seed=nonce), refused.append)
    soon(lambda: refused)
    assert {*refused} == {"the send queue is full"}
    assert len(bare.sender._streams[offer.stream_id].frames) < 20
    reader.close()


def test_a_source_that_sends_what_was_not_asked_for_is_left(bare):
    listener = socket.create_server(("127.0.0.1", 0))
    bare.line.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    callers: list[socket.socket] = []

    def ask(to, nonce, *_):
        callers[0].sendall(HEAD.pack(nonce, 9) + bytes(9) + TAIL.pack(True))

    bare.line.ask = ask
    bare.read(1, some(1, 512))
    source, _ = listener.accept()
    callers.append(source)
    source.sendall(HEAD.pack(0, 0) + TAIL.pack(True))
    assert bare.wait(1).endswith("bad-frame: a frame has 9 bytes, 512 requested")
    source.close()
    listener.close()


def test_closing_ends_what_waits(bare):
    bare.line.ask = lambda *_: None
    bare.read(1, some(1, 512))
    bare.transfers.close()
    assert bare.mover.close(PATIENCE_S)
    assert bare.wait(1) == "the transport was closed"
    with pytest.raises(TransportError, match="closed"):
        bare.read(2, some(1, 512))
