"""The kinds of cache pages, independent of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from kvferry.core.box import TOKEN
from kvferry.core.span import Span
from kvferry.core.state import Axis, Kind, State, Tail
from kvferry.core.view import AxisMap, Digit
from kvferry.errors import SpecError
from kvferry.layout.order import Fork, Leaf, Order


class Sharding(StrEnum):
    """The distribution of an axis over tensor-parallel ranks."""

    WHOLE = "whole"
    """Every rank holds all of it (MLA latents, indexer keys)."""
    EVEN = "even"
    """Equal parts; the size must be divisible (recurrent states)."""
    SPREAD = "spread"
    """Equal parts, rounded outwards: with more ranks than coordinates, several ranks hold the same one (KV
    heads)."""


def held(sharding: Sharding, size: int, rank: int, num_ranks: int, *, what: str = "an axis") -> Span:
    """The coordinates of an axis of ``size`` that rank ``rank`` of ``num_ranks`` holds.

    >>> [str(held(Sharding.SPREAD, 8, r, 4)) for r in range(4)]
    ['[0, 2)', '[2, 4)', '[4, 6)', '[6, 8)']
    >>> [str(held(Sharding.SPREAD, 2, r, 4)) for r in range(4)]
    ['[0, 1)', '[0, 1)', '[1, 2)', '[1, 2)']
    >>> held(Sharding.EVEN, 8, 0, 3)
    Traceback (most recent call last):
    kvferry.errors.SpecError: an axis of 8 cannot be split over 3 ranks
    """
    if sharding is Sharding.WHOLE:
        return Span(0, size)
    if sharding is Sharding.EVEN and size % num_ranks:
        raise SpecError(f"{what} of {size} cannot be split over {num_ranks} ranks")
    return Span(rank * size // num_ranks, -(-(rank + 1) * size // num_ranks))


def stages(num_layers: int, sizes: Sequence[int] | int) -> list[range]:
    """The layers of each pipeline stage, from their sizes or from the number of stages."""
    if isinstance(sizes, int):
        if not 1 <= sizes <= num_layers:
            raise SpecError(f"{num_layers} layers cannot be split into {sizes} pipeline stages")
        edges = [stage * num_layers // sizes for stage in range(sizes + 1)]
    else:
        if sum(sizes) != num_layers or min(sizes, default=0) < 1:
            raise SpecError(f"pipeline stages {list(sizes)} do not add up to {num_layers} layers")
        edges = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def turn(rank: int, num_ranks: int) -> Digit:
    """The digit of the token axis that selects the context-parallel rank."""
    return Digit(num_ranks, 0, None if num_ranks == 1 else Span(rank, rank + 1))


DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "uint8": 1}
"""Bytes of an element, by dtype."""


@dataclass(frozen=True, slots=True)
class Item:
    """The smallest unit that is never split: an element, a packed row, or an opaque block."""

    dtype: str
    num_bytes: int
    encoding: str = "plain"
    """The format beyond the dtype, equal on both sides."""

    @classmethod
    def of(cls, dtype: str) -> Item:
        return cls(dtype, DTYPE_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class Dim:
    """An axis of a part, with its size over all ranks."""

    axis: str
    size: int
    sharding: Sharding = Sharding.WHOLE


@dataclass(frozen=True, slots=True)
class PagePart:
    """One state of a layer: K, V, a latent, a scale, one piece of a convolution …"""

    name: str
    dims: tuple[Dim, ...]
    item: Item

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dim.axis for dim in self.dims)

    @property
    def num_bytes(self) -> int:
        total = self.item.num_bytes
        for dim in self.dims:
            total *= dim.size
        return total


EVEN, SPREAD = Sharding.EVEN, Sharding.SPREAD


@dataclass(frozen=True, slots=True)
class Page:
    """The parts of one layer in one block or slot, and their order in memory."""

    parts: tuple[PagePart, ...]
    order: Order | None = None
    """``None``: the engine's layout."""
    kind: Kind = Kind.PAGED
    tokens_per_cell: int = 1
    tail: Tail = Tail.COMPLETE

    @property
    def is_whole_block(self) -> bool:
        return self.tail is Tail.PARTIAL

    def part(self, name: str) -> PagePart:
        return next(part for part in self.parts if part.name == name)

    def states(self, name: str, aliases: tuple[str, ...] = ()) -> Iterator[State]:
        """One state per part; ``aliases`` are the caches that share it."""
        for part in self.parts:
            yield State(
                f"{name}/{part.name}",
                tuple(Axis(dim.axis, dim.size) for dim in part.dims),
                item_bytes=part.item.num_bytes,
                dtype=part.item.dtype,
                kind=self.kind,
                tokens_per_cell=self.tokens_per_cell,
                tail=self.tail,
                encoding=part.item.encoding,
                aliases=tuple(f"{alias}/{part.name}" for alias in aliases),
            )


# -- attention -----------------------------------------------------------------------------------------


def k_and_v(num_heads: int, widths: tuple[int, int], items: tuple[Item, Item]) -> tuple[PagePart, ...]:
    """K and V by KV head, each with its width and item."""
    heads = Dim("head", num_heads, SPREAD)
    return tuple(
        PagePart(name, (heads, Dim("channel", width)), item)
        for name, width, item in zip("kv", widths, items, strict=True)
    )


def latent(width: int, item: Item) -> Page:
    """MLA: one latent vector and rope key per token, whole on every rank."""
    return rows(PagePart("latent", (Dim("channel", width),), item))


def rows(part: PagePart) -> Page:
    return Page((part,), ("token", *part.axes))


def values_then_scales(value_bytes: int, scale_bytes: int, encoding: str) -> Page:
    """The quantised rows of a block, followed by all their scales (indexer keys, DeepSeek-V4's rows)."""
    values = PagePart("values", (), Item("uint8", value_bytes, encoding))
    scales = PagePart("scales", (), Item("uint8", scale_bytes, encoding))
    return Page((values, scales), ("part", "token"))


# -- recurrent states ----------------------------------------------------------------------------------


def mamba1(inner: int, state: int, kernel: int, conv: Item, ssm: Item) -> Page:
    """Mamba-1: a convolution over the inner channels, and a state vector per channel."""
    channels = (Dim("channel", inner, EVEN),)
    return _slot({"x": channels}, kernel, conv, (*channels, Dim("state", state)), ssm)


def mamba2(heads: int, dim: int, groups: int, state: int, kernel: int, conv: Item, ssm: Item) -> Page:
    """Mamba-2: convolution parts x (by head), B and C (by group), and a matrix per head."""
    by_head = (Dim("head", heads, EVEN), Dim("channel", dim))
    by_group = (Dim("group", groups, SPREAD), Dim("channel", state))
    parts = {"x": by_head, "B": by_group, "C": by_group}
    return _slot(parts, kernel, conv, (*by_head, Dim("state", state)), ssm)


def delta_net(k_heads: int, k_dim: int, v_heads: int, v_dim: int, kernel: int, conv: Item, ssm: Item) -> Page:
    """GDN and KDA: convolution parts q, k and v by their heads, and a matrix per value head."""
    by_k = (Dim("head", k_heads, EVEN), Dim("channel", k_dim))
    by_v = (Dim("head", v_heads, EVEN), Dim("channel", v_dim))
    return _slot({"q": by_k, "k": by_k, "v": by_v}, kernel, conv, (*by_v, Dim("state", k_dim)), ssm)


def _slot(
    conv_dims: Mapping[str, tuple[Dim, ...]], kernel: int, conv: Item, ssm_dims: tuple[Dim, ...], ssm: Item
) -> Page:
    """A slot: the parts of the convolution, then the recurrent state; channel-major."""
    time = Dim("time", kernel - 1)
    parts = [PagePart(f"conv.{name}", (*dims, time), conv) for name, dims in conv_dims.items()]
    return channel_major(Page((*parts, PagePart("ssm", ssm_dims, ssm)), kind=Kind.RECURRENT))


def channel_major(page: Page) -> Page:
    """ "DS": separate convolution parts, with channels outside and time inside."""
    return replace(page, order=(Fork(tuple(((part.name,), part.axes) for part in page.parts)),))


def time_major(page: Page) -> Page:
    """ "SD": time outside; each row has all convolution parts, one after another."""
    *conv, ssm = page.parts
    row = Fork(tuple(((part.name,), part.axes[:-1]) for part in conv))
    names = tuple(part.name for part in conv)
    return replace(page, order=(Fork(((names, ("time", row)), ((ssm.name,), ssm.axes))),))


# -- whole blocks --------------------------------------------------------------------------------------


def opaque_block(num_bytes: int, num_shards: int, num_tokens: int, encoding: str) -> Page:
    """A block as one item per rank, moved unchanged; ``num_shards`` of them are different."""
    part = PagePart("block", _shards(num_shards), Item("opaque", num_bytes, encoding))
    return Page((part,), ("token", "shard"), tokens_per_cell=num_tokens, tail=Tail.PARTIAL)


def opaque_slot(num_bytes: int, num_shards: int, encoding: str) -> Page:
    part = PagePart("slot", _shards(num_shards), Item("opaque", num_bytes, encoding))
    return Page((part,), ("shard",), kind=Kind.RECURRENT)


def _shards(count: int) -> tuple[Dim, ...]:
    return (Dim("shard", count, SPREAD),) if count > 1 else ()


Axes = tuple[tuple[str, AxisMap], ...]

Digits = Mapping[str, Sequence[tuple[int, int]]]
"""(count, stride) of the digits of each axis, the most significant first."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """A rank's position: ``rank`` decides its heads, ``turn`` its tokens."""

    rank: int
    num_ranks: int
    turn: int = 0
    num_turns: int = 1
    """Number of context-parallel ranks."""
    tokens_per_turn: int = 1

    def held(self, part: PagePart, where: str = "") -> dict[str, Span]:
        what = f"{where}/{part.name}" if where else part.name
        return {
            dim.axis: held(dim.sharding, dim.size, self.rank, self.num_ranks, what=f"{what}: {dim.axis}")
            for dim in part.dims
        }

    def leaf(self, page: Page, part: PagePart, where: str, num_cells: int) -> Leaf:
        """The part as a leaf of an order, with this rank's sizes."""
        sizes = {axis: len(span) for axis, span in self.held(part, where).items()}
        if page.kind is Kind.PAGED:
            sizes[TOKEN] = num_cells
        return Leaf(where, part.name, sizes, part.item.num_bytes)

    def axes(self, page: Page, part: PagePart, digits: Digits, where: str = "") -> Axes:
        """The axes of this rank's view of a part."""
        maps = {
            axis: AxisMap(tuple(Digit(*pair) for pair in digits.get(axis, ())), span.start)
            for axis, span in self.held(part, where).items()
        }
        if page.kind is Kind.PAGED:
            tokens = [Digit(*pair) for pair in digits[TOKEN]]
            if self.num_turns > 1:
                each = num_cells(page, self.tokens_per_turn, where)
                tokens = with_turns(tokens, each, turn(self.turn, self.num_turns))
            maps[TOKEN] = AxisMap(tuple(tokens))
        return tuple(sorted(maps.items()))


def num_cells(page: Page, num_tokens: int, where: str = "") -> int:
    """The number of cells of these tokens; raises SpecError if they are not a multiple."""
    cells, rest = divmod(num_tokens, page.tokens_per_cell)
    if rest:
        at = f"{where}: " if where else ""
        raise SpecError(f"{at}{num_tokens} tokens cannot be split into cells of {page.tokens_per_cell}")
    return cells


def with_turns(digits: Sequence[Digit], each: int, whose: Digit) -> list[Digit]:
    """The digits of a token axis, with the digit ``whose`` inserted above every ``each`` cells.

    >>> with_turns([Digit(16, 8)], 4, turn(0, 2))
    [Digit(size=4, stride=32, held=None), Digit(size=2, stride=0, held=Span(start=0, stop=1)),
     Digit(size=4, stride=8, held=None)]
    """
    low: list[Digit] = []
    high = list(digits)
    left = each
    while left > 1:
        if not high:
            raise SpecError(f"an interleave of {each} cells is longer than a block")
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
            raise SpecError(f"an interleave of {each} cells does not divide a block evenly")
    return [*high, whose, *low]
