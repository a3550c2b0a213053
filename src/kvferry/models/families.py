"""From a model's config.json to its caches: one small function per family, and nothing after that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.errors import SpecError
from kvferry.models.cache import (
    Cache,
    Dim,
    Part,
    attention,
    delta_net,
    dtype_name,
    latent,
    mamba1,
    mamba2,
    rows,
    values_then_scales,
)
from kvferry.models.model import Layer, Model

MAX_LAYERS = 10_000

_REQUIRED = object()


class Config:
    """A config.json, read with checks: a missing or senseless key is an error that names it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        text = values.get("text_config")
        self.values: Mapping[str, Any] = {**values, **text} if isinstance(text, Mapping) else values

    def integer(self, *keys: str, default: object = _REQUIRED, most: int = 1 << 20) -> int:
        """The first of these keys that is there, as a whole number."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if type(value) is not int or not 0 <= value <= most:
                    raise SpecError(f"config: {key} must be a whole number up to {most}, got {value!r}")
                return value
        if not isinstance(default, int):
            raise SpecError(f"config: {' or '.join(keys)} is missing")
        return default

    def text(self, *keys: str, default: str) -> str:
        """The first of these keys that is there, as text."""
        value = next((self.values[key] for key in keys if self.values.get(key)), default)
        if not isinstance(value, str):
            raise SpecError(f"config: {keys[0]} must be text, got {value!r}")
        return value

    def sequence(self, key: str, length: int) -> Sequence[Any]:
        """A list, or text, with one entry per layer."""
        value = self.values.get(key)
        if not isinstance(value, list | str) or len(value) != length:
            raise SpecError(
                f"config: {key} must have one entry for each of {length} layers, got {value!r:.80}"
            )
        return value

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS)

    @property
    def dtype(self) -> str:
        return dtype_name(self.text("torch_dtype", "dtype", default="bfloat16"))

    @property
    def q_heads(self) -> int:
        return self.integer("num_attention_heads", "n_head")

    @property
    def head_dim(self) -> int:
        hidden = self.integer("hidden_size", "n_embd", default=0)
        return self.integer("head_dim", default=hidden // self.q_heads)

    def attention(self, *, window: int = 0) -> Cache:
        """Plain attention with the config's KV heads."""
        heads = self.integer("num_key_value_heads", default=self.q_heads)
        if self.values.get("multi_query") is True and not self.values.get("new_decoder_architecture"):
            heads = 1
        return attention(heads, self.head_dim, self.dtype, window=window)

    def latent(self) -> Cache:
        """MLA: latent and rope key in one row."""
        return latent(self.integer("kv_lora_rank") + self.integer("qk_rope_head_dim"), self.dtype)

    @property
    def window(self) -> int:
        return self.integer("sliding_window")


def _layers(num_layers: int, caches: Callable[[int], tuple[Cache, ...]]) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{i}", caches(i)) for i in range(num_layers))


def _dense(config: Config) -> tuple[Layer, ...]:
    """Full attention everywhere: Llama, Qwen3, Falcon, GPT-2 …"""
    cache = config.attention()
    return _layers(config.num_layers, lambda i: (cache,))


def _windowed(config: Config) -> tuple[Layer, ...]:
    """Window and full layers by turns: Gemma-3, gpt-oss; with fewer, wider heads on full ones: Gemma-4."""
    window = config.attention(window=config.window)
    full = attention(
        config.integer(
            "num_global_key_value_heads",
            default=config.integer("num_key_value_heads", default=config.q_heads),
        ),
        config.integer("global_head_dim", default=config.head_dim),
        config.dtype,
    )
    types = config.sequence("layer_types", config.num_layers)
    layers = _layers(config.num_layers, lambda i: (_by_type(types[i], window, full),))
    return _sharing(layers, types, config.integer("num_kv_shared_layers", default=0))


def _by_type(layer_type: object, window: Cache, full: Cache) -> Cache:
    match layer_type:
        case "sliding_attention":
            return window
        case "full_attention":
            return full
        case _:
            raise SpecError(
                f"config: layer_types has {layer_type!r}: sliding_attention or full_attention expected"
            )


def _sharing(layers: tuple[Layer, ...], types: Sequence[Any], num_shared: int) -> tuple[Layer, ...]:
    """The last layers use the cache of the last layer before them that has their type."""
    first = len(layers) - num_shared
    if first < 1:
        raise SpecError(f"config: {num_shared} of {len(layers)} layers cannot share the caches of the rest")
    owners = {types[i]: layers[i].name for i in range(first)}
    if missing := {types[i] for i in range(first, len(layers))} - owners.keys():
        raise SpecError(f"config: no layer owns the cache that {sorted(missing)} layers share")
    shared = (Layer(layers[i].name, shares=owners[types[i]]) for i in range(first, len(layers)))
    return (*layers[:first], *shared)


def _mla(config: Config) -> tuple[Layer, ...]:
    """Latents everywhere: DeepSeek-V3, Kimi-K2; with an indexer beside each: DeepSeek-V3.2."""
    caches: tuple[Cache, ...] = (config.latent(),)
    if width := config.integer("index_head_dim", default=0):
        caches += (values_then_scales("indexer", width, 4 * -(-width // 128), "fp8 rows, fp32 scales"),)
    return _layers(config.num_layers, lambda i: caches)


def _kimi_linear(config: Config) -> tuple[Layer, ...]:
    """KDA states and MLA latents by turns; the config counts layers from 1."""
    inner = config.values.get("linear_attn_config")
    if not isinstance(inner, Mapping):
        raise SpecError("config: linear_attn_config is missing")
    linear = Config(inner)
    heads, dim = linear.integer("num_heads"), linear.integer("head_dim")
    kernel = linear.integer("short_conv_kernel_size")
    kda = delta_net(heads, dim, heads, dim, kernel, config.dtype, "fp32")
    full = set(inner.get("full_attn_layers") or ())
    return _layers(config.num_layers, lambda i: (config.latent() if i + 1 in full else kda,))


def _gated_delta(config: Config) -> tuple[Layer, ...]:
    """GDN states, and full attention on every n-th layer: Qwen3-Next."""
    gdn = delta_net(
        config.integer("linear_num_key_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
        config.dtype,
        dtype_name(config.text("mamba_ssm_dtype", default=config.dtype)),
    )
    every = config.integer("full_attention_interval") or 1
    return _layers(config.num_layers, lambda i: (gdn if (i + 1) % every else config.attention(),))


def _mamba2(config: Config) -> Cache:
    """The Mamba-2 cache, whatever the family calls its dimensions."""
    heads = config.integer("mamba_num_heads", "mamba_n_heads", "num_heads")
    return mamba2(
        heads,
        config.integer("mamba_head_dim", "mamba_d_head", "head_dim"),
        config.integer("n_groups", "mamba_n_groups", "mamba_num_groups"),
        config.integer("ssm_state_size", "mamba_d_state", "state_size"),
        config.integer("conv_kernel", "mamba_d_conv"),
        config.dtype,
        dtype_name(config.text("mamba_ssm_cache_dtype", default=config.dtype)),
    )


def _pure_mamba2(config: Config) -> tuple[Layer, ...]:
    cache = _mamba2(config)
    return _layers(config.num_layers, lambda i: (cache,))


def _nemotron(config: Config) -> tuple[Layer, ...]:
    """A pattern says what each layer is: M state, * attention, anything else remembers nothing."""
    kinds: dict[object, tuple[Cache, ...]] = {"M": (_mamba2(config),), "*": (config.attention(),)}
    pattern = config.sequence("hybrid_override_pattern", config.num_layers)
    return _layers(config.num_layers, lambda i: kinds.get(pattern[i], ()))


def _by_layer_types(config: Config) -> tuple[Layer, ...]:
    """Granite: layer types say mamba or attention."""
    kinds = {"mamba": (_mamba2(config),), "attention": (config.attention(),)}
    types = config.sequence("layer_types", config.num_layers)
    if unknown := set(types) - kinds.keys():
        raise SpecError(f"config: layer_types has {sorted(unknown)}: mamba or attention expected")
    return _layers(config.num_layers, lambda i: kinds[types[i]])


def _bamba(config: Config) -> tuple[Layer, ...]:
    indices = set(config.values.get("attn_layer_indices") or ())
    mamba = _mamba2(config)
    return _layers(config.num_layers, lambda i: (config.attention() if i in indices else mamba,))


def _falcon_h1(config: Config) -> tuple[Layer, ...]:
    """Attention and Mamba-2 side by side in every layer."""
    caches = (config.attention(), _mamba2(config))
    return _layers(config.num_layers, lambda i: caches)


def _jamba(config: Config) -> tuple[Layer, ...]:
    """Mamba-1, and attention on every n-th layer."""
    state = mamba1(
        config.integer("mamba_expand") * config.integer("hidden_size"),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        config.dtype,
        config.dtype,
    )
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset")
    return _layers(
        config.num_layers, lambda i: (config.attention() if i % max(1, period) == offset else state,)
    )


def _deepseek_v4(config: Config) -> tuple[Layer, ...]:
    """A window of rows in each layer; compressed rows, indexer keys and compressor windows by ratio."""
    dim, index = config.integer("head_dim"), config.integer("index_head_dim")
    row = (dim + config.integer("qk_rope_head_dim"), 8, "fp8 rows, ue8m0 scales")
    key = (index, 4, "fp8 rows, fp32 scales")
    aligned = 576

    def compressed(name: str, ratio: int, cells: tuple[int, int, str]) -> Cache:
        return replace(values_then_scales(name, *cells), tokens_per_cell=ratio, page_multiple=aligned)

    def compressor(name: str, width: int, window: int, block: int) -> Cache:
        state = rows(name, Part("state", (Dim("channel", width),), "fp32"))
        return replace(state, window=window, tokens_per_block=block, page_multiple=aligned)

    window = replace(
        values_then_scales("window", *row), window=config.window, tokens_per_block=64, page_multiple=aligned
    )
    by_ratio: dict[int, tuple[Cache, ...]] = {
        0: (window,),
        4: (
            window,
            compressed("attn", 4, row),
            compressed("indexer", 4, key),
            compressor("compressor", 4 * dim, 8, 4),
            compressor("indexer.compressor", 4 * index, 8, 4),
        ),
        128: (window, compressed("attn", 128, row), compressor("compressor", 2 * dim, 128, 8)),
    }
    ratios = config.sequence("compress_ratios", len(config.values.get("compress_ratios") or ()))
    if len(ratios) < config.num_layers or set(ratios[: config.num_layers]) - by_ratio.keys():
        raise SpecError(f"config: compress_ratios needs 0, 4 or 128 for each layer, got {ratios!r:.80}")
    return _layers(config.num_layers, lambda i: by_ratio[ratios[i]])


FAMILIES: dict[str, Callable[[Config], tuple[Layer, ...]]] = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "falcon", "gemma", "gpt2", "phi3", "olmo2"),
        _dense,
    ),
    **dict.fromkeys(
        ("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss"), _windowed
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite"), _mla
    ),
    "kimi_linear": _kimi_linear,
    "qwen3_next": _gated_delta,
    "nemotron_h": _nemotron,
    "granitemoehybrid": _by_layer_types,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "mamba2": _pure_mamba2,
    "deepseek_v4": _deepseek_v4,
}
"""The family of each ``model_type``."""

DEFAULT_BLOCKS = {"deepseek_v32": 64, "deepseek_v4": 256}


def model_from_config(values: Mapping[str, Any], name: str = "") -> Model:
    """The caches of the model that a config.json describes."""
    config = Config(values)
    kind = config.text("model_type", default="")
    if kind not in FAMILIES:
        raise SpecError(f"config: no family for model_type {kind!r}: known are {', '.join(sorted(FAMILIES))}")
    return Model(name or kind, FAMILIES[kind](config), default_block=DEFAULT_BLOCKS.get(kind, 16))
