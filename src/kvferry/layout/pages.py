"""The kinds of pages that caches are made of, whatever the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvferry.core.shard import Sharding
from kvferry.core.state import Axis, Kind, State, Tail
from kvferry.layout.order import Fork, Order
from kvferry.layout.parts import Dim, Item, PagePart

EVEN, SPREAD = Sharding.EVEN, Sharding.SPREAD


@dataclass(frozen=True, slots=True)
class Page:
    """What one layer keeps in one block, or in one slot: its parts, and the order in which they lie."""

    parts: tuple[PagePart, ...]
    order: Order | None = None
    """From the outermost loop to the innermost; ``None``: the engine's layout decides."""
    kind: Kind = Kind.PAGED
    tokens_per_cell: int = 1
    tail: Tail = Tail.COMPLETE

    @property
    def is_whole_block(self) -> bool:
        """Whether a block is one opaque item."""
        return self.tail is Tail.PARTIAL

    def part(self, name: str) -> PagePart:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)

    def states(self, name: str, aliases: tuple[str, ...] = ()) -> Iterator[State]:
        """One state per part, for a cache of this name and for those that share it.

        >>> [state.name for state in latent(576, Item.of("bf16")).states("layers.0.attn")]
        ['layers.0.attn/latent']
        """
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
    """K and V, one pair per KV head: the widths of both, and the items of both."""
    heads = Dim("head", num_heads, SPREAD)
    return tuple(
        PagePart(name, (heads, Dim("channel", width)), item)
        for name, width, item in zip("kv", widths, items, strict=True)
    )


def latent(width: int, item: Item) -> Page:
    """MLA: one latent vector and rope key per token, whole on every rank."""
    return rows(PagePart("latent", (Dim("channel", width),), item))


def rows(part: PagePart) -> Page:
    """One plain row per token."""
    return Page((part,), ("token", *part.axes))


def values_then_scales(value_bytes: int, scale_bytes: int, encoding: str) -> Page:
    """Quantised rows of a block first, all their scales behind them (indexer keys, DeepSeek-V4's rows)."""
    values = PagePart("values", (), Item("uint8", value_bytes, encoding))
    scales = PagePart("scales", (), Item("uint8", scale_bytes, encoding))
    return Page((values, scales), ("part", "token"))


# -- recurrent states ----------------------------------------------------------------------------------


def mamba1(inner: int, state: int, kernel: int, conv: Item, ssm: Item) -> Page:
    """Mamba-1: a convolution over the inner channels, and one state vector for each."""
    channels = Dim("channel", inner, EVEN)
    x = PagePart("conv.x", (channels, Dim("time", kernel - 1)), conv)
    return _slot((x,), PagePart("ssm", (channels, Dim("state", state)), ssm))


def mamba2(heads: int, dim: int, groups: int, state: int, kernel: int, conv: Item, ssm: Item) -> Page:
    """Mamba-2: convolution parts x (by head), B and C (by group: copied where ranks outnumber groups)."""
    time = Dim("time", kernel - 1)
    by_head = (Dim("head", heads, EVEN), Dim("channel", dim))
    by_group = (Dim("group", groups, SPREAD), Dim("channel", state))
    parts = (("x", by_head), ("B", by_group), ("C", by_group))
    return _slot(
        tuple(PagePart(f"conv.{name}", (*dims, time), conv) for name, dims in parts),
        PagePart("ssm", (*by_head, Dim("state", state)), ssm),
    )


def delta_net(k_heads: int, k_dim: int, v_heads: int, v_dim: int, kernel: int, conv: Item, ssm: Item) -> Page:
    """GDN and KDA: convolution parts q, k, v, each by its own heads, and a matrix per value head."""
    time = Dim("time", kernel - 1)
    by_k = (Dim("head", k_heads, EVEN), Dim("channel", k_dim))
    by_v = (Dim("head", v_heads, EVEN), Dim("channel", v_dim))
    parts = (("q", by_k), ("k", by_k), ("v", by_v))
    return _slot(
        tuple(PagePart(f"conv.{name}", (*dims, time), conv) for name, dims in parts),
        PagePart("ssm", (*by_v, Dim("state", k_dim)), ssm),
    )


def _slot(conv: tuple[PagePart, ...], ssm: PagePart) -> Page:
    """A slot with the convolution first and the recurrent state behind it, channel-major."""
    return channel_major(Page((*conv, ssm), kind=Kind.RECURRENT))


def channel_major(page: Page) -> Page:
    """ "DS": each convolution part by itself, channels outside, time inside."""
    return replace(page, order=(Fork(tuple(((part.name,), part.axes) for part in page.parts)),))


def time_major(page: Page) -> Page:
    """ "SD": time outside; every row holds all parts of the convolution, one after another."""
    *conv, ssm = page.parts
    row = Fork(tuple(((part.name,), part.axes[:-1]) for part in conv))
    names = tuple(part.name for part in conv)
    return replace(page, order=(Fork(((names, ("time", row)), ((ssm.name,), ssm.axes))),))


# -- whole blocks --------------------------------------------------------------------------------------


def opaque_block(num_bytes: int, num_shards: int, num_tokens: int, encoding: str) -> Page:
    """A block as one item on each rank: legal to move only as it is.

    ``num_shards`` different ones make up the whole; ranks beyond that hold copies.
    """
    part = PagePart("block", _shards(num_shards), Item("opaque", num_bytes, encoding))
    return Page((part,), ("token", "shard"), tokens_per_cell=num_tokens, tail=Tail.PARTIAL)


def opaque_slot(num_bytes: int, num_shards: int, encoding: str) -> Page:
    """A slot as one item on each rank."""
    part = PagePart("slot", _shards(num_shards), Item("opaque", num_bytes, encoding))
    return Page((part,), ("shard",), kind=Kind.RECURRENT)


def _shards(count: int) -> tuple[Dim, ...]:
    return (Dim("shard", count, SPREAD),) if count > 1 else ()
