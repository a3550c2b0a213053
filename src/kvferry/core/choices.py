"""Options of the command line, in a module without numpy, so that `kvferry --help` starts fast."""

from __future__ import annotations

from enum import StrEnum

MAX_RUNS_PER_BLOCK = 16_384
"""The default budget: runs of one state, per destination block and source rank."""


class Placement(StrEnum):
    """The order of a request's block ids in the pool."""

    CONSECUTIVE = "consecutive"
    """Consecutive ids: a fresh pool."""
    SCATTERED = "scattered"
    """No two adjacent ids: a pool that has been in use for a while."""


class Slack(StrEnum):
    """Handling of the cells of a touched block that are neither needed nor kept."""

    CLEAR = "clear"
    """Copy them along if that makes fewer runs, otherwise list them for zeroing. No stale data remains."""
    LEAVE = "leave"
    """Leave them: the engine clears its own blocks."""


class Way(StrEnum):
    """How the bytes of a remote rank are transferred."""

    DIRECT = "direct"
    """The network reads the remote memory, run by run."""
    MAPPED = "mapped"
    """The remote device memory is mapped into this process, and a kernel copies."""
    PACKED = "packed"
    """The remote rank gathers the bytes and sends them over a stream; this rank scatters them."""
    MEMORY = "memory"
    """Both ranks are in this process."""
