"""How an engine comes together: its ranks, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.wire.messages import Join


class Assembly(StrEnum):
    """How much of this engine is there."""

    GATHERING = "gathering"
    """Not every rank has joined."""
    MERGING = "merging"
    """All have; the engine's outline is being made of what they say."""
    WHOLE = "whole"
    """Readers are welcome."""


@dataclass(slots=True)
class JoinedRank:
    """One rank of this engine that joined."""

    reply_to: str
    join: Join

    def is_same(self, join: Join) -> bool:
        """Whether this is the rank that joined, with the memory that it had."""
        ours, theirs = ((each.transport, each.manifest, each.description) for each in (self.join, join))
        return ours == theirs
