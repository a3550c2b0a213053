"""TCP connections of a channel: limits their memory, mutes and closes them.

ZeroMQ does not report how much waits for a peer, or how much of a message has arrived; it cannot stop reading
(see ``NO_BOUND``), and closes no healthy connection. The kernel reports both. A socket filter mutes a
connection: the kernel drops its packets, and the peer sends them again. ``shutdown`` closes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

MAX_CONNECTIONS = 2048
"""Strangers make room first, then the connection that has been silent longest."""
MAX_STRANGERS = 1024
"""Connections without a message so far, perhaps without the secret. The oldest makes room."""
FILES_PER_STRANGER = 8
"""One stranger per so many of the process's open files; each takes two, at two listeners."""
MAX_UNREAD_BYTES = 32 << 20
"""Answers that one peer has not read, several manifests; more are dropped."""
MAX_UNFINISHED_BYTES = 12 << 20
"""Bytes of one peer since its last message: more than one message. Heartbeats of an idle peer count, too, and
reach the limit after a day or more; then it connects again."""
MAX_UNTAKEN_BYTES = 1 << 20
"""Bytes of all peers since all messages were last taken; ZeroMQ needs up to twenty times as much memory.
Above it, peers that sent more than ``MUTED_BYTES`` are muted, and no connection is accepted, until all
messages are taken."""
MUTED_BYTES = 4 << 10
MAX_BYTES = 128 << 20
"""Unread and unfinished bytes of all peers. Above it, the largest connections are closed."""
MAX_SHUT = 4096
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
LOOK_SECONDS = 0.05
SECONDS_PER_CONNECTION = 5e-5
"""About fifty times the time of one check."""

_NOTHING = struct.pack("=HBBI", 6, 0, 0, 0)
"""A filter of one instruction (``BPF_RET``), which passes 0 bytes of each packet."""

_ACKED_RECEIVED = struct.Struct("=QQ")
_ACKED_OFFSET = 120
"""Of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in the kernel's ``tcp_info``."""


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    """A duplicate of ZeroMQ's."""
    peer: str = ""
    """Empty until its first message."""
    num_handed: int = 0
    """Bytes sent to it since it had last read everything."""
    acked_then: int = 0
    received_then: int = 0
    has_spoken: bool = False
    """Whether a message was taken since the last ``look``."""
    num_unread: int = 0
    num_unfinished: int = 0
    is_closing: bool = False
    is_muted: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_unread + self.num_unfinished

    def look(self, *, is_drained: bool) -> None:
        """Count what the peer has not read, and what it has sent since its last message that was taken.

        ``is_drained``: all messages were taken since the last look.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        acked, received = _ACKED_RECEIVED.unpack_from(info, _ACKED_OFFSET)
        self.num_unread = max(0, self.num_handed - (acked - self.acked_then))
        if not self.num_unread:
            self.num_handed, self.acked_then = 0, acked
        if self.has_spoken and is_drained:
            self.has_spoken, self.received_then = False, received
        self.num_unfinished = received - self.received_then


def _mute(one: socket.socket, *, is_muted: bool) -> None:
    program = ctypes.create_string_buffer(_NOTHING, len(_NOTHING))
    filters = struct.pack("@HP", 1, ctypes.addressof(program))
    option = SO_ATTACH_FILTER if is_muted else SO_DETACH_FILTER
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, option, filters)


class TcpConnections:
    """Connections by ZeroMQ's file descriptor. Belongs to the channel's thread."""

    def __init__(self, counts: Counter[str]) -> None:
        """``counts``: of muted and closed connections, by reason."""
        self._counts = counts
        self._by_fd: OrderedDict[int, _Connection] = OrderedDict()
        """The one that has been silent longest is first."""
        self._by_peer: dict[str, int] = {}
        self._strangers: dict[int, None] = {}
        """Connections without a message, the oldest first."""
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = [MAX_STRANGERS, num_files // FILES_PER_STRANGER]
        self._max_strangers = MAX_STRANGERS if num_files == resource.RLIM_INFINITY else min(limits)
        self._next_look = 0.0
        self._num_bytes = 0
        """Upper bound of all unread and unfinished bytes."""
        self._shut: set[str] = set()
        """Closed peers, of which ZeroMQ may still have messages."""
        self.is_drained = True
        """Whether all messages were taken since the last look."""
        self._listening: socket.socket | None = None
        self._is_muted = False

    def __len__(self) -> int:
        return len(self._by_fd)

    def listen(self, fd: int) -> None:
        """ZeroMQ accepts connections on this socket."""
        self._listening = socket.socket(fileno=os.dup(fd))

    def begin(self, fd: int, port: int) -> None:
        """A connection was made; ``port``: its own, or its peer's."""
        self.end(fd)
        try:
            own = socket.socket(fileno=os.dup(fd))
        except OSError:  # it is closed, or there are no descriptors left
            return
        with contextlib.suppress(OSError):
            if port in (
                own.getsockname()[1],
                own.getpeername()[1],
            ):  # the number may be another socket's by now
                self._make_room()
                self._by_fd[fd] = _Connection(own)
                self._strangers[fd] = None
                return
        own.close()

    def _make_room(self) -> None:
        is_full = len(self._by_fd) >= MAX_CONNECTIONS
        if self._strangers and (is_full or len(self._strangers) >= self._max_strangers):
            oldest = next(iter(self._strangers))
        elif is_full:
            oldest = next(iter(self._by_fd))
        else:
            return
        self._strangers.pop(oldest, None)  # ``end`` comes later
        self._by_fd.move_to_end(oldest)
        self._close(self._by_fd[oldest], "silent")

    def end(self, fd: int) -> None:
        connection = self._by_fd.pop(fd, None)
        self._strangers.pop(fd, None)
        if connection is not None:
            self._by_peer.pop(connection.peer, None)
            connection.socket.close()

    def introduce(self, peer: str, fd: int) -> None:
        if fd in self._by_fd:
            self._strangers.pop(fd, None)
            self._by_peer.pop(self._by_fd[fd].peer, None)
            self._by_fd[fd].peer = peer
            self._by_peer[peer] = fd

    def is_known(self, peer: str) -> bool:
        return peer in self._by_peer

    def is_heard(self, peer: str) -> bool:
        """Note a message of a peer; returns False after the connection was closed here."""
        fd = self._by_peer.get(peer)
        if fd is not None:
            self._by_fd.move_to_end(fd)
            self._by_fd[fd].has_spoken = True
        return peer not in self._shut

    def may_send(self, peer: str, num_bytes: int, now: float) -> bool:
        """Whether a peer has room for a message of that length, which then counts as sent."""
        connection = self._by_fd.get(self._by_peer.get(peer, -1))
        if connection is None:
            return True  # it is gone, which ZeroMQ reports
        if self._num_bytes + num_bytes > MAX_BYTES:
            self.look(now)
        if connection.num_handed + num_bytes > MAX_UNREAD_BYTES:
            connection.look(is_drained=False)
        if connection.is_closing or connection.num_unread + num_bytes > MAX_UNREAD_BYTES:
            return False
        connection.num_handed += num_bytes
        connection.num_unread += num_bytes
        self._num_bytes += num_bytes
        return True

    def hang_up(self, peer: str, why: str) -> None:
        """Close a connection, and ignore its messages."""
        self._shut_out(peer)
        connection = self._by_fd.get(self._by_peer.get(peer, -1))
        if connection is not None:
            self._close(connection, why)

    def seconds_to_look(self, now: float) -> float:
        return max(0.0, self._next_look - now) if self._by_fd else float("inf")

    def look(self, now: float) -> None:
        """Mute connections that send faster than messages are taken; close those that need much memory."""
        is_drained, self.is_drained = self.is_drained, False
        self._next_look = now + max(LOOK_SECONDS, SECONDS_PER_CONNECTION * len(self._by_fd))
        connections = [each for each in self._by_fd.values() if not each.is_closing]
        for each in connections:
            each.look(is_drained=is_drained)
            if each.num_unfinished > MAX_UNFINISHED_BYTES:
                self._close(each, "unfinished")
        self._mute_loud(connections, is_drained=is_drained)
        self._num_bytes = sum(each.num_bytes for each in connections if not each.is_closing)
        if self._num_bytes > MAX_BYTES:
            for each in sorted(connections, key=lambda each: each.num_bytes, reverse=True):
                self._num_bytes -= each.num_bytes * self._close(each, "memory")
                if self._num_bytes <= MAX_BYTES // 2:
                    break

    def _mute_loud(self, connections: list[_Connection], *, is_drained: bool) -> None:
        if is_drained:
            if self._is_muted:
                self._is_muted = False
                for each in connections:
                    if each.is_muted:
                        each.is_muted = False
                        _mute(each.socket, is_muted=False)
                if self._listening is not None:
                    _mute(self._listening, is_muted=False)
        elif sum(each.num_unfinished for each in connections) > MAX_UNTAKEN_BYTES:
            if self._listening is not None and not self._is_muted:
                _mute(self._listening, is_muted=True)
            self._is_muted = True
            for each in connections:
                if each.num_unfinished > MUTED_BYTES and not each.is_muted:
                    each.is_muted = True
                    self._counts["muted"] += 1
                    _mute(each.socket, is_muted=True)

    def _shut_out(self, peer: str) -> None:
        if len(self._shut) > MAX_SHUT:
            self._shut.clear()
        self._shut.add(peer)

    def _close(self, connection: _Connection, why: str) -> bool:
        if connection.is_closing:
            return False
        if why:
            self._counts[why] += 1
        connection.is_closing = True
        self._shut_out(connection.peer)
        if connection.is_muted:
            _mute(connection.socket, is_muted=False)  # for the closing handshake
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        return True

    def forget(self, peer: str) -> None:
        """Mute a peer whose connection ZeroMQ closes."""
        fd = self._by_peer.get(peer)
        if fd is not None:
            _mute(self._by_fd[fd].socket, is_muted=True)
            self.end(fd)

    def hang_up_on_all(self) -> None:
        """Accept no more connections, and close all."""
        if self._listening is not None:
            _mute(self._listening, is_muted=True)
        for each in self._by_fd.values():
            self._close(each, "")

    def close(self) -> None:
        """Release the duplicates; ZeroMQ closes the connections."""
        for fd in list(self._by_fd):
            self.end(fd)
        if self._listening is not None:
            self._listening.close()
            self._listening = None


MAX_WAITING_BYTES = 32 << 20
"""Of all waiting messages; peers with waiting messages have equal shares."""
SMALL_BYTES = 64 << 10
"""The first message of a peer, up to this length, always has room."""
MESSAGE_BYTES = 512
"""Memory of a message beside its own bytes."""
MAX_REFUSED_BYTES = 8 << 20
"""Dropped messages of one connected peer; after more, it is disconnected."""
MAX_REFUSED_PEERS = 4096


@dataclass(slots=True)
class _Queue:
    messages: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0


class Inbox:
    """Waiting messages; peers take turns.

    >>> inbox = Inbox()
    >>> for peer, data in (("loud", b"a"), ("loud", b"b"), ("quiet", b"c")):
    ...     inbox.put(peer, data)
    >>> inbox.has_room("loud", 20 << 20), inbox.has_room("third", 1 << 20)
    (False, True)
    >>> inbox.take(), len(inbox)
    ([('loud', b'a'), ('quiet', b'c'), ('loud', b'b')], 0)
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        """Of peers with waiting messages; the first is next."""
        self._num_bytes = 0
        self._refused: Counter[str] = Counter()
        """Bytes of dropped messages by peer."""

    def __len__(self) -> int:
        """The number of peers with waiting messages."""
        return len(self._queues)

    def has_room(self, peer: str, num_bytes: int) -> bool:
        weight, queue = num_bytes + MESSAGE_BYTES, self._queues.get(peer)
        share = MAX_WAITING_BYTES // (len(self._queues) + (queue is None))
        waiting = queue.num_bytes if queue is not None else 0
        if not waiting and num_bytes <= SMALL_BYTES:
            return True
        return waiting + weight <= share and self._num_bytes + weight <= MAX_WAITING_BYTES

    def put(self, peer: str, data: bytes) -> None:
        queue = self._queues.setdefault(peer, _Queue())
        weight = len(data) + MESSAGE_BYTES
        queue.messages.append(data)
        queue.num_bytes += weight
        self._num_bytes += weight

    def refuse(self, peer: str, num_bytes: int, num_frames: int) -> bool:
        """Count a dropped message; returns whether to disconnect the peer."""
        if len(self._refused) > MAX_REFUSED_PEERS:
            self._refused.clear()
        self._refused[peer] += num_bytes + num_frames * MESSAGE_BYTES
        return self._refused[peer] > MAX_REFUSED_BYTES

    def take(self, max_bytes: int = 256 << 10) -> list[tuple[str, bytes]]:
        """The next messages: about so many bytes, at least one message."""
        taken: list[tuple[str, bytes]] = []
        while self._queues and max_bytes > 0:
            peer, queue = next(iter(self._queues.items()))
            data = queue.messages.popleft()
            weight = len(data) + MESSAGE_BYTES
            max_bytes -= weight
            queue.num_bytes -= weight
            self._num_bytes -= weight
            taken.append((peer, data))
            if queue.messages:
                self._queues.move_to_end(peer)
            else:
                del self._queues[peer]
        return taken

    def forget(self, peer: str) -> None:
        del self._refused[peer]
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self._num_bytes -= queue.num_bytes
