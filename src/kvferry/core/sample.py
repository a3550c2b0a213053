"""Typical requests between two engines, for cost estimates, demonstrations and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np

from kvferry.core.choices import Placement as Placement
from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable, Request, need_of
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing, Group
from kvferry.errors import SpecError


def sample_request(
    src: Manifest,
    dst: Manifest,
    num_tokens: int,
    *,
    num_kept: int = 0,
    placement: Placement = Placement.CONSECUTIVE,
) -> Request:
    """A request of ``num_tokens``, with the first ``num_kept`` already at the destination."""
    tables = _tables(src, num_tokens, placement, salt=1), _tables(dst, num_tokens, placement, salt=2)
    return Request(*tables, *need_and_kept(dst.groups, num_tokens, num_kept))


def need_and_kept(
    groups: Sequence[Group], num_tokens: int, num_kept: int
) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """The needed and the kept tokens of each group, with the first ``num_kept`` already there."""
    need = {group.name: need_of(group, num_tokens, num_kept) for group in groups}
    paged = (group.name for group in groups if group.addressing is not Addressing.SLOT)
    return need, dict.fromkeys(paged, (Span(0, num_kept),)) if num_kept else {}


def _tables(manifest: Manifest, num_tokens: int, placement: Placement, salt: int) -> Mapping[str, BlockTable]:
    """Block tables of every group: blocks for its window, taken from its pool."""
    tables: dict[str, BlockTable] = {}
    drawn: dict[str, int] = {}
    for group in manifest.groups:
        first, num_blocks = table_extent(group, num_tokens)
        at = drawn.get(group.pool, 0)
        drawn[group.pool] = at + num_blocks
        if at + num_blocks > group.num_blocks:
            raise SpecError(
                f"{num_tokens} tokens need more than the {group.num_blocks} blocks of engine"
                f" {manifest.engine}'s pool {group.pool} (group {group.name}); set blocks=N"
            )
        ids = np.arange(at, at + num_blocks)
        if placement is Placement.SCATTERED:
            ids = ids * _stride(group.num_blocks, salt) % group.num_blocks
        tables[group.name] = BlockTable.of(ids, first)
    return tables


def table_extent(group: Group, num_tokens: int) -> tuple[int, int]:
    """(first token, number of blocks) of a request in a group."""
    if group.addressing is Addressing.SLOT:
        return 0, 1
    if group.addressing is Addressing.RING:
        return max(0, num_tokens - group.tokens_per_block), 1
    first = max(0, num_tokens - group.window) if group.window and not group.sinks else 0
    first -= first % group.tokens_per_block
    return first, -(-(num_tokens - first) // group.tokens_per_block)


def _stride(num_blocks: int, salt: int) -> int:
    """A step coprime to the number of blocks, so that consecutive ids are not adjacent."""
    stride = max(1, int(num_blocks * 0.382) + salt)
    while gcd(stride, num_blocks) > 1:
        stride += 1
    return stride
