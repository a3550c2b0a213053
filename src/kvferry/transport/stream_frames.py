"""What travels on a stream: the name of the stream, and after that frames of gathered bytes.

::

    reader ─▶ source   HELLO
    source ─▶ reader   HEAD, bytes, TAIL     once for each ask; the first frame has no bytes

The bytes of a frame are those of a chunk (``pack``), sealed if the stream has a key (``stream_seal``). Asks
and refusals travel on the control channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

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
            raise ValueError(f"it is at another host than the rank, {rank}")


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
        """So many bytes have gone."""
        self.num_left -= num_bytes
        while num_bytes:
            view = self._views[self._at]
            if num_bytes < len(view):
                self._views[self._at] = view[num_bytes:]
                return
            num_bytes -= len(view)
            self._at += 1
