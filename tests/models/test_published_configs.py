"""What a model keeps is read from its config as published; what is not understood is refused by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvferry.errors import SpecError
from kvferry.models import Model, Topology, describe, model_from_config
from tests.models.published import (
    FALCON_7B,
    FALCON_40B,
    FALCON_RW_1B,
    GLM_45,
    LLAMA_4_SCOUT,
    MINIMAX_M2,
    MIXTRAL_8X7B,
    NEMOTRON_H_8B,
    PUBLISHED,
    Shape,
)


def shapes(model: Model) -> Counter[Shape]:
    """How many attention layers have which KV heads, head width and window."""
    found: Counter[Shape] = Counter()
    for layer in model.layers:
        for cache in layer.caches:
            if cache.name == "attn":
                heads, channels = cache.page.parts[0].dims
                found[heads.size, channels.size, cache.window] += 1
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_its_model_is(name: str) -> None:
    values, expected = PUBLISHED[name]
    model = model_from_config(values)
    assert shapes(model) == expected
    assert describe(model, Topology(tp=2)).ranks


def test_falcon_without_a_word_about_multi_query_has_one_kv_head() -> None:
    """The default of its class: FalconConfig(multi_query=True)."""
    values = {key: value for key, value in FALCON_7B.items() if key != "multi_query"}
    assert shapes(model_from_config(values)) == {(1, 64, 0): 32}


def test_layers_without_rope_are_full_and_must_agree_with_layer_types() -> None:
    text: dict[str, Any] = PUBLISHED["llama-4-scout"][0]["text_config"] | {"num_hidden_layers": 4}
    types = ["full_attention", *["chunked_attention"] * 3]
    model = model_from_config({**text, "no_rope_layers": [0, 1, 1, 1], "layer_types": types})
    assert [layer.caches[0].window for layer in model.layers] == [0, 8192, 8192, 8192]
    with pytest.raises(SpecError, match="no_rope_layers and layer_types"):
        model_from_config({**text, "no_rope_layers": [1, 1, 1, 0], "layer_types": types})


def test_the_ssm_state_of_nemotron_h_is_kept_as_vllm_keeps_it() -> None:
    """In float32, unless the config says otherwise; the convolution in the model's dtype."""

    def dtypes(values: dict[str, Any]) -> dict[str, str]:
        return {
            part.name: part.item.dtype for part in model_from_config(values).layers[0].caches[0].page.parts
        }

    assert dtypes(NEMOTRON_H_8B) == {"conv.x": "bf16", "conv.B": "bf16", "conv.C": "bf16", "ssm": "fp32"}
    assert dtypes({**NEMOTRON_H_8B, "mamba_ssm_cache_dtype": "bfloat16"})["ssm"] == "bf16"


def test_a_list_of_blocks_says_the_same_as_a_pattern() -> None:
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    pattern = NEMOTRON_H_8B["hybrid_override_pattern"]
    values = {**NEMOTRON_H_8B, "layers_block_type": [names[letter] for letter in str(pattern)]}
    del values["hybrid_override_pattern"], values["num_hidden_layers"]
    assert model_from_config(values).layers == model_from_config(NEMOTRON_H_8B).layers


def test_a_checkpoint_with_a_quantised_cache_says_its_dtype() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    model = model_from_config({**MIXTRAL_8X7B, "quantization_config": {"kv_cache_scheme": scheme}})
    assert {part.item.dtype for part in model.layers[0].caches[0].page.parts} == {"fp8_e4m3"}
    with pytest.raises(SpecError, match="quantization_config keeps K and V as 'NVFP4'"):
        model_from_config({**MIXTRAL_8X7B, "quantization_config": {"kv_cache_quant_algo": "NVFP4"}})


def test_windows_of_qwen_begin_behind_the_full_layers() -> None:
    values = {
        "model_type": "qwen2",
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "sliding_window": 4096,
        "max_window_layers": 4,
    }
    off = model_from_config(values)
    on = model_from_config({**values, "use_sliding_window": True})
    assert [layer.caches[0].window for layer in off.layers] == [0] * 6
    assert [layer.caches[0].window for layer in on.layers] == [0, 0, 0, 0, 4096, 4096]


UNKNOWN: dict[str, tuple[dict[str, Any], str, object]] = {
    "a number of heads per layer": (MIXTRAL_8X7B, "num_key_value_heads_per_layer", [8] * 32),
    "chunks": (MIXTRAL_8X7B, "attention_chunk_size", 8192),
    "linear layers": (MINIMAX_M2, "linear_attn_layers", [0, 1]),
    "shared caches": (GLM_45, "share_kv_between_layers", 2),
    "heads that differ": (GLM_45, "global_num_kv_heads", 4),
    "blocks": (FALCON_40B, "block_configs", [{"no_op": True}]),
    "a dtype of states": (FALCON_40B, "ssm_dtype", "float32"),
    "sinks": (LLAMA_4_SCOUT, "num_sink_tokens", 4),
    "windows": (FALCON_7B, "sliding_window", 512),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_key_that_decides_and_is_not_understood_is_refused_by_name(case: str) -> None:
    values, key, value = UNKNOWN[case]
    with pytest.raises(SpecError, match=f"config: {key} may decide what the cache looks like"):
        model_from_config({**values, key: value})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown letter": (
        {**NEMOTRON_H_8B, "hybrid_override_pattern": "M" * 51 + "W"},
        "has 'W': known are",
    ),
    "a linear layer": ({**MINIMAX_M2, "attn_type_list": [1] * 61 + [0]}, "attn_type_list: only 1"),
    "two counts": ({**FALCON_40B, "n_head_kv": 16}, "do not agree: .'num_kv_heads': 8, 'n_head_kv': 16"),
    "a width that does not come out": (
        {key: value for key, value in GLM_45.items() if key != "head_dim"},
        "head_dim is missing, and hidden_size 5120 does not divide into 96 heads",
    ),
    "heads that nobody counts": ({**FALCON_RW_1B, "num_kv_heads": 8}, "needs new_decoder_architecture"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_value_that_is_not_understood_is_refused(case: str) -> None:
    values, message = WRONG[case]
    with pytest.raises(SpecError, match=message):
        model_from_config(values)
