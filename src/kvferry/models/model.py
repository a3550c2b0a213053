"""The caches of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.core.identity import Identity
from kvferry.core.state import Kind
from kvferry.errors import SpecError
from kvferry.layout.pages import DTYPE_BYTES, Item, Page, Sharding, k_and_v, opaque_block

_HF_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8": "fp8_e4m3"}


def dtype_name(name: str) -> str:
    """kvferry's name of a dtype, from its own or a config's.

    >>> dtype_name("bfloat16"), dtype_name("torch.float32")
    ('bf16', 'fp32')
    """
    short = name.removeprefix("torch.")
    found = _HF_NAMES.get(short, short)
    if found not in DTYPE_BYTES:
        raise SpecError(f"unknown dtype {name!r}: use one of {', '.join(DTYPE_BYTES)}")
    return found


ATTENTION_PARTS = frozenset({"k", "v", "latent"})
"""The parts with the engine's cache dtype, which the opaque layout covers."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache of one layer."""

    name: str
    """``attn``, ``mamba``, ``indexer`` …; appended to the layer's name."""
    page: Page
    window: int = 0
    tokens_per_block: int = 0
    """Its own block size; 0: the engine's."""
    page_multiple: int = 1
    """Pages are padded to a multiple of these bytes."""
    why_not_fp8: str = ""
    """Why it cannot be described in fp8; empty: it can."""

    @property
    def is_attention(self) -> bool:
        return {part.name for part in self.page.parts} <= ATTENTION_PARTS

    @property
    def is_recurrent(self) -> bool:
        return self.page.kind is Kind.RECURRENT

    def with_dtype(self, dtype: str) -> Cache:
        if self.why_not_fp8 and dtype.startswith("fp8"):
            raise SpecError(self.why_not_fp8)
        parts = tuple(replace(part, item=Item.of(dtype)) for part in self.page.parts)
        return replace(self, page=replace(self.page, parts=parts))

    def as_opaque(self, num_ranks: int, num_tokens: int) -> Cache:
        """The cache as opaque blocks."""
        dims = [dim for part in self.page.parts for dim in part.dims]
        heads = max((dim.size for dim in dims if dim.sharding is not Sharding.WHOLE), default=1)
        shards = min(heads, num_ranks)
        if heads % shards or num_ranks % shards:
            raise SpecError(f"opaque blocks of {heads} heads cannot be split over {num_ranks} ranks")
        block_bytes = sum(part.num_bytes for part in self.page.parts) * num_tokens // shards
        page = opaque_block(block_bytes, shards, num_tokens, f"opaque block of {num_tokens} tokens")
        return replace(self, page=page, tokens_per_block=num_tokens, page_multiple=1)


def attention(heads: int, dim: int, dtype: str, *, window: int = 0) -> Cache:
    item = Item.of(dtype)
    page = Page(k_and_v(heads, (dim, dim), (item, item)))
    return Cache("attn", page, window=window)


OFFLINE = "described offline"


def is_offline(identity: Identity) -> bool:
    return ("", OFFLINE) in identity.unknown


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer and its caches (possibly none)."""

    name: str
    caches: tuple[Cache, ...] = ()
    shares: str = ""
    """The layer whose caches this one uses (KV sharing)."""


@dataclass(frozen=True, slots=True)
class Model:
    """The layers of a model, and of its draft, which is on the last pipeline stage."""

    name: str
    layers: tuple[Layer, ...]
    draft: tuple[Layer, ...] = ()
    default_block: int = 16
    architecture: str = ""
    """The ``model_type`` of its config; empty if unknown."""
    draft_architecture: str = ""
    num_query_heads: int = 0
    """Number of attention heads; 0 if unknown."""

    def with_draft(self, draft: Model) -> Model:
        """This model with another model as its speculative draft."""
        layers = tuple(replace(layer, name=f"draft.{layer.name}") for layer in draft.layers)
        return replace(
            self,
            name=f"{self.name}+{draft.name}",
            draft=(*self.draft, *layers),
            draft_architecture=draft.architecture,
        )

    @property
    def identity(self) -> Identity:
        named = {"architecture": self.architecture, "draft.architecture": self.draft_architecture}
        known = {name: kind for name, kind in named.items() if kind}
        return Identity.of(known, {"": OFFLINE} if known else {})
