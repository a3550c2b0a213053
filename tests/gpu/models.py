"""Models whose caches are those of models people run, and whose weights are made up when they are loaded.

Only a configuration is written: vLLM fills the weights (``load_format: dummy``). The 8B has all weights of an
8B, since its steps are what loads compete with; the others have few.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARGS = {"load_format": "dummy", "skip_tokenizer_init": True}
_NARROW = {"hidden_size": 1024, "intermediate_size": 1024, "vocab_size": 512}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "head_dim": 128,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70b-tp8-shard": {  # one of eight ranks: one KV head in each of 80 layers
        **_LLAMA,
        **_NARROW,
        "num_hidden_layers": 80,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "deepseek-v3": {  # MLA in 61 layers
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_NARROW,
        "hidden_act": "silu",
        "num_hidden_layers": 61,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 61,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
    },
    "hybrid": {  # as Nemotron-H-8B: 24 Mamba-2 layers, 4 of attention; their MLPs are left out
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **_NARROW,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layers_block_type": (["mamba"] * 6 + ["attention"]) * 4,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "chunk_size": 128,
    },
}
SMALL = "8b"
"""The one that has a small form."""
TINY = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 512}
"""What becomes of the 8B where nobody measures: on a CPU, to see that it runs."""


def vocabulary_of(home: Path) -> int:
    """How many tokens the model of a directory knows."""
    return int(json.loads((home / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def make_config(model: str, folder: Path, *, max_tokens: int, is_tiny: bool = False) -> Path:
    """Write the configuration into a directory of the model's name; return it."""
    home = folder / model
    home.mkdir(parents=True, exist_ok=True)
    config = {**CONFIGS[model], **(TINY if is_tiny else {})}
    doc = {
        "max_position_embeddings": max_tokens,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config,
    }
    (home / "config.json").write_text(json.dumps(doc, indent=1), encoding="utf-8")
    return home
