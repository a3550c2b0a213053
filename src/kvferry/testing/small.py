"""One small model per family, with the description code of the real ones.

Heads and groups divide by 2, 3, 4, 6 and 12, for many tensor-parallel sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.models import Model, model_from_config

_ATTENTION = {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 4, "torch_dtype": "bfloat16"}
_MLA = {"kv_lora_rank": 6, "qk_rope_head_dim": 2, "num_attention_heads": 12, "torch_dtype": "bfloat16"}
_MAMBA2 = {
    "mamba_n_heads": 12,
    "mamba_d_head": 2,
    "mamba_d_state": 3,
    "mamba_n_groups": 12,
    "mamba_d_conv": 4,
}
_WINDOW, _FULL = "sliding_attention", "full_attention"

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gqa": {"model_type": "llama", "num_hidden_layers": 3, **_ATTENTION, "num_key_value_heads": 6},
    "mqa": {
        "model_type": "falcon",
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "hidden_size": 48,
        "multi_query": True,
        "torch_dtype": "bfloat16",
    },
    "window": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        **_ATTENTION,
        "sliding_window": 20,
        "layer_types": [_WINDOW, _FULL] * 2,
    },
    "unequal-heads": {
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        **_ATTENTION,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "global_head_dim": 8,
        "sliding_window": 24,
        "layer_types": [_WINDOW, _WINDOW, _FULL],
    },
    "shared-layers": {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 5,
        **_ATTENTION,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 16,
        "layer_types": [_WINDOW, _FULL, _WINDOW, _FULL, _WINDOW],
    },
    "mla": {"model_type": "deepseek_v3", "num_hidden_layers": 3, **_MLA},
    "mla-indexer": {"model_type": "deepseek_v32", "num_hidden_layers": 2, **_MLA, "index_head_dim": 5},
    "kda-mla": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 5,
        **_MLA,
        "linear_attn_config": {
            "full_attn_layers": [3, 5],
            "num_heads": 12,
            "head_dim": 2,
            "short_conv_kernel_size": 4,
        },
    },
    "gdn-gqa": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        **_ATTENTION,
        "num_key_value_heads": 2,
        "full_attention_interval": 2,
        "linear_num_key_heads": 12,
        "linear_key_head_dim": 2,
        "linear_num_value_heads": 24,
        "linear_value_head_dim": 3,
        "linear_conv_kernel_dim": 4,
    },
    "mamba2-gqa": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M-M*M",
        **_ATTENTION,
        "num_key_value_heads": 2,
        "mamba_num_heads": 12,
        "mamba_head_dim": 2,
        "ssm_state_size": 3,
        "n_groups": 12,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "bfloat16",
    },
    "mamba2-one-group": {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        **_ATTENTION,
        **_MAMBA2,
        "mamba_n_groups": 1,
    },
    "mamba1-gqa": {
        "model_type": "jamba",
        "num_hidden_layers": 4,
        **_ATTENTION,
        "num_key_value_heads": 4,
        "hidden_size": 12,
        "mamba_expand": 2,
        "mamba_d_state": 3,
        "mamba_d_conv": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_hidden_layers": 3,
        "num_heads": 12,
        "head_dim": 2,
        "state_size": 3,
        "n_groups": 12,
        "conv_kernel": 4,
        "torch_dtype": "bfloat16",
    },
    "attention-beside-mamba2": {"model_type": "falcon_h1", "num_hidden_layers": 2, **_ATTENTION, **_MAMBA2},
    "compressed": {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "qk_rope_head_dim": 2,
        "index_head_dim": 2,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 128, 0],
    },
}
"""config.json by family."""

DRAFTS = {"gqa+mla": ("gqa", "mla"), "mla+gqa": ("mla", "gqa")}
"""A model of one family with a draft of another."""

FAMILIES = (*CONFIGS, *DRAFTS)


def small(family: str) -> Model:
    """A small model of a family.

    >>> [layer.name for layer in small("mla+gqa").draft]
    ['draft.layers.0', 'draft.layers.1', 'draft.layers.2']
    """
    if family in DRAFTS:
        model, draft = DRAFTS[family]
        return small(model).with_draft(small(draft))
    return model_from_config(CONFIGS[family], family)
