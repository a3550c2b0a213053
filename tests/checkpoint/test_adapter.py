"""RB-9: an adapter is its content, not its name."""

import json

import pytest

from kvferry import SpecError
from kvferry.checkpoint import adapter_digest
from tests.checkpoint.conftest import write

CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "base_model_name_or_path": "/models/a"}


def adapter(folder, tensors, **changes):
    write(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    return adapter_digest(folder)


def test_the_same_content_under_another_name_is_the_same_adapter(tmp_path, tensors):
    here = adapter(tmp_path / "poems", tensors)
    assert here == adapter(
        tmp_path / "verse", tensors, base_model_name_or_path="/elsewhere", inference_mode=True
    )


def test_other_content_under_the_same_name_is_another_adapter(tmp_path, tensors):
    one = adapter(tmp_path / "1" / "poems", tensors)
    assert one != adapter(tmp_path / "2" / "poems", tensors, lora_alpha=32)
    tensors["model.layers.0.mlp.weight"] += 0.01
    assert one != adapter(tmp_path / "3" / "poems", tensors)


def test_an_adapter_that_cannot_be_read_is_refused_with_its_folder(tmp_path, tensors):
    with pytest.raises(SpecError, match="poems"):
        adapter_digest(tmp_path / "poems")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SpecError, match=r"has none of adapter_model\.safetensors, adapter_model\.bin"):
        adapter_digest(tmp_path)


def test_an_adapter_may_be_a_bin_file(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    found = []
    for data in (b"one", b"two"):
        (tmp_path / "adapter_model.bin").write_bytes(data)
        found.append(adapter_digest(tmp_path))
    assert found[0] != found[1]
