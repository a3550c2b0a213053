"""A model's configuration as values of its identity: every key except a short list."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_VALUES = 1024
"""Values of one configuration; further ones become one digest."""
MAX_SHOWN = 160
"""Characters of a value; a longer one is cut, and a digest appended."""
MAX_KEY = 160

NAMES = frozenset(
    {
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "auto_map"),
        *("tokenizer_class", "id2label", "label2id", "problem_type", "finetuning_task"),
    }
)
"""Names and authors."""
OUTPUTS = frozenset(
    {
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("torchscript", "chunk_size_feed_forward", "do_sample", "temperature", "top_p", "num_beams"),
        *("max_length", "min_length", "max_new_tokens", "repetition_penalty"),
        *(f"{kind}_token_id" for kind in ("bos", "cls", "decoder_start", "eos", "mask", "pad", "sep", "unk")),
    }
)
"""Sampling and output. Requests are token ids, so special tokens do not matter."""
TRAINING = frozenset(
    {
        *("initializer_range", "initializer_factor", "gradient_checkpointing", "pretraining_tp"),
        *("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha", "seq_aux"),
    }
)
NOT_COUNTED = NAMES | OUTPUTS | TRAINING
"""Ignored in the configuration of a model or submodel. Deeper levels ignore ``NAMES`` only: a router's
``temperature`` is not a sampling default."""
DTYPE = "dtype"
"""Of the whole model; ignored, since the engine reports the dtype that it uses."""
DROPOUT = ("dropout", "_pdrop", "dropout_prob")
"""Suffixes of keys that matter in training only."""


def config_values(config: Mapping[str, Any], *, without: frozenset[str] = frozenset()) -> dict[str, str]:
    """The values of a configuration that may affect the computation, nested keys joined by dots.

    Unset values (null, false, empty) are omitted: newer libraries add such keys to older configurations.

    >>> config_values({"rope_parameters": {"rope_theta": 1e4}, "use_cache": True, "attention_bias": False})
    {'rope_parameters.rope_theta': '10000'}
    """
    leaves = sorted(leaf for leaf in _leaves(config, "", NOT_COUNTED | without) if leaf[0] != DTYPE)
    values = {name: _shown(text) for name, text in leaves[:MAX_VALUES]}
    if rest := leaves[MAX_VALUES:]:
        values["(more)"] = f"{len(rest)} values, digest {short_digest(json.dumps(rest))}"
    return values


def _leaves(config: Mapping[str, Any], above: str, left_out: frozenset[str]) -> Iterator[tuple[str, str]]:
    ignored = left_out if not above or "model_type" in config else NAMES
    for given, value in config.items():
        key = DTYPE if given == "torch_dtype" else str(given)  # its older name
        if key in ignored or key.endswith(DROPOUT) or _is_unset(value):
            continue
        name = f"{above}{key[:MAX_KEY]}"
        if isinstance(value, Mapping) and len(name) < MAX_KEY:
            yield from _leaves(value, f"{name}.", left_out)
        elif key.endswith(DTYPE):
            yield name, canonical(value).removeprefix("torch.")
        else:
            yield name, canonical(value)


def _is_unset(value: object) -> bool:
    return value is None or value is False or (isinstance(value, str | list | tuple | Mapping) and not value)


def rope_factors(config: Mapping[str, Any], max_model_len: int = 0) -> str:
    """The factors of a LongRoPE model, which depend on the longest allowed request; empty for other models.

    >>> config = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}
    >>> rope_factors(config), rope_factors(config, 65536)
    ('short factors', 'long factors')
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "longrope" not in (rope.get("rope_type"), rope.get("type")):
        return ""
    own = config.get("original_max_position_embeddings")
    longest = own or rope.get("original_max_position_embeddings", 0)
    # vLLM's default is the range of the short factors, if the configuration has it.
    allowed = max_model_len or own or config.get("max_position_embeddings", 0)
    return "long factors" if allowed > longest else "short factors"


def canonical(value: object) -> str:
    """A value as canonical text: 10000.0 is 10000, keys are sorted.

    >>> canonical([1e4, {"b": 1, "a": None}])
    '[10000, {"a": null, "b": 1}]'
    """
    return value if isinstance(value, str) else json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: object) -> object:
    match value:
        case float() if value.is_integer() and abs(value) < 1 << 53:
            return int(value)
        case Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case set() | frozenset():
            return sorted(map(canonical, value))
        case _:
            return value


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… (digest {short_digest(text)})"


def short_digest(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
