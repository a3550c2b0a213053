"""How the manifests of this folder were made: real vLLM engines, asked to describe themselves.

    python -m tests.vllm.corpus.dump DIRECTORY_FOR_LOGS [CASE ...]

Needs vLLM; starts an engine per case, with a connector that writes each worker's manifest and does nothing
else. Addresses are left out: they mean nothing elsewhere.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.core.manifest import merge
from kvferry.wire import manifest_from_json, manifest_to_json
from tests.e2e.harness import MLA_ARGS, EngineError, Nursery

HERE = Path(__file__).parent
BLOCKS = 128
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
BF16 = {"dtype": "bfloat16"}
FP8 = {**BF16, "kv_cache_dtype": "fp8"}
CHANNELS_FIRST = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-b32": ("llama", {"block_size": 32}),
    "llama-b64": ("llama", {"block_size": 64}),
    "llama-tp2-b64": ("llama", {"block_size": 64, **TP2}),
    "llama-pp2-b32": ("llama", {"block_size": 32, **PP2}),
    "llama-bf16-b32": ("llama", {"block_size": 32, **BF16}),
    "llama-bf16-tp2-b96": ("llama", {"block_size": 96, **BF16, **TP2}),
    "llama-fp8-b32": ("llama", {"block_size": 32, **FP8}),
    "llama-fp8-tp2-b64": ("llama", {"block_size": 64, **FP8, **TP2}),
    "llama-1kv-tp2-b64": ("llama-1kv", {"block_size": 64, **TP2}),
    "llama-1kv-b32": ("llama-1kv", {"block_size": 32}),
    "gemma3-b64": ("gemma3", {"block_size": 64}),
    "gemma3-tp2-b32": ("gemma3", {"block_size": 32, **TP2}),
    "gemma3-pp2-b32": ("gemma3", {"block_size": 32, **PP2}),
    "gpt_oss-b64": ("gpt_oss", {"block_size": 64}),
    "gpt_oss-tp2-b32": ("gpt_oss", {"block_size": 32, **TP2}),
    "deepseek_v3": ("deepseek_v3", MLA_ARGS),
    "deepseek_v3-tp2": ("deepseek_v3", {**MLA_ARGS, **TP2}),
    "deepseek_v3-bf16-b64": ("deepseek_v3", {"block_size": 64, **BF16}),
    "deepseek_v3-bf16-b32": ("deepseek_v3", {"block_size": 32, **BF16}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-tp2": ("nemotron_h", TP2),
    "nemotron_h-pp2": ("nemotron_h", PP2),
    "nemotron_h-ds": ("nemotron_h", {"env": CHANNELS_FIRST}),
    "nemotron_h-ds-tp2": ("nemotron_h", {"env": CHANNELS_FIRST, **TP2}),
    "granite": ("granite", {}),
    "granite-tp2": ("granite", TP2),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1-tp2": ("falcon_h1", TP2),
    "qwen3_next-bf16": ("qwen3_next", BF16),
    "qwen3_next-bf16-tp2": ("qwen3_next", {**BF16, **TP2}),
}
"""File -> the tiny model (``tests.support.vllm.tiny``), engine arguments, and its environment."""

DUMP = {
    "kv_connector": "DumpConnector",
    "kv_connector_module_path": "tests.vllm.corpus.connector",
    "kv_role": "kv_both",
}


def main(logs: Path, names: list[str]) -> None:
    with Nursery(logs) as nursery:
        for name in names or CASES:
            with tempfile.TemporaryDirectory() as parts:
                family, args = CASES[name]
                args = {"num_gpu_blocks_override": BLOCKS, **args}
                args["env"] = {"KVFERRY_DUMP": parts, **args.get("env", {})}
                try:
                    nursery.start(nursery.make(family), DUMP, **args).close()
                except EngineError as problem:
                    print(f"{name}: {str(problem).splitlines()[0]}", flush=True)
                else:
                    _merge(name, family, Path(parts))
                    print(f"{name}: written", flush=True)


def _merge(name: str, family: str, parts: Path) -> None:
    """One manifest of an engine from those of its workers."""
    manifests = [manifest_from_json(path.read_bytes()) for path in sorted(parts.iterdir())]
    (HERE / f"{name}.json").write_bytes(manifest_to_json(replace(merge(manifests), model=family)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
