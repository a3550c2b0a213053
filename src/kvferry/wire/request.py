"""Requests, and the runs of a selection, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from kvferry.core.manifest import VERSION
from kvferry.core.plan import Plan
from kvferry.core.request import HOLE, BlockTable, Request
from kvferry.core.select import Selection, Slack
from kvferry.core.span import Span, Spans, normal
from kvferry.core.state import check_range
from kvferry.errors import SpecError
from kvferry.wire.manifest import Schema
from kvferry.wire.reading import Made, SpanDoc, at, key_step, read_json, write_json

MAX_BLOCK_ID = (1 << 40) - 1
"""The core's largest pool has 2^40 blocks."""
MAX_TOKENS = 1 << 26
"""The longest request: 67 million tokens."""
MAX_SPANS = 1 << 10
"""Intervals of one group's needed, or kept, tokens."""


class BlockTableDoc(Schema, frozen=True):
    """``{"block_ids": [3, 1, null, 7], "first_token": 0}``; null is a hole."""

    block_ids: tuple[int | None, ...]
    first_token: int = 0


class RequestDoc(Schema, frozen=True):
    """The whole document; each object is keyed by the name of a group."""

    src: dict[str, BlockTableDoc]
    dst: dict[str, BlockTableDoc]
    need: dict[str, tuple[SpanDoc, ...]]
    kept: dict[str, tuple[SpanDoc, ...]] = msgspec.field(default_factory=dict)
    slack: Slack = Slack.CLEAR


def request_from_json(data: bytes) -> tuple[Request, Slack]:
    """Read a request and its slack mode; raises ``SpecError`` with place, rule and value.

    >>> request, slack = request_from_json(b'''{"src": {"full": {"block_ids": [3, null]}},
    ...     "dst": {"kv": {"block_ids": [0, 1]}}, "need": {"kv": [[0, 16]]}}''')
    >>> request.src["full"].block_ids, request.need["kv"], slack
    (array([ 3, -1]), (Span(start=0, stop=16),), <Slack.CLEAR: 'clear'>)
    """
    doc = read_json(data, RequestDoc)
    request = Request(
        src=_by_group(".src", _table, doc.src),
        dst=_by_group(".dst", _table, doc.dst),
        need=_by_group(".need", _spans, doc.need),
        kept=_by_group(".kept", _spans, doc.kept),
    )
    return request, doc.slack


def _by_group(place: str, make: Callable[..., Made], docs: Mapping[str, object]) -> dict[str, Made]:
    return {group: at(f"{place}{key_step(group)}", make, doc) for group, doc in docs.items()}


def _table(doc: BlockTableDoc) -> BlockTable:
    ids = [at(f".block_ids[{i}]", _block_id, block_id) for i, block_id in enumerate(doc.block_ids)]
    check_range("first_token", doc.first_token, 0, MAX_TOKENS)
    return BlockTable.of(ids, doc.first_token)


def _block_id(block_id: int | None) -> int:
    if block_id is None:
        return HOLE
    check_range("a block id (null for a hole)", block_id, 0, MAX_BLOCK_ID)
    return block_id


def _spans(docs: tuple[SpanDoc, ...]) -> Spans:
    if len(docs) > MAX_SPANS:
        raise SpecError(f"at most {MAX_SPANS} intervals are allowed, got {len(docs)}")
    return normal(tuple(at(f"[{i}]", _span, doc) for i, doc in enumerate(docs)))


def _span(doc: SpanDoc) -> Span:
    start, stop = doc
    check_range("the end of an interval of tokens", stop, 0, MAX_TOKENS)
    return Span(start, stop)


class RunDoc(msgspec.Struct, frozen=True):
    """Copy ``num_bytes`` from a region of a source rank to a region of the destination rank."""

    src_rank: int
    src_region: str
    src_offset: int
    dst_region: str
    dst_offset: int
    num_bytes: int


class ZeroDoc(msgspec.Struct, frozen=True):
    """Fill ``num_bytes`` of a region of the destination rank with zeros."""

    dst_region: str
    dst_offset: int
    num_bytes: int


class SelectionDoc(msgspec.Struct, frozen=True):
    version: int
    dst_rank: int
    num_runs: int
    total_bytes: int
    """Bytes that the runs copy."""
    zeroed_bytes: int
    runs: tuple[RunDoc, ...]
    zeros: tuple[ZeroDoc, ...]


def selection_to_json(plan: Plan, selection: Selection, *, indent: int = 2) -> bytes:
    """Write the runs of one request, regions by name."""
    doc = SelectionDoc(
        version=VERSION,
        dst_rank=plan.dst_rank,
        num_runs=selection.num_runs,
        total_bytes=selection.total_bytes,
        zeroed_bytes=selection.zeros.total_bytes,
        runs=tuple(_runs(plan, selection)),
        zeros=tuple(_zeros(plan, selection)),
    )
    return write_json(doc, indent)


def _runs(plan: Plan, selection: Selection) -> Iterator[RunDoc]:
    dst_names = [region.name for region in plan.dst.rank(plan.dst_rank).regions]
    for src_rank, runs in selection.reads.items():
        src_names = [region.name for region in plan.src.rank(src_rank).regions]
        for src_region, src_offset, dst_region, dst_offset, num_bytes in runs:
            yield RunDoc(
                src_rank, src_names[src_region], src_offset, dst_names[dst_region], dst_offset, num_bytes
            )


def _zeros(plan: Plan, selection: Selection) -> Iterator[ZeroDoc]:
    dst_names = [region.name for region in plan.dst.rank(plan.dst_rank).regions]
    for _, _, dst_region, dst_offset, num_bytes in selection.zeros:
        yield ZeroDoc(dst_names[dst_region], dst_offset, num_bytes)
