"""Messages that were taken from the sockets and wait to be handed over: bounded, and fair between peers."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

MAX_BYTES = 32 << 20
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
        """Drop what a peer has waiting."""
        del self._refused[peer]
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self._num_bytes -= queue.num_bytes
