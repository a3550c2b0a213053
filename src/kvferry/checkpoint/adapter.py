"""A LoRA adapter by its content."""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.checkpoint.config import config_values, short_digest
from kvferry.checkpoint.weights import weights_values
from kvferry.errors import SpecError

ADAPTER_NAMES = frozenset(
    {
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "task_type",
        "inference_mode",
        "init_lora_weights",
    }
)
"""What an adapter's configuration says about names and its training."""


def adapter_digest(folder: Path) -> str:
    """What identifies the adapter in a folder, wherever it is and whatever it is called.

    Raises ``SpecError`` if it is not made of a configuration and safetensors files.
    """
    config_file = folder / "adapter_config.json"
    try:
        config = json.loads(config_file.read_bytes())
        values = weights_values(sorted(folder.glob("*.safetensors")))
    except (OSError, ValueError) as error:  # a SpecError is a ValueError
        raise SpecError(f"the adapter in {folder} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{config_file}: a JSON object is expected")
    return short_digest(json.dumps([config_values(config, without=ADAPTER_NAMES), values], sort_keys=True))
