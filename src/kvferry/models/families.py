"""From a model's config.json to its caches: one function per family."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

from kvferry.errors import SpecError
from kvferry.layout.pages import (
    Dim,
    Item,
    PagePart,
    delta_net,
    latent,
    mamba1,
    mamba2,
    rows,
    values_then_scales,
)
from kvferry.models.config import TEXT_OF, Config
from kvferry.models.model import Cache, Layer, Model, attention, dtype_name

SPARSE_FP8 = (
    "an fp8 row of sparse MLA has 576 or 656 bytes, depending on the GPU and the attention backend. Dump the"
    " engine's manifest and pass the file"
)
VARIANTS = ("-instruct", "-base", "-chat", "-it", "-pt", "-thinking")
"""Suffixes of trained variants, which have the same cache."""


def _layers(num_layers: int, caches: Callable[[int], tuple[Cache, ...]]) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{i}", caches(i)) for i in range(num_layers))


def _check_types(key: str, types: Iterable[object], known: Collection[str]) -> None:
    if unknown := sorted({repr(one) for one in types} - {repr(one) for one in known}):
        raise SpecError(f"config: {key} has {', '.join(unknown)}: supported are {', '.join(known)}")


def _attention(config: Config, heads: int = 0, *, window: int = 0) -> Cache:
    return attention(heads or config.kv_heads, config.head_dim, config.kv_dtype, window=window)


def _latent(config: Config, why_not_fp8: str = "") -> Cache:
    """MLA: latent and rope key in one row."""
    width = config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")
    cache = Cache("attn", latent(width, Item.of(config.dtype)), why_not_fp8=why_not_fp8)
    return cache.with_dtype(config.latent_dtype)


def _uniform(config: Config, pattern: int = 0) -> tuple[Layer, ...]:
    """Attention of one kind, or by ``layer_types``: Llama, Mixtral, GLM-4-MoE, GPT-2 …

    With a ``pattern``, all layers but every ``pattern``-th have windows: Gemma-2, Gemma-3, gpt-oss.
    """
    return _by_types(config, config.layer_types(pattern))


def _by_types(config: Config, types: Sequence[Any], full: Cache | None = None) -> tuple[Layer, ...]:
    by_type = {"full_attention": full or _attention(config)}
    if "sliding_attention" in types:
        if not config.window:
            raise SpecError("config: layer_types has sliding_attention, but sliding_window is missing")
        by_type["sliding_attention"] = _attention(config, window=config.window)
    _check_types("layer_types", types, by_type)
    layers = _layers(config.num_layers, lambda i: (by_type[types[i]],))
    return _sharing(layers, types, config.integer("num_kv_shared_layers", default=0))


def _qwen(config: Config) -> tuple[Layer, ...]:
    """Qwen2 and Qwen3: the first ``max_window_layers`` layers have no window."""
    num_full = config.integer("max_window_layers", least=0) if config.window else 0
    types = config.layer_types()
    if config.get("layer_types") is None:
        types = ["full_attention" if i < num_full else kind for i, kind in enumerate(types)]
    return _by_types(config, types)


def _gemma4(config: Config) -> tuple[Layer, ...]:
    """Full layers have wider heads, and fewer if K and V share a projection; the last layer is full."""
    heads = config.integer("num_global_key_value_heads", default=0)
    if config.get("attention_k_eq_v") is not True or not heads:
        heads = config.kv_heads
    full = attention(heads, config.integer("global_head_dim", default=512), config.kv_dtype)
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise SpecError("config: use_bidirectional_attention: only 'vision' is known")
    types = [*config.layer_types(6)[:-1], "full_attention"]
    return _by_types(config, types, full)


def _falcon(config: Config) -> tuple[Layer, ...]:
    """One KV head with ``multi_query``; the new decoder architecture has its own number."""
    given = config.integer("num_kv_heads", "n_head_kv", default=0)
    is_new = config.get("new_decoder_architecture") is True or config.kind == "RefinedWeb"
    is_multi_query = config.get("multi_query") is True
    if is_new:
        heads = given or config.q_heads
    elif is_multi_query:
        heads = 1
    else:
        heads = config.q_heads
        if given not in (0, heads):
            raise SpecError(
                f"config: num_kv_heads {given} of {heads} heads needs new_decoder_architecture or multi_query"
            )
    cache = _attention(config, heads)
    return _layers(config.num_layers, lambda i: (cache,))


def _llama4(config: Config) -> tuple[Layer, ...]:
    """Chunked attention (a window of one chunk), and full attention on layers without rope."""
    chunk = config.integer("attention_chunk_size", default=0, most=1 << 30)
    every = config.integer("no_rope_layer_interval")
    has_rope = config.numbers("no_rope_layers") or [
        int((i + 1) % every != 0) for i in range(config.num_layers)
    ]
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope]
    if len(types) != config.num_layers or config.get("layer_types") not in (None, types):
        raise SpecError(
            "config: no_rope_layers and layer_types must have one entry per layer, and agree:"
            " layers with rope (1) are chunked_attention"
        )
    full = _attention(config)
    chunked = _attention(config, window=chunk) if chunk else full
    return _layers(config.num_layers, lambda i: (chunked if types[i] == "chunked_attention" else full,))


def _minimax(config: Config) -> tuple[Layer, ...]:
    """MiniMax-M2: full attention only."""
    if set(config.numbers("attn_type_list")) - {1}:
        raise SpecError("config: attn_type_list: only 1 (attention with softmax) is supported")
    return _uniform(config)


def _sharing(layers: tuple[Layer, ...], types: Sequence[Any], num_shared: int) -> tuple[Layer, ...]:
    """The last layers share the cache of the last owning layer of their type."""
    first = len(layers) - num_shared
    if first < 1:
        raise SpecError(f"config: {num_shared} of {len(layers)} layers cannot share the caches of the rest")
    owners = {types[i]: layers[i].name for i in range(first)}
    if missing := {types[i] for i in range(first, len(layers))} - owners.keys():
        raise SpecError(f"config: no layer owns the cache that {sorted(missing)} layers share")
    shared = (Layer(layers[i].name, shares=owners[types[i]]) for i in range(first, len(layers)))
    return (*layers[:first], *shared)


def _mla(config: Config) -> tuple[Layer, ...]:
    """Latents: DeepSeek-V3, Kimi-K2; with an indexer: DeepSeek-V3.2."""
    if config.get("use_mla") is False:
        raise SpecError("config: use_mla is false: only latents are supported for this model_type")
    width = config.integer("index_head_dim", default=0)
    caches: tuple[Cache, ...] = (_latent(config, SPARSE_FP8 if width else ""),)
    types = config.layer_types() if config.get("layer_types") is not None else ()
    _check_types("layer_types", types, ("full_attention", "indexed_attention"))
    if width:
        keys = values_then_scales(width, 4 * -(-width // 128), "fp8 rows, fp32 scales")
        caches += (Cache("indexer", keys),)
    return _layers(config.num_layers, lambda i: caches)


def _kimi_linear(config: Config) -> tuple[Layer, ...]:
    """KDA states and MLA latents; the config counts layers from 1."""
    inner = config.get("linear_attn_config")
    if not isinstance(inner, Mapping):
        raise SpecError("config: linear_attn_config is missing")
    linear = Config(inner)
    heads, dim = linear.integer("num_heads"), linear.integer("head_dim")
    kernel = linear.integer("short_conv_kernel_size")
    items = (Item.of(config.dtype), Item.of("fp32"))
    kda = Cache("linear", delta_net(heads, dim, heads, dim, kernel, *items))
    full = set(linear.numbers("full_attn_layers"))
    return _layers(config.num_layers, lambda i: (_latent(config) if i + 1 in full else kda,))


def _gated_delta(config: Config) -> tuple[Layer, ...]:
    """GDN states, and full attention on every n-th layer: Qwen3-Next."""
    state = delta_net(
        config.integer("linear_num_key_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
        Item.of(config.dtype),
        Item.of(config.dtype),
    )
    gdn = Cache("linear", state)
    every = config.integer("full_attention_interval", default=4) or 1
    kinds = {"linear_attention": gdn, "full_attention": _attention(config)}
    types: Sequence[Any] = [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(config.num_layers)
    ]
    if config.get("layer_types") is not None:
        types = config.sequence("layer_types", config.num_layers)
    _check_types("layer_types", types, kinds)
    return _layers(config.num_layers, lambda i: (kinds[types[i]],))


class Mamba2Keys(NamedTuple):
    """A family's config keys of its Mamba-2 layers."""

    heads: str
    head_dim: str
    groups: tuple[str, ...]
    state: str
    kernel: tuple[str, ...]


_NEMOTRON = Mamba2Keys(
    "mamba_num_heads",
    "mamba_head_dim",
    ("n_groups", "mamba_n_groups", "mamba_num_groups"),
    "ssm_state_size",
    ("conv_kernel", "mamba_d_conv"),
)
_BAMBA = Mamba2Keys("mamba_n_heads", "mamba_d_head", ("mamba_n_groups",), "mamba_d_state", ("mamba_d_conv",))
_MAMBA2 = Mamba2Keys("num_heads", "head_dim", ("n_groups",), "state_size", ("conv_kernel",))


def _mamba2(config: Config, keys: Mamba2Keys, ssm_dtype: str = "") -> Cache:
    """The Mamba-2 cache, with the state in the model's dtype by default."""
    heads = config.integer(keys.heads)
    if config.get(keys.head_dim) == "auto":
        inner = config.integer("mamba_d_ssm", default=0) or (
            config.integer("mamba_expand") * config.integer("hidden_size")
        )
        dim = inner // max(1, heads)
    else:
        dim = config.integer(keys.head_dim)
    if config.integer("mamba_d_ssm", default=heads * dim) != heads * dim:
        raise SpecError(f"config: mamba_d_ssm must be {heads} heads × {dim}")
    page = mamba2(
        heads,
        dim,
        config.integer(*keys.groups),
        config.integer(keys.state),
        config.integer(*keys.kernel),
        Item.of(config.dtype),
        Item.of(ssm_dtype or config.dtype),
    )
    return Cache("mamba", page)


def _pure_mamba2(config: Config) -> tuple[Layer, ...]:
    cache = _mamba2(config, _MAMBA2)
    return _layers(config.num_layers, lambda i: (cache,))


_NEMOTRON_LAYERS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "state"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "E", "mlp", "moe"), "nothing"),
}
"""The kind of cache, by a layer's letter in a pattern or its name in a list."""


def _nemotron(config: Config) -> tuple[Layer, ...]:
    """Layers by a pattern or a list; MLP and MoE layers have no cache."""
    state = _mamba2(config, _NEMOTRON, dtype_name(config.text("mamba_ssm_cache_dtype", default="float32")))
    kept = {"state": (state,), "attention": (_attention(config),), "nothing": ()}
    keys = ("hybrid_override_pattern", "layers_block_type", "layer_types")
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    if (listed := config.get(key)) is None:
        raise SpecError(f"config: {' or '.join(keys)} is missing")
    count = config.integer("num_hidden_layers", default=len(listed) if isinstance(listed, list | str) else 1)
    types = config.sequence(key, count)
    _check_types(key, types, _NEMOTRON_LAYERS)
    return _layers(count, lambda i: kept[_NEMOTRON_LAYERS[types[i]]])


def _granite(config: Config) -> tuple[Layer, ...]:
    """Granite: mamba or attention, by ``layer_types``."""
    types = config.sequence("layer_types", config.num_layers)
    of_state, of_attention = ("mamba", "linear_attention"), ("attention", "full_attention")
    _check_types("layer_types", types, (*of_state, *of_attention))
    state = (_mamba2(config, _BAMBA),) if set(types) & set(of_state) else ()
    full = (_attention(config),)
    return _layers(config.num_layers, lambda i: state if types[i] in of_state else full)


def _bamba(config: Config) -> tuple[Layer, ...]:
    indices = set(config.numbers("attn_layer_indices"))
    mamba, full = _mamba2(config, _BAMBA), _attention(config)
    return _layers(config.num_layers, lambda i: (full if i in indices else mamba,))


def _falcon_h1(config: Config) -> tuple[Layer, ...]:
    """Attention and Mamba-2 side by side in every layer."""
    caches = (_attention(config), _mamba2(config, _BAMBA))
    return _layers(config.num_layers, lambda i: caches)


def _jamba(config: Config) -> tuple[Layer, ...]:
    """Mamba-1, and attention on every n-th layer."""
    page = mamba1(
        config.integer("mamba_expand") * config.integer("hidden_size"),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        Item.of(config.dtype),
        Item.of(config.dtype),
    )
    state = Cache("mamba", page)
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", least=0)
    return _layers(
        config.num_layers, lambda i: (_attention(config) if i % max(1, period) == offset else state,)
    )


def _deepseek_v4(config: Config) -> tuple[Layer, ...]:
    """A window of rows in each layer; compressed rows, indexer keys and compressor windows by ratio."""
    dim, index = config.integer("head_dim"), config.integer("index_head_dim")
    row = (dim + config.integer("qk_rope_head_dim"), 8, "fp8 rows, ue8m0 scales")
    key = (index, 4, "fp8 rows, fp32 scales")
    aligned = 576

    def compressed(name: str, ratio: int, cells: tuple[int, int, str]) -> Cache:
        page = replace(values_then_scales(*cells), tokens_per_cell=ratio)
        return Cache(name, page, page_multiple=aligned)

    def compressor(name: str, width: int, window: int, block: int) -> Cache:
        page = rows(PagePart("state", (Dim("channel", width),), Item.of("fp32")))
        return Cache(name, page, window, tokens_per_block=block, page_multiple=aligned)

    window = Cache(
        "window",
        values_then_scales(*row),
        config.integer("sliding_window"),
        tokens_per_block=64,
        page_multiple=aligned,
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
    ratios = config.numbers("compress_ratios")
    if not ratios:
        raise SpecError("config: compress_ratios is missing")
    if len(ratios) < config.num_layers or set(ratios[: config.num_layers]) - by_ratio.keys():
        raise SpecError(f"config: compress_ratios needs 0, 4 or 128 for each layer, got {ratios!r:.80}")
    return _layers(config.num_layers, lambda i: by_ratio[ratios[i]])


Family = Callable[[Config], tuple[Layer, ...]]

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "glm4_moe", "qwen3_moe", "gemma", "gpt2", "phi3", "olmo2"), _uniform
    ),
    **dict.fromkeys(("qwen2", "qwen3"), _qwen),
    **dict.fromkeys(("falcon", "RefinedWeb", "RefinedWebModel"), _falcon),
    **dict.fromkeys(("gemma2", "gpt_oss"), partial(_uniform, pattern=2)),
    **dict.fromkeys(("gemma3", "gemma3_text"), partial(_uniform, pattern=6)),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), partial(_uniform, pattern=5)),
    **dict.fromkeys(("gemma4", "gemma4_text"), _gemma4),
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    **dict.fromkeys(("minimax", "minimax_m2"), _minimax),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite"), _mla
    ),
    "kimi_linear": _kimi_linear,
    "qwen3_next": _gated_delta,
    "nemotron_h": _nemotron,
    "granitemoehybrid": _granite,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "mamba2": _pure_mamba2,
    "deepseek_v4": _deepseek_v4,
}
"""The family of each ``model_type``."""

_OF_LATENTS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "qk_head_dim", "qk_nope_head_dim"),
    *("v_head_dim", "index_n_heads", "index_topk", "mla_use_nope"),
)
_OF_MAMBA = (
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "mamba_hidden_act", "mamba_expand"),
    *("mamba_norm_before_gate", "mamba_rms_norm", "mamba_dt_rank", "mamba_dt_min", "mamba_dt_max"),
    *("mamba_dt_limit", "mamba_dt_init_floor", "mamba_inner_layernorms", "use_mamba_kernels", "use_mambapy"),
    *("use_conv_bias", "chunk_size", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier"),
    "mamba_use_mlp",
)
_OF_STATES = (_BAMBA.heads, _BAMBA.head_dim, *_BAMBA.groups, _BAMBA.state, *_BAMBA.kernel)
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
IGNORED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("kimi_linear", "deepseek_v4", *(k for k, f in FAMILIES.items() if f is _mla)), _OF_LATENTS
    ),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "mamba2"), _OF_MAMBA),
    "nemotron_h": (*_OF_MAMBA, "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    "granitemoehybrid": (*_OF_MAMBA, *_OF_STATES),  # read if a layer has a state
    **dict.fromkeys(("gemma2", "gemma4"), _PATTERN),
    "gemma4_text": ("per_layer_config", *_PATTERN),
    "phi3": ("full_attn_mod",),
    "qwen3_next": ("mamba_ssm_dtype",),
}
"""Keys that match ``DECIDING`` and do not affect the cache of these families."""

DEFAULT_BLOCKS = {"deepseek_v32": 64, "deepseek_v4": 256, "kimi_linear": 128}
"""Tokens per block if not 16. Latents beside recurrent states have blocks of a multiple of 128."""


def model_from_config(values: Mapping[str, Any], name: str = "", dtype: str = "") -> Model:
    """The caches of the model of a config.json, with its own dtype or this one."""
    config = Config(values, dtype)
    kind = config.kind
    if kind not in FAMILIES:
        raise SpecError(
            f"config: model_type {kind!r} is not supported: supported are {', '.join(sorted(FAMILIES))}"
        )
    if config.get("is_causal") is False:
        raise SpecError("config: is_causal is false: such a model only encodes, and has no KV cache")
    layers = FAMILIES[kind](config)
    config.check_all_read(IGNORED.get(kind, ()))
    architecture = TEXT_OF.get(kind, kind)
    block, heads = DEFAULT_BLOCKS.get(kind, 16), config.integer("num_attention_heads", "n_head", default=0)
    return Model(name or kind, layers, (), block, architecture, num_query_heads=heads)


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Every entry of ``catalogue.json``: title, note, source, config, and models with the same cache."""
    text = files("kvferry.models").joinpath("catalogue.json").read_text(encoding="utf-8")
    models: Mapping[str, Mapping[str, Any]] = json.loads(text)["models"]
    return models


def model_named(name: str) -> Model:
    """A model of the catalogue; ``A+B`` is model A with model B as its speculative draft.

    >>> [len(layer.caches) for layer in model_named("kimi-k2.5+kimi-k2.5-eagle3").draft]
    [1]
    >>> model_named("lama-3.1-70b")
    Traceback (most recent call last):
    kvferry.errors.SpecError: no model 'lama-3.1-70b' in the catalogue; did you mean llama-3.1-70b?
    """
    first, *drafts = name.split("+")
    model = _single(first)
    for draft in drafts:
        model = model.with_draft(_single(draft))
    return model


def catalogued(name: str) -> str | None:
    """The catalogue entry of a model, by its name there or on the Hugging Face hub, variants included.

    >>> catalogued("deepseek-ai/DeepSeek-R1"), catalogued("deepseek-r1"), catalogued("llama-3.1-8b-instruct")
    ('deepseek-v3', 'deepseek-v3', 'llama-3.1-8b')
    """
    wanted = {name.lower(), _without_variant(name.lower())}
    for known, entry in catalogue().items():
        on_hub = map(str.lower, (str(entry["source"]).partition(" ")[0], *entry.get("same_cache", ())))
        # A draft has the hub name of its model, and comes after it.
        if wanted & {known, *(each for full in on_hub for each in _names_on_hub(full))}:
            return known
    return None


def _names_on_hub(name: str) -> tuple[str, ...]:
    short = name.rpartition("/")[2]
    return name, _without_variant(name), short, _without_variant(short)


def _without_variant(name: str) -> str:
    """The name without the suffix of a trained variant.

    >>> _without_variant("meta-llama/llama-3.1-8b-instruct")
    'meta-llama/llama-3.1-8b'
    """
    return next((name.removesuffix(each) for each in VARIANTS if name.endswith(each)), name)


def _single(name: str) -> Model:
    if (known := catalogued(name)) is None:
        # Different numbers are different sizes or versions, with different caches.
        numbers = re.findall(r"\d+", name)
        alike = [each for each in catalogue() if re.findall(r"\d+", each) == numbers]
        close = get_close_matches(name, alike, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(catalogue())}"
        raise SpecError(f"no model {name!r} in the catalogue; {hint}")
    return model_from_config(catalogue()[known]["config"], known)
