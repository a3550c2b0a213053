"""RB-9: what vLLM's configuration and a checkpoint's files say about the model, without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from safetensors.torch import save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from kvferry.core.identity import Identity, compare_identity
from kvferry.integrations.vllm.shared.identity import engine_identity
from kvferry.integrations.vllm.shared.options import Options
from tests.support.vllm import tiny
from tests.vllm import checkpoints
from tests.vllm.checkpoints import changed
from tests.vllm.conftest import Docks
from tests.vllm.engine import PREFILL, Setup, drive

Change = Callable[..., Path]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("models"))


def identity(model: Path, option: str = "", **args: Any) -> Identity:
    """The identity of an engine of this model, as a worker finds it."""
    given = {"model": str(model), "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512}
    config = EngineArgs(**{**given, **args}).create_engine_config()
    return engine_identity(config, Options.of({"identity": option}, host="127.0.0.1"))


def differing(one: Identity, other: Identity) -> set[str]:
    return {found.field for found in compare_identity(one, other).differing}


def test_everything_is_known_of_a_checkpoint_of_safetensors(llama: Path) -> None:
    found = identity(llama)
    assert found.unknown == ()
    assert found.value["architecture"] == "llama"
    assert found.value["dtype"] == "float32"
    assert found.value["config.rope_parameters.rope_theta"] == "10000"
    assert {"config.rms_norm_eps", "weights.content", "weights.files"} <= set(found.value)
    assert found.is_required
    assert not [name for name, value in found.known if str(llama) in value], "no path"


@pytest.mark.parametrize(
    "args",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"block_size": 64, "enforce_eager": True, "max_num_seqs": 4},
        {"max_model_len": 1024, "seed": 7, "served_model_name": "another"},
        {"load_format": "safetensors"},
        {"load_format": "runai_streamer"},
    ],
    ids=str,
)
def test_how_a_model_is_served_does_not_matter(llama: Path, args: dict[str, Any]) -> None:
    assert identity(llama, **args) == identity(llama)


@pytest.mark.parametrize(
    "change",
    [
        partial(changed),
        partial(changed, transformers_version="4.0.0", use_cache=False, eos_token_id=5),
    ],
    ids=["copied", "renamed"],
)
def test_the_same_model_in_another_folder_is_the_same(llama: Path, tmp_path: Path, change: Change) -> None:
    assert identity(change(llama, tmp_path / "copy")) == identity(llama)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (partial(changed, weights=checkpoints.other_weights), {"weights.content"}),
        (partial(changed, weights=checkpoints.one_matrix), {"weights.content"}),
        (partial(changed, weights=checkpoints.one_row), {"weights.content"}),
        (partial(changed, num_files=3), {"weights.content", "weights.files"}),
        (partial(changed, router={"top_k": 2}), {"config.router.top_k"}),
        (
            partial(changed, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
            {"config.rope_parameters.rope_theta"},
        ),
        (partial(changed, rms_norm_eps=1e-5), {"config.rms_norm_eps"}),
        (partial(changed, attention_multiplier=0.5), {"config.attention_multiplier"}),
        (
            partial(changed, weights=checkpoints.no_last_matrix, tie_word_embeddings=True),
            {"config.tie_word_embeddings", "weights.content", "weights.files"},
        ),
    ],
    ids=["weights", "one matrix", "one row", "split", "nested", "rope", "norm", "a new key", "tied"],
)
def test_another_model_differs_by_name(llama: Path, tmp_path: Path, change: Change, parts: set[str]) -> None:
    assert differing(identity(llama), identity(change(llama, tmp_path / "other"))) == parts


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, {"config.rms_norm_eps"}),
        ({"dtype": "bfloat16"}, {"dtype"}),
    ],
    ids=["override", "dtype"],
)
def test_what_an_engine_sets_beside_the_checkpoint_counts(
    llama: Path, args: dict[str, Any], parts: set[str]
) -> None:
    assert differing(identity(llama), identity(llama, **args)) == parts


def test_quantisation_on_load_counts(llama: Path) -> None:
    plain, quantised = (
        identity(llama, dtype="bfloat16", quantization=method) for method in (None, "fp8_per_tensor")
    )
    assert differing(plain, quantised) == {"quantization"}


def test_another_quantisation_of_the_checkpoint_differs_by_name(llama: Path, tmp_path: Path) -> None:
    fp8: Any = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    configs: list[dict[str, Any]] = [
        {},
        {"quantization_config": fp8},
        {"quantization_config": fp8 | {"activation_scheme": "static"}},
    ]
    plain, one, other = (
        identity(changed(llama, tmp_path / str(i), **config), dtype="bfloat16")
        for i, config in enumerate(configs)
    )
    assert "config.quantization_config.quant_method" in differing(plain, one)
    assert differing(one, other) == {"config.quantization_config.activation_scheme"}


@pytest.mark.parametrize(
    ("spoil", "args", "why"),
    [
        (lambda home: None, {"load_format": "dummy"}, "load format dummy"),
        (lambda home: (home / "model.safetensors").unlink(), {}, "not found"),
        (lambda home: None, {"load_format": "sharded_state"}, "load format sharded_state"),
    ],
    ids=["dummy", "none", "sharded_state"],
)
def test_weights_that_cannot_be_read_are_unknown_with_the_reason(
    llama: Path, tmp_path: Path, spoil: Callable[[Path], None], args: dict[str, Any], why: str
) -> None:
    import shutil

    home = Path(shutil.copytree(llama, tmp_path / "copy"))
    spoil(home)
    found = identity(home, **args)
    assert [name for name, _ in found.unknown] == ["weights"]
    assert not [why for _, why in found.unknown if str(tmp_path) in why], "peers see no paths"
    assert why in found.reason["weights"]
    assert differing(found, identity(llama)) == set()


def test_a_draft_is_a_model_of_its_own(llama: Path, tmp_path: Path) -> None:
    draft = tiny.make("llama-draft", tmp_path)
    other = changed(draft, tmp_path / "other", weights=checkpoints.other_weights)

    def drafting(model: Path) -> Identity:
        return identity(
            llama,
            speculative_config={"method": "draft_model", "model": str(model), "num_speculative_tokens": 2},
        )

    assert differing(drafting(draft), drafting(other)) == {"draft.weights.content"}
    assert differing(drafting(draft), identity(llama)) == set(), "a prefill may draft for nobody"
    assert differing(identity(llama), drafting(draft)) == {"draft"}


def test_what_a_model_writes_into_its_configuration_does_not_count(llama: Path) -> None:
    """Some do when they are built, and with pipeline stages not the same on every rank."""
    given = {"model": str(llama), "skip_tokenizer_init": True, "dtype": "float32"}
    overrides = {"hf_overrides": {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}}
    config = EngineArgs(**given, **overrides).create_engine_config()
    config.model_config.hf_config.target_layer_count = 3
    found = engine_identity(config, Options.of({}, host="127.0.0.1"))
    assert "config.target_layer_count" not in found.value
    assert found.value["config.rope_parameters.rope_theta"] == "700000"


def test_a_text_of_the_operator_replaces_it(llama: Path) -> None:
    assert identity(llama, "ours, v3").known == (("stated", "ours, v3"),)


def test_only_unchecked_accepts_an_unknown_model(llama: Path) -> None:
    assert identity(llama, "required") == identity(llama)
    unchecked = identity(llama, "unchecked")
    assert not unchecked.is_required
    assert unchecked.known == identity(llama).known


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_weights_in_other_files_than_safetensors_are_known(llama: Path, tmp_path: Path, name: str) -> None:
    import shutil

    found = []
    for turn in ("a", "b"):
        home = Path(shutil.copytree(llama, tmp_path / turn))
        (home / "model.safetensors").unlink()
        (home / name).write_bytes(f"weights {turn}".encode())
        found.append(identity(home))
    assert found[0].unknown == ()
    assert differing(*found) == {"weights.content"}


def adapter(folder: Path, value: float, lora_id: int) -> LoRARequest:
    folder.mkdir(parents=True)
    weights = {f"model.layers.0.q_proj.lora_{side}.weight": torch.full((8, 64), value) for side in "AB"}
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}')
    return LoRARequest(folder.name, lora_id, str(folder))


def test_a_lora_adapter_is_its_content_not_its_name(
    docks: Docks, prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    """RB-9: the cache of a prompt is the adapter's as well."""
    src, dst = (docks.own(Setup(blocks=64)) for _ in range(2))
    theirs = adapter(tmp_path / "src" / "poems", 0.5, 1)
    cases = [
        (adapter(tmp_path / "dst" / "verse", 0.5, 1), "length"),
        (adapter(tmp_path / "dst" / "poems", 0.6, 2), "error"),
        (None, "error"),
        (LoRARequest("nowhere", 3, str(tmp_path / "nowhere")), "error"),
    ]
    for ours, reason in cases:
        text = prompt(100)
        prefilled = src.ask(text, 1, dict(PREFILL), lora=theirs)
        src.finish(prefilled)
        answer = dst.ask(text, params=prefilled.params, lora=ours)
        drive([src, dst], partial(getattr, answer, "is_done"))
        assert answer.finish_reason == reason, ours
        assert (answer.num_external > 0) == (reason == "length")


def test_a_ticket_is_for_prompts_with_its_salt(docks: Docks, prompt: Callable[[int], list[int]]) -> None:
    src, dst = (docks.own(Setup(blocks=64)) for _ in range(2))
    for theirs, ours in (("a", "a"), ("a", "b"), ("a", None), (None, "a")):
        text = prompt(100)
        prefilled = src.ask(text, 1, dict(PREFILL), cache_salt=theirs)
        src.finish(prefilled)
        answer = dst.ask(text, params=prefilled.params, cache_salt=ours)
        drive([src, dst], partial(getattr, answer, "is_done"))
        assert answer.finish_reason == ("length" if ours == theirs else "error"), (theirs, ours)


def test_a_ticket_for_another_adapter_is_not_called_another_prompt(
    docks: Docks,
    prompt: Callable[[int], list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A ticket has one digest of both: both are named."""
    src, dst = (docks.own(Setup(blocks=64)) for _ in range(2))
    poems = adapter(tmp_path / "poems", 0.5, 1)
    cases = [
        (None, poems, "another prompt, cache_salt or LoRA adapter than this request's (poems)"),
        (poems, None, "another prompt, cache_salt or LoRA adapter than this request's (none)"),
    ]
    for theirs, ours, words in cases:
        text = prompt(100)
        prefilled = src.ask(text, 1, dict(PREFILL), lora=theirs)
        src.finish(prefilled)
        answer = dst.ask(text, params=prefilled.params, lora=ours)
        drive([src, dst], partial(getattr, answer, "is_done"))
        assert words in caplog.text


def test_an_adapter_that_is_not_known_is_refused_or_counts_by_its_name(
    docks: Docks, prompt: Callable[[int], list[int]], tmp_path: Path
) -> None:
    unchecked = replace(Setup(blocks=64), options=(*Setup.options, ("identity", "unchecked")))
    for setup, is_offered in ((Setup(blocks=64), False), (unchecked, True)):
        src = docks.own(setup)
        nowhere = LoRARequest("poems", 1, str(tmp_path / "nowhere"))
        answer = src.ask(prompt(100), 1, dict(PREFILL), lora=nowhere)
        src.finish(answer)
        assert answer.params is not None
        assert answer.params["do_remote_prefill"] == is_offered
