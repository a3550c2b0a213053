"""A request, and the runs that it selects, as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from kvferry.core.manifest import VERSION
from kvferry.core.plan import Plan
from kvferry.core.request import HOLE, BlockTable, Request
from kvferry.core.select import Selection, Slack
from kvferry.core.span import Span, Spans, normal
from kvferry.core.state import check_range
from kvferry.errors import SpecError
from kvferry.wire.reading import PlacedPart, SpanDoc, first_wrong, key_step, read_json, span_docs, write_json

MAX_BLOCK_ID = (1 << 40) - 1
"""The core's largest pool has 2^40 blocks."""
MAX_TOKENS = 1 << 26
"""The longest request: 67 million tokens."""
MAX_SPANS = 1 << 10
"""Intervals of one group's need, or of what it kept."""


class _Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What every object of the schema has in common."""


class BlockTableDoc(_Schema, frozen=True):
    """``{"block_ids": [3, 1, null, 7], "first_token": 0}``; null is a hole."""

    block_ids: tuple[int | None, ...]
    first_token: int = 0


class RequestDoc(_Schema, frozen=True):
    """The whole document; each object is keyed by the name of a group."""

    src: dict[str, BlockTableDoc]
    dst: dict[str, BlockTableDoc]
    need: dict[str, tuple[SpanDoc, ...]]
    kept: dict[str, tuple[SpanDoc, ...]] = {}
    slack: Slack = Slack.CLEAR


def request_from_json(data: bytes) -> tuple[Request, Slack]:
    """Read a request, and what is to become of its slack; raises ``SpecError`` with place, rule and value.

    >>> request, slack = request_from_json(b'''{"src": {"full": {"block_ids": [3, null]}},
    ...     "dst": {"kv": {"block_ids": [0, 1]}}, "need": {"kv": [[0, 16]]}}''')
    >>> request.src["full"].block_ids, request.need["kv"], slack
    (array([ 3, -1]), (Span(start=0, stop=16),), <Slack.CLEAR: 'clear'>)
    """
    doc = read_json(data, RequestDoc)
    try:
        request = Request(
            src={group: _table(table) for group, table in doc.src.items()},
            dst={group: _table(table) for group, table in doc.dst.items()},
            need={group: _spans(spans) for group, spans in doc.need.items()},
            kept={group: _spans(spans) for group, spans in doc.kept.items()},
        )
    except SpecError as error:
        raise first_wrong(_parts(doc), error) from None
    return request, doc.slack


def request_to_json(request: Request, *, slack: Slack = Slack.CLEAR, indent: int = 2) -> bytes:
    """Write a request; defaults are left out."""
    doc = RequestDoc(
        src={group: _table_doc(table) for group, table in request.src.items()},
        dst={group: _table_doc(table) for group, table in request.dst.items()},
        need={group: span_docs(spans) for group, spans in request.need.items()},
        kept={group: span_docs(spans) for group, spans in request.kept.items()},
        slack=slack,
    )
    return write_json(doc, indent)


def _table(doc: BlockTableDoc) -> BlockTable:
    check_range("first_token", doc.first_token, 0, MAX_TOKENS)
    return BlockTable.of([_block_id(block_id) for block_id in doc.block_ids], doc.first_token)


def _block_id(block_id: int | None) -> int:
    if block_id is None:
        return HOLE
    check_range("a block id (null for a hole)", block_id, 0, MAX_BLOCK_ID)
    return block_id


def _spans(docs: tuple[SpanDoc, ...]) -> Spans:
    if len(docs) > MAX_SPANS:
        raise SpecError(f"at most {MAX_SPANS} intervals are read, got {len(docs)}")
    return normal(tuple(map(_span, docs)))


def _span(doc: SpanDoc) -> Span:
    start, stop = doc
    check_range("the end of an interval of tokens", stop, 0, MAX_TOKENS)
    return Span(start, stop)


def _parts(doc: RequestDoc) -> Iterator[PlacedPart]:
    """Everything that a request is made of, the smallest parts first."""
    for side, tables in (("src", doc.src), ("dst", doc.dst)):
        for group, table in tables.items():
            at = f".{side}{key_step(group)}"
            for i, block_id in enumerate(table.block_ids):
                yield f"{at}.block_ids[{i}]", partial(_block_id, block_id)
            yield at, partial(_table, table)
    for what, by_group in (("need", doc.need), ("kept", doc.kept)):
        for group, spans in by_group.items():
            at = f".{what}{key_step(group)}"
            for i, span in enumerate(spans[: MAX_SPANS + 1]):
                yield f"{at}[{i}]", partial(_span, span)
            yield at, partial(_spans, spans)


def _table_doc(table: BlockTable) -> BlockTableDoc:
    ids = (None if block_id == HOLE else block_id for block_id in table.block_ids.tolist())
    return BlockTableDoc(tuple(ids), table.first_token)


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
