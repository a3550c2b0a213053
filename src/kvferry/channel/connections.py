"""TCP connections of a channel: what each keeps of this process's memory, and which is closed for it.

ZeroMQ says neither how much waits for a peer nor how much of a message has arrived, and closes no connection
that is in order. The kernel says both of its socket, and ``shutdown`` is a hang-up like any other.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass

MAX_CONNECTIONS = 2048
"""The one that has been silent for longest makes room."""
MAX_UNREAD_BYTES = 32 << 20
"""Answers that one peer has not read: an engine's whole description, a few times over. More are dropped."""
MAX_UNFINISHED_BYTES = 12 << 20
"""What one peer has sent since its last message: more than a message has. An idle peer's heartbeats count,
too: they reach it after a day or more, and it connects again."""
MAX_BYTES = 128 << 20
"""Both, of all peers. The peers with the most of it are hung up on."""
LOOK_SECONDS = 0.05
SECONDS_PER_CONNECTION = 5e-5
"""A look at one takes about a fiftieth of it."""

_ACKED_RECEIVED = struct.Struct("=QQ")
_ACKED_OFFSET = 120
"""In the kernel's ``tcp_info``: ``tcpi_bytes_acked``, then ``tcpi_bytes_received``."""


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    """The same connection as ZeroMQ's own."""
    peer: str = ""
    """Empty until it has said something."""
    num_handed: int = 0
    """Bytes sent to it, since it had last read all of them."""
    acked_then: int = 0
    received_then: int = 0
    has_spoken: bool = True
    num_unread: int = 0
    num_unfinished: int = 0
    is_closing: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_unread + self.num_unfinished

    def look(self) -> None:
        """Learn how much the peer has read, and how much it has sent since its last message."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        acked, received = _ACKED_RECEIVED.unpack_from(info, _ACKED_OFFSET)
        self.num_unread = max(0, self.num_handed - (acked - self.acked_then))
        if not self.num_unread:
            self.num_handed, self.acked_then = 0, acked
        if self.has_spoken:
            self.has_spoken, self.received_then = False, received
        self.num_unfinished = received - self.received_then


class Connections:
    """Connections by the number of ZeroMQ's file descriptor. Belongs to the channel's thread."""

    def __init__(self) -> None:
        self._by_fd: OrderedDict[int, _Connection] = OrderedDict()
        """The one that has been silent for longest is first."""
        self._by_peer: dict[str, int] = {}
        self._next_look = 0.0
        self._num_bytes = 0
        """What all of them keep, at most."""
        self.closed: Counter[str] = Counter()
        """Connections that were closed, by why."""

    def __len__(self) -> int:
        return len(self._by_fd)

    def begin(self, fd: int, port: int) -> None:
        """There is a connection; ``port``: its own, or its peer's."""
        self.end(fd)
        try:
            own = socket.socket(fileno=os.dup(fd))
        except OSError:  # it is gone, or there is no descriptor left
            return
        with contextlib.suppress(OSError):
            if port in (own.getsockname()[1], own.getpeername()[1]):  # its number may be another's by now
                if len(self._by_fd) >= MAX_CONNECTIONS:
                    oldest = next(iter(self._by_fd))
                    self._by_fd.move_to_end(oldest)
                    self._close(self._by_fd[oldest], "silent")
                self._by_fd[fd] = _Connection(own)
                return
        own.close()

    def end(self, fd: int) -> None:
        """A connection has ended."""
        connection = self._by_fd.pop(fd, None)
        if connection is not None:
            self._by_peer.pop(connection.peer, None)
            connection.socket.close()

    def is_known(self, peer: str) -> bool:
        """Whether we know which connection a peer has."""
        return peer in self._by_peer

    def introduce(self, peer: str, fd: int) -> None:
        """A peer has this connection."""
        if fd in self._by_fd:
            self._by_peer.pop(self._by_fd[fd].peer, None)
            self._by_fd[fd].peer = peer
            self._by_peer[peer] = fd

    def spoke(self, peer: str) -> None:
        """A message of a peer has arrived."""
        fd = self._by_peer.get(peer)
        if fd is not None:
            self._by_fd[fd].has_spoken = True
            self._by_fd.move_to_end(fd)

    def may_send(self, peer: str, num_bytes: int, now: float) -> bool:
        """Whether a message of that length may wait for a peer; if so, it counts as handed over."""
        connection = self._by_fd.get(self._by_peer.get(peer, -1))
        if connection is None:
            return True  # it is gone, and ZeroMQ says so
        if self._num_bytes + num_bytes > MAX_BYTES:
            self.look(now)
        if connection.num_handed + num_bytes > MAX_UNREAD_BYTES:
            connection.look()
        if connection.is_closing or connection.num_unread + num_bytes > MAX_UNREAD_BYTES:
            return False
        connection.num_handed += num_bytes
        connection.num_unread += num_bytes
        self._num_bytes += num_bytes
        return True

    def hang_up(self, peer: str, why: str) -> None:
        """Close a connection."""
        connection = self._by_fd.get(self._by_peer.get(peer, -1))
        if connection is not None:
            self._close(connection, why)

    def seconds_to_look(self, now: float) -> float:
        """After how long to look at the connections again."""
        return max(0.0, self._next_look - now) if self._by_fd else float("inf")

    def look(self, now: float) -> None:
        """Close the connections that keep too much, each or together."""
        self._next_look = now + max(LOOK_SECONDS, SECONDS_PER_CONNECTION * len(self._by_fd))
        connections = [each for each in self._by_fd.values() if not each.is_closing]
        for each in connections:
            each.look()
        self._num_bytes = sum(each.num_bytes for each in connections)
        most = float("inf") if self._num_bytes <= MAX_BYTES else MAX_BYTES // 2
        for each in sorted(connections, key=lambda each: each.num_bytes, reverse=True):
            if self._num_bytes <= most and each.num_unfinished <= MAX_UNFINISHED_BYTES:
                continue
            self._num_bytes -= each.num_bytes
            self._close(each, "unread" if each.num_unread > each.num_unfinished else "unfinished")

    def _close(self, connection: _Connection, why: str) -> None:
        if not connection.is_closing:
            self.closed[why] += 1
            connection.is_closing = True
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connections; ZeroMQ closes them."""
        for fd in list(self._by_fd):
            self.end(fd)
