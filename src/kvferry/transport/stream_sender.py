"""The source's side of streams: a rank sends gathered bytes over TCP connections.

One thread owns the sockets, sends requested bytes, and stops when a ticket is revoked. Each reader has one
stream, with a chunk of memory and a queue: a slow reader delays no other. ``GatherService`` checks the access
of a reader before.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import NamedTuple

from kvferry.errors import TransportError
from kvferry.host.threads import SocketLoop, quietly
from kvferry.log import log_of
from kvferry.transport.pack import ChunkCopier, HostBytes, TermSide
from kvferry.transport.stream_frames import (
    HEAD,
    HELLO,
    KEY_BYTES,
    MAGIC,
    OPENED,
    SEAL_BYTES,
    STREAM_ID_BYTES,
    TAIL,
    Cursor,
    FrameSeal,
    StreamOffer,
)

log = log_of(__name__)

HELLO_S = 10.0
"""The deadline for a caller to name its stream, and for an offered stream to be named."""
MAX_CALLERS = 64
"""Connections that have not named a stream; the oldest makes room. A reader names its stream at once."""
BACKLOG = 1024
"""Connections to be accepted. Beyond it the kernel drops first packets, and readers lose a second."""
ENOUGH_AT_ONCE = 16
"""Connections accepted in a row: too few to push out a new one."""
PAUSE_S = 0.2
"""Pause after a failure to accept, which would repeat at full speed."""


def listen_at(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise TransportError("no-connection", f"cannot listen at {host}: {error}") from error
    listener.setblocking(False)
    return listener


@dataclass(eq=False, slots=True)
class _Caller:
    until: float
    said: bytes = b""


class StreamCallers:
    """Connections until they have named a stream. Used in the thread of ``loop`` only."""

    def __init__(
        self, listener: socket.socket, loop: SocketLoop, take: Callable[[bytes, socket.socket], bool]
    ) -> None:
        """``take`` gets the name of a stream and its socket; returns whether there is such a stream."""
        self._listener, self._loop, self._take = listener, loop, take
        self._callers: dict[socket.socket, _Caller] = {}
        self._listens_again = float("inf")
        """The end of a pause."""
        self._has_warned = False
        loop.watch(listener, self._accept)

    def turn(self, now: float) -> float:
        """Close connections that missed the deadline; returns when to come again."""
        for caller in [caller for caller, each in self._callers.items() if each.until <= now]:
            self._hang_up(caller)
        if self._listens_again <= now:
            self._listens_again = float("inf")
            self._loop.watch(self._listener, self._accept)
        return min(self._listens_again, *(each.until for each in self._callers.values()), float("inf"))

    def close(self) -> None:
        for caller in [*self._callers]:
            self._hang_up(caller)
        self._listens_again = float("inf")
        self._loop.ignore(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ENOUGH_AT_ONCE):
            try:
                caller, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return  # it was closed meanwhile
            except OSError as error:
                self._pause(error)
                return
            self._let_in(caller)

    def _let_in(self, caller: socket.socket) -> None:
        self._has_warned = False
        if len(self._callers) >= MAX_CALLERS:
            self._hang_up(next(iter(self._callers)))
        caller.setblocking(False)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._callers[caller] = _Caller(monotonic() + HELLO_S)
        self._loop.watch(caller, partial(self._hear, caller))

    def _pause(self, error: OSError) -> None:
        """Perhaps this process has too many open files, which may pass."""
        if not self._has_warned:
            log.warning("a reader's stream was not accepted; retrying: %s", error)
        self._has_warned = True
        self._loop.ignore(self._listener)
        self._listens_again = monotonic() + PAUSE_S

    def _hear(self, socket_of: socket.socket) -> None:
        """Receive the name of a stream, perhaps in pieces; one byte more is an error."""
        caller = self._callers[socket_of]
        try:
            more = socket_of.recv(HELLO.size + 1 - len(caller.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        caller.said += more
        is_ours = caller.said.startswith(MAGIC[: len(caller.said)])
        if more and is_ours and len(caller.said) < HELLO.size:
            return
        if not more or not is_ours or len(caller.said) > HELLO.size:
            self._hang_up(socket_of)
            return
        _, stream_id = HELLO.unpack(caller.said)
        if self._take(stream_id, socket_of):
            del self._callers[socket_of]
        else:
            self._hang_up(socket_of)

    def _hang_up(self, caller: socket.socket) -> None:
        self._callers.pop(caller, None)
        self._loop.ignore(caller)
        caller.close()


MAX_STREAMS, MAX_STREAM_BYTES = 256, 1 << 30
"""Both limit the number of streams; a stream in use takes a chunk or two."""
IDLE_S, STALLED_S = 1.0, 5.0
"""When all streams are taken, a new reader replaces one that requested nothing, or received nothing, for so
long. The old reader's next read opens a new stream."""
MAX_QUEUED, MAX_QUEUED_BYTES = 256, 8 << 20
"""Requests that wait in one stream, and the bytes of their lists of places."""
MAX_ALL_QUEUED_BYTES = 128 << 20
"""Of all streams together."""


class TicketKey(NamedTuple):
    """Each start of an engine, a generation, counts its tickets anew."""

    generation: int
    ticket_id: int


Refuse = Callable[[str | TransportError], None]
"""Called with the reason why bytes are not sent."""


@dataclass(eq=False, slots=True)
class _Frame:
    ticket: TicketKey
    nonce: int
    sides: Sequence[TermSide]
    refuse: Refuse

    @property
    def asked_bytes(self) -> int:
        return sum(side.places.nbytes + side.steps.nbytes for side in self.sides)


@dataclass(eq=False, slots=True)
class _Stream:
    offer: StreamOffer
    since: float
    """Time of the offer, or of the last bytes sent."""
    seal: FrameSeal | None
    socket: socket.socket | None = None
    frames: deque[_Frame] = field(default_factory=deque)
    queued_bytes: int = 0
    chunk: HostBytes | None = None
    sealed: memoryview | None = None
    current: _Frame | None = None
    """The frame that is being sent, perhaps straight from memory."""
    cursor: Cursor | None = None
    is_full: bool = False
    """Whether the socket's buffer is full."""

    @property
    def has_work(self) -> bool:
        return bool(self.cursor or self.frames)

    @property
    def can_send(self) -> bool:
        return self.socket is not None and not self.is_full and self.has_work

    @property
    def may_go_at(self) -> float:
        waits = HELLO_S if self.socket is None else STALLED_S if self.has_work else IDLE_S
        return self.since + waits


class StreamSender:
    def __init__(self, copier: ChunkCopier, host: str, *, is_sealed: bool) -> None:
        """``host``: to listen on. ``is_sealed``: whether frames are encrypted, with a key per stream."""
        self._copier, self._is_sealed = copier, is_sealed
        each_bytes = copier.chunk_bytes * (2 if is_sealed else 1)
        self._max_streams = min(MAX_STREAMS, max(1, MAX_STREAM_BYTES // each_bytes))
        listener = listen_at(host)
        self.port = int(listener.getsockname()[1])
        # Used by the thread only:
        self._streams: dict[bytes, _Stream] = {}
        self._loop = SocketLoop("kvferry-streams", self._turn)
        self._callers = StreamCallers(listener, self._loop, self._let_in)
        self._loop.start()

    # ---- from any thread

    def put(self, event: Callable[[], None]) -> None:
        """Run something in the thread, in order."""
        self._loop.put(event)

    @property
    def num_waiting(self) -> int:
        return self._loop.num_waiting

    def close(self) -> None:
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

    def open(self, address: str) -> StreamOffer | None:
        """Offer a stream at ``address``; None if there are too many."""
        now = monotonic()
        if len(self._streams) >= self._max_streams:
            first = min(self._streams.values(), key=lambda stream: stream.may_go_at)
            if first.may_go_at > now:
                return None
            self._drop(first)
        key = secrets.token_bytes(KEY_BYTES) if self._is_sealed else b""
        offer = StreamOffer(address, secrets.token_bytes(STREAM_ID_BYTES), key)
        self._streams[offer.stream_id] = _Stream(offer, now, FrameSeal(key) if key else None)
        return offer

    def _let_in(self, stream_id: bytes, reader: socket.socket) -> bool:
        stream = self._streams.get(stream_id)
        if stream is None or stream.socket is not None:
            return False
        stream.socket = reader
        self._loop.watch(reader, partial(self._hear_of, stream))
        stream.cursor = self._cursor(stream, OPENED, [])
        return True

    def _hear_of(self, stream: _Stream) -> None:
        """The socket is writable again, or the reader has closed it; readers send nothing else."""
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

    def send(
        self, stream_id: bytes, ticket: TicketKey, nonce: int, sides: Sequence[TermSide], refuse: Refuse
    ) -> None:
        """Send bytes whose places were checked, or call ``refuse``."""
        stream = self._streams.get(stream_id)
        if stream is None:
            refuse("the stream is unknown or closed")
            return
        frame = _Frame(ticket, nonce, sides, refuse)
        num_bytes = frame.asked_bytes
        queued = sum(each.queued_bytes for each in self._streams.values())
        if (
            len(stream.frames) >= MAX_QUEUED
            or stream.queued_bytes + num_bytes > MAX_QUEUED_BYTES
            or queued + num_bytes > MAX_ALL_QUEUED_BYTES
        ):
            refuse("the send queue is full")
            return
        stream.frames.append(frame)
        stream.queued_bytes += num_bytes

    def _send_some(self, stream: _Stream) -> None:
        if stream.cursor is None:
            frame = stream.frames.popleft()
            stream.queued_bytes -= frame.asked_bytes
            self._begin(stream, frame)
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
        stream.since = monotonic()
        stream.cursor.advance(sent)
        if not stream.cursor.num_left:
            stream.cursor = stream.current = None

    def _begin(self, stream: _Stream, frame: _Frame) -> None:
        stream.current = frame
        try:
            # Sealing copies anyway.
            data = [] if stream.seal else self._copier.views(frame.sides)
            data = data or [self._gathered(stream, frame.sides)]
        except Exception as error:
            stream.current = None
            if not isinstance(error, TransportError):
                log.exception("bytes could not be gathered")
                error = TransportError("unexpected", repr(error))
            frame.refuse(error)
            return
        stream.cursor = self._cursor(stream, frame.nonce, data)

    def _gathered(self, stream: _Stream, sides: Sequence[TermSide]) -> memoryview:
        if stream.chunk is None:
            stream.chunk = self._copier.new_chunk()
        self._copier.gather(sides, stream.chunk.ctypes.data)
        return stream.chunk.data[: sum(side.total_bytes for side in sides)]

    def _cursor(self, stream: _Stream, nonce: int, data: list[memoryview]) -> Cursor:
        num_bytes = sum(map(len, data))
        head = HEAD.pack(nonce, num_bytes)
        if stream.seal:
            if stream.sealed is None or len(stream.sealed) < num_bytes + SEAL_BYTES:
                room = self._copier.chunk_bytes if num_bytes else 0
                stream.sealed = memoryview(bytearray(room + SEAL_BYTES))
            sealed = stream.sealed[: num_bytes + SEAL_BYTES]
            stream.seal.seal(head, data[0] if data else memoryview(b""), sealed)
            data = [sealed]
        return Cursor([memoryview(head), *data, memoryview(TAIL.pack(True))])

    def revoke(self, is_over: Callable[[TicketKey], bool]) -> None:
        """Stop reading bytes of such tickets. Does not wait for readers."""
        for stream in self._streams.values():
            for frame in [frame for frame in stream.frames if is_over(frame.ticket)]:
                stream.frames.remove(frame)
                stream.queued_bytes -= frame.asked_bytes
                frame.refuse("its lease is over")
            if stream.current and stream.cursor and is_over(stream.current.ticket):
                stream.cursor.make_worthless()

    def _drop(self, stream: _Stream) -> None:
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
