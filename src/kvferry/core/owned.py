"""The bytes of a rank by block: checks the bytes that a reader asks for against a ticket's blocks.

A reader sends patterns over blocks (``core.product``): runs inside block 0, and the distance of each block
from it. Runs are compared with the bytes of a block, and distances with the ticket's blocks, so the cost is
the sum of both numbers, not their product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.core.manifest import Manifest, Rank
from kvferry.core.request import BlockTable
from kvferry.core.runs import place
from kvferry.core.view import Ints, View

MAX_PLACE = 1 << 62
"""Larger than any place, so that sums of received numbers do not overflow."""


@dataclass(frozen=True, eq=False)
class Intervals:
    """Half-open intervals of places, sorted and not touching."""

    starts: Ints
    stops: Ints

    @classmethod
    def of(cls, starts: Ints, stops: Ints) -> Intervals:
        """Sorts intervals, and merges those that touch."""
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(stops[order])
        first = np.flatnonzero(np.concatenate(([True], starts[1:] > reach[:-1])))
        return cls(starts[first], reach[np.append(first[1:], len(starts)) - 1])

    def contain(self, places: Ints, num_bytes: Ints) -> bool:
        """Whether every run is inside one of the intervals."""
        at = np.searchsorted(self.starts, places, side="right") - 1
        return bool((at >= 0).all() and (places + num_bytes <= self.stops[at]).all())


class BlockBytes:
    """The bytes of one block of each group on a rank. Made once, for all tickets."""

    def __init__(self, manifest: Manifest, rank: Rank) -> None:
        self._manifest, self._rank = manifest, rank

    @cached_property
    def of_block_0(self) -> Mapping[tuple[str, int], Intervals]:
        """The places of block 0, by group and block stride."""
        by_stride: dict[tuple[str, int], list[tuple[int, Intervals]]] = defaultdict(list)
        alike: dict[tuple[int, int], Intervals] = {}
        for view in self._rank.views:
            item_bytes = self._manifest.state_by_name[view.state].item_bytes
            # Layers share their axes; the manifest keeps them alive.
            kind = id(view.axes), item_bytes
            if kind not in alike:
                alike[kind] = _cells(view, item_bytes)
            at = place(self._rank.region_index[view.region], view.offset)
            by_stride[view.group, view.block_stride].append((at, alike[kind]))
        return {
            key: Intervals.of(
                np.concatenate([at + cells.starts for at, cells in some]),
                np.concatenate([at + cells.stops for at, cells in some]),
            )
            for key, some in by_stride.items()
        }

    def of_blocks(self, tables: Mapping[str, BlockTable]) -> OwnedBytes:
        return OwnedBytes(self, {name: np.unique(table.block_ids) for name, table in tables.items()})


@dataclass(frozen=True, eq=False)
class OwnedBytes:
    blocks: BlockBytes
    block_ids: Mapping[str, Ints]
    """By group, sorted."""

    def refusal(self, places: Ints, num_bytes: Ints, steps: Ints) -> str:
        """The reason why a pattern is not inside these blocks; empty if it is."""
        if not len(places) or not len(steps) or (num_bytes <= 0).any():
            return "it names no bytes"
        if min(places.min(), steps.min()) < 0 or max(places.max(), num_bytes.max(), steps.max()) >= MAX_PLACE:
            return "it names invalid regions or offsets"
        has_blocks = False
        for (group, stride), cells in self.blocks.of_block_0.items():
            if group not in self.block_ids or not self._has(group, stride, steps):
                continue
            has_blocks = True
            if cells.contain(places, num_bytes):
                return ""
        return "it leaves its block" if has_blocks else "it names blocks of another request"

    def _has(self, group: str, stride: int, steps: Ints) -> bool:
        """Whether all steps are those of owned blocks."""
        ours, (ids, rest) = self.block_ids[group], np.divmod(steps, stride)
        if rest.any() or not len(ours):
            return False
        at = np.minimum(np.searchsorted(ours, ids), len(ours) - 1)
        return bool((ours[at] == ids).all())


def _cells(view: View, item_bytes: int) -> Intervals:
    """The bytes of one block of a view, relative to its first cell."""
    offsets, num_bytes = np.zeros(1, np.int64), item_bytes
    for number, stride in sorted(view.steps(), key=lambda step: step[1]):
        if stride == num_bytes:
            num_bytes *= number
        elif number > 1:
            offsets = np.add.outer(np.arange(number) * stride, offsets).ravel()
    return Intervals.of(offsets, offsets + num_bytes)
