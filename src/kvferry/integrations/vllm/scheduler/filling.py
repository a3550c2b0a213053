"""Which blocks a load fills completely. vLLM registers blocks in its prefix cache by all of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from kvferry.core.request import HOLE, BlockTable
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing, Group


@dataclass(frozen=True)
class Filling:
    """What a load brings, group by group."""

    need: dict[str, Spans]
    """The tokens to load."""
    partial: dict[str, range]
    """Blocks that get only their last tokens, or none, by their places in the block table."""
    held_from: int
    """From this token on, the load leaves no cell of its blocks unfilled."""


def filling(
    groups: Iterable[Group],
    tables: Mapping[str, BlockTable],
    need: Mapping[str, Spans],
    num_tokens: int,
    num_kept: int,
    held_from: int | None,
) -> Filling:
    """Load whole blocks if the source holds all tokens from ``held_from`` on; else say which stay partial.

    ``num_kept`` tokens are here already. A window of 60 tokens needs 50 of the second block's 64 tokens:

    >>> window, table = Group("window", 9, 64, window=60), {"window": BlockTable.of([HOLE, 4, 7])}
    >>> need = {"window": (Span(78, 138),)}
    >>> filling([window], table, need, 138, 0, held_from=64).need
    {'window': (Span(start=64, stop=138),)}
    >>> filling([window], table, need, 138, 0, held_from=65).partial
    {'window': range(1, 2)}
    """
    wanted, partial, oldest = dict(need), dict[str, range](), 0
    for group in groups:
        if group.addressing is not Addressing.TABLE:
            continue
        size = group.tokens_per_block
        first = _first_own_block(tables[group.name], -(-num_kept // size))
        # A chunk of local attention may begin right behind the loaded tokens: nothing is needed then.
        start = need[group.name][0].start if need[group.name] else num_tokens
        if first * size >= start:
            continue
        if held_from is not None and first * size >= held_from:
            wanted[group.name] = (Span(first * size, num_tokens),)
        else:
            partial[group.name], oldest = range(first, -(-start // size)), max(oldest, start)
    return Filling(wanted, partial, oldest)


def _first_own_block(table: BlockTable, first: int) -> int:
    """The place of the first block from ``first`` on that is no hole."""
    own = np.flatnonzero(table.block_ids[first:] != HOLE)
    return first + int(own[0]) if own.size else len(table.block_ids)
