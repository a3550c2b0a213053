"""RB-9: every value of a configuration counts, but for a short list."""

from typing import Any

import pytest

from kvferry.checkpoint import config_values
from kvferry.checkpoint.config import MAX_VALUES
from kvferry.core.identity import MAX_VALUE_LENGTH, Identity

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0},
    "sliding_window": None,
    "attention_bias": False,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "5.19.0",
    "_name_or_path": "/models/llama",
    "use_cache": True,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_what_counts_is_kept_as_text():
    assert config_values(LLAMA) == {
        "architectures": '["LlamaForCausalLM"]',
        "hidden_size": "4096",
        "model_type": "llama",
        "quantization_config.quant_method": "fp8",
        "quantization_config.weight_block_size": "[128, 128]",
        "rms_norm_eps": "1e-05",
        "rope_parameters.factor": "8",
        "rope_parameters.rope_theta": "500000",
        "rope_parameters.rope_type": "llama3",
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_parameters", {**LLAMA["rope_parameters"], "rope_theta": 10000.0}),
        ("rms_norm_eps", 1e-6),
        ("sliding_window", 4096),
        ("attention_bias", True),
        ("quantization_config", {"quant_method": "awq", "weight_block_size": [128, 128]}),
        ("quantization_config", None),
        ("anything_new", 3),
        ("top_k", 2),
        ("tie_word_embeddings", True),
        ("router", {"top_k": 2}),
        ("router", {"temperature": 0.7}),
        ("text_config", {"model_type": "llama", "dtype": "float32"}),
        ("mlp", {"dtype": "float32"}),
    ],
)
def test_any_other_value_is_another_model(key, value):
    assert config_values({**LLAMA, key: value}) != config_values(LLAMA)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_name_or_path", "/elsewhere"),
        ("transformers_version", "5.20.0"),
        ("torch_dtype", "float16"),
        ("use_cache", False),
        ("attention_dropout", 0.0),
        ("eos_token_id", [2, 3]),
        ("new_and_off", False),
        ("new_and_empty", {}),
        ("router", {"_name_or_path": "/elsewhere"}),
    ],
)
def test_what_cannot_shape_a_number_does_not_count(key, value):
    assert config_values({**LLAMA, key: value}) == config_values(LLAMA)


def test_one_meaning_has_one_text():
    theirs = {**LLAMA, "rope_parameters": {"factor": 8, "rope_type": "llama3", "rope_theta": 500000}}
    assert config_values(theirs) == config_values(LLAMA)


def test_a_part_that_is_a_model_has_defaults_for_sampling_too():
    part = {"model_type": "llama", "hidden_size": 64}
    more = {"use_cache": True, "temperature": 0.7, "pad_token_id": 3}
    assert config_values({"text_config": part | more}) == config_values({"text_config": part})


def test_a_dtype_has_one_name_and_one_text():
    found = [
        config_values({"text_config": part})
        for part in ({"torch_dtype": "torch.bfloat16"}, {"dtype": "bfloat16"})
    ]
    assert found == [{"text_config.dtype": "bfloat16"}] * 2


def test_long_and_many_values_become_digests():
    long = [config_values({"layer_types": ["full_attention"] * 99 + [last]}) for last in "ab"]
    assert long[0] != long[1]
    assert max(len(text) for values in long for text in values.values()) <= MAX_VALUE_LENGTH
    many = [config_values({f"key{i:05}": i + 1 for i in range(5000)} | {"z": last}) for last in "ab"]
    assert many[0] != many[1]
    assert len(many[0]) == MAX_VALUES + 1
    Identity.of(many[0])


def test_deep_and_odd_configurations_are_read():
    nested: dict = {}
    for _ in range(300):
        nested = {"deeper": nested, "x": 1.5}
    found = config_values({"nested": nested, "set": {"a", "b"}, "inf": float("inf")})
    assert found["set"] == '["a", "b"]'
    assert found["inf"] == "Infinity"
    Identity.of(found)
