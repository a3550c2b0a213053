"""The frames of one stream as they come: each byte goes to where it belongs, or to a scratch first."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvferry.errors import TransportError
from kvferry.transport.chunk_copier import ChunkCopier, HostBytes
from kvferry.transport.pack import TermSide
from kvferry.transport.stream_frames import HEAD, OPENED, TAIL, Cursor
from kvferry.transport.stream_seal import SEAL_BYTES, FrameSeal

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
            raise TransportError("bad-frame", f"a frame of {num_bytes} bytes: at most {most}")
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
            self._copier.scatterer(frame.sides)(self._scratch_array.ctypes.data)
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
