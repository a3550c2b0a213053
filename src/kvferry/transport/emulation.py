"""Reads that UCX cannot do by itself, and how to keep them from ending the process they read from.

Where nothing on the way can read another process's memory (TCP, or one host without CMA), UCX *emulates* a
read: it asks the source's process to send the bytes, in fragments of one TCP segment. If the reader dies
meanwhile, the second fragment that finds the connection broken, or the second request, ends the *source's*
process: ucs_fatal("unexpected error: Endpoint timeout"), or a segmentation fault. No setting of UCX mends
that, as of 1.23. A read of one fragment with no other behind it is safe.

So there are two ways to a peer, each with an agent of its own. The *direct* way may not emulate. The
*careful* way may, and asks for one fragment at a time; it is slow, and taken only where the first is closed.
"""

from __future__ import annotations

from enum import Enum

SETTING = "KVFERRY_EMULATED_READS"

SEGMENT_BYTES = 256 << 10
"""What our agents send and receive at once over TCP."""
UCX_SEGMENT_BYTES = 8 << 10
"""What UCX does if it is not told."""
HEADER_BYTES = 1 << 10
"""Room for what UCX puts before the bytes of a fragment: more than it needs."""


class EmulatedReads(Enum):
    """What is done about a peer that cannot be read directly: the setting, as users write it."""

    CAREFUL = "careful"
    """One fragment at a time."""
    FAST = "fast"
    """As UCX does it: a reader that dies may take its source with it."""
    REFUSE = "refuse"
    """Nothing: it is not connected to."""


class AgentMode(Enum):
    """What an agent may do to read a peer."""

    DIRECT = "direct"
    """Read by itself or not at all."""
    CAREFUL = "careful"
    """Have reads emulated, one fragment at a time."""
    FAST = "fast"
    """Whatever UCX likes best, at full pace."""


def fragment_bytes(segment_bytes: int) -> int:
    """The most bytes of memory that surely fit into one segment.

    >>> fragment_bytes(256 << 10) >> 10
    255
    """
    return max(segment_bytes - HEADER_BYTES, segment_bytes // 2)
