"""What requests do to a pair of engines: prefix hits, chunks, crowds, aborts, preemption."""

from concurrent.futures import Future
from typing import Any

import pytest

from tests.e2e.harness import KVFERRY, NUM_TOKENS, PROMPTS, Answer, Nursery, ferry, prefill, until
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

BLOCK = 32
LONG = [(5 * index + index * index % 17) % 256 for index in range(700)]
"""More than two chunks of the prefill engine."""
FAMILIES = ("llama", "gemma3", "nemotron_h")
"""One group; windows and full attention; attention and states."""
NUM_BLOCKS = 40
"""Of the decode engine: too few for all of a crowd to go on at once."""


class Pair:
    """A prefill engine that works in chunks and a decode engine that caches prefixes, and one alone."""

    def __init__(self, nursery: Nursery, family: str) -> None:
        model = nursery.make(family)
        self.has_prefixes = family != "nemotron_h"  # there vLLM's CPU build dies of them, connector or not
        args: dict[str, Any] = {"enable_prefix_caching": self.has_prefixes}
        if self.has_prefixes:
            args["block_size"] = BLOCK
        engines = (
            nursery.begin(model, KVFERRY, max_num_batched_tokens=256, **args),
            nursery.begin(model, KVFERRY, **args),
            nursery.begin(model),
        )
        for engine in engines:
            engine.wait_ready()
        self.src, self.dst, self.alone = engines
        self.left_out = int(family != "llama")
        self.free = self.src.num_free_blocks(), self.dst.num_free_blocks()

    def agree(self, prompt, **kwargs) -> Answer:
        """The ferried answer, which is what one engine says."""
        answer = ferry(self.src, self.dst, prompt, **kwargs)
        assert answer.tokens == self.alone.ask(prompt).tokens, f"{len(prompt)} tokens of prompt"
        return answer

    def is_whole(self) -> None:
        """Nothing is pinned, held or loading any more."""
        until(
            lambda: (self.src.num_free_blocks(), self.dst.num_free_blocks()) == self.free,
            f"{self.free} blocks are free",
            seconds=40,
        )


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("logs")) as nursery:
        yield Pair(nursery, request.param)


def fresh(length: int, seed: int) -> list[int]:
    """A prompt that no other test has left in a prefix cache."""
    return [(seed + 31 * index + index * index % 13 + index // 7) % 256 for index in range(length)]


def test_a_prompt_of_several_chunks(pair):
    answer = pair.agree(LONG)
    assert answer.sources.computed == pair.left_out
    pair.is_whole()


@pytest.mark.parametrize("length", [1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 95, 96, 97, 127, 159])
def test_lengths_at_the_edges_of_blocks_and_windows(pair, length):
    pair.agree(fresh(length, seed=length))
    pair.is_whole()


def test_the_prefill_engine_has_the_prefix(pair):
    prompt = fresh(200, seed=3)
    pair.src.ask(prompt[:150])
    pair.agree(prompt)
    pair.agree(prompt)
    pair.is_whole()


def test_the_decode_engine_has_all_of_it(pair):
    prompt = fresh(200, seed=4)
    expected = pair.alone.ask(prompt).tokens
    assert pair.dst.ask(prompt).tokens == expected
    answer = pair.agree(prompt)
    assert (answer.sources.cached > 0) == pair.has_prefixes
    assert answer.tokens == expected
    pair.is_whole()


def test_the_decode_engine_has_a_part_of_it(pair):
    prompt = fresh(300, seed=5)
    pair.dst.ask(prompt[:170])
    answer = pair.agree(prompt)
    assert answer.sources.computed <= 1
    assert answer.sources.cached + answer.sources.external + answer.sources.computed == len(prompt)
    pair.is_whole()


def test_the_decode_engine_has_the_start_of_another_prompt(pair):
    prompt = fresh(300, seed=6)
    pair.dst.ask(prompt[:100] + fresh(150, seed=7))
    pair.agree(prompt)
    pair.is_whole()


def test_what_was_loaded_serves_the_next_request_as_a_prefix(pair):
    prompt = fresh(260, seed=8)
    pair.agree(prompt)
    longer = prompt + fresh(40, seed=9)
    assert pair.dst.ask(longer).tokens == pair.alone.ask(longer).tokens
    pair.is_whole()


def test_a_crowd(pair):
    prompts = [
        fresh(length, seed=10 + length) for length in (5, 64, 90, 131, 200, 300, 33, 32, 17, 250, 128, 400)
    ]
    expected = [pair.alone.ask(prompt).tokens for prompt in prompts]
    tickets = [prefill(pair.src, prompt) for prompt in prompts]
    futures = [
        pair.dst.begin(pair.dst.new_id(), prompt, NUM_TOKENS, params)
        for prompt, params in zip(prompts, tickets, strict=True)
    ]
    answers = [future.result(120).tokens for future in futures]
    assert answers == expected
    pair.is_whole()


def test_aborts(pair):
    """At any moment: the blocks come back, and others are not disturbed."""
    prompt = fresh(500, seed=11)
    begun: list[tuple[str, Future]] = []
    for _ in range(6):
        request_id = pair.dst.new_id()
        begun.append((request_id, pair.dst.begin(request_id, prompt, 200, prefill(pair.src, prompt))))
        if len(begun) % 2:
            pair.dst.abort(request_id)
    pair.agree(fresh(100, seed=12))
    for request_id, _ in begun:
        pair.dst.abort(request_id)
    assert pair.dst.is_alive
    pair.agree(fresh(100, seed=13))
    pair.is_whole()


def test_an_abort_on_the_prefill_engine(pair):
    request_id = pair.src.new_id()
    pair.src.begin(request_id, LONG, 1, {"do_remote_decode": True})
    pair.src.abort(request_id)
    pair.agree(fresh(100, seed=14))
    pair.is_whole()


def test_a_ticket_that_nobody_uses_is_released(short_lease):
    src, _ = short_lease
    free = src.num_free_blocks()
    prefill(src, fresh(200, seed=15))
    assert src.num_free_blocks() < free
    until(lambda: src.num_free_blocks() == free, "the lease is over", seconds=2 + 2 + 3)


@pytest.fixture(scope="module")
def short_lease(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("logs")) as nursery:
        model = nursery.make("llama")
        connector = {**KVFERRY, "kv_connector_extra_config": {"lease_seconds": 2}}
        args: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 1}
        src, dst = (nursery.begin(model, connector, **args) for _ in range(2))
        for engine in (src, dst):
            engine.wait_ready()
        yield src, dst


def test_a_lease_is_kept_while_its_request_waits(short_lease):
    """The decode engine takes one request at a time; the second waits for longer than a lease."""
    src, dst = short_lease
    first, second = fresh(100, seed=16), fresh(100, seed=17)
    expected = dst.ask(second).tokens
    busy = dst.begin(dst.new_id(), first, 900, prefill(src, first))
    waiting = dst.begin(dst.new_id(), second, NUM_TOKENS, prefill(src, second))
    answer = waiting.result(120)
    assert busy.done(), "it did not have to wait"
    assert answer.tokens == expected
    assert answer.sources.computed == 0


def test_the_decode_engine_preempts(tmp_path):
    """A request that lost its blocks is computed anew: its ticket is spent."""
    with Nursery(tmp_path) as nursery:
        model = nursery.make("llama")
        src = nursery.begin(model, KVFERRY, block_size=BLOCK)
        dst = nursery.begin(model, KVFERRY, block_size=BLOCK, num_gpu_blocks_override=NUM_BLOCKS)
        alone = nursery.begin(model)
        for engine in (src, dst, alone):
            engine.wait_ready()
        prompts = [fresh(200, seed=20 + seed) for seed in range(5)]
        expected = [alone.ask(prompt, 160).tokens for prompt in prompts]
        tickets = [prefill(src, prompt) for prompt in prompts]
        futures = [
            dst.begin(dst.new_id(), prompt, 160, params)
            for prompt, params in zip(prompts, tickets, strict=True)
        ]
        assert [future.result(120).tokens for future in futures] == expected
        assert dst.num_preemptions() > 0, "the pool was large enough for all"
        assert all(engine.is_alive for engine in (src, dst))


def test_every_prompt_of_the_other_tests_too(pair):
    for prompt in PROMPTS:
        pair.agree(prompt)
    pair.is_whole()
