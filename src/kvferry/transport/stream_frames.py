"""What travels on a stream: the name of the stream, and after that frames of gathered bytes.

::

    reader ─▶ source   HELLO
    source ─▶ reader   HEAD, bytes, TAIL     once for each ask; the first frame has no bytes

The bytes of a frame are those of a chunk (``pack``), sealed with AES-128-GCM if the stream has a key: only
this file imports cryptography. Asks and refusals travel on the control channel.
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
"""Nobody guesses it: whoever names a stream was told of it."""
HELLO = Struct(f">8s{STREAM_ID_BYTES}s")
HEAD = Struct(">QI")
"""The reader's number of the ask; how many bytes of memory follow, to which a seal adds its own."""
TAIL = Struct(">?")
"""Whether the bytes count."""
OPENED = 0
"""The number of the first frame."""
MAX_VIEWS = 512
"""Pieces of memory in one call; the kernel takes 1,024."""


@dataclass(frozen=True, slots=True)
class StreamOffer:
    """Where a rank sends what it gathered for one reader.

    >>> StreamOffer("tcp://127.0.0.1:5", bytes(16)).host_and_port
    ('127.0.0.1', 5)
    >>> StreamOffer("tcp://127.0.0.1:70000", bytes(16)).host_and_port
    Traceback (most recent call last):
    ValueError: tcp://127.0.0.1:70000 has no port
    """

    address: str
    stream_id: bytes
    key: bytes = b""
    """What its frames are sealed with; empty: with nothing."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        if not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{self.address} has no port")
        return host.strip("[]"), int(port)

    def check_host(self, rank: str) -> None:
        """Raise ValueError unless it is at the host of the rank that offers it, which listens at ``rank``.

        A rank cannot have its readers call a third party, nor look up a name that never resolves.
        """
        if self.address.rpartition(":")[0] != rank.rpartition(":")[0]:
            raise ValueError(f"its host is not that of the rank, {rank}")


class Cursor:
    """Pieces of memory that are sent, or received, one after another.

    >>> cursor = Cursor([memoryview(b"abc"), memoryview(b"de")])
    >>> cursor.advance(4)
    >>> [bytes(view) for view in cursor.next_views()], cursor.num_left
    ([b'e'], 1)
    """

    def __init__(self, views: list[memoryview]) -> None:
        self._views, self._at = views, 0
        self.num_left = sum(map(len, views))

    def next_views(self) -> list[memoryview]:
        """What comes next, as much as one call takes."""
        return self._views[self._at : self._at + MAX_VIEWS]

    def make_worthless(self) -> None:
        """Touch the bytes of a frame no more: zeros take their place, and its tail says that it is no good.

        >>> parts = HEAD.pack(1, 8), b"8 bytes!", TAIL.pack(True)
        >>> frame = Cursor([*map(memoryview, parts)])
        >>> frame.advance(HEAD.size + 2)
        >>> frame.make_worthless()
        >>> [(len(view), any(view)) for view in frame.next_views()]
        [(6, False), (1, False)]
        """
        if self.num_left <= TAIL.size:
            return  # all its bytes are on their way
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
"""What a sealed frame is longer by."""
NONCE_BYTES = 12


class FrameSeal:
    """One end of a stream: frames are counted, and each is sealed, or opened, in its turn.

    A key is drawn for one stream and used in one direction, so no count ever comes twice under it.

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
        if len(key) != KEY_BYTES:  # a peer's word
            raise TransportError("bad-key", f"a stream's key has {KEY_BYTES} bytes, got {len(key)}")
        self._cipher, self._count = AESGCM(key), 0

    def seal(self, head: bytes, plain: memoryview, sealed: memoryview) -> None:
        """Encrypt bytes into ``sealed``, which is longer by ``SEAL_BYTES``; the head is proved with them."""
        self._cipher.encrypt_into(self._next(), plain, head, sealed)

    def open(self, head: bytes, sealed: memoryview, plain: memoryview) -> None:
        """Decrypt into ``plain``; raises TransportError if head or bytes are not those that were sealed."""
        try:
            self._cipher.decrypt_into(self._next(), sealed, head, plain)
        except InvalidTag:
            raise TransportError("bad-frame", "it was modified in transit") from None

    def skip(self) -> None:
        """A frame passed that nobody wants."""
        self._next()

    def _next(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(NONCE_BYTES, "big")


def start_call(offer: StreamOffer) -> socket.socket:
    """A socket that is being connected; raises OSError or ValueError if the address makes no sense."""
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
    """Name the stream, now that the socket has room to send; raises OSError if it was not connected."""
    if error := caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.sendall(HELLO.pack(MAGIC, offer.stream_id))


ENOUGH_BYTES = 256 << 10
"""The thread sleeps until so many bytes of a frame have come, or its end: each waking costs as much as
copying some tens of kilobytes, and takes time from the kernel that receives them."""


@dataclass(frozen=True, slots=True)
class ArrivedFrame:
    """A frame of which all bytes are in place."""

    nonce: int
    is_good: bool
    """Whether the source says that its bytes count."""


@dataclass(eq=False, slots=True)
class _Frame:
    head: bytes
    sides: Sequence[TermSide]
    """Where its bytes belong; none if nobody wants them."""
    data: list[memoryview]
    is_direct: bool
    """Whether its bytes are written straight to where they belong."""
    tail: bytearray = field(default_factory=lambda: bytearray(TAIL.size))


class FrameReceiver:
    """For one thread. It writes to memory in ``receive``, and at no other time."""

    def __init__(
        self,
        copier: ChunkCopier,
        key: bytes,
        sides_of: Callable[[int, int], Sequence[TermSide]],
    ) -> None:
        """``sides_of``: where the bytes of a frame belong, by its number and length."""
        self._copier, self._sides_of = copier, sides_of
        self._seal = FrameSeal(key) if key else None
        self._head = bytearray(HEAD.size)
        self._cursor = Cursor([memoryview(self._head)])
        self._frame: _Frame | None = None
        self._worth_waking = 1
        """As the kernel was told."""
        self._scratch: HostBytes | None = None
        """Where short runs wait to be scattered, and where what nobody wants goes."""
        self._sealed = memoryview(b"")
        """Where sealed frames wait to be opened."""

    @property
    def nonce(self) -> int:
        """The number of the frame that is being received; 0 if there is none."""
        return int(HEAD.unpack(self._frame.head)[0]) if self._frame else 0

    def receive(self, stream: socket.socket) -> ArrivedFrame | None:
        """Take what is there, by one call; a frame, if that was its end.

        Raises OSError if the stream is lost, TransportError if what has come is no frame of ours.
        """
        num_bytes = stream.recvmsg_into(self._cursor.next_views())[0]
        if not num_bytes:
            raise ConnectionError("it was closed")
        self._cursor.advance(num_bytes)
        arrived = None if self._cursor.num_left else self._go_on()
        self._wait_for_enough(stream)
        return arrived

    def _go_on(self) -> ArrivedFrame | None:
        """After a head come its bytes; after these the frame is there, and the next head comes."""
        if self._frame is None:
            self._begin()
            return None
        frame, self._frame = self._frame, None
        self._cursor = Cursor([memoryview(self._head)])
        return self._end(frame)

    def _wait_for_enough(self, stream: socket.socket) -> None:
        """Have the kernel wake us for as much as is worth it, and never for more than is to come."""
        if (enough := min(ENOUGH_BYTES, self._cursor.num_left)) != self._worth_waking:
            self._worth_waking = enough
            with suppress(OSError):  # nothing is lost: who waits looks by itself, too
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)

    def ignore(self) -> None:
        """The rest of the frame that is being received goes where it harms nobody."""
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
        """Give its memory back; nothing more is received."""
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
