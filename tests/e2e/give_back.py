"""Ways in which a decode engine does not need a ticket, and how long the prefill engine's blocks stay pinned.

The engines are vLLM's own, driven through ``AsyncLLM`` as its HTTP server drives them.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from tests.e2e.harness import KVFERRY, PREFILL, STOCK, Engine, EngineError, Nursery, Params, prefill, until

PROMPT_TOKENS = 300
SRC_BLOCKS, DST_BLOCKS = 18, 34
"""Of 32 tokens: room for one prompt on offer, and for one long request beside which the prompt must wait."""
BUSY = (750, 250)
"""Tokens of its prompt and answer: from the first step on 24 of 33 usable blocks; the prompt needs 10."""
LEASE_SECONDS = 30.0
"""Of either connector: what a ticket costs that is not given back."""
_seeds = count(1)


def new_prompt(num_tokens: int = PROMPT_TOKENS) -> list[int]:
    seed = next(_seeds)
    return [(seed * 7919 + index * (seed + 31) + index * index % 13) % 256 for index in range(num_tokens)]


class Yard:
    """A prefill engine, a decode engine that fails what it cannot load, and one that computes it."""

    def __init__(self, nursery: Nursery, connector: Mapping[str, Any]) -> None:
        model = nursery.make("llama")
        self.is_ours = connector["kv_connector"] == KVFERRY["kv_connector"]

        def begin(blocks: int, longest: int, policy: str = "fail", *, is_caching: bool = True) -> Engine:
            config = {**connector, "kv_load_failure_policy": policy}
            args: dict[str, Any] = {"num_gpu_blocks_override": blocks, "max_model_len": longest}
            args |= {"block_size": 32, "enable_prefix_caching": is_caching}
            return nursery.begin(model, config, **args)

        self.src = begin(SRC_BLOCKS, 512, is_caching=False)
        self.dst, self.computing = begin(DST_BLOCKS, 1024), begin(DST_BLOCKS, 1024, "recompute")
        self.engines = self.src, self.dst, self.computing
        for engine in self.engines:
            engine.wait_ready()
        self.num_free = self.src.num_free_blocks()
        for engine in self.engines[1:]:  # the first contact is not what is measured
            engine.ask(words := new_prompt(), 2, self.prefill(words))
            self.wait()

    def prefill(self, prompt: list[int]) -> Params:
        return prefill(self.src, prompt)

    def wait(self, seconds: float = 2 * LEASE_SECONDS) -> float:
        """The seconds until all of the prefill engine's blocks are free."""
        started = time.monotonic()
        while self.src.num_free_blocks() < self.num_free:
            if time.monotonic() - started > seconds:
                raise TimeoutError(f"blocks are still pinned after {seconds} s")
            time.sleep(0.002)
        return time.monotonic() - started

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def is_in_the_prefix_cache(yard: Yard) -> None:
    words = new_prompt(321)
    yard.dst.ask(words, 1)
    yard.dst.ask(words, 2, yard.prefill(words[:-1]) if yard.is_ours else yard.prefill(words))


def is_computed(yard: Yard) -> None:
    words = new_prompt()
    yard.dst.call("generate", yard.dst.new_id(), words, 2, yard.prefill(words), {"prompt_logprobs": 1})


def is_rejected(yard: Yard) -> None:
    yard.dst.call("reject", yard.dst.new_id(), yard.prefill(new_prompt()))


def waits(yard: Yard) -> None:
    words = new_prompt()
    params = yard.prefill(words)
    busy, waiting = yard.dst.new_id(), yard.dst.new_id()
    answer = yard.dst.begin(busy, new_prompt(BUSY[0]), BUSY[1])
    until(lambda: yard.dst.core("num_running") == 1, "the long request runs")
    asked = yard.dst.begin(waiting, words, 2, params)
    until(lambda: yard.dst.core("num_waiting") == 1 or answer.done(), "the prompt waits")
    is_waiting = not asked.done() and not answer.done()
    yard.dst.abort(waiting)
    yard.dst.abort(busy)
    if not is_waiting:
        raise RuntimeError("the request did not wait")


def hangs_up_at_once(yard: Yard) -> None:
    words, request_id = new_prompt(), yard.dst.new_id()
    yard.dst.begin(request_id, words, 2, yard.prefill(words))
    yard.dst.abort(request_id)


def hangs_up_during_the_load(yard: Yard) -> None:
    words, request_id = new_prompt(), yard.dst.new_id()
    yard.dst.begin(request_id, words, 200, yard.prefill(words))
    time.sleep(0.005)
    yard.dst.abort(request_id)


def fails(yard: Yard) -> None:
    """And the front end says so, as vLLM's HTTP server does."""
    params = yard.prefill(new_prompt())
    with suppress(EngineError):
        yard.dst.ask(new_prompt(), 2, params)
    yard.dst.call("reject", yard.dst.new_id(), params)


def fails_and_is_computed(yard: Yard) -> None:
    params = yard.prefill(new_prompt())
    yard.computing.ask(new_prompt(), 2, params)


WAYS: dict[str, Callable[[Yard], None]] = {
    "the decode engine has the prompt in its prefix cache": is_in_the_prefix_cache,
    "the decode engine computes the prompt (`prompt_logprobs`)": is_computed,
    "the front end rejects the request": is_rejected,
    "the client hangs up while the request waits for blocks": waits,
    "the client hangs up at once": hangs_up_at_once,
    "the client hangs up during the load": hangs_up_during_the_load,
    "the load fails, policy `fail`": fails,
    "the load fails, policy `recompute`": fails_and_is_computed,
}
OURS_ONLY = (fails, fails_and_is_computed)
"""A ticket for another prompt: vLLM's own connector loads it, and answers with wrong tokens."""
CONNECTORS = {"kvferry": KVFERRY, "NixlConnector": STOCK}


def next_prefill(yard: Yard, after: Callable[[Yard], None] | None) -> float:
    """How long a prefill takes whose prompt has no room beside the one on offer."""
    if after is not None:
        after(yard)
    started = time.monotonic()
    words = new_prompt(321)
    params = yard.src.ask(words, 1, dict(PREFILL)).params
    took = time.monotonic() - started
    yard.dst.ask(words, 1, params)
    yard.wait()
    return took
