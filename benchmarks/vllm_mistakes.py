"""What becomes of a request between engines that differ, or whose router makes a mistake.

    .venv-vllm/bin/python -m benchmarks.vllm_mistakes [case]      needs the environment of `make e2e`

Real vLLM engines on a CPU (tiny models), kvferry and vLLM's own NixlConnector. An answer is *right* if its
tokens are those of one engine alone, *wrong* if others came without an error, else an *error*.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.harness import KVFERRY, STOCK, Engine, EngineError, Nursery, Params, prefill

NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 4, 300, 12
SRC_BLOCKS = 18
"""Of 32 tokens: what is granted after a lease are the blocks of the prompt before."""
LEASE_SECONDS = 3
SHORT_LEASE = {
    "kvferry": {"lease_seconds": LEASE_SECONDS},
    "NixlConnector": {"kv_lease_duration": LEASE_SECONDS},
}
PATIENCE = 40.0
"""Seconds for an answer; a request that hangs is an error."""


def prompts(first: int = 1) -> list[list[int]]:
    return [
        [(seed * 7919 + index * (seed + 31) + index * index % 13) % 256 for index in range(PROMPT_TOKENS)]
        for seed in range(first, first + NUM_PROMPTS)
    ]


OTHERS = prompts(100)
Tamper = Callable[[Engine, Params], Params]


def nothing(_: Engine, params: Params) -> Params:
    return params


def repeat_a_block(_: Engine, params: Params) -> Params:
    """The first block of each group becomes the second: attention does not notice an exchange."""
    groups = [list(ids) for ids in params["remote_block_ids"]]
    return {**params, "remote_block_ids": [[ids[1], *ids[1:]] for ids in groups]}


def take_anothers(src: Engine, _: Params) -> Params:
    """The parameters of another prompt of the same length."""
    return prefill(src, OTHERS[0])


def wait_too_long(src: Engine, params: Params) -> Params:
    """The lease ends, and the blocks are granted to other prompts."""
    time.sleep(3 * LEASE_SECONDS)
    for prompt in OTHERS:
        src.ask(prompt, 1)
    return params


CASES: Mapping[str, tuple[str, int, int, Tamper]] = {
    "Llama, blocks 32 → 32": ("llama", 32, 32, nothing),
    "Llama, blocks 64 → 32": ("llama", 64, 32, nothing),
    "Llama, blocks 32 → 64": ("llama", 32, 64, nothing),
    "Gemma-3, blocks 32 → 64": ("gemma3", 32, 64, nothing),
    "one block id changed by the router": ("llama", 32, 32, repeat_a_block),
    "the parameters of another prompt": ("llama", 32, 32, take_anothers),
    "read after the lease": ("llama", 32, 32, wait_too_long),
}


@contextmanager
def engine(
    nursery: Nursery, family: str, connector: Mapping[str, Any] | None, block: int, **more: Any
) -> Iterator[Engine]:
    args = {"block_size": block, "max_model_len": 512, "enable_prefix_caching": False, **more}
    started = nursery.begin(nursery.make(family), connector, **args)
    with closing(started):
        started.wait_ready()
        yield started


def answers(src: Engine, dst: Engine, tamper: Tamper) -> Iterator[Sequence[int] | None]:
    """The tokens of each answer; None for an error."""
    for prompt in prompts():
        try:
            params = tamper(src, prefill(src, prompt))
            answer = dst.begin(dst.new_id(), prompt, ANSWER_TOKENS, params).result(PATIENCE)
        except (EngineError, TimeoutError):
            yield None
        else:
            yield answer.tokens if answer.finish_reason == "length" else None


def outcome(given: Sequence[int] | None, expected: Sequence[int]) -> str:
    return "error" if given is None else "right" if list(given) == list(expected) else "wrong"


def run(nursery: Nursery, name: str, expected: Mapping[str, list[list[int]]], case: str) -> str:
    family, src_block, dst_block, tamper = CASES[case]
    connector = {"kvferry": KVFERRY, "NixlConnector": STOCK}[name]
    is_short = tamper is wait_too_long
    config = {**connector, "kv_connector_extra_config": SHORT_LEASE[name] if is_short else {}}
    few = {"num_gpu_blocks_override": SRC_BLOCKS} if is_short else {}
    start = partial(engine, nursery, family, config)
    with start(src_block, **few) as src, start(dst_block) as dst:
        given = answers(src, dst, tamper)
        counts = Counter(outcome(*both) for both in zip(given, expected[family], strict=True))
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


def main() -> None:
    chosen = [case for case in CASES if not sys.argv[1:] or sys.argv[1] in case]
    print("| | NixlConnector | kvferry |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as logs, Nursery(Path(logs)) as nursery:
        expected = {}
        for family in sorted({CASES[case][0] for case in chosen}):
            with engine(nursery, family, None, 32) as alone:
                expected[family] = [alone.ask(prompt, ANSWER_TOKENS).tokens for prompt in prompts()]
        for case in chosen:
            columns = [run(nursery, name, expected, case) for name in ("NixlConnector", "kvferry")]
            print(f"| {case} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
