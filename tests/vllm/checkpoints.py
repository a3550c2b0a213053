"""Copies of a checkpoint, each changed in one thing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Weights = dict[str, Any]
"""Tensors by name."""


def changed(
    model: Path,
    home: Path,
    *,
    weights: Callable[[Weights], None] | None = None,
    num_files: int = 1,
    **config: Any,
) -> Path:
    """A copy of a model with other weights, in other files, or with other values in its configuration."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, home)
    values = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(values | config))
    if weights is None and num_files == 1:
        return home
    tensors = {name: t for file in home.glob("*.safetensors") for name, t in load_file(file).items()}
    if weights is not None:
        weights(tensors)
    for file in home.glob("*.safetensors"):
        file.unlink()
    names = sorted(tensors)
    files = [f"model-{i}.safetensors" for i in range(num_files)] if num_files > 1 else ["model.safetensors"]
    places = {name: files[i % num_files] for i, name in enumerate(names)}
    for place in files:
        part = {name: tensors[name] for name in names if places[name] == place}
        save_file(part, home / place, metadata={"format": "pt"})
    (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return home


def other_weights(tensors: Weights) -> None:
    """Of equal names and shapes, as another fine-tuning has them."""
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensors[name] = tensor + 0.02 * tensor.roll(1, 0)


def one_matrix(tensors: Weights) -> None:
    name = "model.layers.2.self_attn.v_proj.weight"
    tensors[name] = tensors[name] * 1.01


def one_row(tensors: Weights) -> None:
    tensors["model.embed_tokens.weight"][7] += 0.5


def no_last_matrix(tensors: Weights) -> None:
    del tensors["lm_head.weight"]
