"""A LoRA adapter by its content."""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.checkpoint.config import config_values, short_digest
from kvferry.checkpoint.weights import file_digests
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

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Of these, engines load the first that is there."""


def adapter_digest(folder: Path) -> str:
    """What identifies the adapter in a folder, wherever it is and whatever it is called.

    Raises ``SpecError`` if it is not made of a configuration and one file of weights.
    """
    config_file = folder / "adapter_config.json"
    try:
        config = json.loads(config_file.read_bytes())
        found = [path for path in map(folder.joinpath, WEIGHTS) if path.exists()][:1]
        weights = file_digests(found).values()
    except (OSError, ValueError) as error:  # a SpecError is a ValueError
        raise SpecError(f"the adapter in {folder} cannot be read: {error}") from None
    if not found:
        raise SpecError(f"the adapter in {folder} has none of {', '.join(WEIGHTS)}")
    if not isinstance(config, dict):
        raise SpecError(f"{config_file}: a JSON object is expected")
    return short_digest(json.dumps([config_values(config, without=ADAPTER_NAMES), *weights], sort_keys=True))
