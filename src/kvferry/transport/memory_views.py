"""Memory of a rank as Python's buffers: long runs are sent from where they are, and received there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from kvferry.transport.pack import TermSide
from kvferry.transport.places import Places

LONG_BYTES = 8 << 10
"""Runs that are as long on average are not copied to a chunk before they are sent, nor after they were
received: the kernel takes them from where they are, and puts them to where they belong."""


class MemoryViews:
    """Memory of a rank as Python's buffers, made once for each region."""

    def __init__(self, memory: Places) -> None:
        self.memory = memory
        self._regions = [
            memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")
            for region in memory.regions
        ]

    def of(self, sides: Sequence[TermSide]) -> list[memoryview]:
        """The bytes that these name, in their order in a chunk; all of them were checked."""
        views = []
        for side in sides:
            places = np.add.outer(side.places, side.steps)
            index, offset = Places.split(places.ravel())
            lengths = np.repeat(side.num_bytes, len(side.steps))
            for i, at, num_bytes in zip(index.tolist(), offset.tolist(), lengths.tolist(), strict=True):
                views.append(self._regions[i][at : at + num_bytes])
        return views


def are_long(sides: Sequence[TermSide]) -> bool:
    """Whether runs are so long that no chunk is needed."""
    num_runs = sum(len(side.places) * len(side.steps) for side in sides)
    return num_runs > 0 and sum(side.total_bytes for side in sides) >= LONG_BYTES * num_runs
