"""TCP connections of a channel: what each keeps of this process's memory, what is muted, what is closed.

ZeroMQ says neither how much waits for a peer nor how much of a message has arrived; it cannot stop reading
(see ``NO_BOUND``), and closes no connection that is in order. The kernel says both of its sockets. It drops
what a socket's filter does not let through, and the peer sends that again: so a connection is muted for a
while. ``shutdown`` is a hang-up like any other.
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
"""Strangers make room first, then the one that has been silent for longest."""
MAX_STRANGERS = 1024
"""Connections without a message so far: the caller may not know the secret. The oldest makes room."""
FILES_PER_STRANGER = 8
"""One stranger for so many files that the process may have: each takes two, at two listeners."""
MAX_UNREAD_BYTES = 32 << 20
"""Answers that one peer has not read: an engine's whole description, a few times over. More are dropped."""
MAX_UNFINISHED_BYTES = 12 << 20
"""What one peer has sent since its last message: more than a message has. An idle peer's heartbeats count,
too: they reach it after a day or more, and it connects again."""
MAX_UNTAKEN_BYTES = 1 << 20
"""What all peers have sent since the last time that all messages were taken. ZeroMQ needs twenty times as
much memory for short ones. Beyond it, whoever sent more than ``MUTED_BYTES`` is muted until all are taken,
and no connection is accepted."""
MUTED_BYTES = 4 << 10
MAX_BYTES = 128 << 20
"""Both, of all peers. The peers with the most of it are hung up on."""
MAX_SHUT = 4096
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
LOOK_SECONDS = 0.05
SECONDS_PER_CONNECTION = 5e-5
"""A look at one takes about a fiftieth of it."""

_NOTHING = struct.pack("=HBBI", 6, 0, 0, 0)
"""A filter of one instruction (``BPF_RET``): 0 bytes of each packet are let through."""

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
    has_spoken: bool = False
    """Whether a message was taken, and it was not looked at since."""
    num_unread: int = 0
    num_unfinished: int = 0
    is_closing: bool = False
    is_muted: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_unread + self.num_unfinished

    def look(self, *, is_drained: bool) -> None:
        """Learn how much the peer has read, and how much it has sent since its last message that was taken.

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
    """Have the kernel drop what arrives at a socket, or no more."""
    program = ctypes.create_string_buffer(_NOTHING, len(_NOTHING))
    filters = struct.pack("@HP", 1, ctypes.addressof(program))
    option = SO_ATTACH_FILTER if is_muted else SO_DETACH_FILTER
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, option, filters)


class TcpConnections:
    """Connections by the number of ZeroMQ's file descriptor. Belongs to the channel's thread."""

    def __init__(self, counts: Counter[str]) -> None:
        """``counts``: connections that were muted or closed, by why."""
        self._counts = counts
        self._by_fd: OrderedDict[int, _Connection] = OrderedDict()
        """The one that has been silent for longest is first."""
        self._by_peer: dict[str, int] = {}
        self._strangers: dict[int, None] = {}
        """Those of which no message was taken yet, the oldest first."""
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        is_unlimited = soft_limit == resource.RLIM_INFINITY
        self._max_strangers = (
            MAX_STRANGERS if is_unlimited else min(MAX_STRANGERS, soft_limit // FILES_PER_STRANGER)
        )
        self._next_look = 0.0
        self._num_bytes = 0
        """What all of them keep, at most."""
        self._shut: set[str] = set()
        """Peers that we hung up on. What they sent before may still be taken from ZeroMQ."""
        self.is_drained = True
        """Whether all messages were taken since the last look."""
        self._listening: socket.socket | None = None
        self._is_muted = False

    def __len__(self) -> int:
        return len(self._by_fd)

    def listen(self, fd: int) -> None:
        """Connections are accepted by a socket of ZeroMQ's."""
        self._listening = socket.socket(fileno=os.dup(fd))

    def begin(self, fd: int, port: int) -> None:
        """There is a connection; ``port``: its own, or its peer's."""
        self.end(fd)
        try:
            own = socket.socket(fileno=os.dup(fd))
        except OSError:  # it is gone, or there is no descriptor left
            return
        with contextlib.suppress(OSError):
            if port in (own.getsockname()[1], own.getpeername()[1]):  # its number may be another's by now
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
        self._strangers.pop(oldest, None)  # it is closed by and by
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
        """Note that a message of a peer has arrived; whether it is taken: not after we have hung up."""
        fd = self._by_peer.get(peer)
        if fd is not None:
            self._by_fd.move_to_end(fd)
            self._by_fd[fd].has_spoken = True
        return peer not in self._shut

    def may_send(self, peer: str, num_bytes: int, now: float) -> bool:
        """Whether a message of that length may wait for a peer; if so, it counts as handed over."""
        connection = self._by_fd.get(self._by_peer.get(peer, -1))
        if connection is None:
            return True  # it is gone, and ZeroMQ says so
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
        """Close a connection, and take no message of it any more."""
        self._shut_out(peer)
        connection = self._by_fd.get(self._by_peer.get(peer, -1))
        if connection is not None:
            self._close(connection, why)

    def seconds_to_look(self, now: float) -> float:
        return max(0.0, self._next_look - now) if self._by_fd else float("inf")

    def look(self, now: float) -> None:
        """Mute the connections whose messages come faster than they are taken, or no more; close those that
        keep too much, each or together.
        """
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
            _mute(connection.socket, is_muted=False)  # else the end would not come through
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        return True

    def forget(self, peer: str) -> None:
        """Let nothing more of a peer arrive; ZeroMQ closes the connection."""
        fd = self._by_peer.get(peer)
        if fd is not None:
            _mute(self._by_fd[fd].socket, is_muted=True)
            self.end(fd)

    def hang_up_on_all(self) -> None:
        """Accept no connection any more, and close all."""
        if self._listening is not None:
            _mute(self._listening, is_muted=True)
        for each in self._by_fd.values():
            self._close(each, "")

    def close(self) -> None:
        """Let go of the connections; ZeroMQ closes them."""
        for fd in list(self._by_fd):
            self.end(fd)
        if self._listening is not None:
            self._listening.close()
            self._listening = None


MAX_WAITING_BYTES = 32 << 20
"""Of all messages that wait. A peer has an equal share of it among those that have messages waiting."""
SMALL_BYTES = 64 << 10
"""A message of this length from a peer that has nothing waiting always has room."""
MESSAGE_BYTES = 512
"""What a message costs beside its own bytes."""
MAX_REFUSED_BYTES = 8 << 20
"""Of messages that had no room, while their peer was connected. A peer that has sent more is hung up on."""
MAX_REFUSED_PEERS = 4096


@dataclass(slots=True)
class _Queue:
    messages: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0


class Inbox:
    """Messages by peer; peers take turns. Counts bytes; every message weighs ``MESSAGE_BYTES`` more.

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
        """Of those peers that have messages waiting; the first one's turn is next."""
        self._num_bytes = 0
        self._refused: Counter[str] = Counter()
        """Bytes of messages that were not taken, by peer."""

    def __len__(self) -> int:
        """How many peers have messages waiting."""
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

    def refuse(self, peer: str, num_bytes: int, num_frames: int = 1) -> bool:
        """Count a message that is not taken; whether the peer has sent too many of them to be kept."""
        if len(self._refused) > MAX_REFUSED_PEERS:
            self._refused.clear()
        self._refused[peer] += num_bytes + num_frames * MESSAGE_BYTES
        return self._refused[peer] > MAX_REFUSED_BYTES

    def take(self, max_bytes: int = 256 << 10) -> list[tuple[str, bytes]]:
        """The next messages, about so many bytes of them and at least one, if any waits."""
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
