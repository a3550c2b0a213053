"""The seam between the plan and the wire: what a transport is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Rank
from kvferry.core.plan import Plan
from kvferry.core.select import Selection

Memory = Mapping[str, NDArray[np.uint8]]
"""A rank's memory: the bytes of each region, by name."""


class Transport(Protocol):
    """Moves the bytes of a selection. Both ranks of every run must be registered."""

    def register(self, engine: str, rank: Rank, memory: Memory) -> None:
        """Make the regions of one rank of an engine known."""
        ...

    def apply(self, plan: Plan, selection: Selection) -> None:
        """Read every run into the plan's destination rank and fill its zeros; return when all is in.

        ``selection`` must come from a route of this very plan.
        """
        ...
