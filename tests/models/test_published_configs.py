"""What a model keeps is read from its config as published; what is not understood is refused by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import SpecError
from kvferry.models import Model, Topology, catalogue, describe, model_from_config, model_named
from kvferry.models.describe import served_block
from kvferry.models.topology import why_not_served
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
    for method in ("compressed-tensors", "modelopt"):
        quantised = {"quant_method": method, "kv_cache_scheme": scheme}
        model = model_from_config({**MIXTRAL_8X7B, "quantization_config": quantised})
        assert {part.item.dtype for part in model.layers[0].caches[0].page.parts} == {"fp8_e4m3"}


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4, "type": "float"}},
        {"quant_method": "compressed-tensors", "kv_cache_scheme": "fp8"},
    ],
)
def test_a_format_of_quantised_caches_that_is_not_known_is_refused(quantised: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"config: a KV cache .*is not supported"):
        model_from_config({**MIXTRAL_8X7B, "quantization_config": quantised})


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_sparse_latents_in_fp8_are_not_guessed(dtype: str) -> None:
    """Whether a flag, a topology or the checkpoint says so: vLLM's rows depend on its backend."""
    model = model_named("deepseek-v3.2")
    with pytest.raises(SpecError, match="576 or 656 bytes"):
        describe(model, Topology.parse(f"tp=2,dtype={dtype}"))
    values = dict(catalogue()["deepseek-v3.2"]["config"])
    values["quantization_config"] = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    with pytest.raises(SpecError, match="576 or 656 bytes"):
        model_from_config(values)


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
    "latents": (MIXTRAL_8X7B, "use_mla", True),
    "caches that layers share": (MIXTRAL_8X7B, "cla_share_factor", 2),
    "groups of queries": (MIXTRAL_8X7B, "multi_query_group_num", 2),
    "local attention": (MIXTRAL_8X7B, "local_attention", 128),
    "layers that look at images": (MIXTRAL_8X7B, "cross_attention_layers", [3, 8]),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_key_that_decides_and_is_not_understood_is_refused_by_name(case: str) -> None:
    values, key, value = UNKNOWN[case]
    with pytest.raises(SpecError, match=f"config: {key} may affect the cache"):
        model_from_config({**values, key: value})


def test_gemma_2_as_published_names_its_window_twice() -> None:
    values = {"model_type": "gemma2", "num_hidden_layers": 2, "num_attention_heads": 8}
    model = model_from_config({**values, "sliding_window": 4096, "sliding_window_size": 4096})
    assert [layer.caches[0].window for layer in model.layers] == [4096, 0]
    with pytest.raises(SpecError, match="with different values"):
        model_from_config({**values, "sliding_window": 4096, "sliding_window_size": 512})


def test_a_checkpoint_in_float32_is_kept_in_bf16_unless_float32_is_asked_for() -> None:
    """As `--dtype auto` of vLLM has it."""

    def kept(dtype: str) -> str:
        values = {**MIXTRAL_8X7B, "torch_dtype": "float32"}
        return model_from_config(values, dtype=dtype).layers[0].caches[0].page.parts[0].item.dtype

    assert (kept(""), kept("fp32"), kept("fp16")) == ("bf16", "fp32", "fp16")


def test_gemma_2_is_not_served_in_fp16() -> None:
    values = {"model_type": "gemma2", "num_hidden_layers": 2, "torch_dtype": "float16"}
    model = model_from_config(values)
    assert {part.item.dtype for part in model.layers[0].caches[0].page.parts} == {"bf16"}
    with pytest.raises(SpecError, match="dtype fp16: vLLM does not serve model_type 'gemma2' with it"):
        model_from_config(values, dtype="fp16")


def test_a_stage_may_keep_nothing() -> None:
    mlp = describe(model_from_config(NEMOTRON_H_8B), Topology(pp=52))
    assert {len(rank.views) for rank in mlp.ranks} == {0, 2, 4}


def test_vllm_does_not_serve_layers_that_share_a_cache_across_stages() -> None:
    model, pp = model_named("gemma-3n-e4b"), Topology(pp=3)
    assert describe(model, pp).rank(2).views == ()
    assert list(why_not_served(model, pp)) == [
        "models of the kind gemma3n_text have no pipeline stages",
        "layers.23 uses the cache of layers.18, which is on another pipeline stage",
    ]
    assert list(why_not_served(replace(model, architecture="gemma4_text"), Topology(pp=2))) == []


def test_vllm_does_not_split_groups_of_states_that_do_not_come_out() -> None:
    model = model_named("nemotron-h-8b")
    assert list(why_not_served(model, Topology(tp=8))) == []
    assert list(why_not_served(model, Topology(tp=16))) == [
        "8 groups of the recurrent state are not divisible by tp=16"
    ]


BLOCKS = {
    "kimi-linear-48b": {1: 1920, 2: 1024, 4: 512, 8: 256},
    "qwen3-next-80b": {1: 544, 2: 544, 4: 272, 8: 144},
    "nemotron-h-8b": {1: 1040, 8: 1040},
    "nemotron-3-nano-30b-a3b": {1: 2096, 4: 1056, 8: 528},
    "jamba-v0.1": {1: 80, 8: 80},
    "falcon-h1-7b": {1: 1568, 4: 784, 8: 400},
    "granite-4.0-h-tiny": {1: 400, 8: 208},
    "llama-3.1-8b": {1: 16, 8: 16},
}
"""Tokens per block by tensor parallelism, as vLLM 0.32 and 0.33 choose them on a GPU."""


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_hybrids_are_as_long_as_vllm_makes_them(name: str) -> None:
    model = model_named(name)
    assert {tp: served_block(model, Topology(tp=tp)) for tp in BLOCKS[name]} == BLOCKS[name]


def test_groups_of_narrower_rows_have_longer_blocks_as_vllm_gives_them() -> None:
    """Gemma-4: 16 heads of 256 in windows, 4 of 512 elsewhere; with eight ranks the rows are equal."""
    model = model_named("gemma-4-31b")
    sizes = {
        tp: {group.name.partition("-")[0].partition(".")[0]: group.tokens_per_block for group in groups}
        for tp, groups in ((tp, describe(model, Topology(tp=tp)).groups) for tp in (1, 8))
    }
    assert sizes == {1: {"window": 16, "full": 32}, 8: {"window": 16, "full": 16}}


def test_a_block_size_that_is_asked_for_is_the_step_of_a_hybrid() -> None:
    """vLLM 0.32: --block-size 64 becomes 576, 320 with four ranks."""
    model = model_named("qwen3-next-80b")
    assert [served_block(model, Topology(tp=tp, block=64)) for tp in (1, 4)] == [576, 320]
    (full, *_) = (group for group in describe(model, Topology()).groups if group.name == "full")
    assert full.tokens_per_block == 544


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an encoder": ({**MIXTRAL_8X7B, "is_causal": False}, "is_causal is false"),
    "a number for a list": ({**MINIMAX_M2, "attn_type_list": 1}, "attn_type_list must be a list"),
    "a number for rope": (
        {**PUBLISHED["llama-4-scout"][0]["text_config"], "no_rope_layers": 4},
        "no_rope_layers must be a list",
    ),
    "an interval of 0": (
        {**PUBLISHED["llama-4-scout"][0]["text_config"], "no_rope_layer_interval": 0},
        "no_rope_layer_interval must be a whole number from 1",
    ),
    "a number for a pattern": (
        {**NEMOTRON_H_8B, "hybrid_override_pattern": 4},
        "hybrid_override_pattern must have one entry for each of",
    ),
    "no heads": (
        {**MIXTRAL_8X7B, "num_key_value_heads": 0},
        "num_key_value_heads must be a whole number from 1",
    ),
    "an unknown letter": (
        {**NEMOTRON_H_8B, "hybrid_override_pattern": "M" * 51 + "W"},
        "has 'W': supported are",
    ),
    "a linear layer": ({**MINIMAX_M2, "attn_type_list": [1] * 61 + [0]}, "attn_type_list: only 1"),
    "two counts": (
        {**FALCON_40B, "n_head_kv": 16},
        "synonyms with different values: .'num_kv_heads': 8, 'n_head_kv': 16",
    ),
    "a width that does not come out": (
        {key: value for key, value in GLM_45.items() if key != "head_dim"},
        "head_dim is missing, and hidden_size 5120 cannot be split into 96 heads",
    ),
    "heads that nobody counts": ({**FALCON_RW_1B, "num_kv_heads": 8}, "needs new_decoder_architecture"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_value_that_is_not_understood_is_refused(case: str) -> None:
    values, message = WRONG[case]
    with pytest.raises(SpecError, match=message):
        model_from_config(values)
