"""The manifest of an engine, from a model and a topology."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.state import Addressing, Group, State
from kvferry.core.view import View
from kvferry.errors import SpecError
from kvferry.layout.order import (
    BLOCK,
    LAYER,
    OPAQUE,
    Leaf,
    Node,
    Order,
    Repeat,
    Row,
    grow,
    in_kernel_blocks,
    layout,
    num_bytes,
    spots,
)
from kvferry.layout.pages import Page, PagePart, RankShare, num_cells, stages, time_major
from kvferry.models.model import Cache, Model
from kvferry.models.topology import Topology

POOL = "pool"
"""The pool of groups that share regions."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One cache of one layer in this engine."""

    layer: str
    stage: int
    cache: Cache
    aliases: tuple[str, ...]
    group: str

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.cache.name}"


@dataclass(frozen=True, slots=True)
class _Form:
    """The layout of a part inside a block, common to all layers and ranks."""

    page: Page
    part: PagePart
    digits: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]
    """(count, stride) of the digits of each axis."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory of ranks with equal shares."""

    regions: tuple[Region, ...]
    places: tuple[tuple[str, str, str, int, int, int], ...]
    """State, group, region, offset, block stride and form index of each view."""
    forms: tuple[_Form, ...]


def describe(model: Model, topology: Topology, engine: str = "engine") -> Manifest:
    described = _Engine(model, topology)
    return Manifest(
        engine=engine,
        model=model.name,
        identity=model.identity,
        states=tuple(described.states()),
        groups=tuple(described.groups()),
        ranks=tuple(described.rank(rank) for rank in range(topology.num_ranks)),
    )


def served_block(model: Model, topology: Topology) -> int:
    """vLLM's block size: in a hybrid model, a page of attention is at least a page of recurrent state.

    >>> from kvferry.models import model_named
    >>> [served_block(model_named("kimi-linear-48b"), Topology(tp=tp)) for tp in (1, 8)]
    [1920, 256]
    """
    share = RankShare(0, topology.tp)
    step = max(topology.block, model.default_block)
    caches = [cache for layer in model.layers for cache in layer.caches]
    slot = max((_bytes_of(cache, share) for cache in caches if cache.is_recurrent), default=0)
    row = _widest_row(model, topology)
    return step * max(1, -(-slot // (step * row))) if row else step


def _widest_row(model: Model, topology: Topology) -> int:
    """The most bytes of one token in one layer's attention, on a rank."""
    attending = (cache for layer in model.layers for cache in layer.caches if cache.is_attention)
    kept = (cache.with_dtype(topology.dtype) if topology.dtype else cache for cache in attending)
    return max((_bytes_of(cache, RankShare(0, topology.tp)) for cache in kept), default=0)


def _bytes_of(cache: Cache, share: RankShare) -> int:
    """Bytes of one rank's share of a slot, or of one token."""
    leaves = (share.leaf(cache.page, part, cache.name, 1) for part in cache.page.parts)
    return sum(leaf.item_bytes * prod(leaf.sizes.values()) for leaf in leaves)


class _Engine:
    def __init__(self, model: Model, topology: Topology) -> None:
        self.model, self.topology = model, topology
        self.layout = layout(topology.layout)
        self._memories: dict[tuple[int, tuple[int, ...]], _Memory] = {}

    # -- states and groups -------------------------------------------------------------------------

    @cached_property
    def caches(self) -> tuple[LayerCache, ...]:
        """Every cache of every layer, with its stage and its group."""
        found = list(self._ungrouped())
        if not found:
            raise SpecError(f"model {self.model.name}: no layer has a cache")
        paged = dict.fromkeys(each.group for each in found if not each.cache.is_recurrent)
        if unknown := self.topology.block_of.keys() - paged:
            raise SpecError(
                f"block.{min(unknown)}: {self.model.name} has {', '.join(paged) or 'no paged groups'}"
            )
        buckets: dict[str, list[int]] = defaultdict(list)
        for i, each in enumerate(found):
            buckets[each.group].append(i)
        if self.is_shared:
            for name, members in buckets.items():
                num_groups = -(-len(members) // _group_size([len(m) for m in buckets.values()]))
                for turn_of, i in enumerate(members):
                    if num_groups > 1:
                        found[i] = replace(found[i], group=f"{name}.{turn_of % num_groups}")
        return tuple(found)

    def _ungrouped(self) -> Iterator[LayerCache]:
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
                yield LayerCache(layer.name, stage, kept, tuple(aliases[layer.name]), self._bucket(kept))

    @cached_property
    def is_shared(self) -> bool:
        """Whether groups share regions (hybrid allocator)."""
        kinds = {each.group for each in self._ungrouped()}
        return self.topology.alloc == "shared" or (self.topology.alloc == "auto" and len(kinds) > 1)

    def _adapted(self, cache: Cache) -> Cache:
        """The cache with this engine's dtype, convolution order and block size."""
        topology = self.topology
        if topology.dtype and cache.is_attention:
            cache = cache.with_dtype(topology.dtype)
        if cache.is_recurrent:
            return replace(cache, page=time_major(cache.page)) if topology.conv == "SD" else cache
        bucket = self._bucket(cache)
        chosen = topology.block_of.get(bucket, cache.tokens_per_block or topology.block)
        num_tokens = chosen or self.default_block
        if self.layout.name == OPAQUE and cache.is_attention:
            return cache.as_opaque(topology.tp, num_tokens)
        if self.widest_row and cache.is_attention and bucket not in topology.block_of:
            row_bytes = _bytes_of(cache, RankShare(0, topology.tp))
            longer, rest = divmod(self.widest_row, row_bytes)
            num_tokens *= 1 if rest else longer
        return replace(cache, tokens_per_block=num_tokens)

    @cached_property
    def widest_row(self) -> int:
        """Of groups that share a pool: vLLM gives those with narrower rows longer blocks; 0: one group."""
        buckets = {self._bucket(cache) for layer in self.model.layers for cache in layer.caches}
        is_pool = self.topology.alloc != "separate" and len(buckets) > 1
        return _widest_row(self.model, self.topology) if is_pool else 0

    @cached_property
    def default_block(self) -> int:
        return served_block(self.model, self.topology)

    @staticmethod
    def _bucket(cache: Cache) -> str:
        """Caches that can share a block table."""
        if cache.is_recurrent:
            return "state"
        own = f"-{cache.name}" if cache.window and cache.name != "attn" else ""
        return f"window-{cache.window}{own}" if cache.window else "full"

    def states(self) -> Iterator[State]:
        """One state per part of every page."""
        for each in self.caches:
            aliases = tuple(f"{layer}.{each.cache.name}" for layer in each.aliases)
            yield from each.cache.page.states(each.name, aliases)

    def groups(self) -> Iterator[Group]:
        """One group per block table."""
        for name, each in {each.group: each for each in self.caches}.items():
            cache = each.cache
            is_slot = cache.is_recurrent
            yield Group(
                name,
                num_blocks=self.topology.blocks,
                tokens_per_block=1 if is_slot else cache.tokens_per_block * self.topology.cp,
                addressing=Addressing.SLOT if is_slot else Addressing.TABLE,
                pool=POOL if self.is_shared else "",
                window=cache.window,
            )

    # -- the memory of one rank --------------------------------------------------------------------

    def rank(self, rank: int) -> Rank:
        topology = self.topology
        rest, tp_rank = divmod(rank, topology.tp)
        stage, cp_rank = divmod(rest, topology.cp)
        share = RankShare(tp_rank, topology.tp, cp_rank, topology.cp, topology.interleave)
        memory = self._memory(stage, share)
        axes = [share.axes(form.page, form.part, dict(form.digits)) for form in memory.forms]
        views = tuple(
            View(state, group, region, offset, stride, axes[form])
            for state, group, region, offset, stride, form in memory.places
        )
        return Rank(rank, memory.regions, views)

    def _memory(self, stage: int, share: RankShare) -> _Memory:
        """The memory of a rank: equal for all ranks of a stage with equal sizes."""
        sizes = tuple(len(span) for part in self._parts for span in share.held(part).values())
        if (stage, sizes) not in self._memories:
            self._memories[stage, sizes] = self._laid_out(stage, share)
        return self._memories[stage, sizes]

    @cached_property
    def _parts(self) -> tuple[PagePart, ...]:
        """The distinct parts of all pages."""
        return tuple(dict.fromkeys(part for each in self.caches for part in each.cache.page.parts))

    def _laid_out(self, stage: int, share: RankShare) -> _Memory:
        by_group: dict[str, list[LayerCache]] = defaultdict(list)
        for each in self.caches:
            if each.stage == stage:
                by_group[each.group].append(each)
        sizes: dict[str, int] = defaultdict(int)
        forms: dict[_Form, int] = {}
        places = []
        for region, caches, tree in self._trees(by_group, share):
            sizes[region] = max(sizes[region], num_bytes(tree))
            by_name = {each.name: each for each in caches}
            for spot in spots(tree):
                each = by_name[spot.leaf.layer]
                ((_, stride),) = spot.digits.pop(BLOCK)
                digits = tuple((axis, tuple(pairs)) for axis, pairs in spot.digits.items())
                page = each.cache.page
                form = forms.setdefault(_Form(page, page.part(spot.leaf.part), digits), len(forms))
                places.append(
                    (f"{each.name}/{spot.leaf.part}", each.group, region, spot.offset, stride, form)
                )
        regions = tuple(Region(name, size) for name, size in sizes.items())
        return _Memory(regions, tuple(places), tuple(forms))

    def _trees(
        self, by_group: Mapping[str, Sequence[LayerCache]], share: RankShare
    ) -> Iterator[tuple[str, Sequence[LayerCache], Node]]:
        """(region, caches, tree): one per layer, or one per group with cross-layer blocks."""
        bundles: list[tuple[str, Sequence[LayerCache]]] = []
        for group, caches in by_group.items():
            if self.layout.across_layers:
                bundles.append((POOL if self.is_shared else group, caches))
            else:
                for i, each in enumerate(caches):
                    bundles.append((f"{POOL}.{i}" if self.is_shared else each.name, [each]))
        widest = 0
        if self.is_shared:
            widest = max((self._page_bytes(caches, share) for _, caches in bundles), default=0)
        for region, caches in bundles:
            yield region, caches, self._tree(caches, share, widest)

    def _tree(self, caches: Sequence[LayerCache], share: RankShare, widest: int) -> Node:
        blocks, padded = self.topology.blocks, partial(max, widest)
        orders = {self._order(each) for each in caches}
        leaves = [leaf for each in caches for leaf in self._leaves(each, share)]
        if len(orders) == 1 and all(each.cache.page_multiple == 1 for each in caches):
            return grow(orders.pop(), leaves, num_blocks=blocks, page_bytes=padded)
        return Repeat(BLOCK, blocks, row := self._row(caches, share), padded(num_bytes(row)))

    def _row(self, caches: Sequence[LayerCache], share: RankShare) -> Row:
        """The caches of one block, one after another, each padded to its multiple."""
        children = []
        for each in caches:
            order = self._order(each)
            if set(order[:2]) != {BLOCK, LAYER}:
                raise SpecError(
                    f"layout {self.layout.name} cannot hold {each.name} and other caches in one block"
                )
            inner = grow(order[2:], self._leaves(each, share), num_blocks=self.topology.blocks)
            multiple = each.cache.page_multiple
            padded = -(-num_bytes(inner) // multiple) * multiple
            children.append(Repeat(PAGE, 1, inner, padded))
        return Row(tuple(children))

    def _page_bytes(self, caches: Sequence[LayerCache], share: RankShare) -> int:
        """The bytes of one contiguous block of these caches."""
        tree = self._tree(caches, share, widest=0)
        while isinstance(tree, Row) and len(tree.children) == 1:
            tree = tree.children[0]
        if not isinstance(tree, Repeat) or tree.axis != BLOCK:
            raise SpecError(
                f"layout {self.layout.name} splits blocks; groups that share regions need contiguous ones:"
                " set alloc=separate"
            )
        return tree.pitch

    def _order(self, each: LayerCache) -> Order:
        """A cache's order: the layout's, or the page's own inside the layout's blocks and layers."""
        interior = each.cache.page.order
        order = self.layout.order if interior is None else (*self.layout.outer, *interior)
        kernel = self.topology.kernel
        is_whole = each.cache.is_recurrent or each.cache.page.is_whole_block
        if is_whole or not 0 < kernel < each.cache.tokens_per_block:
            return order
        return in_kernel_blocks(order, num_cells(each.cache.page, kernel))

    @staticmethod
    def _leaves(each: LayerCache, share: RankShare) -> list[Leaf]:
        page = each.cache.page
        cells = 0 if each.cache.is_recurrent else num_cells(page, each.cache.tokens_per_block)
        return [share.leaf(page, part, each.name, cells) for part in page.parts]


PAGE = "page"
"""The axis of a padded page: of size 1, and in no view."""


def _group_size(counts: Sequence[int]) -> int:
    """Layers per group: the smallest count of any kind, or the largest if it is less than 1.5 times that."""
    fewest, most = min(counts), max(counts)
    return most if most < 1.5 * fewest else fewest
