"""The protocol of a stream: the name of the stream, then frames of gathered bytes.

::

    reader ─▶ source   HELLO
    source ─▶ reader   HEAD, bytes, TAIL     for each request; the first frame has no bytes

The bytes of a frame are those of a chunk (``pack``), sealed with AES-128-GCM if the stream has a key: only
this file imports cryptography. Requests and refusals use the control channel.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from struct import Struct

from kvferry.errors import MissingPackage, TransportError
from kvferry.transport.pack import ChunkCopier, HostBytes, TermSide

MAGIC = b"kvfstrm2"
STREAM_ID_BYTES = 16
"""Random, so that knowing it is the right to connect."""
HELLO = Struct(f">8s{STREAM_ID_BYTES}s")
HEAD = Struct(">QI")
"""Number of the request; number of bytes, without the seal."""
TAIL = Struct(">?")
"""Whether the bytes are valid."""
OPENED = 0
MAX_VIEWS = 512
"""Pieces of memory in one call; the kernel takes 1,024."""


@dataclass(frozen=True, slots=True)
class StreamOffer:
    """A stream that a rank offers to one reader.

    >>> StreamOffer("tcp://127.0.0.1:5", bytes(16)).host_and_port
    ('127.0.0.1', 5)
    >>> StreamOffer("tcp://127.0.0.1:70000", bytes(16)).host_and_port
    Traceback (most recent call last):
    ValueError: tcp://127.0.0.1:70000 has no port
    """

    address: str
    stream_id: bytes
    key: bytes = b""
    """Seals its frames; empty: they are not sealed."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        if not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{self.address} has no port")
        return host.strip("[]"), int(port)

    def check_host(self, rank: str) -> None:
        """Raise ValueError unless it is at the host of the rank, so that a rank cannot name a third party."""
        if self.address.rpartition(":")[0] != rank.rpartition(":")[0]:
            raise ValueError(f"its host differs from that of the rank, {rank}")


class Cursor:
    """Progress through pieces of memory that are sent or received.

    >>> cursor = Cursor([memoryview(b"abc"), memoryview(b"de")])
    >>> cursor.advance(4)
    >>> [bytes(view) for view in cursor.next_views()], cursor.num_left
    ([b'e'], 1)
    """

    def __init__(self, views: list[memoryview]) -> None:
        self._views, self._at = views, 0
        self.num_left = sum(map(len, views))

    def next_views(self) -> list[memoryview]:
        return self._views[self._at : self._at + MAX_VIEWS]

    def make_worthless(self) -> None:
        """Replace the remaining bytes of a frame by zeros, and mark it as invalid.

        >>> parts = HEAD.pack(1, 8), b"8 bytes!", TAIL.pack(True)
        >>> frame = Cursor([*map(memoryview, parts)])
        >>> frame.advance(HEAD.size + 2)
        >>> frame.make_worthless()
        >>> [(len(view), any(view)) for view in frame.next_views()]
        [(6, False), (1, False)]
        """
        if self.num_left <= TAIL.size:
            return  # all its bytes were sent
        head = [] if self._at else self._views[:1]
        num_zeros = self.num_left - TAIL.size - sum(map(len, head))
        self._views, self._at = [*head, memoryview(bytes(num_zeros)), memoryview(TAIL.pack(False))], 0

    def advance(self, num_bytes: int) -> None:
        self.num_left -= num_bytes
        while num_bytes:
            view = self._views[self._at]
            if num_bytes < len(view):
                self._views[self._at] = view[num_bytes:]
                return
            num_bytes -= len(view)
            self._at += 1


try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ModuleNotFoundError as error:
    raise MissingPackage.named(error) from None

KEY_BYTES = 16
SEAL_BYTES = 16
"""Added to the length of a frame."""
NONCE_BYTES = 12


class FrameSeal:
    """Seals, or opens, the frames of one stream in order.

    The number of a frame is its nonce, which never repeats: each key is for one stream and one direction.

    >>> sender, receiver = FrameSeal(bytes(16)), FrameSeal(bytes(16))
    >>> sealed, plain = bytearray(5 + SEAL_BYTES), bytearray(5)
    >>> sender.seal(b"head", memoryview(b"bytes"), memoryview(sealed))
    >>> receiver.open(b"head", memoryview(sealed), memoryview(plain))
    >>> bytes(plain)
    b'bytes'
    >>> receiver.open(b"head", memoryview(sealed), memoryview(plain))  # once more
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-frame: it was modified in transit
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise TransportError("bad-key", f"a stream's key has {KEY_BYTES} bytes, got {len(key)}")
        self._cipher, self._count = AESGCM(key), 0

    def seal(self, head: bytes, plain: memoryview, sealed: memoryview) -> None:
        """Encrypt into ``sealed``, which is longer by ``SEAL_BYTES``; the head is authenticated, too."""
        self._cipher.encrypt_into(self.skip(), plain, head, sealed)

    def open(self, head: bytes, sealed: memoryview, plain: memoryview) -> None:
        """Decrypt into ``plain``; raises TransportError if head or bytes were modified."""
        try:
            self._cipher.decrypt_into(self.skip(), sealed, head, plain)
        except InvalidTag:
            raise TransportError("bad-frame", "it was modified in transit") from None

    def skip(self) -> bytes:
        """Pass a frame; returns its nonce."""
        self._count += 1
        return self._count.to_bytes(NONCE_BYTES, "big")


def start_call(offer: StreamOffer) -> socket.socket:
    """A socket that is connecting; raises OSError or ValueError if the address is invalid."""
    host, port = offer.host_and_port
    caller = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        caller.setblocking(False)
        caller.connect_ex((host, port))
    except BaseException:
        caller.close()
        raise
    return caller


def end_call(caller: socket.socket, offer: StreamOffer) -> None:
    """Name the stream, once the socket is writable; raises OSError if it could not connect."""
    if error := caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.sendall(HELLO.pack(MAGIC, offer.stream_id))


ENOUGH_BYTES = 256 << 10
"""The kernel wakes the thread for so many bytes of a frame, or its end: waking costs as much as copying some
tens of kilobytes."""


@dataclass(frozen=True, slots=True)
class ArrivedFrame:
    nonce: int
    is_good: bool
    """Whether its tail says that the bytes are valid."""


@dataclass(eq=False, slots=True)
class _Frame:
    head: bytes
    sides: Sequence[TermSide]
    """The places of its bytes; none if it is not needed."""
    data: list[memoryview]
    is_direct: bool
    """Whether it is received in place."""
    tail: bytearray = field(default_factory=lambda: bytearray(TAIL.size))


class FrameReceiver:
    """For one thread. It writes to memory only in ``receive``."""

    def __init__(
        self, copier: ChunkCopier, key: bytes, sides_of: Callable[[int, int], Sequence[TermSide]]
    ) -> None:
        """``sides_of``: the places of a frame's bytes, by its number and length."""
        self._copier, self._sides_of = copier, sides_of
        self._seal = FrameSeal(key) if key else None
        self._head = bytearray(HEAD.size)
        self._cursor = Cursor([memoryview(self._head)])
        self._frame: _Frame | None = None
        self._worth_waking = 1
        self._scratch: HostBytes | None = None
        """For frames that are scattered or dropped."""
        self._sealed = memoryview(b"")

    @property
    def nonce(self) -> int:
        """The number of the frame that is being received; 0 if there is none."""
        return int(HEAD.unpack(self._frame.head)[0]) if self._frame else 0

    def receive(self, stream: socket.socket) -> ArrivedFrame | None:
        """One call; returns a frame at its end. Raises OSError, or TransportError for a malformed frame."""
        num_bytes = stream.recvmsg_into(self._cursor.next_views())[0]
        if not num_bytes:
            raise ConnectionError("it was closed")
        self._cursor.advance(num_bytes)
        arrived = None if self._cursor.num_left else self._go_on()
        if (enough := min(ENOUGH_BYTES, self._cursor.num_left)) != self._worth_waking:
            self._worth_waking = enough
            with suppress(OSError):  # harmless: the reader also polls
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
        return arrived

    def _go_on(self) -> ArrivedFrame | None:
        """After a head come its bytes and tail, then the next head."""
        if self._frame is None:
            self._begin()
            return None
        frame, self._frame = self._frame, None
        self._cursor = Cursor([memoryview(self._head)])
        return self._end(frame)

    def ignore(self) -> None:
        """Drop the rest of the frame that is being received."""
        if frame := self._frame:
            frame.sides = ()
            if frame.is_direct and self._cursor.num_left > TAIL.size:
                rest = self._chunk[: self._cursor.num_left - TAIL.size]
                self._cursor = Cursor([rest, memoryview(frame.tail)])

    def _begin(self) -> None:
        head = bytes(self._head)
        nonce, num_bytes = HEAD.unpack(head)
        if num_bytes > (most := self._copier.chunk_bytes):
            raise TransportError("bad-frame", f"a frame of {num_bytes} bytes exceeds the limit of {most}")
        sides = self._sides_of(nonce, num_bytes)
        if self._seal:
            views, data = [], [self._sealed_room(num_bytes + SEAL_BYTES)]
        else:
            views = self._copier.views(sides)
            data = views or ([self._chunk[:num_bytes]] if num_bytes else [])
        self._frame = _Frame(head, sides, data, is_direct=bool(views))
        self._cursor = Cursor([*data, memoryview(self._frame.tail)])

    def _end(self, frame: _Frame) -> ArrivedFrame:
        nonce, num_bytes = HEAD.unpack(frame.head)
        (is_good,) = TAIL.unpack(frame.tail)
        is_wanted = is_good and (bool(frame.sides) or nonce == OPENED)
        if self._seal and is_wanted:
            self._seal.open(frame.head, frame.data[0], self._chunk[:num_bytes])
        elif self._seal:
            self._seal.skip()
        if is_wanted and not frame.is_direct and frame.sides:
            self._copier.scatter(frame.sides, self._scratch_array.ctypes.data)
        return ArrivedFrame(nonce, is_good)

    def close(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            self._copier.free_chunk(scratch)

    def _sealed_room(self, num_bytes: int) -> memoryview:
        if len(self._sealed) < num_bytes:
            self._sealed = memoryview(bytearray(max(num_bytes, self._copier.chunk_bytes + SEAL_BYTES)))
        return self._sealed[:num_bytes]

    @property
    def _scratch_array(self) -> HostBytes:
        if self._scratch is None:
            self._scratch = self._copier.new_chunk()
        return self._scratch

    @property
    def _chunk(self) -> memoryview:
        return self._scratch_array.data
