"""Exact overlap tests for separable sets of bytes, without enumerating them.

A view's bytes are a *comb*: ``base + Σ kᵢ·strideᵢ + [0, width)`` with ``0 <= kᵢ < countᵢ``. Two combs overlap
if a sum of differences is near zero. The search goes from the largest stride down and follows only the few
multiples that can still bring the sum near zero. The size of the pool is just another count.

Only combs with overlapping extents are compared, and the work is linear in their number: a comb that overlaps
others is reported once, with one of them. A search that exceeds its limit raises ``Tangled``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, TypeVar

MAX_WORK = 20_000
"""Branches that one search may follow."""
WORK_PER_COMB = 200
"""Further branches for each comb of a search over many."""


class Tangled(Exception):
    """The search exceeded its number of branches."""


class _Work:
    """The number of branches that a search may still follow."""

    def __init__(self, num_combs: int = 0) -> None:
        self._left = MAX_WORK + WORK_PER_COMB * num_combs

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Tangled


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
    """(stride, count) of every step with a count above 1, the largest stride first."""
    width: int

    @classmethod
    def of(cls, base: int, steps: Sequence[tuple[int, int]], width: int) -> Comb:
        taken = sorted(((stride, count) for count, stride in steps if count > 1), reverse=True)
        return cls(base, tuple(taken), width)

    @property
    def stop(self) -> int:
        return self.base + sum(stride * (count - 1) for stride, count in self.steps) + self.width

    def folds(self) -> bool:
        """Whether two different cells of this comb share a byte."""
        reach = self.width
        for stride, count in reversed(self.steps):
            if stride < reach:
                break
            reach += stride * (count - 1)
        else:
            return False  # each stride exceeds the extent of all smaller ones: the common case
        return _Search(self.width, self.width, _Work()).cells_collide(self.steps)


def meet(a: Comb, b: Comb, work: _Work | None = None) -> bool:
    return _Search(a.width, b.width, work or _Work()).near(b.base - a.base, _differences(a, b))


class Blocks(NamedTuple):
    """The bytes of a view, block by block."""

    first: Comb
    """The bytes of block 0."""
    stride: int
    num_blocks: int

    @property
    def base(self) -> int:
        return self.first.base

    @property
    def stop(self) -> int:
        return self.first.stop + self.stride * (self.num_blocks - 1)


def meet_apart(a: Blocks, b: Blocks, work: _Work | None = None) -> bool:
    """Whether some block of ``a`` and *another* block of ``b`` share a byte.

    Two groups of one pool may share the bytes of a block, since a block belongs to one of them at a time, but
    not the bytes of two blocks. Their strides may differ, so all distances between two blocks with different
    ids are tested.
    """
    work = work or _Work()
    if b.num_blocks < a.num_blocks:
        a, b = b, a
    search = _Search(a.first.width, b.first.width, work)
    inner = _differences(a.first, b.first)
    distance = b.base - a.base
    low, high = search.reachable(distance, inner)
    return any(search.near(distance + shift, inner) for shift in _shifts(a, b, low, high, work))


def _shifts(a: Blocks, b: Blocks, low: int, high: int, work: _Work) -> Iterator[int]:
    """Each ``j·b.stride - i·a.stride`` in [low, high] of two blocks ``i != j``."""
    step = gcd(a.stride, b.stride)
    if (high - low) // step > a.num_blocks:
        yield from _shifts_by_block(a, b, low, high, work)
        return
    for shift in range(-(-low // step) * step, high + 1, step):
        work.spend()
        if _occurs(a.stride // step, b.stride // step, shift // step, a.num_blocks, b.num_blocks):
            yield shift


def _shifts_by_block(a: Blocks, b: Blocks, low: int, high: int, work: _Work) -> Iterator[int]:
    for i in range(a.num_blocks):
        first = max(0, -(-(low + i * a.stride) // b.stride))
        last = min(b.num_blocks - 1, (high + i * a.stride) // b.stride)
        work.spend()
        for j in range(first, last + 1):
            work.spend()
            if i != j:
                yield j * b.stride - i * a.stride


def _occurs(p: int, q: int, shift: int, num_i: int, num_j: int) -> bool:
    """Whether ``j·q - i·p = shift`` for some ``i != j``, 0 <= i < num_i, 0 <= j < num_j; p and q are coprime.

    >>> _occurs(2, 3, 1, 10, 10), _occurs(2, 3, 1, 2, 2), _occurs(1, 1, 0, 10, 10)
    (True, False, False)
    """
    # One solution, and then all of them: (i + k·q, j + k·p).
    j = shift * pow(q, -1, p) % p
    i = (j * q - shift) // p
    first = max(-(j // p), -(i // q))
    last = min((num_j - 1 - j) // p, (num_i - 1 - i) // q)
    num_solutions = max(0, last - first + 1)
    if p == q:
        return num_solutions > 0 and i != j
    k, rest = divmod(i - j, p - q)  # the one solution with i == j, if there is one
    return num_solutions > (rest == 0 and first <= k <= last)


Ranges = tuple[tuple[int, int, int], ...]
"""(stride, lowest multiple, highest multiple), the largest stride first."""


def _differences(a: Comb, b: Comb) -> Ranges:
    """The possible differences between a cell of ``b`` and a cell of ``a``, by stride."""
    ranges: dict[int, tuple[int, int]] = {}
    steps = [(stride, 1 - count, 0) for stride, count in a.steps if stride]
    steps += [(stride, 0, count - 1) for stride, count in b.steps if stride]
    for stride, low, high in steps:
        before = ranges.get(stride, (0, 0))
        ranges[stride] = (before[0] + low, before[1] + high)
    return tuple((stride, *ranges[stride]) for stride in sorted(ranges, reverse=True))


class _Search:
    """Searches for a sum of multiples that makes two cells overlap."""

    def __init__(self, width_a: int, width_b: int, work: _Work) -> None:
        self._low, self._high = 1 - width_b, width_a - 1
        self._work = work

    def reachable(self, distance: int, ranges: Ranges) -> tuple[int, int]:
        """The range of values that, added to ``distance``, can still make the cells overlap."""
        low = self._low - distance - sum(stride * most for stride, _, most in ranges)
        return low, self._high - distance - sum(stride * least for stride, least, _ in ranges)

    def near(self, distance: int, ranges: Ranges) -> bool:
        """Whether ``distance`` plus a sum of multiples makes the cells overlap."""
        self._work.spend()
        if not ranges:
            return self._low <= distance <= self._high
        (stride, low, high), rest = ranges[0], ranges[1:]
        if stride == 0:
            return self.near(distance, rest)
        if self._is_out_of_step(distance, ranges):
            return False
        least, most = self.reachable(distance, rest)
        first, last = max(low, -(-least // stride)), min(high, most // stride)
        return any(self.near(distance + k * stride, rest) for k in range(first, last + 1))

    def _is_out_of_step(self, distance: int, ranges: Ranges) -> bool:
        """Whether no multiple of the first strides' common divisor is within reach of the others."""
        low, high = self.reachable(distance, ranges)
        step = 0
        for stride, least, most in ranges:
            step = gcd(step, stride)
            low, high = low + stride * most, high + stride * least
            if stride and high // step * step < low:
                return True
        return False

    def cells_collide(self, steps: Sequence[tuple[int, int]]) -> bool:
        """Whether a sum of differences, not all zero, makes two cells overlap."""
        for i, (stride, count) in enumerate(steps):
            # The first difference that is not zero is this one; by symmetry it is positive.
            rest = [(s, 1 - c, c - 1) for s, c in steps[i + 1 :]]
            if self.near(0, ((stride, 1, count - 1), *rest)):
                return True
        return False


def overlaps(combs: Sequence[Comb], owners: Sequence[Hashable] | None = None) -> Iterator[tuple[int, int]]:
    """(i, j) for each comb j that shares a byte with a comb i. Each j comes once; the others are disjoint.

    Combs of one owner may share bytes; without owners, none may. Combs with disjoint extents are never
    compared; those whose largest strides have a common divisor are compared modulo that divisor (a page).

    >>> k, v, scales = (Comb.of(base, [(8, 100)], width) for base, width in ((0, 50), (50, 50), (90, 10)))
    >>> list(overlaps([k, v])), list(overlaps([k, v, scales]))
    ([], [(1, 2)])
    """
    yield from _overlaps_within(list(enumerate(combs)), combs, owners or range(len(combs)), _Work(len(combs)))


def overlaps_apart(views: Sequence[Blocks], owners: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """(i, j) for each view j with a block that shares a byte with another block of another owner's view i.

    Each j comes once; no two different blocks of the other views share a byte.
    """
    work = _Work(len(views))
    for cluster in _clusters(list(enumerate(views))):
        if len({owners[i] for i, _ in cluster}) > 1 and not _in_pages([view for _, view in cluster]):
            yield from _named_once(cluster, owners, lambda i, j: meet_apart(views[i], views[j], work))


def _in_pages(views: Sequence[Blocks]) -> bool:
    """Whether each block of every view is inside a page of the same size: the common case."""
    start, stride = min(view.base for view in views), views[0].stride
    return all(view.stride == stride and view.first.stop <= start + stride for view in views)


E = TypeVar("E", Comb, Blocks)
Indexed = list[tuple[int, Comb]]


def _clusters(items: Sequence[tuple[int, E]]) -> Iterator[list[tuple[int, E]]]:
    """Groups of two or more items with overlapping extents, each sorted by base."""
    cluster: list[tuple[int, E]] = []
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


def _overlaps_within(
    items: Indexed, combs: Sequence[Comb], owners: Sequence[Hashable], work: _Work
) -> Iterator[tuple[int, int]]:
    for cluster in _clusters(items):
        if len({owners[i] for i, _ in cluster}) == 1:
            continue
        folded = _folded(cluster)
        if folded is not None:
            yield from _overlaps_within(folded, combs, owners, work)
            continue
        # The comparison modulo a page can report false overlaps: compare the real combs.
        yield from _named_once(cluster, owners, lambda i, j: meet(combs[i], combs[j], work))


def _named_once(
    cluster: Sequence[tuple[int, E]],
    owners: Sequence[Hashable],
    clash: Callable[[int, int], bool],
) -> Iterator[tuple[int, int]]:
    """Report each item that clashes with an earlier good one, and leave it out of further comparisons."""
    good: dict[Hashable, list[tuple[int, E]]] = {}
    for j, extent in cluster:
        for owner in [owner for owner in good if owner != owners[j]]:
            found = next((i for i, other in good[owner] if other.stop > extent.base and clash(i, j)), None)
            if found is not None:
                yield found, j
                break
            good[owner] = [(i, other) for i, other in good[owner] if other.stop > extent.base]
            if not good[owner]:
                del good[owner]
        else:
            good.setdefault(owners[j], []).append((j, extent))


def _folded(cluster: Indexed) -> Indexed | None:
    """The combs modulo the common divisor of their largest strides, or None if one straddles it."""
    page = gcd(*(comb.steps[0][0] for _, comb in cluster if comb.steps))
    if not page:
        return None
    start = cluster[0][1].base
    folded = []
    for i, comb in cluster:
        inner = tuple((stride, count) for stride, count in comb.steps if stride % page)
        folded.append((i, Comb((comb.base - start) % page, inner, comb.width)))
    return folded if all(comb.stop <= page for _, comb in folded) else None
