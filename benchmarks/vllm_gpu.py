"""How long a load takes between two real vLLM engines that share a GPU: kvferry beside vLLM's own connector.

    python -m benchmarks.vllm_gpu [FOLDER]       needs vLLM 0.32 with its GPU kernels, NIXL, and a GPU

An 8B-like cache (32 layers, 8 KV heads of 128, bf16: 128 KiB a token) under a small random model. One engine
is asked for one token of a prompt that another one prefilled; the time of a two-token prompt is taken off.
The tokens that follow must be those of the decode engine by itself.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.cli.processes import FABRICS

LENGTHS = (1024, 4096)
TURNS = 15
NUM_CHECKED = 8
"""Tokens that are compared."""
KVFERRY = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.integrations.vllm"}
OWN = {"kv_connector": "NixlConnector"}
DIRECT = "kvferry, by NIXL"
"""Without our kernel: NIXL against NIXL."""
CASES = [
    ("kvferry", KVFERRY, 16, 16),
    ("kvferry", KVFERRY, 16, 64),
    ("kvferry", KVFERRY, 64, 16),
    (DIRECT, KVFERRY, 16, 16),
    ("vLLM's own", OWN, 16, 16),
    ("vLLM's own", OWN, 16, 64),
]
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def make_model(folder: Path) -> None:
    """A model whose cache is an 8B's and whose weights are few; its tokens depend on the cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=16384,
        initializer_range=0.05,
        torch_dtype="bfloat16",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    model.save_pretrained(folder)


def serve(
    pipe: Any, model: str, connector: dict[str, str], role: str, block: int, port: int, log: str
) -> None:
    """One engine in this process, asked through a pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
    try:
        from vllm import LLM, SamplingParams

        engine = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            block_size=block,
            kv_cache_memory_bytes=4 << 30,
            gpu_memory_utilization=0.05,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=8,
            enable_prefix_caching=False,
            kv_transfer_config={**connector, "kv_role": role},
        )
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            prompt, num_tokens, params = asked
            extra = {"kv_transfer_params": params} if params else None
            sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra)
            started = time.perf_counter()
            (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            seconds = time.perf_counter() - started
            pipe.send((list(output.outputs[0].token_ids), output.kv_transfer_params, seconds))
    except BaseException:
        traceback.print_exc()
        pipe.send(traceback.format_exc()[-600:])


class Engine:
    """One engine, seen from outside."""

    def __init__(self, *args: Any) -> None:
        self._pipe, theirs = mp.Pipe()
        self._process = mp.Process(target=serve, args=(theirs, *args), daemon=True)
        self._process.start()

    def _take(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise RuntimeError("no answer in time")
        answer = self._pipe.recv()
        if isinstance(answer, str) and answer != "ready":
            raise RuntimeError(answer)
        return answer

    def wait_ready(self) -> None:
        self._take(240)

    def ask(self, prompt: list[int], num_tokens: int, params: Any = None) -> tuple[list[int], Any, float]:
        self._pipe.send((prompt, num_tokens, params))
        return self._take(60)

    def close(self) -> None:
        self._process.kill()


def prompt_of(length: int, salt: int) -> list[int]:
    return [(7 * i + 13 * salt + i * i % 11) % 500 + 1 for i in range(length)]


def load(src: Engine, dst: Engine, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """One request: prefilled there, decoded here; the tokens, and the seconds of the second."""
    _, params, _ = src.ask(prompt, 1, ASK)
    tokens, _, seconds = dst.ask(prompt, num_tokens, params)
    return tokens, seconds


def measure(src: Engine, dst: Engine) -> dict[str, Any]:
    for salt in range(3):
        load(src, dst, prompt_of(64, salt), 1)
    small = median(load(src, dst, prompt_of(2, 50 + i), 1)[1] for i in range(TURNS))
    row: dict[str, Any] = {"two_tokens_ms": 1e3 * small}
    for length in LENGTHS:
        took = [load(src, dst, prompt_of(length, 100 + i), 1)[1] for i in range(TURNS)]
        row[f"{length}_ms"] = 1e3 * median(took)
        row[f"{length}_less_two_ms"] = 1e3 * (median(took) - small)
    equal = 0
    for salt, length in enumerate((37, 300, 1024, 4096)):
        prompt = prompt_of(length, 200 + salt)
        tokens, _ = load(src, dst, prompt, NUM_CHECKED)
        equal += tokens == dst.ask(prompt, NUM_CHECKED)[0]
    row["answers_equal"] = f"{equal} of 4"
    return row


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/kvferry-vllm-gpu")
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    if not (model / "config.json").exists():
        maker = mp.Process(target=make_model, args=(model,))
        maker.start()
        maker.join()
    pairs = []
    for number, (name, connector, src_block, dst_block) in enumerate(CASES):
        engines = []
        for key in FABRICS["cma"]:
            os.environ.pop(key, None)
        os.environ |= FABRICS["cma"] if name == DIRECT else {}
        for i, (role, block) in enumerate((("kv_producer", src_block), ("kv_consumer", dst_block))):
            log = str(folder / f"{number}-{role}.log")
            engines.append(Engine(str(model), connector, role, block, 5700 + 20 * number + 10 * i, log))
        pairs.append((f"{name} {src_block}→{dst_block}", *engines))
    rows = {}
    for name, src, dst in pairs:
        try:
            src.wait_ready()
            dst.wait_ready()
            rows[name] = measure(src, dst)
        except Exception as error:
            rows[name] = {"error": str(error)[-400:]}
        print(f"{name:20} {rows[name]}", flush=True)
    for _, src, dst in pairs:
        src.close()
        dst.close()
    (folder / "vllm_gpu.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    mp.set_start_method("spawn")
    main()
