"""What a person may choose, apart from what works with it: `kvferry --help` loads this, and no numpy."""

from __future__ import annotations

from enum import StrEnum

MAX_RUNS_PER_BLOCK = 16_384
"""The default budget: runs of one state, per destination block and source rank."""


class Placement(StrEnum):
    """How the block ids of a request lie in the pool."""

    CONSECUTIVE = "consecutive"
    """One after another: a fresh pool."""
    SCATTERED = "scattered"
    """No two neighbours: a pool that has served for a while."""


class Slack(StrEnum):
    """What to do with the cells of a touched block that are neither needed nor kept.

    >>> list(Slack)
    [<Slack.CLEAR: 'clear'>, <Slack.LEAVE: 'leave'>]
    """

    CLEAR = "clear"
    """Copy them along where that makes fewer runs, else name them to be zeroed. Nothing stale is left."""
    LEAVE = "leave"
    """Leave them: the engine clears its blocks itself."""


class Way(StrEnum):
    """How the bytes of a remote rank come; DESIGN: the ways to move."""

    DIRECT = "direct"
    """The fabric reads the remote memory, run by run."""
    MAPPED = "mapped"
    """Its device memory is open in this process, and a kernel of ours copies."""
    PACKED = "packed"
    """The remote rank gathers them and sends them over a stream; we scatter them."""
    MEMORY = "memory"
    """Both ranks are in this process."""
