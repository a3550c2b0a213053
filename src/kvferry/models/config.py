"""Reads a config.json: keys that affect the cache are read or rejected, never guessed."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvferry.errors import SpecError
from kvferry.models.model import dtype_name

MAX_LAYERS = 10_000

_SIZES_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_GEMMA_2B = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_WINDOW_OFF = {"use_sliding_window": False, "sliding_window": 4096}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_conv": 4},
    "falcon": {"multi_query": True},
    "falcon_h1": {"num_key_value_heads": 8, "mamba_n_groups": 1, "mamba_d_conv": 4},
    "gemma": {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
    },
    "gemma2": _GEMMA_2B,
    "gemma3_text": _GEMMA_2B,
    "gemma3n_text": {
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    "gemma4_text": {
        "hidden_size": 2304,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "glm4_moe": {"num_key_value_heads": 8},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "jamba": {"num_key_value_heads": 8},
    "llama": _SIZES_7B,
    "llama4_text": {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
    },
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "mistral": {**_SIZES_7B, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {**_SIZES_7B, "num_key_value_heads": 8},
    "nemotron_h": {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        # vLLM's default as well.
        "mamba_ssm_cache_dtype": "float32",
    },
    "olmo2": _SIZES_7B,
    "phi3": {**_SIZES_7B, "hidden_size": 3072},
    "qwen2": {**_SIZES_7B, "num_key_value_heads": 32, "max_window_layers": 28, **_WINDOW_OFF},
    "qwen3": {
        **_SIZES_7B,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_window_layers": 28,
        **_WINDOW_OFF,
    },
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        **_WINDOW_OFF,
    },
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256},
}
"""Defaults of the config classes of transformers, which published config.json files omit."""

TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
}
"""The ``model_type`` of the ``text_config`` of multimodal models that omit it."""

FIXED_LAYERS = frozenset(
    {"gemma", "glm4_moe", "gpt2", "gpt_oss", "minimax", "minimax_m2", "mixtral", "qwen3_moe"}
)
"""vLLM does not read ``layer_types`` of these: other types than those of the class are rejected."""

WITHOUT_FP16 = frozenset({"gemma2", "gemma3", "gemma3_text"})
"""vLLM serves their fp16 checkpoints in bf16, unless they are a part of another model."""

DECIDING = re.compile(
    r"heads|n_head|d_head|head_dim|head_size|key_value|kv_|window|bidirectional|(?<!cross_)chunk_size|chunked"
    r"|layer_types|layer_config|attn_type|block_type|block_config|pattern|conv|ssm|mamba|recurrent|delta"
    r"|linear_(attn|num|key|value|conv|head)|no_rope|nope|compress|share_kv|shared_layers|sink|lora_rank"
    r"|index_|indexer|attn_layer|full_attn|full_attention_i|global_attn|local_att|sparse_att|state_size"
    r"|use_mla|cla_|multi_query|cross_attention_layers"
)
"""Keys whose names suggest that they affect the cache."""

HARMLESS = frozenset(
    {
        *("chunk_size_feed_forward", "layernorm_full_attention_beta", "layernorm_linear_attention_beta"),
        *("mlp_layer_types", "activation_sparsity_pattern", "hc_sinkhorn_iters", "compress_rope_theta"),
        *("q_lora_rank", "o_lora_rank", "query_pre_attn_scalar", "output_attentions", "nope_scaling"),
    }
)
"""Keys that match ``DECIDING`` and do not affect the cache."""

_REQUIRED = object()


class Config:
    """A config.json with the defaults of its class."""

    def __init__(self, values: Mapping[str, Any], dtype: str = "") -> None:
        text = values.get("text_config")
        inner = text if isinstance(text, Mapping) else {}
        dtypes = [side.get(key) for side in (values, inner) for key in ("dtype", "torch_dtype")]
        given = {**values, **inner, "dtype": next(filter(None, dtypes), None)}
        self.kind = given.get("model_type", "")
        if not isinstance(self.kind, str):
            raise SpecError(f"config: model_type must be a string, got {self.kind!r}")
        self._given, self._sides = given, (values, inner)
        self._defaults = CLASS_DEFAULTS.get(TEXT_OF.get(self.kind, self.kind), {})
        self._values = {**self._defaults, **given}
        self._read: set[str] = set()
        self._dtype = dtype

    def get(self, key: str) -> Any:
        """The value of a key, which is marked as read."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, *keys: str, default: object = _REQUIRED, least: int = 1, most: int = 1 << 20) -> int:
        """An integer under any of these names, which must agree; it may be 0 if that is the default."""
        found: dict[str, int] = {}
        least = 0 if default == 0 else least
        for key in keys:
            value = self.get(key)
            if value is not None:
                if type(value) is not int or not least <= value <= most:
                    raise SpecError(
                        f"config: {key} must be a whole number from {least} to {most}, got {value!r:.80}"
                    )
                found[key] = value
        if len(set(found.values())) > 1:
            raise SpecError(f"config: these keys are synonyms with different values: {found}")
        if found:
            return next(iter(found.values()))
        if not isinstance(default, int):
            raise SpecError(f"config: {' or '.join(keys)} is missing")
        return default

    def text(self, *keys: str, default: str) -> str:
        """The first of these keys that is set."""
        value = next((found for found in map(self.get, keys) if found), default)
        if not isinstance(value, str):
            raise SpecError(f"config: {keys[0]} must be text, got {value!r}")
        return value

    def sequence(self, key: str, length: int) -> Sequence[Any]:
        """A list or text with one entry per layer."""
        value = self.get(key)
        if not isinstance(value, list | str) or len(value) != length:
            raise SpecError(
                f"config: {key} must have one entry for each of {length} layers, got {value!r:.80}"
            )
        return value

    def numbers(self, key: str) -> Sequence[int]:
        """A list of integers; empty if the key is missing."""
        value = self.get(key) or []
        if not isinstance(value, list) or {type(one) for one in value} - {int, bool}:
            raise SpecError(f"config: {key} must be a list of whole numbers, got {value!r:.80}")
        return value

    def check_all_read(self, ignored: Collection[str] = ()) -> None:
        """Raise if a key that may affect the cache is set and was not read."""
        for key, value in self._given.items():
            is_known = key in self._read or key in HARMLESS or key in ignored
            if value and not is_known and DECIDING.search(key):
                raise SpecError(
                    f"config: {key} may affect the cache, and is not supported for model_type {self.kind!r}."
                    f" If {key} is irrelevant for the cache, remove it from the config"
                )

    # -- common to many families ---------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS)

    @property
    def dtype(self) -> str:
        """The dtype of the computation. As with vLLM's `auto`, fp32 checkpoints use bf16."""
        own = dtype_name(self.text("dtype", default="bfloat16"))
        has_fp16 = str(self._sides[0].get("model_type")) not in WITHOUT_FP16
        if self._dtype == "fp16" and not has_fp16:
            raise SpecError(f"dtype fp16: vLLM does not serve model_type {self.kind!r} with it")
        return self._dtype or ("bf16" if own == "fp32" or (own == "fp16" and not has_fp16) else own)

    @property
    def kv_dtype(self) -> str:
        """The dtype of K and V: the model's, or that of its quantisation config."""
        method, scheme = self._cache_scheme
        if method != "compressed-tensors" or scheme is None:
            return self.latent_dtype
        match scheme:
            case {"num_bits": 8, "type": "float"}:
                return "fp8_e4m3"
            case _:
                raise SpecError(f"config: a KV cache of the format {scheme!r:.80} is not supported")

    @property
    def latent_dtype(self) -> str:
        """The dtype of latents, for which vLLM reads ModelOpt's configs only."""
        method, scheme = self._cache_scheme
        if not method.startswith("modelopt"):
            return self.dtype
        name = scheme.lower() if isinstance(scheme, str) else scheme
        match name:
            case "nvfp4" | {"num_bits": 4, "type": "float"}:
                raise SpecError(f"config: a KV cache in NVFP4 is not supported: {scheme!r:.80}")
            case "fp8" | {"num_bits": 8, "type": "float", "dynamic": False}:
                return "fp8_e4m3"
            case _:
                return self.dtype

    @property
    def _cache_scheme(self) -> tuple[str, Any]:
        """The quantisation method, and what it says of the cache; as in vLLM, the outer config decides."""
        names = ("quantization_config", "compression_config")
        self._read.update(names)
        root, text = self._sides
        found = [side[name] for side in (root, text) for name in names if isinstance(side.get(name), Mapping)]
        if not found:
            return "", None
        outer = found[0]
        inner, producer = (
            each if isinstance(each, Mapping) else {}
            for each in (outer.get("quantization"), outer.get("producer"))
        )
        by_producer = producer.get("name") if inner.get("quant_algo") else ""
        method = str(outer.get("quant_method") or by_producer or "").lower()
        if method.startswith("modelopt") and outer is not root.get(names[0]):
            return "", None  # for the cache, vLLM looks there only
        keys = ("kv_cache_scheme", "kv_cache_quant_algo")
        schemes = [side.get(key) for key in keys for side in (inner, outer)]
        return method.replace("_tensors", "-tensors"), next(filter(None, schemes), None)

    @property
    def q_heads(self) -> int:
        return self.integer("num_attention_heads", "n_head")

    @property
    def kv_heads(self) -> int:
        return self.integer("num_key_value_heads", "num_kv_heads", "n_head_kv", default=self.q_heads)

    @property
    def head_dim(self) -> int:
        if width := self.integer("head_dim", "attention_head_dim", default=0):
            return width
        hidden = self.integer("hidden_size", "n_embd")
        width, rest = divmod(hidden, self.q_heads or 1)
        if rest:
            raise SpecError(
                f"config: head_dim is missing, and hidden_size {hidden} cannot be split into"
                f" {self.q_heads} heads"
            )
        return width

    @property
    def window(self) -> int:
        """Tokens in the window of a window layer; 0: no window."""
        width = self.integer("sliding_window", "sliding_window_size", default=0, most=1 << 30)
        self._read.update(("use_sliding_window", "max_window_layers"))  # by Qwen's classes only
        is_off = "use_sliding_window" in self._defaults and not self.get("use_sliding_window")
        return 0 if is_off else width

    def layer_types(self, pattern: int = 0) -> Sequence[Any]:
        """The type of each layer: listed, periodic with one full layer in ``pattern``, or all equal."""
        count, every = self.num_layers, pattern
        if self.kind.startswith("gemma3"):
            every = self.integer("sliding_window_pattern", "_sliding_window_pattern", default=pattern)
        kind = "sliding_attention" if self.window else "full_attention"
        of_class = [kind if not every or (i + 1) % every else "full_attention" for i in range(count)]
        if self.get("layer_types") is None:
            return of_class
        listed = self.sequence("layer_types", count)
        if self.kind in FIXED_LAYERS and listed != of_class:
            raise SpecError(f"config: layer_types of model_type {self.kind!r} must be {of_class!r:.80}")
        return listed
