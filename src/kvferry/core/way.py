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
    """The remote rank gathers them into its ring, which the fabric reads chunk by chunk; we scatter them."""
    EMULATED = "emulated"
    """The fabric has the remote process send the bytes, a fragment at a time: slow."""
    MEMORY = "memory"
    """Both ranks are in this process."""
