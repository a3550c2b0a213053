"""Messages that were taken from the sockets and wait to be handed over: bounded, and fair between peers."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

MAX_BYTES = 32 << 20
"""Of all messages that wait. A peer has an equal share of it among those that have messages waiting."""
SMALL_BYTES = 64 << 10
"""A message of this length from a peer that has nothing waiting always has room."""
MESSAGE_BYTES = 512
"""What a message costs beside its own bytes."""


@dataclass(slots=True)
class _Queue:
    messages: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    refused_bytes: int = 0


class Inbox:
    """Messages by peer; peers take turns. Counts bytes; every message weighs ``MESSAGE_BYTES`` more.

    >>> inbox = Inbox()
    >>> [inbox.has_room("loud", 20 << 20), inbox.put("loud", b"a"), inbox.put("loud", b"b"), inbox.put("quiet", b"c")]
    [True, None, None, None]
    >>> inbox.take(), len(inbox)
    ([('loud', b'a'), ('quiet', b'c'), ('loud', b'b')], 0)
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        """Of those peers that have messages waiting; the first one's turn is next."""
        self._num_bytes = 0

    def __len__(self) -> int:
        """How many peers have messages waiting."""
        return len(self._queues)

    def has_room(self, peer: str, num_bytes: int) -> bool:
        """Whether a message of that length may wait."""
        weight, queue = num_bytes + MESSAGE_BYTES, self._queues.get(peer)
        share = MAX_BYTES // (len(self._queues) + (queue is None))
        waiting = queue.num_bytes if queue is not None else 0
        if not waiting and num_bytes <= SMALL_BYTES:
            return True
        return waiting + weight <= share and self._num_bytes + weight <= MAX_BYTES

    def put(self, peer: str, data: bytes) -> None:
        """Let a message wait."""
        queue = self._queues.setdefault(peer, _Queue())
        weight = len(data) + MESSAGE_BYTES
        queue.messages.append(data)
        queue.num_bytes += weight
        self._num_bytes += weight

    def refuse(self, peer: str, num_bytes: int) -> bool:
        """Count a message that had no room; whether the peer has sent too many of them to be kept."""
        queue = self._queues.get(peer)
        if queue is None:
            return False
        queue.refused_bytes += num_bytes + MESSAGE_BYTES
        return queue.refused_bytes > MAX_BYTES // len(self._queues)

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
        """Drop what a peer has waiting."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self._num_bytes -= queue.num_bytes
