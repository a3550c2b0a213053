"""Frames as they come over a real connection: when is the reader woken, and does it get all of them."""

import select
import socket

import numpy as np
import pytest

from kvferry.core.manifest import Region
from kvferry.transport.pack import ChunkCopier, TermSide
from kvferry.transport.places import Places
from kvferry.transport.stream_frames import ENOUGH_BYTES, HEAD, TAIL, FrameReceiver

FRAME_BYTES = 3 * ENOUGH_BYTES + 1000
SOON_S = 30.0


@pytest.fixture
def connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        reader, _ = listener.accept()
    with sender, reader:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader.setblocking(False)
        yield sender, reader


def is_woken(reader, within_s):
    poller = select.epoll()
    poller.register(reader, select.EPOLLIN)
    try:
        return bool(poller.poll(within_s))
    finally:
        poller.close()


def receive(frames, reader):
    """What arrives until nothing more is there."""
    arrived = []
    try:
        while True:
            arrived.append(frames.receive(reader))
    except BlockingIOError:
        return [frame.nonce for frame in arrived if frame]


def test_a_reader_sleeps_until_enough_has_come_or_the_frame_is_whole(connection):
    sender, reader = connection
    memory = np.zeros(FRAME_BYTES, np.uint8)
    places = Places("ours", [Region("kv", FRAME_BYTES, address=memory.ctypes.data)])
    side = TermSide(np.array([0]), np.array([FRAME_BYTES]), np.array([0]))
    frames = FrameReceiver(ChunkCopier(places, FRAME_BYTES), b"", lambda nonce, num_bytes: [side])
    data = np.random.default_rng(1).integers(0, 256, FRAME_BYTES, np.uint8).tobytes()
    for nonce in (1, 2):  # a frame leaves nothing behind that the next one waits for
        memory[:] = 0
        sender.sendall(HEAD.pack(nonce, FRAME_BYTES))
        assert is_woken(reader, SOON_S), "a head is worth it"
        assert receive(frames, reader) == []
        sender.sendall(data[: ENOUGH_BYTES // 2])
        assert not is_woken(reader, 0.2)
        sender.sendall(data[ENOUGH_BYTES // 2 : -1000])
        assert is_woken(reader, SOON_S)
        while is_woken(reader, 0.2):
            assert receive(frames, reader) == []
        sender.sendall(data[-1000:])
        assert not is_woken(reader, 0.2), "its tail is to come"
        *most, last = TAIL.pack(True)
        sender.sendall(bytes(most))
        while frames._cursor.num_left > 1:
            receive(frames, reader)
        sender.sendall(bytes([last]))
        assert is_woken(reader, SOON_S)
        assert receive(frames, reader) == [nonce]
        assert memory.tobytes() == data


def test_a_closed_connection_wakes_whoever_waits_for_more(connection):
    sender, reader = connection
    memory = np.zeros(8, np.uint8)
    places = Places("ours", [Region("kv", 8, address=memory.ctypes.data)])
    frames = FrameReceiver(ChunkCopier(places, FRAME_BYTES), b"", lambda nonce, num_bytes: [])
    sender.sendall(HEAD.pack(1, FRAME_BYTES))
    assert is_woken(reader, SOON_S)
    assert receive(frames, reader) == []
    sender.close()
    assert is_woken(reader, SOON_S)
    with pytest.raises(ConnectionError):
        frames.receive(reader)
