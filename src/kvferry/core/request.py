"""Requests: block tables of both sides, and the tokens that the destination needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.span import Span, Spans, normal
from kvferry.core.state import Addressing, Group
from kvferry.core.view import Ints
from kvferry.errors import SpecError

HOLE = -1
"""The block id of a null block (outside the window, never allocated)."""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """A group's blocks of one request, in the order of the tokens.

    Block ``i`` holds the tokens from ``first_token + i * tokens_per_block`` on. A slot group has one id, the
    slot. A ring has one id, its block; ``first_token`` is a token in cell 0, in a source ring the oldest one.

    >>> BlockTable.of([7, 3, HOLE], first_token=32).block_ids
    array([ 7,  3, -1])
    """

    block_ids: Ints
    first_token: int = 0

    def __post_init__(self) -> None:
        ids: NDArray[Any] = np.empty(())
        with suppress(ValueError):  # a ragged list
            ids = np.asarray(self.block_ids)
        if not ids.size or (ids.dtype.kind in "iu" and int(ids.max()) < 1 << 63):
            ids = ids.astype(np.int64)  # a copy
            ids.setflags(write=False)
        is_list = ids.ndim == 1 and ids.dtype == np.int64 and not (ids < HOLE).any()
        if not is_list or type(self.first_token) is not int or self.first_token < 0:
            raise SpecError(
                f"a block table is a list of ids >= 0 (or {HOLE} for a hole) and a first token >= 0,"
                f" got {self.block_ids!r:.80} from {self.first_token!r}"
            )
        object.__setattr__(self, "block_ids", ids)

    @classmethod
    def of(cls, block_ids: Sequence[int] | Ints, first_token: int = 0) -> BlockTable:
        return cls(block_ids, first_token)  # type: ignore[arg-type]  # converted by __post_init__


@dataclass(frozen=True, eq=False)
class Request:
    """One request's block tables by group, and the token intervals that each destination group needs.

    With the first block a prefix hit, and the other 84 tokens needed:

    >>> src, dst = {"full": BlockTable.of([4, 9, 7])}, {"full": BlockTable.of([2, 0, 5, 1, 3, 8, 6])}
    >>> Request(src, dst, need={"full": (Span(16, 100),)}, kept={"full": (Span(0, 16),)}).need
    {'full': (Span(start=16, stop=100),)}
    """

    src: Mapping[str, BlockTable]
    dst: Mapping[str, BlockTable]
    need: Mapping[str, Spans]
    """Tokens to load, by destination group; sorted, disjoint. Slot groups need their slot by default."""
    kept: Mapping[str, Spans] = field(default_factory=dict)
    """Tokens that are already at the destination (prefix hits) and never written."""

    def __post_init__(self) -> None:
        check_tables("src", self.src)
        check_tables("dst", self.dst)
        check_spans("need", self.need)
        check_spans("kept", self.kept)


def check_tables(what: str, tables: Mapping[str, BlockTable]) -> None:
    """Raise unless every table is a ``BlockTable``: a plain list lacks its first token."""
    for group, table in tables.items():
        if not isinstance(table, BlockTable):
            raise SpecError(
                f"{what} table of group {group}: expected a BlockTable, got {table!r:.80};"
                " use BlockTable.of(block_ids)"
            )


def check_spans(what: str, by_group: Mapping[str, Any]) -> None:
    """Raise unless every value is a list of spans."""
    for group, spans in by_group.items():
        if not isinstance(spans, Sequence) or not all(isinstance(span, Span) for span in spans):
            raise SpecError(f"{what} of group {group}: expected a list of spans, got {spans!r:.80}")


def need_of(group: Group, num_tokens: int, num_kept: int = 0) -> Spans:
    """The tokens that a group must load of a request, with ``num_kept`` of ``num_tokens`` present.

    >>> need_of(Group("window", 9, 16, window=100, sinks=4), 300)
    (Span(start=0, stop=4), Span(start=200, stop=300))
    """
    if group.addressing is Addressing.SLOT:
        return (Span(0, 1),) if num_tokens else ()
    oldest = max(0, num_tokens - group.window) if group.window else 0
    recent = Span(max(oldest, num_kept), max(oldest, num_kept, num_tokens))
    num_sinks = min(group.sinks, num_tokens) if group.window else 0
    return normal((recent, Span(min(num_kept, num_sinks), num_sinks)))


def held_from(groups: Iterable[Group], tables: Mapping[str, BlockTable], num_tokens: int) -> int:
    """The first token from which every table has a block for each token. Slots have no tokens.

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
