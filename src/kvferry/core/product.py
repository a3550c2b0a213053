"""Runs as products: patterns over pairs of blocks, expanded into a list on demand.

A request moves the same pattern between many pairs of blocks. The expanded list has pattern × pairs entries,
a million for a long prompt in small cells; the product has pattern + pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvferry.core.check import Claim, check_list
from kvferry.core.runs import NO_RUNS, Runs, coalesce
from kvferry.core.view import Ints


@dataclass(frozen=True, eq=False)
class Term:
    """A pattern, repeated for every pair of blocks: run ``(p, b)`` is run ``p``, moved by the steps of ``b``.

    >>> pattern = Runs(np.array([0, 64]), np.array([100, 200]), np.array([8, 8]))
    >>> term = Term(pattern, np.array([[0, 1000], [0, 5000]]))
    >>> term.num_runs, term.total_bytes, [run[1] for run in term.runs()]
    (4, 32, [0, 1000, 64, 1064])
    """

    pattern: Runs
    steps: Ints
    """The distances of each pair's blocks from block 0, in bytes: a source and a destination row."""
    block_bytes: int = 0
    """The bytes of a block if every run of the pattern is a whole block on both sides; adjacent blocks then
    merge into one run.

    >>> runs = Runs(np.array([0]), np.array([64]), np.array([16]))
    >>> list(Term(runs, np.array([[0, 96, 112, 128], [32, 0, 16, 32]]), 16).runs())
    [(0, 0, 0, 96, 16), (0, 96, 0, 64, 48)]
    """
    claim: Claim | None = None
    """Its origin, for the checker; None for a plain list."""

    @property
    def num_runs(self) -> int:
        """Number of runs, adjacent blocks merged."""
        has_merged = self.block_bytes and self.num_pairs
        return len(self.pattern) * (len(self._heads) if has_merged else self.num_pairs)

    @property
    def num_pairs(self) -> int:
        return int(self.steps.shape[1])

    @property
    def total_bytes(self) -> int:
        return self.pattern.total_bytes * self.num_pairs

    def runs(self) -> Runs:
        """The expanded list, ordered by the runs of the pattern, then by pair."""
        steps, counts = self.steps, np.ones(self.num_pairs, np.int64)
        if self.block_bytes and self.num_pairs:
            counts = np.diff(self._heads, append=self.num_pairs)
            steps = steps[:, self._heads]
        return Runs(
            np.add.outer(self.pattern.src, steps[0]).ravel(),
            np.add.outer(self.pattern.dst, steps[1]).ravel(),
            np.multiply.outer(self.pattern.num_bytes, counts).ravel(),
        )

    @cached_property
    def _heads(self) -> Ints:
        """The pairs that are not adjacent to the pair before them."""
        is_next = self.steps[:, 1:] - self.steps[:, :-1] == self.block_bytes
        return np.concatenate(([0], np.flatnonzero(~(is_next[0] & is_next[1])) + 1))


@dataclass(frozen=True, eq=False)
class Product:
    """The transfer of one request from one source rank: terms that write disjoint bytes.

    >>> Product.of(Runs(np.array([0]), np.array([8]), np.array([4]))).num_runs, Product(()).total_bytes
    (1, 0)
    """

    terms: tuple[Term, ...]

    @classmethod
    def of(cls, runs: Runs | Product) -> Product:
        """A list of runs as one pattern and one pair; a product is returned unchanged."""
        if isinstance(runs, Product):
            return runs
        return cls((Term(runs, np.zeros((2, 1), np.int64)),) if len(runs) else ())

    @property
    def num_runs(self) -> int:
        """Number of runs of its terms, before adjacent runs are merged."""
        return sum(term.num_runs for term in self.terms)

    @property
    def total_bytes(self) -> int:
        return sum(term.total_bytes for term in self.terms)

    @cached_property
    def runs(self) -> Runs:
        """The expanded list; runs that are adjacent on both sides are merged."""
        runs = merged(term.runs() for term in self.terms)
        check_list(self.terms, runs)
        return runs


def listed(runs: Runs | Product) -> Runs:
    """The expanded list of a product; a list is returned unchanged."""
    return runs.runs if isinstance(runs, Product) else runs


def merged(lists: Iterable[Runs]) -> Runs:
    """One list of several, adjacent runs merged."""
    some = [runs for runs in lists if len(runs)]
    if not some:
        return NO_RUNS
    columns = zip(*((runs.src, runs.dst, runs.num_bytes) for runs in some), strict=True)
    return coalesce(*(np.concatenate(column) if len(some) > 1 else column[0] for column in columns))
