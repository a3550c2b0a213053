"""The source's side of streams: a rank sends what it gathers over plain TCP connections of its own.

One thread owns the sockets. Each reader has one stream, with one chunk of memory of its own: a reader that
receives nothing holds up nobody else, and what it was to get waits in its own queue. A reader's death is a
closed connection. Who may have which bytes is decided before they are handed over (``GatherService``).
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from kvferry.errors import TransportError
from kvferry.transport.chunk_copier import ChunkCopier, HostBytes
from kvferry.transport.pack import TermSide
from kvferry.transport.quietly import quietly
from kvferry.transport.socket_loop import SocketLoop
from kvferry.transport.stream_callers import HELLO_S, StreamCallers, listen_at
from kvferry.transport.stream_frames import (
    HEAD,
    KEY_BYTES,
    OPENED,
    STREAM_ID_BYTES,
    TAIL,
    Cursor,
    StreamOffer,
    proof,
)

MAX_STREAMS, MAX_STREAM_BYTES = 256, 1 << 30
"""Streams that are open or offered; each costs a chunk once it is used. As many as both allow."""
MAX_QUEUED = 256
"""Frames of one stream that wait."""


Refuse = Callable[[str | TransportError], None]
"""Told why bytes are not sent: in words, where a stream or a lease is over; or what failed."""


@dataclass(eq=False, slots=True)
class _Frame:
    ticket_id: int
    nonce: int
    sides: Sequence[TermSide]
    refuse: Refuse


@dataclass(eq=False, slots=True)
class _Stream:
    """What is sent to one reader."""

    offer: StreamOffer
    deadline: float
    """Until when it must be named."""
    socket: socket.socket | None = None
    frames: deque[_Frame] = field(default_factory=deque)
    chunk: HostBytes | None = None
    """Where short runs are gathered."""
    current: _Frame | None = None
    """Of which bytes are sent straight from memory: nobody may write there meanwhile."""
    cursor: Cursor | None = None
    """What is being sent."""
    is_full: bool = False
    """Whether the kernel has no room for more."""

    @property
    def can_send(self) -> bool:
        return self.socket is not None and not self.is_full and bool(self.cursor or self.frames)


class StreamSender:
    """Sends frames to the readers that it offered a stream to."""

    def __init__(self, copier: ChunkCopier, host: str, *, is_proved: bool) -> None:
        """``host``: where to listen. ``is_proved``: whether each frame carries a proof."""
        self._copier, self._is_proved = copier, is_proved
        self._max_streams = min(MAX_STREAMS, max(1, MAX_STREAM_BYTES // copier.chunk_bytes))
        listener = listen_at(host)
        self.port = int(listener.getsockname()[1])
        # The thread's alone:
        self._streams: dict[bytes, _Stream] = {}
        self.num_sent = 0
        self._loop = SocketLoop("kvferry-streams", self._turn)
        self._callers = StreamCallers(listener, self._loop, self._let_in)
        self._loop.start()

    # ---- from any thread

    def open(self, address: str, then: Callable[[StreamOffer | None], None]) -> None:
        """Offer a stream, to be called at ``address``; ``then`` gets None if there are too many."""
        self._loop.put(partial(self._open, address, then))

    def send(
        self,
        stream_id: bytes,
        ticket_id: int,
        nonce: int,
        sides: Sequence[TermSide],
        refuse: Refuse,
    ) -> None:
        """Send bytes that were checked; ``refuse`` is told why, if they are not sent."""
        self._loop.put(partial(self._queue, stream_id, _Frame(ticket_id, nonce, sides, refuse)))

    def revoke(self, ticket_id: int) -> None:
        """Touch no byte of a ticket any more, once the thread has come to it. It waits for no reader."""
        self._loop.put(partial(self._revoke, ticket_id))

    def put(self, event: Callable[[], None]) -> None:
        """Have something done by the thread, after all that was asked for before."""
        self._loop.put(event)

    def close(self) -> None:
        """Close all connections."""
        self._loop.put(self._close)
        self._loop.join()

    # ---- in the thread

    def _turn(self, now: float) -> float:
        come_again = self._callers.turn(now)
        for stream in [stream for stream in self._streams.values() if stream.can_send]:
            self._send_some(stream)
        if any(stream.can_send for stream in self._streams.values()):
            return now
        return come_again

    def _open(self, address: str, then: Callable[[StreamOffer | None], None]) -> None:
        now = monotonic()
        for stream in [*self._streams.values()]:
            if stream.socket is None and stream.deadline <= now:
                self._drop(stream)
        if len(self._streams) >= self._max_streams:
            then(None)
            return
        key = secrets.token_bytes(KEY_BYTES) if self._is_proved else b""
        offer = StreamOffer(address, secrets.token_bytes(STREAM_ID_BYTES), key)
        self._streams[offer.stream_id] = _Stream(offer, now + HELLO_S)
        then(offer)

    def _let_in(self, stream_id: bytes, reader: socket.socket) -> bool:
        """Whether somebody who named a stream gets it."""
        stream = self._streams.get(stream_id)
        if stream is None or stream.socket is not None:
            return False
        stream.socket = reader
        self._loop.watch(reader, partial(self._hear_of, stream))
        stream.cursor = self._cursor(stream, OPENED, [])
        return True

    def _hear_of(self, stream: _Stream) -> None:
        """A reader says nothing more on its stream: there is room, or it is gone."""
        stream.is_full = False
        if stream.socket is not None:
            self._loop.watch(stream.socket, partial(self._hear_of, stream))
            try:
                if not stream.socket.recv(64):
                    self._drop(stream)
            except BlockingIOError:
                pass
            except OSError:
                self._drop(stream)

    def _queue(self, stream_id: bytes, frame: _Frame) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            frame.refuse("there is no such stream or ring, or not any more")
        elif len(stream.frames) >= MAX_QUEUED:
            frame.refuse(f"{MAX_QUEUED} frames of its stream wait already")
        else:
            stream.frames.append(frame)

    def _send_some(self, stream: _Stream) -> None:
        """One call for each reader in turn."""
        if stream.cursor is None:
            self._begin(stream, stream.frames.popleft())
        if stream.cursor is None or stream.socket is None:
            return
        try:
            sent = stream.socket.sendmsg(stream.cursor.next_views(), (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            stream.is_full = True
            self._loop.watch(stream.socket, partial(self._hear_of, stream), for_room=True)
            return
        except OSError:
            self._drop(stream)
            return
        stream.cursor.advance(sent)
        if not stream.cursor.num_left:
            self.num_sent += stream.current is not None
            stream.cursor = stream.current = None

    def _begin(self, stream: _Stream, frame: _Frame) -> None:
        stream.current = frame
        try:
            data = self._copier.views(frame.sides) or [self._gathered(stream, frame.sides)]
        except TransportError as error:
            stream.current = None
            frame.refuse(error)
            return
        stream.cursor = self._cursor(stream, frame.nonce, data)

    def _gathered(self, stream: _Stream, sides: Sequence[TermSide]) -> memoryview:
        """The bytes as a copy in the stream's own chunk."""
        if stream.chunk is None:
            stream.chunk = self._copier.new_chunk()
        self._copier.gather(sides, stream.chunk.ctypes.data)
        return stream.chunk.data[: sum(side.total_bytes for side in sides)]

    @staticmethod
    def _cursor(stream: _Stream, nonce: int, data: list[memoryview]) -> Cursor:
        head = HEAD.pack(nonce, sum(map(len, data)))
        tail = TAIL.pack(True, proof(stream.offer.key, head, data))
        return Cursor([memoryview(head), *data, memoryview(tail)])

    def _revoke(self, ticket_id: int) -> None:
        for stream in self._streams.values():
            for frame in [frame for frame in stream.frames if frame.ticket_id == ticket_id]:
                stream.frames.remove(frame)
                frame.refuse("its lease is over")
            if stream.current and stream.cursor and stream.current.ticket_id == ticket_id:
                stream.cursor.make_worthless()

    def _drop(self, stream: _Stream) -> None:
        """A reader is gone."""
        del self._streams[stream.offer.stream_id]
        if stream.socket is not None:
            self._loop.ignore(stream.socket)
            stream.socket.close()
            stream.socket = None
        stream.cursor = stream.current = None
        stream.frames.clear()
        chunk, stream.chunk = stream.chunk, None
        if chunk is not None:
            quietly(self._copier.free_chunk, chunk)

    def _close(self) -> None:
        for stream in [*self._streams.values()]:
            self._drop(stream)
        self._callers.close()
        self._loop.stop()
