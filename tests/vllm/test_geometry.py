"""Our reading of a config.json beside the caches that vLLM makes of it: its model is built without memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry

from kvferry.cli.engines import model_of_file
from kvferry.errors import SpecError
from kvferry.models.topology import Topology, why_not_served

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.uint8: "fp8_e4m3"}
Shape = tuple[object, ...]

SMALL = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
}
MIXED = ["full_attention", "sliding_attention"] * 2
LLAMA = {**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
MISTRAL = {**SMALL, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA2 = {**SMALL, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {**SMALL, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
PHI3 = {**SMALL, "model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
OLMO2 = {**SMALL, "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
GPT_OSS = {
    **SMALL,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MIXTRAL = {
    **SMALL,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
}
DEEPSEEK = {
    **SMALL,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 8,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
GRANITE = {
    **SMALL,
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "shared_intermediate_size": 256,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "layer_types": ["attention"] * 4,
    "position_embedding_type": "rope",
}
FALCON_H1 = {
    **SMALL,
    "model_type": "falcon_h1",
    "architectures": ["FalconH1ForCausalLM"],
    "head_dim": 64,
    "mamba_use_mlp": True,
    "mamba_d_head": "auto",
    "mamba_d_ssm": 768,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 12,
    "mamba_chunk_size": 128,
}
QWEN3_NEXT = {
    **SMALL,
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_key_value_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "mlp_only_layers": [0, 1, 2],
    "mamba_ssm_dtype": "float32",
}
PALIGEMMA: dict[str, Any] = {
    "model_type": "paligemma",
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "hidden_size": 2048,
    "image_token_index": 257152,
    "projection_dim": 2304,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_image_tokens": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "torch_dtype": "float16",
        "vocab_size": 1000,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_image_tokens": 256,
        "patch_size": 14,
        "image_size": 224,
        "projection_dim": 2304,
    },
}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
MODELOPT: dict[str, Any] = {
    "producer": {"name": "modelopt", "version": "0.23"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "input_activations": {**FP8, "dynamic": True, "strategy": "token"},
            "targets": ["Linear"],
            "weights": {**FP8, "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": FP8,
    "quantization_status": "compressed",
}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def quantised(config: dict[str, Any], quantisation: dict[str, Any]) -> dict[str, Any]:
    return {**config, "quantization_config": quantisation}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, a window": {**LLAMA, "sliding_window": 1024},
    "llama, a window that is off": {**LLAMA, "sliding_window": 1024, "use_sliding_window": False},
    "llama, layer types": {**LLAMA, "sliding_window": 1024, "layer_types": MIXED},
    "llama, two dtypes": {**LLAMA, "torch_dtype": "float16", "dtype": "bfloat16"},
    "llama, modelopt": quantised(LLAMA, MODELOPT),
    "llama, modelopt without an algorithm": quantised(
        LLAMA, {**MODELOPT, "quantization": {**MODELOPT["quantization"], "quant_algo": None}}
    ),
    "llama, modelopt, flat": quantised(
        LLAMA, {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FP8}
    ),
    "llama, modelopt, dynamic": quantised(
        LLAMA,
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {**FP8, "dynamic": True}},
    ),
    "llama, compressed": quantised(LLAMA, COMPRESSED),
    "llama, compressed by its old name": {**LLAMA, "compression_config": COMPRESSED},
    "llama, fp8 without a cache": quantised(LLAMA, {**FP8_STATIC, "kv_cache_scheme": "static"}),
    "llama, fp8 with a scheme": quantised(LLAMA, {**FP8_STATIC, "kv_cache_scheme": FP8}),
    "mistral": MISTRAL,
    "mistral, without a window": {**MISTRAL, "sliding_window": None},
    "phi3, as phi-4": {**PHI3, "sliding_window": 262144, "full_attn_mod": 1},
    "phi3, a window that is off": {**PHI3, "sliding_window": 2047, "use_sliding_window": False},
    "olmo2": OLMO2,
    "qwen2, windows off": {**QWEN2, "sliding_window": 1024, "max_window_layers": 2},
    "qwen2, windows of the class": {**QWEN2, "use_sliding_window": True, "max_window_layers": 0},
    "qwen2, no window left": {**QWEN2, "use_sliding_window": True, "max_window_layers": 4},
    "qwen3": {**QWEN3, "head_dim": 128},
    "gemma2": GEMMA2,
    "gemma2, a pattern that is not read": {**GEMMA2, "sliding_window_pattern": 3},
    "gemma2, fp16": {**GEMMA2, "torch_dtype": "float16"},
    "gemma3, a pattern": {**GEMMA3, "sliding_window_pattern": 3},
    "gpt-oss": {**GPT_OSS, "sliding_window": 128},
    "mixtral, a window": {**MIXTRAL, "sliding_window": 1024},
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3, compressed": quantised(DEEPSEEK, COMPRESSED),
    "granite, attention only": GRANITE,
    "granite, attention only, with keys of states": {
        **GRANITE,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "falcon-h1": FALCON_H1,
    "qwen3-next, a dtype of states": QWEN3_NEXT,
    "paligemma-2, another dtype outside": PALIGEMMA,
    "paligemma-2, fp16": {**PALIGEMMA, "torch_dtype": "float16"},
    "paligemma-2, quantised outside": quantised(
        {**PALIGEMMA, "text_config": {**PALIGEMMA["text_config"], "quantization_config": None}}, MODELOPT
    ),
    "paligemma-2, quantised in two ways": quantised(
        {**PALIGEMMA, "text_config": quantised(PALIGEMMA["text_config"], COMPRESSED)}, FP8_STATIC
    ),
    "paligemma-2, quantised inside": {
        **PALIGEMMA,
        "text_config": quantised(PALIGEMMA["text_config"], MODELOPT),
    },
}


@pytest.fixture(autouse=True)
def classes_are_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a process for each, which takes ten seconds."""
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())


def vllms(folder: Path) -> dict[int, set[Shape]]:
    """Of each layer, what vLLM's model keeps."""
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True)
    config = args.create_engine_config()
    default = torch.get_default_dtype()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            parallel_state.initialize_model_parallel()
            torch.set_default_dtype(config.model_config.dtype)
            with torch.device("meta"):
                initialize_model(config)
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        finally:
            torch.set_default_dtype(default)
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
    found: dict[int, set[Shape]] = {}
    num_layers = config.model_config.hf_text_config.num_hidden_layers
    for name, spec in specs.items():
        if spec and "vision" not in name:
            (number,) = re.findall(r"\d+", name)
            layer = int(number) % num_layers  # Falcon-H1's states are counted behind its attention
            found.setdefault(layer, set()).add(shape_of(spec))
    return found


def shape_of(spec: Any) -> Shape:
    if shapes := getattr(spec, "shapes", None):
        return (tuple(shapes[-1]), DTYPES[spec.dtypes[0]], DTYPES[spec.dtypes[-1]])
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
    return (spec.num_kv_heads, spec.head_size, window, DTYPES[spec.dtype])


def ours(folder: Path) -> dict[int, set[Shape]]:
    found: dict[int, set[Shape]] = {}
    for number, layer in enumerate(model_of_file(folder / "config.json").model.layers):
        for cache in layer.caches:
            first, last = cache.page.parts[0], cache.page.parts[-1]
            if cache.is_recurrent:
                shape: Shape = (tuple(dim.size for dim in last.dims), first.item.dtype, last.item.dtype)
            else:
                *heads, channels = (dim.size for dim in first.dims)
                shape = (heads[0] if heads else 1, channels, cache.window, first.item.dtype)
            found.setdefault(number, set()).add(shape)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_caches_that_vllm_makes_of_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert ours(tmp_path) == vllms(tmp_path)


def test_modelopt_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    assert ours(tmp_path) == vllms(tmp_path) == {i: {(4, 64, 0, "fp8_e4m3")} for i in range(4)}


NO_CACHES = {
    "an encoder": {**QWEN2, "is_causal": False},
    "layer types that vLLM does not read": {**MIXTRAL, "sliding_window": 1024, "layer_types": MIXED},
    "layer types in another order": {**GPT_OSS, "sliding_window": 128, "layer_types": MIXED},
}


@pytest.mark.parametrize("name", NO_CACHES)
def test_a_config_of_which_vllm_makes_other_caches_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NO_CACHES[name]))
    with pytest.raises(SpecError, match=r"is_causal|layer_types of model_type"):
        ours(tmp_path)
    assert "encoder" not in name or vllms(tmp_path) == {}


@pytest.mark.parametrize("config", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_windows_on_some_layers_of_qwen_are_not_served(tmp_path: Path, config: dict[str, Any]) -> None:
    mixed = {**config, "use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    (why,) = why_not_served(model_of_file(tmp_path / "config.json").model, Topology())
    assert "a window on all layers or on none" in why
    with pytest.raises(AssertionError, match="Sliding window for some but all layers is not supported"):
        vllms(tmp_path)
