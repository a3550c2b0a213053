"""Callers of a stream's address: a name that comes in pieces, and a process that has no room for a caller."""

import contextlib
import os
import resource
import socket
import time

import pytest

from kvferry.host.threads import SocketLoop
from kvferry.transport.stream_frames import HELLO, MAGIC
from kvferry.transport.stream_sender import PAUSE_S, StreamCallers, listen_at

PATIENCE_S = 60.0
STREAM_ID = bytes(range(16))
NAME = HELLO.pack(MAGIC, STREAM_ID)


def soon(look):
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    return found


class World:
    """Callers of one stream, which is there once."""

    def __init__(self):
        self.taken = []
        listener = listen_at("127.0.0.1")
        self.address = listener.getsockname()
        self.loop = SocketLoop("callers", self.turn)
        self.callers = StreamCallers(listener, self.loop, self.take)
        self.loop.start()

    def turn(self, now):
        return self.callers.turn(now)

    def take(self, stream_id, reader):
        self.loop.ignore(reader)
        self.taken.append((stream_id, reader))
        return stream_id == STREAM_ID

    def close(self):
        for _, reader in self.taken:
            reader.close()
        self.loop.put(self.callers.close)
        self.loop.put(self.loop.stop)
        assert self.loop.join(PATIENCE_S)


@pytest.fixture
def world():
    world = World()
    yield world
    world.close()


@pytest.mark.parametrize("at", [1, len(MAGIC), len(NAME) - 1])
def test_a_name_may_come_in_two_pieces(world, at):
    """The second piece is sent when the first was read: the kernel cannot make one of them."""
    with socket.create_connection(world.address, timeout=PATIENCE_S) as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller.sendall(NAME[:at])
        soon(lambda: [each for each in world.callers._callers.values() if each.said == NAME[:at]])
        caller.sendall(NAME[at:])
        soon(lambda: [stream_id for stream_id, _ in world.taken] == [STREAM_ID])
        assert not world.callers._callers


@pytest.mark.parametrize("said", [b"G", NAME[:9] + b"?" * 999, b"kvfstrm2"])
def test_what_cannot_become_a_name_is_not_waited_for(world, said):
    with socket.create_connection(world.address, timeout=PATIENCE_S) as caller:
        caller.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert caller.recv(1) == b""
    assert world.taken == []


@contextlib.contextmanager
def no_free_descriptor():
    """This process cannot open another file meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def seconds_of(thread):
    """The processor's time that a thread has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


@pytest.mark.timed
def test_without_a_free_descriptor_it_waits_and_then_lets_in(world, caplog):
    with socket.socket() as caller:
        with no_free_descriptor():
            caller.connect(world.address)
            soon(lambda: "was not accepted" in caplog.text)
            before, since = seconds_of(world.loop._thread), time.monotonic()
            soon(lambda: time.monotonic() > since + 4 * PAUSE_S)
            # A thread that tries for ever uses all of the time that it gets.
            assert seconds_of(world.loop._thread) - before < PAUSE_S
        caller.sendall(NAME)
        soon(lambda: world.taken)
    assert caplog.text.count("was not accepted") == 1
