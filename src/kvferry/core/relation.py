"""The source byte of each destination byte, from two views: the checker's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from kvferry.core.addresses import Ints, held_offsets
from kvferry.core.box import TOKEN
from kvferry.core.runs import Runs
from kvferry.core.view import AxisMap, View


@dataclass(frozen=True, eq=False)
class Relation:
    """Destination bytes with their source bytes: as few runs as possible, in destination order.

    >>> a, b, size = np.array([8, 0, 99]), np.array([108, 100, 50]), np.array([8, 8, 1])
    >>> Relation.of([(a, b, size)]).dst.tolist(), Relation.of([(a, b, size)]).num_bytes.tolist()
    ([50, 100], [1, 16])
    """

    src: Ints
    dst: Ints
    num_bytes: Ints

    @classmethod
    def of(cls, parts: Sequence[tuple[Ints, Ints, Ints]]) -> Relation:
        """Sorts runs, and merges those that are adjacent on both sides."""
        if not parts:
            return NOTHING
        src, dst, num_bytes = parts[0]
        if len(parts) > 1:
            src, dst, num_bytes = (np.concatenate([part[i] for part in parts]) for i in range(3))
        if (dst[1:] < dst[:-1]).any():
            order = np.argsort(dst, kind="stable")
            src, dst, num_bytes = src[order], dst[order], num_bytes[order]
        goes_on = (dst[1:] - dst[:-1] == num_bytes[:-1]) & (src[1:] - src[:-1] == num_bytes[:-1])
        if not goes_on.any():
            return cls(src, dst, num_bytes)
        first = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
        last = np.concatenate((first[1:], [len(dst)])) - 1
        return cls(src[first], dst[first], dst[last] + num_bytes[last] - dst[first])

    def first_outside(self, runs: Runs) -> int | None:
        """The destination of the first run that this relation does not contain, if any."""
        if not len(self.dst):
            return int(runs.dst[0]) if len(runs.dst) else None
        at = np.searchsorted(self.dst, runs.dst, side="right") - 1
        into = runs.dst - self.dst[at]
        is_inside = (at >= 0) & (runs.num_bytes > 0) & (into + runs.num_bytes <= self.num_bytes[at])
        is_inside &= runs.src - self.src[at] == into
        return None if is_inside.all() else int(runs.dst[~is_inside][0])

    def is_list(self, runs: Runs) -> bool:
        return len(runs.dst) == len(self.dst) and bool(
            (runs.dst == self.dst).all()
            and (runs.src == self.src).all()
            and (runs.num_bytes == self.num_bytes).all()
        )


NOTHING = Relation(*(np.zeros(0, np.int64) for _ in range(3)))


class _Stroke(NamedTuple):
    """Stretches of an axis, of one length, along which each side advances by one step."""

    length: int
    src_step: int
    dst_step: int
    src: Ints
    """The first offset of each."""
    dst: Ints


class CommonCells:
    """The common bytes of two views in some cells of their blocks, cached for layers of equal layout."""

    def __init__(self) -> None:
        # By identity: the manifests keep the axes alive, and many layers share them.
        self._held: dict[int, tuple[Ints, Ints]] = {}
        self._strokes: dict[tuple[int, int], list[_Stroke]] = {}

    def held(self, axis: AxisMap) -> tuple[Ints, Ints]:
        if id(axis) not in self._held:
            self._held[id(axis)] = held_offsets(axis)
        return self._held[id(axis)]

    def num_items(self, view: View) -> int:
        """Number of items of one cell on this rank."""
        total = 1
        for name, axis in view.axes:
            if name != TOKEN:
                total *= len(self.held(axis)[0])
        return total

    def relation(self, src: View, dst: View, item_bytes: int, cells: tuple[int, int, int]) -> Relation:
        """The common bytes of ``cells`` (first in the source block, first in the destination block, number),
        relative to the views' offsets.
        """
        dst_axes = dict(dst.axes)
        axes = [
            self._token_strokes(axis, dst_axes[name], *cells)
            if name == TOKEN
            else self._axis_strokes(axis, dst_axes[name])
            for name, axis in src.axes
        ]
        return Relation.of([_copies(strokes, item_bytes) for strokes in product(*axes)])

    def _axis_strokes(self, src: AxisMap, dst: AxisMap) -> list[_Stroke]:
        key = id(src), id(dst)
        if key not in self._strokes:
            self._strokes[key] = _common_strokes(*self.held(src), *self.held(dst))
        return self._strokes[key]

    def _token_strokes(
        self, src: AxisMap, dst: AxisMap, src_cell: int, dst_cell: int, num_cells: int
    ) -> list[_Stroke]:
        found: list[Ints] = []
        for axis, first in ((src, src_cell), (dst, dst_cell)):
            at, offsets = self.held(axis)
            start, stop = np.searchsorted(at, (first, first + num_cells))
            found += [at[start:stop] - first, offsets[start:stop]]
        return _common_strokes(*found)


def _common_strokes(src_at: Ints, src_offsets: Ints, dst_at: Ints, dst_offsets: Ints) -> list[_Stroke]:
    if np.array_equal(src_at, dst_at):
        return list(_strokes(src_offsets, dst_offsets))
    _, in_src, in_dst = np.intersect1d(src_at, dst_at, assume_unique=True, return_indices=True)
    return list(_strokes(src_offsets[in_src], dst_offsets[in_dst]))


def _strokes(src: Ints, dst: Ints) -> Iterator[_Stroke]:
    """An axis of common coordinates, cut where the step of either side changes."""
    if len(src) < 2:
        yield from [_Stroke(1, 0, 0, src, dst)] * len(src)
        return
    src_steps, dst_steps = src[1:] - src[:-1], dst[1:] - dst[:-1]
    breaks = np.flatnonzero((src_steps != src_steps[0]) | (dst_steps != dst_steps[0])) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(starts, append=len(src))
    for length in sorted(set(lengths.tolist())):
        some = starts[lengths == length]
        yield _Stroke(length, int(src_steps[0]), int(dst_steps[0]), src[some], dst[some])


def _copies(strokes: Sequence[_Stroke], item_bytes: int) -> tuple[Ints, Ints, Ints]:
    """The product of one stroke of each axis, as runs."""
    num_bytes, src, dst = item_bytes, np.zeros(1, np.int64), np.zeros(1, np.int64)
    for stroke in sorted(strokes, key=lambda stroke: (stroke.dst_step, stroke.src_step)):
        if stroke.src_step == stroke.dst_step == num_bytes:
            num_bytes *= stroke.length
        elif stroke.length > 1:
            along = np.arange(stroke.length)
            src = np.add.outer(along * stroke.src_step, src).ravel()
            dst = np.add.outer(along * stroke.dst_step, dst).ravel()
        src, dst = np.add.outer(stroke.src, src).ravel(), np.add.outer(stroke.dst, dst).ravel()
    return src, dst, np.full(len(dst), num_bytes)
