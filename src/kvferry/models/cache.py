"""What a layer remembers, whatever the engine: the kinds of cache that models are made of."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.shard import Sharding
from kvferry.core.state import Kind, Tail
from kvferry.errors import SpecError
from kvferry.models.order import Fork, Order

WHOLE, EVEN, SPREAD = Sharding.WHOLE, Sharding.EVEN, Sharding.SPREAD

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "uint8": 1}
_HF_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8_e4m3"}


def dtype_name(name: str) -> str:
    """Our name of a dtype, from ours or from a config's.

    >>> dtype_name("bfloat16"), dtype_name("torch.float32")
    ('bf16', 'fp32')
    """
    short = name.removeprefix("torch.")
    found = _HF_NAMES.get(short, short)
    if found not in DTYPE_BYTES:
        raise SpecError(f"no dtype {name!r}: name one of {', '.join(DTYPE_BYTES)}")
    return found


ATTENTION_PARTS = frozenset({"k", "v", "latent"})
"""The parts that follow an engine's choice of cache dtype, and that its attention kernels may hide."""


@dataclass(frozen=True, slots=True)
class Dim:
    """An axis of a part, its size over all ranks, and how tensor parallelism spreads it."""

    axis: str
    size: int
    sharding: Sharding = WHOLE


@dataclass(frozen=True, slots=True)
class Part:
    """One state of a layer: K, V, a latent, a scale, one piece of a convolution …"""

    name: str
    dims: tuple[Dim, ...]
    dtype: str
    item_bytes: int = 0
    """Bytes of an item; 0: those of the dtype."""
    encoding: str = "plain"

    @property
    def bytes_per_item(self) -> int:
        return self.item_bytes or DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of one layer: its parts, and the order inside a page where the layout does not choose it."""

    name: str
    """What it is called after its layer: ``attn``, ``mamba``, ``indexer`` …"""
    parts: tuple[Part, ...]
    interior: Order | None = None
    """The order inside a block, where a kernel fixes it; ``None``: the layout's."""
    kind: Kind = Kind.PAGED
    tokens_per_cell: int = 1
    tail: Tail = Tail.COMPLETE
    window: int = 0
    sinks: int = 0
    tokens_per_block: int = 0
    """A block size of its own; 0: the engine's."""
    page_multiple: int = 1
    """Pages are padded to a multiple of this many bytes."""

    @property
    def is_attention(self) -> bool:
        return {part.name for part in self.parts} <= ATTENTION_PARTS

    def part(self, name: str) -> Part:
        """The part of that name."""
        return next(part for part in self.parts if part.name == name)


def attention(heads: int, dim: int, dtype: str, *, v_dim: int = 0, window: int = 0, sinks: int = 0) -> Cache:
    """Attention over K and V, one pair per KV head."""
    k = Part("k", (Dim("head", heads, SPREAD), Dim("channel", dim)), dtype)
    v = Part("v", (Dim("head", heads, SPREAD), Dim("channel", v_dim or dim)), dtype)
    return Cache("attn", (k, v), window=window, sinks=sinks)


def latent(width: int, dtype: str) -> Cache:
    """MLA: one latent vector and rope key per token, whole on every rank."""
    return rows("attn", Part("latent", (Dim("channel", width),), dtype))


def rows(name: str, part: Part) -> Cache:
    """One plain row per token."""
    return Cache(name, (part,), ("token", "channel"))


def values_then_scales(name: str, value_bytes: int, scale_bytes: int, encoding: str) -> Cache:
    """Quantised rows of a block first, all their scales behind them (indexer keys, DeepSeek-V4's rows)."""
    values = Part("values", (), "uint8", value_bytes, encoding)
    scales = Part("scales", (), "uint8", scale_bytes, encoding)
    return Cache(name, (values, scales), ("part", "token"))


def mamba1(inner: int, state: int, kernel: int, conv_dtype: str, ssm_dtype: str) -> Cache:
    """Mamba-1: a convolution over the inner channels, and one state vector for each."""
    channels = Dim("channel", inner, EVEN)
    conv = Part("conv.x", (channels, Dim("time", kernel - 1)), conv_dtype)
    ssm = Part("ssm", (channels, Dim("state", state)), ssm_dtype)
    return _recurrent("mamba", (conv,), ssm)


def mamba2(
    heads: int, dim: int, groups: int, state: int, kernel: int, conv_dtype: str, ssm_dtype: str
) -> Cache:
    """Mamba-2: convolution parts x (by head), B and C (by group: copied where ranks outnumber groups)."""
    time = Dim("time", kernel - 1)
    x = Part("conv.x", (Dim("head", heads, EVEN), Dim("channel", dim), time), conv_dtype)
    b, c = (
        Part(f"conv.{name}", (Dim("group", groups, SPREAD), Dim("channel", state), time), conv_dtype)
        for name in "BC"
    )
    ssm = Part("ssm", (Dim("head", heads, EVEN), Dim("channel", dim), Dim("state", state)), ssm_dtype)
    return _recurrent("mamba", (x, b, c), ssm)


def delta_net(
    k_heads: int, k_dim: int, v_heads: int, v_dim: int, kernel: int, conv_dtype: str, ssm_dtype: str
) -> Cache:
    """GDN and KDA: convolution parts q, k, v, each by its own heads, and a matrix per value head."""
    time = Dim("time", kernel - 1)
    q, k, v = (
        Part(f"conv.{name}", (Dim("head", heads, EVEN), Dim("channel", dim), time), conv_dtype)
        for name, heads, dim in (("q", k_heads, k_dim), ("k", k_heads, k_dim), ("v", v_heads, v_dim))
    )
    ssm = Part("ssm", (Dim("head", v_heads, EVEN), Dim("channel", v_dim), Dim("state", k_dim)), ssm_dtype)
    return _recurrent("linear", (q, k, v), ssm)


def _recurrent(name: str, conv: tuple[Part, ...], ssm: Part) -> Cache:
    """A page with the convolution first (channel-major, "DS") and the recurrent state behind it."""
    return Cache(name, (*conv, ssm), channel_major(conv, ssm), kind=Kind.RECURRENT)


def channel_major(conv: tuple[Part, ...], ssm: Part) -> Order:
    """ "DS": each convolution part by itself, channels outside, time inside."""
    return (Fork(tuple(((part.name,), _axes(part)) for part in (*conv, ssm))),)


def time_major(conv: tuple[Part, ...], ssm: Part) -> Order:
    """ "SD": time outside; every row holds all parts, one after another."""
    row = Fork(tuple(((part.name,), _axes(part)[:-1]) for part in conv))
    return (Fork(((tuple(part.name for part in conv), ("time", row)), ((ssm.name,), _axes(ssm)))),)


def _axes(part: Part) -> tuple[str, ...]:
    return tuple(dim.axis for dim in part.dims)


def opaque(cache: Cache, num_ranks: int, num_tokens: int) -> Cache:
    """The cache as one opaque item per block: legal to move only as it is."""
    heads = max((d.size for p in cache.parts for d in p.dims if d.sharding is not WHOLE), default=1)
    shards = min(heads, num_ranks)
    if heads % shards or num_ranks % shards:
        raise SpecError(f"opaque blocks of {heads} heads do not divide over {num_ranks} ranks")
    total = sum(_part_bytes(part) for part in cache.parts) * num_tokens
    axis = (Dim("shard", shards, SPREAD),) if heads > 1 else ()
    item_bytes = total // (shards if axis else 1)
    tag = f"opaque block of {num_tokens} tokens"
    part = Part("block", axis, "opaque", item_bytes, tag)
    return Cache(
        cache.name,
        (part,),
        ("token", "shard"),
        tokens_per_cell=num_tokens,
        tail=Tail.PARTIAL,
        window=cache.window,
        sinks=cache.sinks,
        tokens_per_block=num_tokens,
    )


def _part_bytes(part: Part) -> int:
    total = part.bytes_per_item
    for dim in part.dims:
        total *= dim.size
    return total
