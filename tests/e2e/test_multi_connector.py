"""Beside vLLM's ExampleConnector, which saves whole prompts to files: real engines, both orders."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import KVFERRY, Nursery, ferry, until
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

PROMPTS = [[(31 * index + 7 * length) % 256 for index in range(length)] for length in (70, 130, 300)]
SOURCES = "vllm:prompt_tokens_cached_by_source"


def both(folder: Path, *, is_kvferry_first: bool) -> dict[str, Any]:
    folder.mkdir()
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    connectors = [KVFERRY, example] if is_kvferry_first else [example, KVFERRY]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": connectors},
    }


@pytest.mark.parametrize("is_kvferry_first", [True, False], ids=["kvferry-first", "kvferry-last"])
def test_prompts_are_loaded_saved_and_read_again(tmp_path: Path, is_kvferry_first: bool):
    """The tokens are those of an engine alone, wherever the prompt comes from; vLLM's metrics say where."""
    with Nursery(tmp_path) as nursery:
        model = nursery.make("llama")
        src, dst = (
            nursery.begin(model, both(tmp_path / name, is_kvferry_first=is_kvferry_first), block_size=32)
            for name in ("src", "dst")
        )
        alone = nursery.begin(model, block_size=32)
        for engine in (src, dst, alone):
            engine.wait_ready()
        free = src.num_free_blocks(), dst.num_free_blocks()
        expected = [alone.ask(prompt).tokens for prompt in PROMPTS]
        assert [ferry(src, dst, prompt).tokens for prompt in PROMPTS] == expected
        assert len(list((tmp_path / "dst").iterdir())) == len(PROMPTS), "each prompt is saved"
        by_source = dst.totals(SOURCES, "source")
        assert 0 <= sum(map(len, PROMPTS)) - by_source["p2p"] <= len(PROMPTS)
        dst.spoil()
        assert [dst.ask(prompt).tokens for prompt in PROMPTS] == expected
        from_files = dst.totals(SOURCES, "source")["external_unspecified"]
        assert from_files >= sum(map(len, PROMPTS)) // 2
        assert [ferry(src, dst, prompt).tokens for prompt in PROMPTS] == expected
        later = dst.totals(SOURCES, "source")
        assert (later["p2p"] > by_source["p2p"]) == is_kvferry_first
        assert (later["external_unspecified"] > from_files) != is_kvferry_first
        until(lambda: (src.num_free_blocks(), dst.num_free_blocks()) == free, "blocks are back", 15)
