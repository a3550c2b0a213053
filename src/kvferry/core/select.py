"""From block tables and token intervals to runs: the hot path, array arithmetic only.

A needed interval is cut at the block edges of both sides. Every *segment* between two cuts is in one source
block and one destination block. Segments of one shape share a pattern; a pattern and its block ids form a
*product*, which an outer sum expands into runs on demand. Prefix hits, windows, holes and unequal block
counts are all just intervals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvferry.core.check import Claim, Shape
from kvferry.core.choices import Slack as Slack
from kvferry.core.lower import Bundle, Lane, Route
from kvferry.core.manifest import Manifest
from kvferry.core.product import Product, Term
from kvferry.core.request import HOLE, BlockTable, Request
from kvferry.core.runs import NO_RUNS, Runs
from kvferry.core.span import Span, Spans, count, intersect, normal, show, subtract
from kvferry.core.state import Addressing, Group, Kind, Tail, one_of
from kvferry.core.view import Ints
from kvferry.errors import Refused, RequestError


class Walk:
    """Maps the cells of a request to blocks, on one side."""

    def __init__(
        self, group: Group, tables: Mapping[str, BlockTable], tokens_per_cell: int, side: str
    ) -> None:
        self.group, self.side = group, side
        table = tables.get(group.name)
        if table is None:
            raise RequestError(f"{side}-table-missing", group.name, "the request has no block table")
        self.block_ids = table.block_ids
        self.is_ring = group.addressing is Addressing.RING
        self.first, rest = divmod(table.first_token, tokens_per_cell)
        self.num_cells = group.tokens_per_block // tokens_per_cell
        if rest:
            raise self._error("table-start", f"token {table.first_token} is inside a cell")

    def _error(self, code: str, detail: str) -> RequestError:
        return RequestError(f"{self.side}-{code}", self.group.name, detail)

    def check(self, need: Spans, period: int) -> None:
        """Raise unless the table covers the need."""
        if self.first % period:
            raise self._error("table-start", f"cell {self.first} is not a multiple of {period}")
        if self.group.addressing is not Addressing.TABLE and len(self.block_ids) != 1:
            raise self._error("table-length", f"expected one block id, got {len(self.block_ids)}")
        if self.is_ring:
            if self.side == "src" and need[0].start < self.first:
                detail = f"cells {show(need)} are needed, those before {self.first} are overwritten"
                raise self._error("ring-short", detail)
            if need[-1].stop - need[0].start > self.num_cells:
                raise self._error("ring-short", f"{show(need)} exceeds its {self.num_cells} cells")
            return
        has = Span(self.first, self.first + len(self.block_ids) * self.num_cells)
        if missing := subtract(need, (has,)):
            detail = f"cells {show(missing)} are outside its {len(self.block_ids)} blocks {has}"
            raise self._error("table-short", detail)

    def block_start(self, cell: int) -> int:
        """The first cell of the block of ``cell``."""
        return cell - (cell - self.first) % self.num_cells

    def cuts(self, span: Span) -> Ints:
        """The start of a non-empty span, and every block edge inside it."""
        cuts = np.arange(self.block_start(span.start), span.stop, self.num_cells)
        cuts[0] = span.start
        return cuts

    def touched(self, need: Spans) -> Spans:
        """All cells of the blocks that the need touches."""
        if self.is_ring:
            return (Span(need[0].start, need[0].start + self.num_cells),)
        size = self.num_cells
        return normal(
            Span(max(0, self.block_start(s.start)), self.block_start(s.stop - 1) + size) for s in need
        )

    def kept(self, kept: Spans, need: Spans) -> Spans:
        """The kept cells; in a ring, also the cells that share their positions."""
        if not self.is_ring:
            return kept
        size, start, stop = self.num_cells, need[0].start, need[-1].stop
        if kept and kept[-1].stop - size > start:
            detail = f"kept cells up to {kept[-1].stop} overwrite needed cells {show(need)}"
            raise self._error("ring-short", f"{detail}: the ring has {size} cells")
        older = intersect(kept, (Span(max(0, stop - size), start),)) if stop - size < start else ()
        return (*kept, *(Span(span.start + size, span.stop + size) for span in older))

    def locate(self, cells: Ints) -> tuple[Ints, Ints]:
        """Block id and position in the block of each cell."""
        index, inside = np.divmod(cells - self.first, self.num_cells)
        if self.is_ring:
            index = np.zeros_like(index)
        ids = self.block_ids[index]
        if ids.min() == HOLE:
            raise self._error(
                "hole", f"cell {int(cells[ids == HOLE][0])} has no block: its table entry is a hole"
            )
        return ids, inside


MAX_RUNS = 1 << 24
"""The default limit: runs of one request to one destination rank, about 60 bytes each."""


@dataclass(frozen=True, eq=False)
class Selection:
    """The transfer of one request: runs to read from each source rank, and destination bytes to zero.

    >>> Selection.of({}).num_runs
    0
    """

    products: Mapping[int, Product]
    """The transfer from each source rank."""
    blank: Product
    """Destination places to fill with zeros; the source places are equal to them."""

    @classmethod
    def of(cls, reads: Mapping[int, Runs], zeros: Runs = NO_RUNS) -> Selection:
        return cls({src_rank: Product.of(runs) for src_rank, runs in reads.items()}, Product.of(zeros))

    @cached_property
    def reads(self) -> Mapping[int, Runs]:
        """The products expanded into lists, adjacent runs merged."""
        return {src_rank: product.runs for src_rank, product in self.products.items()}

    @property
    def zeros(self) -> Runs:
        return self.blank.runs

    @property
    def num_runs(self) -> int:
        return sum(len(runs) for runs in self.reads.values())

    @property
    def total_bytes(self) -> int:
        return sum(product.total_bytes for product in self.products.values())

    def __repr__(self) -> str:
        ranks = ", ".join(map(str, self.products))
        return f"Selection({self.total_bytes} bytes from ranks [{ranks}], {self.blank.total_bytes} to zero)"


class _Products(NamedTuple):
    lane: Lane
    reads: list[tuple[int, Term]]
    """Each with its source rank."""
    zeros: list[Term]

    @property
    def terms(self) -> list[Term]:
        return [*(term for _, term in self.reads), *self.zeros]

    @property
    def num_runs(self) -> int:
        return sum(term.num_runs for term in self.terms)


def select(
    route: Route, request: Request, *, slack: Slack = Slack.CLEAR, max_runs: int = MAX_RUNS
) -> Selection:
    """The byte runs of one request. Raises ``RequestError`` if it does not fit the engines.

    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> from kvferry import lower, plan, prove
    >>> from kvferry.core.sample import sample_request
    >>> selection = select(lower(prove(plan(src, dst, 0))), sample_request(src, dst, 100))
    >>> {rank: len(runs) for rank, runs in selection.reads.items()}, selection.total_bytes
    ({0: 366, 1: 366}, 20987904)
    """
    slack = one_of("slack", Slack, slack)
    _check_tables(route.plan.src, request.src, "src")
    _check_tables(route.plan.dst, request.dst, "dst")
    _check_tokens(route.plan.dst, request)
    products = []
    for lane in route.lanes:
        try:
            products.append(_products(lane, request, slack))
        except Refused as error:
            # Without the code of the finding, which is that of the error.
            found = error.findings[0]
            detail = ": ".join(part for part in (found.state, found.field, found.note) if part)
            raise RequestError("too-many-runs", lane.dst_group.name, detail) from error
    _check_number(products, max_runs)
    by_rank: dict[int, list[Term]] = defaultdict(list)
    for src_rank, term in (read for each in products for read in each.reads):
        if len(term.pattern) and term.num_pairs:
            by_rank[src_rank].append(term)
    reads = {src_rank: Product(tuple(terms)) for src_rank, terms in sorted(by_rank.items())}
    selection = Selection(reads, Product(tuple(term for each in products for term in each.zeros)))
    read_terms = {src_rank: product.terms for src_rank, product in selection.products.items()}
    route.checker.check_selection(request, read_terms, selection.blank.terms, slack)
    return selection


def _check_number(products: Sequence[_Products], max_runs: int) -> None:
    """Refuse a request with too many runs, before the list is made."""
    if sum(len(term.pattern) * term.num_pairs for each in products for term in each.terms) <= max_runs:
        return  # merging only lowers the number
    total = sum(each.num_runs for each in products)
    if total > max_runs:
        most = max(products, key=lambda each: each.num_runs)
        detail = (
            f"the request needs {total:,} runs, the limit is {max_runs:,}; use the same block layout on both"
            " sides, or larger blocks, or load fewer tokens at a time"
        )
        raise RequestError("too-many-runs", most.lane.dst_group.name, detail)


def _products(lane: Lane, request: Request, slack: Slack) -> _Products:
    """The transfers and the zeroing of one lane."""
    need, kept = _needed_cells(lane, request)
    if not need:
        return _Products(lane, [], [])
    src = Walk(lane.src_group, request.src, lane.key.tokens_per_cell, "src")
    dst = Walk(lane.dst_group, request.dst, lane.key.tokens_per_cell, "dst")
    src.check(need, lane.src_period)
    dst.check(need, lane.dst_period)
    free: Spans = ()
    if slack is Slack.CLEAR and lane.key.kind is Kind.PAGED:
        free = subtract(dst.touched(need), (*need, *dst.kept(kept, need)))
        # A ring holds other tokens outside the need, which must not be copied.
        need = _stretched(lane, need, free, src, dst) if free and not src.is_ring else need
    segments = list(_segments(need, src, dst, lane.period))
    blank = list(_segments(subtract(free, need), dst, dst, lane.dst_period))
    return _Products(
        lane,
        [
            (bundle.key.src_rank, _spread(lane, bundle, *segment))
            for bundle in lane.bundles
            for segment in segments
        ],
        [_spread(lane, bundle, *segment) for bundle in lane.blanks for segment in blank],
    )


def _check_tables(manifest: Manifest, tables: Mapping[str, BlockTable], side: str) -> None:
    """Check that ids are in range, and that no block occurs twice in the tables of one pool."""
    pools: dict[str, list[Ints]] = defaultdict(list)
    for name, table in tables.items():
        group = manifest.group_by_name.get(name)
        if group is None:
            # Without the engine's name: engines of equal geometry share a route.
            engine = "source" if side == "src" else "destination"
            raise RequestError(f"{side}-group-unknown", name, f"the {engine} engine has no such group")
        if len(table.block_ids):
            pools[group.pool].append(table.block_ids)
            if (highest := int(table.block_ids.max())) >= group.num_blocks:
                detail = f"block {highest} is outside the pool of {group.num_blocks} blocks"
                raise RequestError(f"{side}-block-range", name, detail)
    for pool, parts in pools.items():
        ordered = np.sort(np.concatenate(parts) if len(parts) > 1 else parts[0])
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice) and twice[-1] != HOLE:
            raise RequestError(f"{side}-block-twice", pool, f"block {twice[-1]} appears twice in the tables")


def _check_tokens(manifest: Manifest, request: Request) -> None:
    """Check that needed and kept groups exist, and that no slot group keeps tokens."""
    for what, by_group in (("need", request.need), ("kept", request.kept)):
        for name in by_group:
            if name not in manifest.group_by_name:
                detail = "the destination engine has no such group"
                raise RequestError(f"{what}-group-unknown", name, detail)
    for name, spans in request.kept.items():
        if count(spans) and manifest.group_by_name[name].addressing is Addressing.SLOT:
            detail = (
                f"{show(spans)} is kept, but a slot has one value and no tokens; remove the group from"
                " `kept` (with an empty need its slot is not written)"
            )
            raise RequestError("kept-slot", name, detail)


def _needed_cells(lane: Lane, request: Request) -> tuple[Spans, Spans]:
    """The needed and the kept cells of a lane, from the tokens of its destination group."""
    name = lane.dst_group.name
    if lane.key.kind is Kind.RECURRENT:
        return normal(request.need.get(name, (Span(0, 1),))), ()
    if name not in request.need:
        raise RequestError(
            "need-missing", name, "its need is missing: list the tokens, or an empty list for none"
        )
    need, kept = normal(request.need[name]), normal(request.kept.get(name, ()))
    if both := intersect(need, kept):
        raise RequestError("need-kept", name, f"tokens {show(both)} are both needed and kept")
    size = lane.key.tokens_per_cell
    if size == 1:
        return need, kept
    need, kept = (_whole_cells(spans, size, lane.key.tail) for spans in (need, kept))
    # Only partial cells can be in both: a complete cell belongs to its last token.
    if both := intersect(need, kept):
        detail = f"cells {show(both)} have needed and kept tokens; the {size} tokens of a cell move together"
        raise RequestError("need-kept", name, detail)
    return need, kept


def _whole_cells(tokens: Spans, size: int, tail: Tail) -> Spans:
    """The cells of ``size`` tokens that these tokens complete or, with a partial tail, touch."""
    up = size - 1 if tail is Tail.PARTIAL else 0
    return normal(Span(s.start // size, max(s.start, s.stop + up) // size) for s in tokens)


def _stretched(lane: Lane, need: Spans, free: Spans, src: Walk, dst: Walk) -> Spans:
    """The need, extended by slack at its ends where that makes fewer runs."""

    def num_runs(start: int, stop: int) -> int:
        cells = np.array([start])
        shape = Shape(
            int(src.locate(cells)[1][0]), int(dst.locate(cells)[1][0]), stop - start, start % lane.period
        )
        return sum(len(bundle.pattern(shape)) for bundle in lane.bundles)

    stretched = []
    for span in need:
        start, stop = span.start, span.stop
        for gap in free:
            if gap.start == stop:
                begin = max(start, src.block_start(stop - 1), dst.block_start(stop - 1))
                end = min(gap.stop, *(w.block_start(stop - 1) + w.num_cells for w in (src, dst)))
                if end > stop and num_runs(begin, end) < num_runs(begin, stop):
                    stop = end
            elif gap.stop == start:
                end = min(stop, *(w.block_start(start) + w.num_cells for w in (src, dst)))
                begin = max(gap.start, src.block_start(start), dst.block_start(start))
                if begin < start and num_runs(begin, end) < num_runs(start, end):
                    start = begin
        stretched.append(Span(start, stop))
    return normal(stretched)


def _segments(spans: Spans, src: Walk, dst: Walk, period: int) -> Iterator[tuple[Shape, Ints, Ints]]:
    """Cut spans at both sides' block edges: (shape, source block ids, destination block ids)."""
    if not spans:
        return
    cuts = [_cuts(span, src, dst) for span in spans]
    starts = np.concatenate(cuts) if len(cuts) > 1 else cuts[0]
    # Each segment ends where the next one starts, except the last of every span.
    stops = np.empty_like(starts)
    stops[:-1] = starts[1:]
    at = 0
    for span, each in zip(spans, cuts, strict=True):
        at += len(each)
        stops[at - 1] = span.stop
    src_ids, src_cells = src.locate(starts)
    dst_ids, dst_cells = (src_ids, src_cells) if dst is src else dst.locate(starts)
    order = np.argsort(dst_ids, kind="stable")
    src_ids, dst_ids = src_ids[order], dst_ids[order]
    keys = np.stack([src_cells, dst_cells, stops - starts, starts % period])
    for shape, members in _alike(keys, order):
        yield shape, src_ids[members], dst_ids[members]


def _cuts(span: Span, src: Walk, dst: Walk) -> Ints:
    """The start of a span and every block edge of either side inside it."""
    cuts, other = src.cuts(span), dst.cuts(span)
    if len(cuts) == len(other) and (cuts == other).all():
        return cuts
    both = np.sort(np.concatenate([cuts, other]))
    return both[np.concatenate(([True], both[1:] != both[:-1]))]


def _alike(keys: Ints, order: Ints) -> Iterator[tuple[Shape, Ints | slice]]:
    """The distinct columns of ``keys``, each with its positions in ``order``."""
    first = keys[:, :1]
    if (keys == first).all():
        yield Shape(*first[:, 0].tolist()), slice(None)
        return
    keys = keys[:, order]
    by_shape = np.lexsort(keys)
    ordered = keys[:, by_shape]
    edges = np.flatnonzero((ordered[:, 1:] != ordered[:, :-1]).any(axis=0)) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(by_shape)]):
        yield Shape(*ordered[:, start].tolist()), by_shape[start:stop]


def _spread(lane: Lane, bundle: Bundle, shape: Shape, src_ids: Ints, dst_ids: Ints) -> Term:
    pattern, (_, src_stride, dst_stride, _) = bundle.pattern(shape), bundle.key
    steps = np.empty((2, len(src_ids)), np.int64)
    np.multiply(src_ids, src_stride, out=steps[0])
    np.multiply(dst_ids, dst_stride, out=steps[1])
    is_whole = src_stride == dst_stride == pattern.each_bytes
    return Term(pattern, steps, src_stride if is_whole else 0, Claim(lane.key, bundle.key, shape))
