"""The reader's side of the packed way, with a rank that answers as the test wants."""

import threading
import time
from itertools import count

import numpy as np
import pytest

from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.core.way import Way
from kvferry.errors import TransportError
from kvferry.transport import packed
from kvferry.transport.base import CANCELLED, Connected
from kvferry.transport.chunk_copier import HostChunkCopier
from kvferry.transport.gather_line import GatheredChunk
from kvferry.transport.pack import pack, src_of
from kvferry.transport.packed import PackedMover
from kvferry.transport.places import Places
from kvferry.transport.staging import Staging
from kvferry.transport.staging_ring import StagingRing, StagingSize
from tests.transport.turning import Turning

RANK = "tcp://127.0.0.1:5"
SIZE = StagingSize(num_chunks=4, chunk_bytes=1024)


class Fabric:
    """Reads a ring into another; held back if the test wants."""

    def __init__(self, src, dst):
        self.src, self.dst, self.held = src, dst, None
        self.is_forgotten = False

    def read(self, transfer, product, report, after, permit=b""):
        ((_, src, _, dst, num_bytes),) = product.runs

        def end(error=""):
            to = np.frombuffer(self.dst._memory, np.uint8)
            to[dst : dst + num_bytes] = np.frombuffer(self.src._memory, np.uint8)[src : src + num_bytes]
            report(error)

        if self.held is None:
            end()
        else:
            self.held.append(end)

    def cancel(self, transfer):
        raise AssertionError("what the fabric was asked for is waited for")

    @property
    def connected(self):
        return Connected(Way.DIRECT)

    def forget(self):
        self.is_forgotten = True


class Rank:
    """A rank that gathers what it is asked for, as its behaviour says."""

    def __init__(self, memory):
        self.memory, self.ring = memory, StagingRing(SIZE)
        self.asked, self.given_back = [], []
        self.answer = self.gather
        self.is_valid = lambda: True
        self.lent_s = 0.0
        """0: readers always ask whether a chunk was untouched."""
        self.turning = Turning()
        self.wake = self.turning.wake

    def listen(self, answers, turn=None):
        self.answers = answers
        if turn:
            self.turning.start(turn)

    def ask(self, to, nonce, permit, terms, into):
        self.asked.append((nonce, permit))
        self.answer(nonce, terms)

    def gather(self, nonce, terms):
        chunk = nonce % SIZE.num_chunks
        pack(self.memory, [src_of(term) for term in terms], self.ring.address(chunk), SIZE.chunk_bytes)
        self.answers.gathered(RANK, nonce, GatheredChunk(self.ring.address(chunk), chunk, 1, self.lent_s))

    def give_back(self, to, nonce, chunk, generation, *, is_asking):
        self.given_back.append(nonce)
        if is_asking:
            self.answers.given_back(RANK, nonce, is_valid=self.is_valid())

    def open_stream(self, to, nonce, regions):
        raise AssertionError("its ring is read")

    def hang_up(self, address):
        pass

    def close(self):
        pass


class World:
    def __init__(self):
        self.src = np.random.default_rng(1).integers(1, 255, 64_000, np.uint8)
        self.dst = np.zeros(64_000, np.uint8)
        src, dst = (
            Places(n, [Region("kv", 64_000, a.ctypes.data)]) for n, a in (("s", self.src), ("d", self.dst))
        )
        self.rank, self.ring = Rank(src), StagingRing(SIZE)
        self.mover = PackedMover(HostChunkCopier(dst, SIZE.chunk_bytes), self.ring, self.rank, count(1))
        self.rank.listen(self.mover, self.mover.turn)
        self.fabric = Fabric(self.rank.ring, self.ring)
        staging = Staging(RANK, self.rank.ring.region.address, SIZE.num_bytes, SIZE.chunk_bytes)
        self.link = self.mover.link("src", staging, src, self.fabric, self.fabric.forget)
        self.ends, self.ended = {}, threading.Event()

    def read(self, transfer, num_runs=100, permit=b"permit"):
        at = np.arange(num_runs) * 320
        runs = Runs(at, np.flip(at), np.full(num_runs, 100))

        def report(error):
            assert transfer not in self.ends
            self.ends[transfer] = error
            self.ended.set()

        self.link.read(transfer, Product.of(runs), report, None, permit)
        return runs

    def wait(self, transfer):
        deadline = time.monotonic() + 20
        while transfer not in self.ends and time.monotonic() < deadline:
            time.sleep(1e-3)
        return self.ends[transfer]

    def settle(self):
        """Have the thread do all that was asked of it so far."""
        done = threading.Event()
        self.mover.put(done.set)
        assert done.wait(20)


@pytest.fixture
def world():
    world = World()
    yield world
    assert world.mover.close(20)
    world.rank.turning.close()
    assert sorted(world.mover._free) == [*range(SIZE.num_chunks)]  # the ring is whole again


def test_what_is_asked_for_arrives_chunk_by_chunk_under_its_permit(world):
    runs = world.read(1)
    assert world.wait(1) == ""
    for _, src, _, dst, num_bytes in runs:
        assert (world.dst[dst : dst + num_bytes] == world.src[src : src + num_bytes]).all()
    assert len(world.rank.asked) == len(world.rank.given_back) == 10
    assert {permit for _, permit in world.rank.asked} == {b"permit"}


def test_a_chunk_that_was_taken_away_is_asked_for_again(world):
    verdicts = iter([False, True, False])
    world.rank.is_valid = lambda: next(verdicts, True)
    runs = world.read(1)
    assert world.wait(1) == ""
    assert len(world.rank.asked) == 12
    for _, src, _, dst, num_bytes in runs:
        assert (world.dst[dst : dst + num_bytes] == world.src[src : src + num_bytes]).all()


def test_a_chunk_that_is_always_taken_away_fails_the_read(world):
    world.rank.is_valid = lambda: False
    world.read(1)
    assert "took a chunk away before it was read, 4 times" in world.wait(1)


def test_a_refusal_fails_the_read_and_says_why(world):
    world.rank.answer = lambda nonce, _: world.rank.answers.not_gathered(RANK, nonce, "ended: over")
    world.read(1)
    assert world.wait(1) == "src does not gather: ended: over"


def test_a_silent_rank_fails_the_read_by_a_deadline_and_delays_no_other(world, monkeypatch):
    monkeypatch.setattr(packed, "ANSWER_S", 0.2)
    monkeypatch.setattr(packed, "SURE_ASKED", 2)
    silent = Rank(world.rank.memory)
    staging = Staging(
        "tcp://127.0.0.1:6",
        *(getattr(world.link.staging, n) for n in ("ring_address", "ring_bytes", "chunk_bytes")),
    )
    ends: dict[int, str] = {}
    dead = world.mover.link("dead", staging, silent.memory, world.fabric)
    gather = world.rank.answer
    world.rank.answer = lambda nonce, terms: None
    runs = Runs(np.array([0]), np.array([0]), np.array([5000]))
    dead.read(9, Product.of(runs), lambda error: ends.setdefault(9, error), None)
    world.settle()
    world.rank.answer = gather
    world.read(1)
    assert world.wait(1) == ""
    assert 9 not in ends or "silent" in ends[9]
    deadline = time.monotonic() + 20
    while 9 not in ends and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert "dead did not answer within 0.2 s" in ends[9]


def test_between_two_hosts_a_reader_asks_however_quick_it_was(world):
    """Either clock may have stood still: only the source knows whether it took the chunk away."""
    world.rank.lent_s = 60.0
    verdicts = iter([False])
    world.rank.is_valid = lambda: next(verdicts, True)
    world.read(1)
    assert world.wait(1) == ""
    assert len(world.rank.asked) == 11


def test_a_cancelled_read_ends_at_once_and_what_comes_late_is_given_back(world):
    late = []
    world.rank.answer = lambda nonce, terms: late.append((nonce, terms))
    world.read(1)
    world.settle()
    world.link.cancel(1)
    assert world.wait(1) == CANCELLED
    quiet = world.dst.copy()
    for nonce, terms in late:
        world.rank.gather(nonce, terms)
    world.settle()
    assert sorted(world.rank.given_back) == [nonce for nonce, _ in late]
    assert (world.dst == quiet).all()


def test_a_cancelled_read_waits_for_what_the_fabric_was_asked_for(world):
    world.fabric.held = []
    world.read(1)
    world.settle()
    world.settle()
    assert len(world.fabric.held) == SIZE.num_chunks
    world.link.cancel(1)
    world.settle()
    assert world.ends == {}
    quiet = world.dst.copy()
    for end in world.fabric.held:
        end()
    assert world.wait(1) == CANCELLED
    assert (world.dst == quiet).all()


def test_a_failed_read_of_the_fabric_fails_the_read(world):
    world.fabric.held = []
    world.read(1)
    world.settle()
    world.settle()
    for end in world.fabric.held:
        end("cable cut")
    assert world.wait(1) == "cable cut"


@pytest.mark.parametrize("offset", [-1, SIZE.num_bytes - 999, 1 << 60])
def test_bytes_that_are_not_in_the_ring_are_not_read(world, offset):
    ring = world.rank.ring.region.address
    world.rank.answer = lambda nonce, _: world.rank.answers.gathered(
        RANK, nonce, GatheredChunk(ring + offset, 0, 1)
    )
    world.read(1)
    assert world.wait(1) == "src says that bytes are outside of its ring"


def test_answers_of_somebody_else_are_not_heard(world):
    world.rank.answer = lambda nonce, _: world.rank.answers.not_gathered("tcp://stranger", nonce, "no")
    world.read(1)
    world.settle()
    assert world.ends == {}
    world.rank.answers.lost("tcp://stranger")
    world.settle()
    assert world.ends == {}
    world.rank.answers.lost(RANK)
    assert "is lost" in world.wait(1)


def test_a_forgotten_rank_is_asked_for_nothing_more(world):
    world.rank.answer = lambda nonce, terms: None
    world.read(1)
    world.link.forget()
    assert world.wait(1) == "peer 'src' was forgotten"
    world.settle()
    assert world.fabric.is_forgotten
    world.read(2)
    assert world.wait(2) == "peer 'src' was forgotten"


def test_closing_ends_what_waits_and_takes_nothing_more(world):
    world.rank.answer = lambda nonce, terms: None
    world.read(1)
    assert world.mover.close(20)
    world.rank.turning.close()
    assert world.wait(1) == "the transport was closed"
    with pytest.raises(TransportError, match="closed"):
        world.read(2)


def test_scattering_is_prepared_while_the_rank_gathers(world, monkeypatch):
    asked, prepared = [], []
    scatterer = world.mover.copier.scatterer

    def prepare(sides):
        prepared.append(sides)
        return scatterer(sides)

    monkeypatch.setattr(world.mover.copier, "scatterer", prepare)
    world.rank.answer = lambda *ask: asked.append(ask)
    runs = world.read(1, num_runs=30)
    deadline = time.monotonic() + 20
    while (len(prepared) < 3 or len(asked) < 3) and time.monotonic() < deadline:
        time.sleep(1e-3)
    for ask in asked:
        world.rank.gather(*ask)
    assert world.wait(1) == ""
    for _, src, _, dst, num_bytes in runs:
        assert (world.dst[dst : dst + num_bytes] == world.src[src : src + num_bytes]).all()
    assert len(prepared) == len(asked) == 3


def test_scattering_that_cannot_be_prepared_fails_its_read(world, monkeypatch):
    def fail(sides):
        raise ValueError("no")

    monkeypatch.setattr(world.mover.copier, "scatterer", fail)
    world.rank.answer = lambda *ask: None
    world.read(1, num_runs=5)
    assert "no" in world.wait(1)
    world.settle()
    assert sorted(world.mover._free) == [0, 1, 2, 3]
    assert not world.dst.any()


def test_what_cannot_be_prepared_is_not_tried_again_while_the_fabric_writes(world, monkeypatch):
    """Its read has failed, and ends when the fabric is through: nothing else is to be done for it."""
    tried, world.fabric.held = [], []

    def fail(sides):
        tried.append(sides)
        raise ValueError("no")

    monkeypatch.setattr(world.mover.copier, "scatterer", fail)
    world.read(1, num_runs=5)
    deadline = time.monotonic() + 20
    while not tried and time.monotonic() < deadline:
        time.sleep(1e-3)
    world.settle()
    time.sleep(0.05)
    num_tried, has_ended = len(tried), 1 in world.ends
    for end in world.fabric.held:
        end()
    assert "no" in world.wait(1)
    assert (num_tried, has_ended) == (1, False)
    assert not world.dst.any()


def test_a_chunk_that_came_before_it_was_prepared_is_prepared_once(world, monkeypatch):
    """Also if it is asked for again, and while its rank is asked whether it was untouched."""
    prepared, verdicts = [], []
    scatterer = world.mover.copier.scatterer

    def prepare(sides):
        prepared.append(sides)
        return scatterer(sides)

    def give_back(to, nonce, chunk, generation, *, is_asking):
        assert is_asking
        verdicts.append(nonce)

    def answer(is_valid):
        deadline = time.monotonic() + 20
        while not verdicts and time.monotonic() < deadline:
            time.sleep(1e-3)
        time.sleep(0.02)  # there is time to prepare something
        world.rank.answers.given_back(RANK, verdicts.pop(), is_valid=is_valid)

    monkeypatch.setattr(world.mover.copier, "scatterer", prepare)
    monkeypatch.setattr(world.rank, "give_back", give_back)
    world.read(1, num_runs=5)
    answer(is_valid=False)
    answer(is_valid=True)
    assert world.wait(1) == ""
    assert len(prepared) == 1
