"""How much may be on its way to each peer: a peer that asks for much and reads nothing costs little."""

from __future__ import annotations

import threading
from collections import OrderedDict

BURST_BYTES = 32 << 20
"""What a peer may be sent at once: an engine's whole description, a few times over."""
BYTES_PER_SECOND = 2 << 20
"""What it may be sent after that. A connection that nobody reads is given up by its heartbeats, with all that
waits in it."""
MAX_PEERS = 4096
"""Peers that are kept account of; the least recently answered goes first."""


class Budget:
    """What may still be sent to each peer. Time is an argument; any thread may ask.

    >>> budget = Budget()
    >>> [budget.take("peer", 12 << 20, now=0.0) for _ in range(3)], budget.take("another", 12 << 20, now=0.0)
    ([True, True, False], True)
    >>> budget.take("peer", 12 << 20, now=1.0), budget.take("peer", 12 << 20, now=2.0)
    (False, True)
    """

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By peer: how many bytes it may be sent, as of when."""
        self._lock = threading.Lock()

    def take(self, peer: str, num_bytes: int, now: float) -> bool:
        """Whether so much may be sent to a peer now; if so, it counts as sent."""
        with self._lock:
            left, since = self._left.pop(peer, (float(BURST_BYTES), now))
            left = min(float(BURST_BYTES), left + (now - since) * BYTES_PER_SECOND)
            is_granted = num_bytes <= left
            self._left[peer] = (left - num_bytes * is_granted, now)
            if len(self._left) > MAX_PEERS:
                self._left.popitem(last=False)
            return is_granted
