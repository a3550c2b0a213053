"""kvferry beside vLLM's own OffloadingConnector, which keeps evicted blocks in the host's memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.e2e.conversations import TOLERANCE, Prompt, Reference, Step, Taken, Way
from tests.e2e.harness import KVFERRY, SECONDS, Answer, Engine, prefill, until
from tests.gpu.cases import OffloadCase, Order, Setting
from tests.gpu.engines import Engines, close_all, warm_up
from tests.gpu.pairs import MAX_COMPUTED, Wrong
from tests.gpu.prefixes import ON_A_GPU

HOST_BYTES = 24 << 20
"""Of the host, for each engine's offloaded blocks: two such regions fit into a small /dev/shm."""
POOL_TOKENS = {"llama": 1536, "gemma3": 2560}
"""The decode engine's cache. A token of Gemma 3 may be in blocks of three groups."""
MAX_TOKENS = 512
"""Of a request: vLLM wants a cache for one such at least."""
LENGTHS = (100, 127, 300, 401)
NUM_CROWD, CROWD_TOKENS, CROWD_ANSWER_TOKENS = 8, 150, 150
"""Requests at a time, whose prompts fit into the cache and whose answers do not."""
ON_A_CPU = {"spec_name": "HostTier", "spec_module_path": "tests.vllm.host_tier"}
"""vLLM's connector copies by CUDA only: there, another worker copies for it."""
HOST, PEER, DEVICE = "host", "p2p", "device"
"""vLLM's names of where cached prompt tokens came from."""
LEASE_SECONDS, PATIENCE = 30.0, 60.0


@dataclass
class Trial:
    """Two engines, each with both connectors, and one that has none."""

    src: Engine
    dst: Engine
    reference: Reference
    found: dict[str, Any]

    def __post_init__(self) -> None:
        self._draw = random.Random(17)
        self.found |= {"answers": 0, "close": 0, "largest_difference": 0.0}

    def prompts(self, lengths: Sequence[int]) -> list[Prompt]:
        return [tuple(self._draw.randrange(256) for _ in range(length)) for length in lengths]

    def evict(self) -> None:
        """Nothing of the decode engine's device cache is found, or right, any more; only the host has it."""
        until(lambda: not self.dst.core("has_transfers"), "every block is saved", PATIENCE)
        self.dst.forget()
        self.dst.spoil()

    def tiers(self) -> dict[str, int]:
        """Prompt tokens that the decode engine did not compute, by where they came from."""
        return self.dst.totals("vllm:prompt_tokens_cached_by_source", "source")

    def ask(self, prompt: Prompt, *, is_loaded: bool) -> tuple[Answer, dict[str, int]]:
        """One answer, which must be right, and where its prompt came from."""
        before = self.tiers()
        params = prefill(self.src, prompt) if is_loaded else None
        answer = self.dst.ask(prompt, params=params, has_logprobs=True)
        self.judge(prompt, answer, len(answer.tokens))
        return answer, {tier: num - before[tier] for tier, num in self.tiers().items()}

    def judge(self, prompt: Prompt, answer: Answer, num_tokens: int) -> None:
        if answer.finish_reason != "length":
            raise Wrong(f"a request ended with {answer.finish_reason}; the log ends with\n{self.dst.tail(5)}")
        taken: Taken = self.reference.judge(Step(prompt, Way.LOADED, num_tokens), answer)
        self.found["answers"] += 1
        self.found["close"] += not taken.is_equal
        self.found["largest_difference"] = max(self.found["largest_difference"], taken.difference)
        if not taken.is_right:
            self.found["evidence"] = taken.evidence()
            raise Wrong(f"an answer differs from that of an engine alone by {taken.difference:.3f} nats")

    def crowd(self, prompts: Sequence[Prompt], *, is_loaded: bool) -> None:
        """All at once, in a cache that is too small for their answers."""
        before = self.dst.num_preemptions()
        tickets = [prefill(self.src, prompt) if is_loaded else None for prompt in prompts]
        begun = [
            self.dst.begin(self.dst.new_id(), prompt, CROWD_ANSWER_TOKENS, params, has_logprobs=True)
            for prompt, params in zip(prompts, tickets, strict=True)
        ]
        for prompt, future in zip(prompts, begun, strict=True):
            self.judge(prompt, future.result(SECONDS), CROWD_ANSWER_TOKENS)
        preempted = self.dst.num_preemptions() - before
        self.found["preemptions_loaded" if is_loaded else "preemptions_offloaded"] = preempted
        if not preempted:
            raise Wrong(
                "no request was preempted: the cache was large enough for all, and this proves nothing"
            )


def run_offload(engines: Engines, case: OffloadCase, found: dict[str, Any]) -> None:
    """Writes down what it finds; raises Wrong, NotHere, or whatever the engines do."""
    with _trial(engines, case, found) as trial:
        free = trial.src.num_free_blocks(), trial.dst.num_free_blocks()
        prompts = trial.prompts(LENGTHS)
        for prompt in prompts:
            _must_come(trial, prompt, PEER, is_loaded=True)
        trial.evict()
        for prompt in prompts:
            _must_come(trial, prompt, HOST, is_loaded=False)
        trial.evict()
        for prompt in prompts:
            _must_come(trial, prompt, PEER if case.order is Order.KVFERRY_FIRST else HOST, is_loaded=True)
        until(
            lambda: trial.src.num_free_blocks() == free[0],
            "tickets that were not used are given back before their leases end",
            LEASE_SECONDS / 2,
        )
        crowd = trial.prompts([CROWD_TOKENS] * NUM_CROWD)
        trial.crowd(crowd, is_loaded=True)
        trial.evict()
        trial.crowd(crowd, is_loaded=False)
        until(
            lambda: (trial.src.num_free_blocks(), trial.dst.num_free_blocks()) == free,
            f"both pools have {free} free blocks again",
            LEASE_SECONDS + 10,
        )
        _check_counters(trial)


def _must_come(trial: Trial, prompt: Prompt, tier: str, *, is_loaded: bool) -> None:
    """Raise Wrong unless at least half of a prompt came from there, and none from the device's cache.

    Only whole blocks are offloaded; a load brings all but the last token.
    """
    least = len(prompt) - MAX_COMPUTED if tier == PEER else len(prompt) // 2
    _, tiers = trial.ask(prompt, is_loaded=is_loaded)
    others = {other: num for other, num in tiers.items() if num and other != tier}
    if tiers[tier] < least or others:
        raise Wrong(
            f"{len(prompt)} tokens of prompt: {tiers[tier]} came from {tier}, and {others} from elsewhere"
        )


def _check_counters(trial: Trial) -> None:
    """What both connectors counted themselves: neither may have been idle."""
    found, dst = trial.found, trial.dst
    found["tokens_by_source"] = trial.tiers()
    found["stored_bytes"] = sum(dst.totals("vllm:kv_offload_store_bytes").values())
    found["loaded_bytes"] = sum(dst.totals("vllm:kv_offload_load_bytes").values())
    found["src_stored_bytes"] = sum(trial.src.totals("vllm:kv_offload_store_bytes").values())
    found["digests"] = dst.totals("vllm:kvferry_load_digests", "digest")
    if idle := [name for name in ("stored_bytes", "loaded_bytes", "src_stored_bytes") if not found[name]]:
        raise Wrong(f"the offloading tier was not used: {', '.join(idle)} of vLLM's metrics are 0")
    if set(found["digests"]) != {"equal"} or found["digests"]["equal"] < NUM_CROWD:
        raise Wrong(f"digests of loads: {found['digests']}")


@contextmanager
def _trial(engines: Engines, case: OffloadCase, found: dict[str, Any]) -> Iterator[Trial]:
    connector = _connectors(case.order, ON_A_CPU if engines.device.name == "cpu" else {})
    fitted, model = case.setting.on(engines.device, case.family), engines.tiny(case.family)
    size = {"max_model_len": MAX_TOKENS}
    pool = {**size, "num_gpu_blocks_override": POOL_TOKENS[case.family] // (fitted.block or MAX_TOKENS)}
    tolerance = TOLERANCE if engines.device.name == "cpu" else ON_A_GPU[fitted.dtype]
    wanted: dict[str, tuple[Setting, dict[str, Any] | None, dict[str, Any]]] = {
        "src": (fitted, connector, size),
        "dst": (fitted, connector, pool),
        "alone": (replace(fitted, features=()), None, size),
    }
    started: dict[str, Engine] = {}
    try:
        for name, (setting, chosen, more) in wanted.items():
            started[name] = engines.begin(model, setting, chosen, **more)
        for name, (setting, _, more) in wanted.items():
            engines.wait(started[name], partial(engines.begin, model, setting, None, **more), warm_up)
        yield Trial(started["src"], started["dst"], Reference(lambda: started["alone"], tolerance), found)
    finally:
        close_all(started.values())


def _connectors(order: Order, more: dict[str, Any]) -> dict[str, Any]:
    ours = {**KVFERRY, "kv_connector_extra_config": {"digest": "full", "lease_seconds": LEASE_SECONDS}}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": HOST_BYTES, **more},
    }
    both = [ours, offloading] if order is Order.KVFERRY_FIRST else [offloading, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"connectors": both},
    }
