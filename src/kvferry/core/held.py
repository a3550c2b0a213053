"""From which token on a request's block tables hold everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvferry.core.request import HOLE, BlockTable
from kvferry.core.state import Addressing, Group


def held_from(groups: Iterable[Group], tables: Mapping[str, BlockTable], num_tokens: int) -> int:
    """The first token from which on every table has a block for each token. Slots hold no tokens.

    >>> groups = Group("full", 9, 16), Group("window", 9, 32, window=40)
    >>> tables = {"full": BlockTable.of([1, 2, 3, 4, 5, 6, 7]), "window": BlockTable.of([HOLE, 3, 4, 5])}
    >>> held_from(groups, tables, 100)
    32
    """
    return max((_held_from(group, tables[group.name], num_tokens) for group in groups), default=0)


def _held_from(group: Group, table: BlockTable, num_tokens: int) -> int:
    match group.addressing:
        case Addressing.TABLE:
            holes = np.flatnonzero(table.block_ids == HOLE)
            num_behind = int(holes[-1]) + 1 if holes.size else 0
            return table.first_token + num_behind * group.tokens_per_block
        case Addressing.RING:
            return max(table.first_token, num_tokens - group.tokens_per_block)
        case Addressing.SLOT:
            return 0
