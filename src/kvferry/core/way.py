"""The ways to move bytes from one rank to another."""

from __future__ import annotations

from enum import StrEnum


class Way(StrEnum):
    """How the bytes of a remote rank come; DESIGN: the ways to move.

    >>> Way("mapped") is Way.MAPPED
    True
    """

    DIRECT = "direct"
    """The fabric reads the remote memory, run by run."""
    MAPPED = "mapped"
    """Its device memory is open in this process, and a kernel of ours copies."""
    PACKED = "packed"
    """The remote rank gathers them and sends them over a stream; we scatter them."""
    MEMORY = "memory"
    """Both ranks are in this process."""
