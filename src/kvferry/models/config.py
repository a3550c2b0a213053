"""Reads a config.json: keys that affect the cache are read or rejected, never guessed."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvferry.errors import SpecError
from kvferry.models.model import dtype_name

MAX_LAYERS = 10_000

CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_conv": 4},
    "falcon": {"multi_query": True},
    "falcon_h1": {"num_key_value_heads": 8, "mamba_n_groups": 1, "mamba_d_conv": 4},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
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
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
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
    "qwen2": {"num_key_value_heads": 32, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "max_window_layers": 28,
    },
    "qwen3_moe": {"num_key_value_heads": 4, "use_sliding_window": False},
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
        given = {**values, **text} if isinstance(text, Mapping) else dict(values)
        self.kind = given.get("model_type", "")
        if not isinstance(self.kind, str):
            raise SpecError(f"config: model_type must be a string, got {self.kind!r}")
        self._given = given
        self._values = {**CLASS_DEFAULTS.get(TEXT_OF.get(self.kind, self.kind), {}), **given}
        self._read: set[str] = set()
        self._dtype = dtype

    def get(self, key: str) -> Any:
        """The value of a key, which is marked as read."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, *keys: str, default: object = _REQUIRED, most: int = 1 << 20) -> int:
        """An integer under any of these names, which must agree."""
        found: dict[str, int] = {}
        for key in keys:
            value = self.get(key)
            if value is not None:
                if type(value) is not int or not 0 <= value <= most:
                    raise SpecError(f"config: {key} must be a whole number up to {most}, got {value!r}")
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
        own = dtype_name(self.text("torch_dtype", "dtype", default="bfloat16"))
        return self._dtype or ("bf16" if own == "fp32" else own)

    @property
    def kv_dtype(self) -> str:
        """The dtype of K, V and latents: the model's, or that of its quantisation config."""
        quantised = self.get("quantization_config")
        scheme = None
        if isinstance(quantised, Mapping):
            scheme = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
        match scheme:
            case None:
                return self.dtype
            case {"num_bits": 8, "type": "float"} | "FP8" | "fp8":
                return "fp8_e4m3"
            case _:
                raise SpecError(
                    f"config: quantization_config: KV cache format {scheme!r:.80} is not supported"
                )

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
        if self.get("use_sliding_window") is False:
            self._read.add("max_window_layers")
            return 0
        return width

    def layer_types(self, pattern: int = 0) -> Sequence[Any]:
        """The type of each layer: listed, periodic with one full layer in ``pattern``, or all equal."""
        count = self.num_layers
        every = self.integer("sliding_window_pattern", "_sliding_window_pattern", default=pattern)
        if self.get("layer_types") is not None:
            return self.sequence("layer_types", count)
        kind = "sliding_attention" if self.window else "full_attention"
        return [kind if not every or (i + 1) % every else "full_attention" for i in range(count)]
