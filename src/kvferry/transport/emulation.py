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

import os
import re
from enum import Enum
from typing import NamedTuple

from kvferry.errors import TransportError
from kvferry.transport.descriptors import FULL_PACE, Pace

SETTING = "KVFERRY_EMULATED_READS"
UCX_EMULATES = "UCX_PROTO_EMULATION_ENABLE"
UCX_SENT, UCX_RECEIVED = "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"

SEGMENT_BYTES = 256 << 10
"""What our agents send and receive at once over TCP."""
UCX_SEGMENT_BYTES = 8 << 10
"""What UCX does if it is not told."""
HEADER_BYTES = 1 << 10
"""Room for what UCX puts before the bytes of a fragment: more than it needs."""

UNITS = {unit: 1 << (10 * i) for i, unit in enumerate(("", "k", "m", "g"))}


class EmulatedReads(Enum):
    """What is done about a peer that cannot be read directly: the setting, as users write it."""

    CAREFUL = "careful"
    """One fragment at a time."""
    FAST = "fast"
    """As UCX does it: a reader that dies may take its source with it."""
    REFUSE = "refuse"
    """Nothing: it is not connected to."""

    @classmethod
    def from_environment(cls) -> EmulatedReads:
        """The setting, checked beside UCX's own, which NIXL lets win over what an agent is made with."""
        value = os.environ.get(SETTING, cls.CAREFUL.value)
        try:
            chosen = cls(value)
        except ValueError:
            choices = ", ".join(choice.value for choice in cls)
            raise TransportError("bad-setting", f"{SETTING}={value!r}: one of {choices}") from None
        ucx = os.environ.get(UCX_EMULATES, "")
        if ucx.lower() in ("n", "no", "0", "off"):
            return cls.REFUSE
        if ucx and chosen is not cls.FAST:
            raise TransportError(
                "bad-setting",
                f"{UCX_EMULATES}={ucx!r} has UCX emulate reads unasked, and {SETTING} is {value!r}: unset the"
                f" first, or set the second to {cls.FAST.value!r}",
            )
        return chosen


class Way(Enum):
    """What an agent may do to read a peer."""

    DIRECT = "direct"
    """Read by itself or not at all."""
    CAREFUL = "careful"
    """Have reads emulated, one fragment at a time."""
    FAST = "fast"
    """Whatever UCX likes best, at full pace."""

    @property
    def engine_config(self) -> str:
        """Settings for NIXL's UCX engine; those that the environment has, too, are left as they are there."""
        segments = Segments.from_environment()
        settings = {UCX_SENT: str(segments.sent), UCX_RECEIVED: str(segments.received)}
        if self is Way.DIRECT:
            settings[UCX_EMULATES] = "n"
        if self is Way.CAREFUL:
            # Where InfiniBand cannot read memory, it could still carry messages, but in other fragments.
            settings["UCX_TLS"] = "^ib"
        return ",".join(f"{name.removeprefix('UCX_')}={value}" for name, value in settings.items())

    def pace(self, src_segment_bytes: int) -> Pace:
        """How to read from an agent that sends such segments; 0 if nobody told it which."""
        received, sent = Segments.from_environment().received, src_segment_bytes or UCX_SEGMENT_BYTES
        if self is Way.CAREFUL:
            return Pace.careful(fragment_bytes(min(received, sent)))
        if self is Way.FAST and received < sent:
            # UCX does not negotiate: the first long segment breaks the connection, and ends the source.
            raise TransportError(
                "segments", f"it sends segments of {sent} bytes, {UCX_RECEIVED} has room for {received}"
            )
        return FULL_PACE


def fragment_bytes(segment_bytes: int) -> int:
    """The most bytes of memory that surely fit into one segment.

    >>> fragment_bytes(256 << 10) >> 10
    255
    """
    return max(segment_bytes - HEADER_BYTES, segment_bytes // 2)


class Segments(NamedTuple):
    """The most bytes that an agent sends, and has room for, at once over TCP."""

    sent: int
    received: int

    @classmethod
    def from_environment(cls) -> Segments:
        """Those of an agent made here and now. UCX wants no more to be sent than there is room for."""
        sent, received = _bytes_in(UCX_SENT), _bytes_in(UCX_RECEIVED)
        sent = sent or min(SEGMENT_BYTES, received or SEGMENT_BYTES)
        return cls(sent, received or max(SEGMENT_BYTES, sent))


def _bytes_in(name: str) -> int | None:
    """A number of bytes of the environment, the way UCX reads it ('8k', '1M', '65536', '64KB')."""
    if name not in os.environ:
        return None
    found = re.fullmatch(r"([1-9]\d*)([kmg]?)b?", os.environ[name].lower())
    if not found:
        raise TransportError("bad-setting", f"{name}={os.environ[name]!r}: not a number of bytes")
    return int(found[1]) * UNITS[found[2]]
