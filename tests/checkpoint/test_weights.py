"""RB-9: the same weights are the same wherever they are, and any others are others."""

import json
import time

import numpy as np
import pytest

from kvferry import SpecError
from kvferry.checkpoint import weights_values
from kvferry.checkpoint.weights import MAX_READS, READ_BYTES, StoredTensor, _chosen, stored_tensors
from tests.checkpoint.conftest import write


def values(folder, tensors, num_files=1, **options):
    """What identifies these tensors, spread over files in a folder."""
    names = list(tensors)
    files = [
        write(
            folder / f"model-{i}.safetensors",
            {name: tensors[name] for name in names[i::num_files]},
            **options,
        )
        for i in range(num_files)
    ]
    return weights_values(files)


def test_the_same_weights_in_two_folders_and_other_files_are_the_same(tmp_path, tensors):
    """RB-9: not file names, not paths, not the way in which tensors are spread over files."""
    one = values(tmp_path / "a", tensors)
    assert one == values(tmp_path / "b", tensors, num_files=4)
    assert one == values(
        tmp_path / "c", dict(reversed(tensors.items())), metadata={"format": "pt"}, padding=9
    )
    assert set(one) == {"weights.tensors", "weights.content", "weights.embeddings"}


def changes():
    def other_bytes(tensors):
        tensors["model.layers.1.mlp.weight"] += 1e-6

    def other_bytes_of_a_small_tensor(tensors):
        tensors["model.layers.2.norm.weight"][95] = 7

    def swapped(tensors):
        a, b = "model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight"
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return [other_bytes, other_bytes_of_a_small_tensor, swapped]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_other_weights_of_equal_shapes_are_others(tmp_path, tensors, change):
    """RB-9: a fine-tuned model, in one tensor only."""
    one = values(tmp_path / "a", tensors)
    change(tensors)
    other = values(tmp_path / "b", tensors)
    assert one["weights.tensors"] == other["weights.tensors"]
    assert one["weights.content"] != other["weights.content"]


def reshaped(tensors):
    tensors["model.layers.0.mlp.weight"] = tensors["model.layers.0.mlp.weight"].reshape(96, 64)


def renamed(tensors):
    tensors["model.layers.9.mlp.weight"] = tensors.pop("model.layers.0.mlp.weight")


def one_less(tensors):
    del tensors["model.layers.0.mlp.weight"]


@pytest.mark.parametrize("change", [reshaped, renamed, one_less])
def test_other_names_and_shapes_are_seen_by_themselves(tmp_path, tensors, change):
    one = values(tmp_path / "a", tensors)
    change(tensors)
    assert one["weights.tensors"] != values(tmp_path / "b", tensors)["weights.tensors"]


def test_tied_embeddings_that_are_written_twice_are_the_same_weights(tmp_path, tensors):
    separate = values(tmp_path / "a", tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    twice = values(tmp_path / "b", tensors)
    del tensors["lm_head.weight"]
    once = values(tmp_path / "c", tensors)
    assert twice == once
    assert [each["weights.embeddings"] for each in (separate, once)] == ["separate", "tied"]
    assert separate["weights.tensors"] != once["weights.tensors"]


def cut_off(data):
    return data[:-1]


def long_header(data):
    return (1 << 40).to_bytes(8, "little") + data[8:]


def no_json(data):
    return data[:8] + b"x" + data[9:]


def no_object(data):
    return (2).to_bytes(8, "little") + b"[]" + data


def wrong_offsets(data):
    return data.replace(b'"data_offsets"', b'"data_offsetz"')


@pytest.mark.parametrize("spoil", [cut_off, long_header, no_json, no_object, wrong_offsets])
def test_a_file_that_is_none_is_refused_by_name(tmp_path, tensors, spoil):
    path = write(tmp_path / "a.safetensors", tensors)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(SpecError, match=r"a\.safetensors is"):
        weights_values([path])


def test_a_tensor_that_is_in_two_files_is_refused(tmp_path, tensors):
    files = [write(tmp_path / name, tensors) for name in ("a.safetensors", "b.safetensors")]
    with pytest.raises(SpecError, match=r"is in a\.safetensors and in b\.safetensors"):
        weights_values(files)
    with pytest.raises(SpecError, match="no safetensors files"):
        weights_values([])


def test_of_very_many_tensors_each_kind_is_read(tmp_path):
    """256 experts a layer do not crowd out attention: each kind gets as many reads."""
    parts = ["q_proj", "norm", *(f"experts.{i}.up" for i in range(256))]
    tensors = [
        StoredTensor(f"model.layers.{layer}.{part}.weight", "F32", (4,), tmp_path, 0, 16)
        for layer in range(61)
        for part in parts
    ]
    chosen = [tensor.name for tensor in _chosen(tensors)]
    assert len(set(chosen)) == MAX_READS
    assert chosen == sorted(chosen)
    assert chosen == [tensor.name for tensor in _chosen(sorted(tensors, key=lambda each: each.name))]
    assert sum("q_proj" in name for name in chosen) == sum("norm" in name for name in chosen) == 61


@pytest.mark.timed
def test_a_checkpoint_of_16_gb_takes_well_under_a_second(tmp_path):
    """RB-9: 4 files, 300 tensors, sparse on disk: what counts is how often and how much is read."""
    big = 16 * (1 << 30) // 300 // 4 // 1024 * 1024 * 4
    files = []
    for i in range(4):
        entries = {
            f"layers.{i}.{j}.weight": {
                "dtype": "BF16",
                "shape": [big // 2],
                "data_offsets": [j * big, (j + 1) * big],
            }
            for j in range(75)
        }
        text = json.dumps(entries).encode()
        path = tmp_path / f"{i}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 75 * big)
        files.append(path)
    started = time.process_time()  # this process's own: tests share their cores
    found = weights_values(files)
    seconds = time.process_time() - started
    print(f"identity of {found['weights.tensors']} in {1e3 * seconds:.0f} ms")
    assert found["weights.tensors"].startswith("300 tensors, 17")
    assert seconds < 1
    assert READ_BYTES * MAX_READS < 1 << 22


def test_headers_are_read_as_they_are_written(tmp_path, tensors):
    found = stored_tensors([write(tmp_path / "a.safetensors", tensors)])
    data = (tmp_path / "a.safetensors").read_bytes()
    for tensor in found:
        there = np.frombuffer(data[tensor.offset : tensor.offset + tensor.num_bytes], np.float32)
        assert (there.reshape(tensor.shape) == tensors[tensor.name]).all()
