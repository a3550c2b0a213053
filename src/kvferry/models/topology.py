"""An engine's configuration: the value of ``--src tp=4,block=16,layout=NHD``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from kvferry.errors import SpecError
from kvferry.layout.order import layout
from kvferry.layout.pages import Sharding, stages
from kvferry.models.model import Model, dtype_name

MAX_RANKS = 4096
MAX_SETTING = 1 << 30
"""The largest value of a count: far above any engine's."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Parallelism, block sizes and memory layout of one engine.

    >>> Topology.parse("tp=4,pp=12+20,block=64,layout=NHD").num_ranks
    8
    >>> Topology.parse("tp=4,blok=64")
    Traceback (most recent call last):
    kvferry.errors.SpecError: unknown key 'blok' in 'tp=4,blok=64': did you mean block=64? ...
    """

    tp: int = 1
    pp: tuple[int, ...] | int = 1
    """Number of pipeline stages, or the number of layers of each."""
    cp: int = 1
    """Number of context-parallel ranks."""
    interleave: int = 1
    """Consecutive tokens on one context-parallel rank."""
    block: int = 0
    """Tokens per block and context-parallel rank; 0: the model's default."""
    block_of: Mapping[str, int] = field(default_factory=dict)
    """Block sizes by group (``block.window-1024=32``)."""
    kernel: int = 0
    """Tokens per kernel block inside a block; 0: no kernel blocks."""
    blocks: int = 4096
    """Blocks in the pool."""
    layout: str = "HND"
    conv: str = "SD"
    """Convolution states time-major (SD) or channel-major (DS)."""
    dtype: str = ""
    """Dtype of attention caches; empty: the model's."""
    alloc: str = "auto"
    """``separate``: a region per layer; ``shared``: groups share regions; ``auto``: shared if hybrid."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "interleave", "blocks"):
            _check_positive(name, getattr(self, name))
        for name in ("block", "kernel"):
            if getattr(self, name):
                _check_positive(name, getattr(self, name))
        layout(self.layout)
        for name, known in (("conv", ("SD", "DS")), ("alloc", ("auto", "separate", "shared"))):
            if getattr(self, name) not in known:
                raise SpecError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.num_ranks > MAX_RANKS:
            raise SpecError(f"{self.num_ranks} ranks, at most {MAX_RANKS} are allowed")

    @property
    def num_stages(self) -> int:
        return self.pp if isinstance(self.pp, int) else len(self.pp)

    @property
    def num_ranks(self) -> int:
        return self.tp * self.num_stages * self.cp

    @classmethod
    def parse(cls, text: str) -> Topology:
        """A topology from ``key=value,key=value``."""
        values: dict[str, object] = {}
        block_of: dict[str, int] = {}
        for item in filter(None, text.split(",")):
            key, _, value = (part.strip() for part in item.partition("="))
            if key.startswith("block."):
                block_of[key.removeprefix("block.")] = _positive(key, value)
            elif key not in _READERS:
                known = ", ".join([*_READERS, "block.GROUP"])
                raise SpecError(f"unknown key {key!r} in {text!r}: {_hint(item)}known are {known}")
            elif key in values:
                raise SpecError(f"{key} is given twice in {text!r}")
            else:
                values[key] = _READERS[key](key, value)
        return cls(**values, block_of=block_of)  # type: ignore[arg-type]  # each reader makes its field's type


def _hint(item: str) -> str:
    """A suggestion for an item with an unknown key.

    >>> _hint("tp4"), _hint("blok=64"), _hint("color=red")
    ('did you mean tp=4? ', 'did you mean block=64? ', '')
    """
    if found := re.fullmatch(r"([a-z]+)[ :]?([0-9]+)", item.strip()):
        key, value = found.groups()
    else:
        key, _, value = (part.strip() for part in item.partition("="))
    close = get_close_matches(key, _READERS, n=1, cutoff=0.75)
    return f"did you mean {close[0]}={value or '…'}? " if close else ""


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise SpecError(f"{name} must be at least 1, got {value}")
    if value > MAX_SETTING:
        raise SpecError(f"{name} must be at most {MAX_SETTING}, got {value}")


def _integer(key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 12:
        raise SpecError(f"{key} must be a whole number, got {value!r}")
    return int(value)


def _positive(key: str, value: str) -> int:
    _check_positive(key, number := _integer(key, value))
    return number


def _stages(key: str, value: str) -> tuple[int, ...] | int:
    parts = [_integer(key, part) for part in value.split("+")]
    for part in parts:
        _check_positive(key, part)
    return parts[0] if len(parts) == 1 else tuple(parts)


def _text(key: str, value: str) -> str:
    if not value:
        raise SpecError(f"{key} needs a value")
    return dtype_name(value) if key == "dtype" else value


_READERS: dict[str, Callable[[str, str], object]] = {
    **dict.fromkeys(("tp", "cp", "interleave", "block", "kernel", "blocks"), _positive),
    "pp": _stages,
    **dict.fromkeys(("layout", "conv", "dtype", "alloc"), _text),
}


WITHOUT_STAGES = frozenset({"gemma3n_text", "mamba2"})
"""Kinds of models that vLLM does not split into pipeline stages."""
ALL_OR_NO_WINDOWS = frozenset({"qwen2", "qwen3"})
"""Kinds of models that vLLM does not serve with windows on some layers. (It does if ``layer_types`` has some,
and ``max_window_layers`` is the number of layers, as in no published model.)"""


def why_not_served(model: Model, topology: Topology) -> Iterator[str]:
    """Each reason why vLLM and similar engines would not start.

    >>> from kvferry.models import model_named
    >>> for why in why_not_served(model_named("llama-3.1-70b"), Topology(tp=7)):
    ...     print(why)
    64 attention heads are not divisible by tp=7
    8 KV heads and tp=7: neither is a multiple of the other
    >>> list(why_not_served(model_named("llama-3.1-70b"), Topology(tp=16)))
    []
    """
    tp, num_heads = topology.tp, model.num_query_heads
    if num_heads % tp:
        yield f"{num_heads} attention heads are not divisible by tp={tp}"
    for num_kv_heads in sorted(_spread(model, "head")):
        if num_kv_heads % tp and tp % num_kv_heads:
            yield f"{num_kv_heads} KV heads and tp={tp}: neither is a multiple of the other"
    for num_groups in sorted(_spread(model, "group") - {1}):
        if num_groups % tp:
            yield f"{num_groups} groups of the recurrent state are not divisible by tp={tp}"
    if model.architecture in WITHOUT_STAGES and topology.num_stages > 1:
        yield f"models of the kind {model.architecture} have no pipeline stages"
    windows = {cache.window for layer in model.layers for cache in layer.caches}
    if model.architecture in ALL_OR_NO_WINDOWS and len(windows) > 1:
        yield f"models of the kind {model.architecture} have a window on all layers or on none"
    plan = stages(len(model.layers), topology.pp)
    stage_of = {model.layers[i].name: stage for stage, layers in enumerate(plan) for i in layers}
    for layer in model.layers:
        if layer.shares and stage_of[layer.shares] != stage_of[layer.name]:
            yield f"{layer.name} uses the cache of {layer.shares}, which is on another pipeline stage"
            break


def _spread(model: Model, axis: str) -> set[int]:
    """Sizes of a dimension of which ranks may have copies."""
    parts = (part for layer in model.layers for cache in layer.caches for part in cache.page.parts)
    return {
        dim.size
        for part in parts
        for dim in part.dims
        if dim.axis == axis and dim.sharding is Sharding.SPREAD
    }
