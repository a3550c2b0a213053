"""The copier's threads, lanes and tables over a device that is made of threads and host memory."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
import pytest

from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport import copy_kernel, exports, mapped
from kvferry.transport import copy_kernel as copy_queue
from kvferry.transport.base import CANCELLED
from kvferry.transport.cards import Card
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.exports import (
    PROBE_BYTES,
    DescriptorServer,
    Export,
    ExportedPiece,
    Extent,
    receive_descriptors,
)
from kvferry.transport.mapped import NUM_LANES, DeviceCopier, EventWait
from kvferry.transport.places import Places
from kvferry.transport.reads import Read
from kvferry.transport.transfers import Transfers
from tests.transport.fake_cuda import UUID, FakeCuda, FakeEvent

CELL, NUM_CELLS = 64, 512
PATIENCE_S = 5.0


class World:
    """A copier, its memory, and sources to read from."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.cuda = FakeCuda(delay_s)
        self.dst = np.full(CELL * NUM_CELLS, 0xFF, np.uint8)
        self.src = np.random.default_rng(1).integers(1, 255, CELL * NUM_CELLS, np.uint8)
        self._probe = np.arange(PROBE_BYTES, dtype=np.uint8)
        self.cuda.exported = {b"m" * 64: self.src, b"p" * 64: self._probe}
        self.regions = [Region("kv", self.src.nbytes, self.src.ctypes.data, "cuda:0")]
        places = Places("ours", [Region("kv", self.dst.nbytes, self.dst.ctypes.data, "cuda:0")])
        self.transfers = Transfers()
        self.copier = DeviceCopier(self.transfers, self.cuda, places, CopyLimits())  # type: ignore[arg-type]
        self.ends: list[tuple[int, str]] = []

    def card(self) -> Card:
        pieces = [ExportedPiece(m.nbytes, h.hex()) for h, m in self.cuda.exported.items()]
        extents = [Extent(i, 1, 0, m.ctypes.data) for i, m in enumerate(self.cuda.exported.values())]
        export = Export(UUID, tuple(pieces), tuple(extents), self._probe.tobytes().hex())
        return Card("agent", b"metadata", export=export.to_bytes())

    def connect(self) -> mapped.MappedLink:
        return self.copier.connect("src", self.card().export, self.regions)

    def collect(self) -> list[tuple[int, str]]:
        self.ends += [(end.transfer, end.error) for end in self.transfers.collect()]
        return sorted(self.ends)

    def wait(self, number: int) -> list[tuple[int, str]]:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.collect()) < number and time.monotonic() < deadline:
            time.sleep(1e-3)
        return self.collect()

    def close(self) -> bool:
        self.transfers.close()
        return self.copier.close(PATIENCE_S)

    def check_nothing_left(self) -> None:
        assert not self.cuda.faults
        assert not self.cuda.memory, "tables are left"
        assert not self.cuda.mapped, "a remote rank is still mapped"
        assert (self.cuda.num_streams, self.cuda.num_events) == (0, 0)


def cells(first: int, number: int = 1) -> Runs:
    at = np.arange(first, first + number) * CELL
    return Runs(at + place(0, 0), at + place(0, 0), np.full(number, CELL))


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_kernel, "compiled_kernel", lambda *_: b"")
    monkeypatch.setattr(exports, "visible_devices", lambda: frozenset({UUID}))


@pytest.fixture
def world() -> Iterator[World]:
    world = World(delay_s=1e-3)
    yield world
    assert world.close()
    world.check_nothing_left()


def read(world: World, link: mapped.MappedLink, transfer: int, runs: Runs, after: object = None) -> None:
    world.transfers.begin(transfer, link.prepare(Product.of(runs), after))


def test_a_copy_whose_event_cannot_be_looked_at_ends_only_when_the_device_says_so(world: World) -> None:
    link, event = world.connect(), FakeEvent()
    event.has_come = threading.Event()
    event.is_freed = True
    read(world, link, 1, cells(0), after=event)
    time.sleep(0.05)
    assert world.collect() == [], "the device still waits: the copy can write any time"
    event.has_come.set()
    assert [transfer for transfer, _ in world.wait(1)] == [1]
    assert (world.dst[:CELL] == world.src[:CELL]).all()


def test_a_copy_whose_end_cannot_be_marked_is_waited_for_all_the_same(world: World) -> None:
    link, event = world.connect(), FakeEvent()
    event.has_come = threading.Event()
    world.cuda.failing = {"record"}
    read(world, link, 1, cells(0), after=event)
    time.sleep(0.05)
    assert world.collect() == []
    event.has_come.set()
    assert [transfer for transfer, _ in world.wait(1)] == [1]


def test_a_report_that_raises_costs_no_lane(world: World) -> None:
    link = world.connect()

    def bad(error: str) -> None:
        raise RuntimeError("the caller's code")

    for i in range(NUM_LANES):
        world.transfers.submit(Read(link.prepare(Product.of(cells(i)), None), bad))
    read(world, link, 99, cells(9))
    assert world.wait(1) == [(99, "")]


def test_a_rank_whose_memory_cannot_be_closed_ends_its_copies_and_the_rest_is_closed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    link, event = world.connect(), FakeEvent()
    event.has_come = threading.Event()
    read(world, link, 1, cells(0), after=event)
    world.transfers.forget(link.queues)
    assert len(world.cuda.mapped) == 2, "a copy still reads it"
    world.cuda.failing = {"close_opened"}
    event.has_come.set()
    assert world.wait(1) == [(1, "")]
    assert not world.cuda.mapped, "one that fails must not keep the others"
    assert "could not be unmapped" in caplog.text


def test_what_is_connected_while_the_copier_closes_is_not_left_mapped(world: World) -> None:
    card = world.card()
    assert world.close()
    with pytest.raises(TransportError, match="closed"):
        world.copier.connect("src", card.export, world.regions)
    assert not world.cuda.mapped


def test_a_table_that_cannot_grow_fails_its_copy_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_queue, "TABLE_BYTES", 1 << 10)
    small = World()
    link = small.connect()
    small.cuda.failing = {"allocate"}
    num_buffers = len(small.cuda.memory)
    for i in range(2 * NUM_LANES):
        read(small, link, i, cells(0, 200))
        assert "allocate failed" in small.wait(i + 1)[-1][1]
    assert len(small.cuda.memory) == num_buffers
    for i in range(2 * NUM_LANES):
        read(small, link, 100 + i, cells(i))
    assert [error for transfer, error in small.wait(4 * NUM_LANES) if transfer >= 100] == [""] * 2 * NUM_LANES
    small.cuda.failing = set()
    read(small, link, 200, cells(0, 200))
    assert small.wait(4 * NUM_LANES + 1)[-1] == (200, "")
    assert (small.dst[: 200 * CELL] == small.src[: 200 * CELL]).all()
    assert small.close()
    small.check_nothing_left()


def test_a_copier_that_cannot_be_made_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, num_made = FakeCuda(), 0

    def allocate(num_bytes: int) -> int:
        nonlocal num_made
        num_made += 1
        if num_made == 3:
            raise TransportError("cuda", "out of memory")
        return cuda._new(num_bytes)

    monkeypatch.setattr(cuda, "allocate", allocate)
    with pytest.raises(TransportError, match="out of memory"):
        DeviceCopier(Transfers(), cuda, Places("ours", world.regions), CopyLimits())  # type: ignore[arg-type]
    assert not cuda.memory
    assert (cuda.num_streams, cuda.num_events) == (0, 0)


def test_a_launch_that_fails_is_reported(world: World) -> None:
    link = world.connect()
    world.cuda.failing = {"launch"}
    read(world, link, 1, cells(0))
    ((transfer, error),) = world.wait(1)
    assert transfer == 1
    assert "launch failed" in error


NUM_THREADS, NUM_EACH = 6, 60


def test_whatever_many_threads_do_at_once_every_copy_ends_once_and_nothing_is_left() -> None:
    world = World(delay_s=2e-4)
    links = [world.connect()]
    accepted: list[int] = []
    marks: list[FakeEvent] = []
    is_over = threading.Event()

    def engine() -> None:
        """Its stream comes to one mark after another."""
        while not is_over.is_set() or marks:
            time.sleep(1e-4)
            if marks:
                marks.pop(0).has_come.set()

    def work(thread: int) -> None:
        rng = random.Random(thread)
        for i in range(NUM_EACH):
            transfer = thread * NUM_EACH + i
            after = None
            if rng.random() < 0.5:
                after = FakeEvent()
                after.has_come = threading.Event()
            link = links[-1]
            try:
                if rng.random() < 0.2:
                    work = world.copier.clear(Product.of(cells(transfer)), after)
                    world.transfers.begin(transfer, work, can_cancel=False)
                else:
                    read(world, link, transfer, cells(transfer), after)
                accepted.append(transfer)
            except TransportError as error:
                assert error.code in ("unknown-peer", "closed")  # noqa: PT017
            if after:
                marks.append(after)
            if rng.random() < 0.3:
                world.transfers.cancel(transfer)
            if rng.random() < 0.1:
                links.append(world.connect())
                world.transfers.forget(link.queues)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(NUM_THREADS)]
    engine_thread = threading.Thread(target=engine)
    for thread in (*threads, engine_thread):
        thread.start()
    for thread in threads:
        thread.join()
    closers = [threading.Thread(target=world.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    is_over.set()
    engine_thread.join()
    assert [transfer for transfer, _ in world.collect()] == sorted(accepted)
    known = {"", CANCELLED, "the transport was closed", "peer 'src' was forgotten"}
    assert {error for _, error in world.ends} <= known
    world.check_nothing_left()
    for transfer, error in world.ends:
        got, want = (m[transfer * CELL : (transfer + 1) * CELL] for m in (world.dst, world.src))
        is_all, is_none = (got == want).all() or (got == 0).all(), (got == 0xFF).all()
        assert is_all if not error else is_none or (error == CANCELLED and is_all)


def test_a_mark_that_follows_an_event_outlives_it() -> None:
    """A read that is cancelled ends at once, and the engine gives its event up."""
    cuda, event, told = FakeCuda(), FakeEvent(), SimpleQueue[str]()
    event.has_come = threading.Event()
    waiter = EventWait(cuda)  # type: ignore[arg-type]
    mark = waiter.follow(event)
    event.is_freed = True
    waiter.submit(mark, told.put)
    time.sleep(0.02)
    assert told.empty(), "the device has not come to it"
    event.has_come.set()
    assert told.get(timeout=PATIENCE_S) == ""
    with pytest.raises(TransportError, match="no event"):
        waiter.follow("no event")
    waiter.close()
    assert waiter._thread.join(PATIENCE_S)
    assert (cuda.num_streams, cuda.num_events) == (0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"pieces": [{"num_bytes": float("inf"), "handle": ""}]},
        {"pieces": [{"num_bytes": -4096, "handle": ""}]},
        {"pieces": [{"num_bytes": 1 << 64, "handle": ""}]},
        {"extents": [{"first_piece": 0, "num_pieces": 1, "offset": 0, "address": -1}]},
        {"extents": [{"first_piece": 0, "num_pieces": 1, "offset": 0.5, "address": 1}]},
    ],
)
def test_numbers_of_a_card_that_the_driver_cannot_take_are_no_export(changes: dict[str, object]) -> None:
    fields = json.loads(Export(UUID).to_bytes())
    with pytest.raises(TransportError, match="bad-card"):
        Export.from_bytes(json.dumps(fields | changes).encode())


def test_a_card_without_an_export_says_why() -> None:
    with pytest.raises(TransportError, match="exports no device memory"):
        Export.from_bytes(b"")


def test_a_source_that_sends_bytes_without_descriptors_keeps_nobody_waiting() -> None:
    name, is_over = "kvferry-test-drip", threading.Event()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen()

    def drip() -> None:
        caller, _ = listener.accept()
        with caller, suppress(OSError):
            while not is_over.wait(0.01):
                caller.sendall(b".")

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with pytest.raises(TransportError, match="0 of 2 descriptors"):
            receive_descriptors(name, "00" * 32, 2)
    finally:
        is_over.set()
        thread.join()
        listener.close()


def test_descriptors_come_to_who_knows_the_token_and_to_nobody_else() -> None:
    with open(__file__, "rb") as file:
        server = DescriptorServer([file.fileno()] * 300)
        received = receive_descriptors(server.name, server.token, 300)
        assert all(os.fstat(fd).st_ino == os.fstat(file.fileno()).st_ino for fd in received)
        assert not any(os.get_inheritable(fd) for fd in received)
        for fd in received:
            os.close(fd)
        with pytest.raises(TransportError, match="0 of 300"):
            receive_descriptors(server.name, "00" * 32, 300)
        server.close()
        assert server._server._loop.join(0)
        with pytest.raises(TransportError, match="no-descriptors"):
            receive_descriptors(server.name, server.token, 300)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_gets_no_descriptors_and_keeps_nobody_waiting() -> None:
    """Whatever it knows; once, four idle callers held the server for 20 s."""
    with tempfile.TemporaryFile() as file:
        server = DescriptorServer([file.fileno()])
        code = """if True:
            import os, socket, sys, time
            os.setuid(65534)
            callers = [socket.socket(socket.AF_UNIX) for _ in range(8)]
            for caller in callers:
                caller.connect("\\0" + sys.argv[1])
            try:
                callers[0].sendall(bytes.fromhex(sys.argv[2]))
                print(len(socket.recv_fds(callers[0], 1, 9)[1]), flush=True)
            except OSError:
                print(0, flush=True)
            time.sleep(60)
        """
        command = [sys.executable, "-c", code, server.name, server.token]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "0\n"
            started = time.monotonic()
            (received,) = receive_descriptors(server.name, server.token, 1)
            assert time.monotonic() - started < 2
            os.close(received)
            other.kill()
        server.close()
