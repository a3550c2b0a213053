"""Whether two separable sets of bytes share one: decided exactly, without listing them.

A view's bytes are a *comb*: ``base + Σ kᵢ·strideᵢ + [0, width)`` with ``0 <= kᵢ < countᵢ``. Whether two combs
meet is a question about one sum of differences, answered from the largest stride down: at each stride only
the few multiples that can still bring the sum near zero are followed. The pool's size is just another count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.core.state import State
from kvferry.core.view import View

MAX_WORK = 20_000
"""How many branches are followed before a layout counts as too tangled to be proved."""


class Tangled(Exception):
    """The question was not decided within ``MAX_WORK`` branches."""


@dataclass(frozen=True, slots=True)
class Comb:
    """``base + Σ kᵢ·strideᵢ + [0, width)``.

    >>> pages = Comb.of(0, [(4, 100), (8, 10)], width=2)
    >>> pages.stop, meet(pages, Comb.of(2, [(4, 100), (8, 10)], width=8)), pages.folds()
    (372, False, False)
    >>> meet(pages, Comb.of(5, [(4, 95)], width=1)), Comb.of(0, [(8, 2), (2, 8)], width=2).folds()
    (True, True)
    """

    base: int
    steps: tuple[tuple[int, int], ...]
    """(stride, count) of every step that is taken more than once, the largest stride first."""
    width: int

    @classmethod
    def of(cls, base: int, steps: Sequence[tuple[int, int]], width: int) -> Comb:
        """A comb of (count, stride) steps."""
        taken = sorted(((stride, count) for count, stride in steps if count > 1), reverse=True)
        return cls(base, tuple(taken), width)

    @classmethod
    def of_view(cls, view: View, state: State, num_blocks: int = 1) -> Comb:
        """All bytes of a view, over this many blocks."""
        steps = (*view.steps(), (num_blocks, view.block_stride))
        return cls.of(view.offset, steps, state.item_bytes)

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.base + sum(stride * (count - 1) for stride, count in self.steps) + self.width

    def folds(self) -> bool:
        """Whether two different cells of this comb share a byte."""
        reach = self.width
        for stride, count in reversed(self.steps):
            if stride < reach:
                break
            reach += stride * (count - 1)
        else:
            return False  # each stride clears all that lies below it: the common case
        return _Search(self.width, self.width).cells_collide(self.steps)


def meet(a: Comb, b: Comb) -> bool:
    """Whether a byte lies in both."""
    return _Search(a.width, b.width).near(b.base - a.base, _differences(a, b))


def meet_apart(a: Comb, b: Comb, stride: int, num_blocks_a: int, num_blocks_b: int) -> bool:
    """Whether some block of ``a`` and *another* block of ``b`` share a byte; the combs are those of block 0.

    Two groups that draw from one pool may share the bytes of a block, since a block belongs to one of them
    at a time, but not those of two blocks.
    """
    inner = _differences(a, b)
    sides = [(stride, 1 - num_blocks_a, -1), (stride, 1, num_blocks_b - 1)]
    search = _Search(a.width, b.width)
    return any(
        search.near(b.base - a.base, tuple(sorted((side, *inner), reverse=True)))
        for side in sides
        if side[1] <= side[2]
    )


Ranges = tuple[tuple[int, int, int], ...]
"""(stride, lowest multiple, highest multiple), the largest stride first."""


def _differences(a: Comb, b: Comb) -> Ranges:
    """How far a cell of ``b`` can be from a cell of ``a``, stride by stride."""
    steps = [(stride, 1 - count, 0) for stride, count in a.steps]
    steps += [(stride, 0, count - 1) for stride, count in b.steps]
    return _merged(steps)


def _merged(steps: Sequence[tuple[int, int, int]]) -> Ranges:
    """Multiples of one stride as one range, the largest stride first."""
    ranges: dict[int, tuple[int, int]] = {}
    for stride, low, high in steps:
        before = ranges.get(stride, (0, 0))
        ranges[stride] = (before[0] + low, before[1] + high)
    return tuple((stride, *ranges[stride]) for stride in sorted(ranges, reverse=True))


class _Search:
    """Looks for a sum of multiples that brings two cells within each other's width."""

    def __init__(self, width_a: int, width_b: int) -> None:
        self._low, self._high = 1 - width_b, width_a - 1
        self._work = 0

    def near(self, distance: int, ranges: Ranges) -> bool:
        """Whether ``distance`` plus some allowed sum of multiples makes the cells overlap."""
        self._work += 1
        if self._work > MAX_WORK:
            raise Tangled
        if not ranges:
            return self._low <= distance <= self._high
        (stride, low, high), rest = ranges[0], ranges[1:]
        reach_low = sum(s * lo for s, lo, _ in rest)
        reach_high = sum(s * hi for s, _, hi in rest)
        if stride == 0:
            return self.near(distance, rest)
        first = max(low, -((distance + reach_high - self._low) // stride))
        last = min(high, (self._high - distance - reach_low) // stride)
        return any(self.near(distance + k * stride, rest) for k in range(first, last + 1))

    def cells_collide(self, steps: Sequence[tuple[int, int]]) -> bool:
        """Whether some sum of differences, not all of them zero, brings two cells together."""
        for i, (stride, count) in enumerate(steps):
            # The first difference that is not zero is this one; by symmetry it is positive.
            rest = [(s, 1 - c, c - 1) for s, c in steps[i + 1 :]]
            if self.near(0, ((stride, 1, count - 1), *rest)):
                return True
        return False


def overlaps(combs: Sequence[Comb]) -> Iterator[tuple[int, int]]:
    """Pairs of combs, by index, that share a byte.

    Sorted by extent first, so that what lies apart is never compared; then all combs that take the same
    largest step are laid over one another (a page each), and the question is asked inside the page.
    """
    for cluster in _clusters(list(enumerate(combs))):
        yield from _overlaps_within(cluster, combs)


Indexed = list[tuple[int, Comb]]


def _clusters(items: Indexed) -> Iterator[Indexed]:
    """Groups of two or more whose extents overlap."""
    cluster: Indexed = []
    stop = -1
    for item in sorted(items, key=lambda pair: pair[1].base):
        if cluster and item[1].base >= stop:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        cluster.append(item)
        stop = max(stop, item[1].stop) if len(cluster) > 1 else item[1].stop
    if len(cluster) > 1:
        yield cluster


def _overlaps_within(cluster: Indexed, combs: Sequence[Comb]) -> Iterator[tuple[int, int]]:
    folded = _folded(cluster)
    if folded is not None:
        for inner in _clusters(folded):
            yield from _overlaps_within(inner, combs)
        return
    for at, (i, a) in enumerate(cluster):
        for j, b in cluster[at + 1 :]:
            # Laying pages over one another can only invent overlaps: ask about the real combs.
            if meet(a, b) and meet(combs[i], combs[j]):
                yield (min(i, j), max(i, j))


def _folded(cluster: Indexed) -> Indexed | None:
    """The combs modulo their common largest stride, or None if they have none or would straddle it."""
    strides = {comb.steps[0][0] if comb.steps else 0 for _, comb in cluster}
    stride = strides.pop()
    if strides or not stride:
        return None
    folded = [(i, Comb(comb.base % stride, comb.steps[1:], comb.width)) for i, comb in cluster]
    return folded if all(comb.stop <= stride for _, comb in folded) else None
