"""Models of a few million random weights, one per family of caches: real engines run them on a CPU.

A tiny model has no opinions: with the usual weights its next token hardly depends on what it has read.
Here the matrices are wide (standard deviation 0.08) and the embeddings wider (1.0), so that a wrong cache
is a wrong token.
"""

import json
import sys
from pathlib import Path
from typing import Any

WEIGHT_STD = 0.08
EMBEDDING_STD = 1.0
TIED_EMBEDDING_STD = 0.1
"""Where the embeddings are also the last matrix: with wider ones each token is followed by itself."""
NUM_TOKENS = 1024
"""The longest request, prompt and answer."""
VOCABULARY = 320
"""256 bytes, and room for the special ones."""

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}

_LLAMA = {"model_type": "llama", "num_hidden_layers": 4, **_ATTENTION}

_DEEPSEEK_V3 = {  # MLA: one latent per token for all heads
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}

_DEEPSEEK_V3_WIDE = {  # a GPU's kernels for MLA are made for these widths, and no others
    **_DEEPSEEK_V3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

_GPT_OSS = {  # a window every other layer, sinks, experts
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    **_ATTENTION,
    "sliding_window": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-1kv": {**_LLAMA, "num_key_value_heads": 1},
    "llama-4kv": {**_LLAMA, "num_key_value_heads": 4},
    "llama-draft": {**_LLAMA, "num_hidden_layers": 1},  # a model that drafts for llama
    "llama-eagle": {**_LLAMA, "num_hidden_layers": 1},  # a layer on top of llama that drafts for it
    "gemma3": {  # two windows for each full layer: two groups that share a pool
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        **_ATTENTION,
        "query_pre_attn_scalar": 64,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "gemma3n": {  # the last three layers read the caches of the first three
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        **_ATTENTION,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "tie_word_embeddings": True,
    },
    "gpt_oss": _GPT_OSS,
    "gpt_oss-all": {  # no choice of experts: in bf16 rounding would change it, and with it the answer
        **_GPT_OSS,
        "num_experts_per_tok": _GPT_OSS["num_local_experts"],
    },
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 96},  # windows and nothing else
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v3-wide": _DEEPSEEK_V3_WIDE,
    "deepseek_v3-wide-all": {  # no choice of experts, as above
        **_DEEPSEEK_V3_WIDE,
        "num_experts_per_tok": _DEEPSEEK_V3_WIDE["n_routed_experts"],
    },
    "nemotron_h": {  # Mamba2 and attention in layers of their own
        "model_type": "nemotron_h",
        **_ATTENTION,
        "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mamba", "mlp", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 32,
        "chunk_size": 64,
    },
    "granite": {  # Mamba2 and attention in layers of their own, experts
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        **_MAMBA,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 256,
        "attention_multiplier": 0.125,
        "position_embedding_type": "nope",
    },
    "falcon_h1": {  # Mamba2 and attention side by side in each layer
        "model_type": "falcon_h1",
        "num_hidden_layers": 3,
        **_ATTENTION,
        **_MAMBA,
        "mamba_d_ssm": 512,
    },
    "qwen3_next": {  # gated delta net and attention; bf16 only on a CPU
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        **_ATTENTION,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    },
    "gemma4": {  # full layers have other heads than windows: fewer and wider, keys that are values, too
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        **_ATTENTION,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 96,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "tie_word_embeddings": True,
    },
    "mamba2": {  # Mamba-2 and nothing else
        "model_type": "mamba2",
        "num_hidden_layers": 4,
        "num_heads": 8,
        "head_dim": 64,
        "state_size": 32,
        "n_groups": 2,
        "chunk_size": 64,
    },
    # What follows has no kernels on a CPU.
    "deepseek_v32": {  # MLA that looks at the 64 tokens that an indexer chooses
        **_DEEPSEEK_V3_WIDE,
        "model_type": "deepseek_v32",
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
    },
    "jamba": {  # Mamba-1 and attention in layers of their own, experts
        "model_type": "jamba",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "kimi_linear": {  # Kimi delta attention and MLA, experts
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_num_heads": 4,
        "linear_head_dim": 128,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["sparse"] * 4,
        "moe_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""Family -> what its configuration says beyond the common part."""
IN_VLLM: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "num_heads": 4,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": NUM_TOKENS,
        "first_k_dense_replace": 0,
        "mla_use_nope": True,
    },
}
"""What vLLM reads in a family's configuration that transformers does not write."""
EAGLE = {"llama-eagle"}
"""Families that are no models of their own: EAGLE's layers, which read what a model's last layer gives."""


def make(family: str, directory: Path) -> Path:
    """Write the model and its tokenizer into a directory of that name, unless they are there; return it."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    home = directory / family
    if (home / "tokenizer.json").exists():
        return home
    config = AutoConfig.for_model(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "intermediate_size": 512,
            "max_position_embeddings": NUM_TOKENS,
            "tie_word_embeddings": False,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": 258,
            **FAMILIES[family],
        }
    )
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, WEIGHT_STD)
    scale = getattr(
        model.get_input_embeddings(), "scalar_embed_scale", 1.0
    )  # Gemma multiplies what it looks up
    std = TIED_EMBEDDING_STD if config.tie_word_embeddings else EMBEDDING_STD
    model.get_input_embeddings().weight.data.normal_(0, std / scale)
    model.save_pretrained(home, state_dict=_eagle(model) if family in EAGLE else None)
    if more := IN_VLLM.get(family):
        path = home / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more, indent=2))
    byte_tokenizer().save_pretrained(home)
    return home


def _eagle(model: Any) -> dict[str, Any]:
    """A model's layers as EAGLE has them: one more matrix takes in a hidden state; the first norm is gone."""
    import torch

    hidden = model.config.hidden_size
    weights = {
        name.removeprefix("model."): weight
        for name, weight in model.state_dict().items()
        if name.startswith(("model.layers.", "model.embed_tokens."))
        and "layers.0.input_layernorm" not in name
    }
    return {**weights, "fc.weight": torch.empty(hidden, 2 * hidden).normal_(0, WEIGHT_STD)}


def byte_tokenizer(num_tokens: int = 256) -> Any:
    """Token ids are the bytes of the text, in the order of their printable stand-ins.

    Of a model that knows more tokens the special ones come next, then words that nobody writes: so that
    whatever such a model says can be read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    names = (letters + [*special.values()] + [f"<{token}>" for token in range(num_tokens)])[:num_tokens]
    words = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
