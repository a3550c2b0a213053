"""A model and a topology in, an engine's manifest out: what an engine set up that way would say of itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.shard import held, stages, turn
from kvferry.core.span import Span
from kvferry.core.state import Addressing, Axis, Group, Kind, State, Tail
from kvferry.core.view import AxisMap, Digit, View
from kvferry.errors import SpecError
from kvferry.models.cache import DTYPE_BYTES, Cache, Part, opaque, time_major
from kvferry.models.layout import OPAQUE, layout
from kvferry.models.model import Model
from kvferry.models.order import (
    BLOCK,
    LAYER,
    TOKEN,
    Leaf,
    Loop,
    Node,
    Order,
    Row,
    grow,
    in_kernel_blocks,
    num_bytes,
    spots,
)
from kvferry.models.topology import Topology

POOL = "pool"
"""The pool of engines whose groups share regions."""


@dataclass(frozen=True, slots=True)
class Page:
    """One cache of one layer, as this engine keeps it."""

    layer: str
    stage: int
    cache: Cache
    aliases: tuple[str, ...]
    group: str

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.cache.name}"


Axes = tuple[tuple[str, AxisMap], ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """How a part lies inside a block: what its views in all layers and on all ranks have in common."""

    part: Part
    kind: Kind
    tokens_per_cell: int
    digits: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """The (count, stride) digits of each axis."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """What ranks with equal shares have in common."""

    regions: tuple[Region, ...]
    places: tuple[tuple[str, str, str, int, int, int], ...]
    """State, group, region, offset and block stride of each view, and the index of its form."""
    forms: tuple[_Form, ...]


def describe(model: Model, topology: Topology, engine: str = "engine") -> Manifest:
    """The manifest of an engine that serves ``model`` set up as ``topology`` says."""
    described = _Engine(model, topology)
    return Manifest(
        engine=engine,
        model=model.name,
        states=tuple(described.states()),
        groups=tuple(described.groups()),
        ranks=tuple(described.rank(rank) for rank in range(topology.num_ranks)),
    )


class _Engine:
    """The pieces of a description that several ranks share."""

    def __init__(self, model: Model, topology: Topology) -> None:
        self.model, self.topology = model, topology
        self.layout = layout(topology.layout)
        self._memories: dict[tuple[int, tuple[int, ...]], _Memory] = {}

    # -- what there is -----------------------------------------------------------------------------

    @cached_property
    def pages(self) -> tuple[Page, ...]:
        """Every cache of every layer, with its stage and its group."""
        found = list(self._ungrouped())
        if not found:
            raise SpecError(f"model {self.model.name}: no layer remembers anything")
        buckets: dict[str, list[int]] = defaultdict(list)
        for i, page in enumerate(found):
            buckets[page.group].append(i)
        if self.is_shared:
            for name, members in buckets.items():
                num_groups = -(-len(members) // _group_size([len(m) for m in buckets.values()]))
                for turn_of, i in enumerate(members):
                    if num_groups > 1:
                        found[i] = replace(found[i], group=f"{name}.{turn_of % num_groups}")
        return tuple(found)

    def _ungrouped(self) -> Iterator[Page]:
        model = self.model
        names = [layer.name for layer in (*model.layers, *model.draft)]
        aliases: dict[str, list[str]] = defaultdict(list)
        for layer in (*model.layers, *model.draft):
            if layer.shares:
                aliases[layer.shares].append(layer.name)
        plan = stages(len(model.layers), self.topology.pp)
        stage_of = {names[i]: stage for stage, layers in enumerate(plan) for i in layers}
        for layer in (*model.layers, *model.draft):
            stage = stage_of.get(layer.name, len(plan) - 1)
            for cache in layer.caches:
                kept = self._adapted(cache)
                yield Page(layer.name, stage, kept, tuple(aliases[layer.name]), self._bucket(kept))

    @cached_property
    def is_shared(self) -> bool:
        """Whether groups share regions, as hybrid allocators have it."""
        kinds = {page.group for page in self._ungrouped()}
        return self.topology.alloc == "shared" or (self.topology.alloc == "auto" and len(kinds) > 1)

    def _adapted(self, cache: Cache) -> Cache:
        """The cache with this engine's dtype, convolution order and block size."""
        topology = self.topology
        if topology.dtype and cache.is_attention:
            parts = tuple(_as_dtype(part, topology.dtype) for part in cache.parts)
            cache = replace(cache, parts=parts)
        if cache.kind is Kind.RECURRENT:
            order = time_major(cache.parts[:-1], cache.parts[-1]) if topology.conv == "SD" else cache.interior
            return replace(cache, interior=order)
        bucket = self._bucket(cache)
        chosen = topology.block_of.get(bucket, cache.tokens_per_block or topology.block)
        num_tokens = chosen or self.model.default_block
        if self.layout.name == OPAQUE and cache.is_attention:
            return opaque(cache, topology.tp, num_tokens)
        return replace(cache, tokens_per_block=num_tokens)

    @staticmethod
    def _bucket(cache: Cache) -> str:
        """Caches that can share a block table."""
        if cache.kind is Kind.RECURRENT:
            return "state"
        own = f"-{cache.name}" if cache.window and cache.name != "attn" else ""
        return f"window-{cache.window}{own}" if cache.window else "full"

    def states(self) -> Iterator[State]:
        """One state per part of every page."""
        axes = {part: tuple(Axis(dim.axis, dim.size) for dim in part.dims) for part in self._parts}
        for page in self.pages:
            for part in page.cache.parts:
                yield State(
                    f"{page.name}/{part.name}",
                    axes[part],
                    item_bytes=part.bytes_per_item,
                    dtype=part.dtype,
                    kind=page.cache.kind,
                    tokens_per_cell=page.cache.tokens_per_cell,
                    tail=page.cache.tail,
                    encoding=part.encoding,
                    aliases=tuple(f"{layer}.{page.cache.name}/{part.name}" for layer in page.aliases),
                )

    def groups(self) -> Iterator[Group]:
        """One group per block table."""
        for name, page in {page.group: page for page in self.pages}.items():
            cache = page.cache
            is_slot = cache.kind is Kind.RECURRENT
            yield Group(
                name,
                num_blocks=self.topology.blocks,
                tokens_per_block=1 if is_slot else cache.tokens_per_block * self.topology.cp,
                addressing=Addressing.SLOT if is_slot else Addressing.TABLE,
                pool=POOL if self.is_shared else "",
                window=cache.window,
                sinks=cache.sinks,
            )

    # -- where one rank keeps it -------------------------------------------------------------------

    def rank(self, rank: int) -> Rank:
        """The regions and views of one rank."""
        rest, tp_rank = divmod(rank, self.topology.tp)
        stage, cp_rank = divmod(rest, self.topology.cp)
        memory = self._memory(stage, tp_rank)
        axes = [self._axes(form, tp_rank, cp_rank) for form in memory.forms]
        views = tuple(
            View(state, group, region, offset, stride, axes[form])
            for state, group, region, offset, stride, form in memory.places
        )
        return Rank(rank, memory.regions, views)

    def _memory(self, stage: int, tp_rank: int) -> _Memory:
        """The memory of a rank: the same for all ranks of a stage that hold as much of every part."""
        shares = tuple(len(span) for part in self._parts for span in self._held(part, tp_rank).values())
        if (stage, shares) not in self._memories:
            self._memories[stage, shares] = self._laid_out(stage, tp_rank)
        return self._memories[stage, shares]

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        """Every part of any page, once."""
        return tuple(dict.fromkeys(part for page in self.pages for part in page.cache.parts))

    def _laid_out(self, stage: int, tp_rank: int) -> _Memory:
        by_group: dict[str, list[Page]] = defaultdict(list)
        for page in self.pages:
            if page.stage == stage:
                by_group[page.group].append(page)
        sizes: dict[str, int] = defaultdict(int)
        forms: dict[_Form, int] = {}
        places = []
        for region, pages, tree in self._trees(by_group, tp_rank):
            sizes[region] = max(sizes[region], num_bytes(tree))
            by_name = {page.name: page for page in pages}
            for spot in spots(tree):
                page = by_name[spot.leaf.layer]
                ((_, stride),) = spot.digits.pop(BLOCK)
                digits = tuple((axis, tuple(pairs)) for axis, pairs in spot.digits.items())
                part = page.cache.part(spot.leaf.part)
                form = _Form(part, page.cache.kind, page.cache.tokens_per_cell, digits)
                at = forms.setdefault(form, len(forms))
                places.append((f"{page.name}/{spot.leaf.part}", page.group, region, spot.offset, stride, at))
        regions = tuple(Region(name, size) for name, size in sizes.items())
        return _Memory(regions, tuple(places), tuple(forms))

    def _trees(
        self, by_group: Mapping[str, Sequence[Page]], tp_rank: int
    ) -> Iterator[tuple[str, Sequence[Page], Node]]:
        """(region, pages, tree): one per layer, or one per group where blocks run across layers."""
        bundles: list[tuple[str, Sequence[Page]]] = []
        for group, pages in by_group.items():
            if self.layout.across_layers:
                bundles.append((POOL if self.is_shared else group, pages))
            else:
                for i, page in enumerate(pages):
                    bundles.append((f"{POOL}.{i}" if self.is_shared else page.name, [page]))
        widest = 0
        if self.is_shared:
            widest = max(self._page_bytes(pages, tp_rank) for _, pages in bundles)
        for region, pages in bundles:
            yield region, pages, self._tree(pages, tp_rank, widest)

    def _tree(self, pages: Sequence[Page], tp_rank: int, widest: int) -> Node:
        """Blocks over pages, or whatever else the layout orders."""

        def padded(size: int) -> int:
            return max(widest, size)

        blocks = self.topology.blocks
        orders = {self._order(page) for page in pages}
        leaves = [leaf for page in pages for leaf in self._leaves(page, tp_rank)]
        if len(orders) == 1 and all(page.cache.page_multiple == 1 for page in pages):
            return grow(orders.pop(), leaves, num_blocks=blocks, page_bytes=padded)
        return Loop(BLOCK, blocks, row := self._row(pages, tp_rank), padded(num_bytes(row)))

    def _row(self, pages: Sequence[Page], tp_rank: int) -> Row:
        """The pages of one block, one after another, each padded to its own multiple."""
        children = []
        for page in pages:
            order = self._order(page)
            if set(order[:2]) != {BLOCK, LAYER}:
                raise SpecError(f"layout {self.layout.name} cannot keep {page.name} beside other caches")
            inner = grow(order[2:], self._leaves(page, tp_rank), num_blocks=self.topology.blocks)
            multiple = page.cache.page_multiple
            padded = -(-num_bytes(inner) // multiple) * multiple
            children.append(Loop(PAGE, 1, inner, padded))
        return Row(tuple(children))

    def _page_bytes(self, pages: Sequence[Page], tp_rank: int) -> int:
        """The bytes of one block of these pages, where blocks are what a region is made of."""
        tree = self._tree(pages, tp_rank, widest=0)
        while isinstance(tree, Row) and len(tree.children) == 1:
            tree = tree.children[0]
        if not isinstance(tree, Loop) or tree.axis != BLOCK:
            raise SpecError(
                f"layout {self.layout.name} does not keep a block together: groups that share regions"
                " need that (alloc=separate gives every layer a region of its own)"
            )
        return tree.pitch

    def _order(self, page: Page) -> Order:
        """The page's order: the layout's, or its kernel's own inside the layout's blocks and layers."""
        interior = page.cache.interior
        order = self.layout.order if interior is None else (*self.layout.outer, *interior)
        kernel = self.topology.kernel
        is_cut = page.cache.kind is Kind.PAGED and page.cache.tail is Tail.COMPLETE
        if not is_cut or not 0 < kernel < page.cache.tokens_per_block:
            return order
        return in_kernel_blocks(order, self._cells(page.cache, kernel))

    @staticmethod
    def _cells(of: Cache | _Form, num_tokens: int) -> int:
        cells, rest = divmod(num_tokens, of.tokens_per_cell)
        if rest:
            raise SpecError(f"{num_tokens} tokens do not divide into cells of {of.tokens_per_cell}")
        return cells

    def _leaves(self, page: Page, tp_rank: int) -> list[Leaf]:
        leaves = []
        for part in page.cache.parts:
            sizes = {axis: len(span) for axis, span in self._held(part, tp_rank).items()}
            if page.cache.kind is Kind.PAGED:
                sizes[TOKEN] = self._cells(page.cache, page.cache.tokens_per_block)
            leaves.append(Leaf(page.name, part.name, sizes, part.bytes_per_item))
        return leaves

    def _held(self, part: Part, tp_rank: int) -> dict[str, Span]:
        return {
            dim.axis: held(dim.sharding, dim.size, tp_rank, self.topology.tp, what=f"{part.name}: {dim.axis}")
            for dim in part.dims
        }

    def _axes(self, form: _Form, tp_rank: int, cp_rank: int) -> Axes:
        """The axes of a form on one rank: how its coordinates lie, and which of them are held."""
        digits = {axis: [Digit(*pair) for pair in pairs] for axis, pairs in form.digits}
        maps = {
            axis: AxisMap(tuple(digits.get(axis, ())), start=span.start)
            for axis, span in self._held(form.part, tp_rank).items()
        }
        if form.kind is Kind.PAGED:
            cells = digits[TOKEN]
            if self.topology.cp > 1:
                each = self._cells(form, self.topology.interleave)
                cells = with_turns(cells, each, turn(cp_rank, self.topology.cp))
            maps[TOKEN] = AxisMap(tuple(cells))
        return tuple(sorted(maps.items()))


PAGE = "page"
"""The axis of a padded page: one turn, so it never shows in a view."""


def _as_dtype(part: Part, dtype: str) -> Part:
    return replace(part, dtype=dtype, item_bytes=DTYPE_BYTES[dtype])


def _group_size(counts: Sequence[int]) -> int:
    """Layers per group: the fewest of any kind, or the most where that wastes little."""
    fewest, most = min(counts), max(counts)
    return most if most < 1.5 * fewest else fewest


def with_turns(digits: Sequence[Digit], each: int, whose: Digit) -> list[Digit]:
    """The digits of a token axis with a turn taken after every ``each`` cells.

    >>> with_turns([Digit(16, 8)], 4, turn(0, 2))
    [Digit(size=4, stride=32, held=None), Digit(size=2, stride=0, held=Span(start=0, stop=1)),
     Digit(size=4, stride=8, held=None)]
    """
    low: list[Digit] = []
    high = list(digits)
    left = each
    while left > 1:
        if not high:
            raise SpecError(f"a turn of {each} cells is longer than a block")
        digit = high.pop()
        if digit.size <= left:
            low.insert(0, digit)
            left, rest = divmod(left, digit.size)
        else:
            rest = digit.size % left
            high.append(Digit(digit.size // left, digit.stride * left))
            low.insert(0, Digit(left, digit.stride))
            left = 1
        if rest:
            raise SpecError(f"a turn of {each} cells does not divide a block")
    return [*high, whose, *low]
