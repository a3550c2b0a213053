"""Safetensors files, written by hand: a length, a JSON header, bytes."""

import json
from pathlib import Path

import numpy as np
import pytest

Tensors = dict[str, np.ndarray]


def write(path: Path, tensors: Tensors, *, metadata: dict | None = None, padding: int = 0) -> Path:
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name, tensor in tensors.items():
        stop = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode() + b" " * padding
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in tensors.values()))
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tensors() -> Tensors:
    """A small model of three layers: each tensor has bytes of its own."""
    rng = np.random.default_rng(0)
    names = [f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("q_proj", "mlp", "norm")]
    shapes = [(96, 128), (64, 96), (96,)] * 3
    made = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in zip(names, shapes, strict=True)
    }
    made["model.embed_tokens.weight"] = rng.standard_normal((320, 96)).astype(np.float32)
    made["lm_head.weight"] = rng.standard_normal((320, 96)).astype(np.float32)
    return made
