"""The connector in vLLM's own scheduler, if all goes well: right tokens, no work done twice, no block lost.

A token is made of every cell that the model reads (``toy.py``), so that right tokens mean a right cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")


from tests.vllm.conftest import Docks
from tests.vllm.engine import PREFILL, Setup, drive
from tests.vllm.pairs import FAMILIES, LEASE_SECONDS, Pair, assert_whole

Prompt = Callable[[int], list[int]]

LENGTHS = (2, 5, 31, 32, 33, 64, 131, 300)
"""Shorter than a block, on and beside its edges, longer than a window, many blocks."""


@pytest.fixture(scope="module", autouse=True)
def _whole_again(all_docks: Docks):
    """Tickets that nobody read pin a source's blocks: tests do not wait for each lease, but for all."""
    yield
    assert_whole(*all_docks.all_shared)


@pytest.fixture(params=FAMILIES)
def pair(request, docks: Docks):
    """Two engines that other tests use too."""
    setup = FAMILIES[request.param]
    pair = Pair(docks.shared("src", setup), docks.shared("dst", setup))
    yield pair
    assert_whole(pair.dst)


def own(docks: Docks, src: Setup, dst: Setup) -> Pair:
    return Pair(docks.own(src), docks.own(dst))


# -- the bed itself


@pytest.mark.parametrize("family", FAMILIES)
def test_one_engine_alone_answers_as_the_formula_says(docks: Docks, prompt: Prompt, family: str):
    engine = docks.own(replace(FAMILIES[family], connector=False, chunk=100))
    for length in LENGTHS:
        words = prompt(length)
        answer = engine.ask(words, 40)
        engine.finish(answer)
        assert answer.tokens == engine.right(words, 40), length


@pytest.mark.parametrize("cell", ["first", "last"])
def test_one_wrong_cell_is_a_wrong_token(pair: Pair, prompt: Prompt, cell: str):
    """The control: whatever the other tests compare, they would notice."""
    words = prompt(70)
    params = pair.prefill(words)
    (worker,) = pair.src.workers
    for name, cache in worker.caches.items():
        group = next(i for i, group in enumerate(worker._groups) if name in group.layer_names)
        block = params["remote_block_ids"][group][0 if cell == "first" else -1]
        if block:  # not the null block: a window has passed it
            cache[block].view(-1)[0 if cell == "first" else 1] += 1
    answer = pair.decode(words, params)
    assert answer.finish_reason == "length"
    assert answer.tokens != pair.dst.right(words)


# -- lengths, chunks, many at once


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_one_engine(pair: Pair, prompt: Prompt, length: int):
    words = prompt(length)
    pair.assert_loaded(pair.ferry(words), words)


def test_a_prompt_of_one_token(pair: Pair, prompt: Prompt):
    """vLLM takes the last token of a full load back; nothing is left of this one, and it asks again."""
    words = prompt(1)
    pair.assert_right(pair.ferry(words), words)


@pytest.mark.parametrize("length", [127, 159])
def test_the_oldest_token_of_a_window(docks: Docks, prompt: Prompt, length: int):
    """vLLM computes a prompt's last token anew, which reads a token more than the next one will.

    Here that token is the last of its block: for the next one alone, nobody would keep it.
    """
    setup = FAMILIES["gemma3"]
    pair, words = own(docks, setup, setup), prompt(length)
    pair.assert_loaded(pair.ferry(words), words)


def test_a_long_answer_crosses_blocks(pair: Pair, prompt: Prompt):
    words = prompt(50)
    pair.assert_loaded(pair.ferry(words, 120), words, 120)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill(docks: Docks, prompt: Prompt, family: str):
    setup = FAMILIES[family]
    pair = own(docks, replace(setup, chunk=48), setup)
    for length in (47, 48, 49, 200):
        words = prompt(length)
        pair.assert_loaded(pair.ferry(words), words)
    pair.assert_whole()


def test_many_at_once(pair: Pair, prompt: Prompt):
    """Both engines prefill, load and decode at the same time; there are more requests than running places."""
    prompts = [prompt(length) for length in (3, 32, 40, 64, 65, 90, 120, 131, 33, 7, 96, 50)]
    prefills = [pair.src.ask(words, 1, dict(PREFILL)) for words in prompts]
    answers = {}

    def all_are_done() -> bool:
        for i, found in enumerate(prefills):
            if found.is_done and i not in answers:
                answers[i] = pair.dst.ask(prompts[i], params=found.params)
        return len(answers) == len(prompts) and all(answer.is_done for answer in answers.values())

    drive([pair.src, pair.dst], all_are_done)
    for i, answer in answers.items():
        pair.assert_loaded(answer, prompts[i])


def test_an_engine_that_prefills_and_decodes_at_once(docks: Docks, prompt: Prompt):
    """R002-15. Each of two engines is the other's source."""
    one, two = (docks.own(FAMILIES["gemma3"]) for _ in range(2))
    prompts = [prompt(100) for _ in range(6)]
    pairs = [Pair(one, two), Pair(two, one)] * 3
    params = [pair.prefill(words) for pair, words in zip(pairs, prompts, strict=True)]
    answers = [pair.dst.ask(words, params=p) for pair, words, p in zip(pairs, prompts, params, strict=True)]
    drive([one, two], lambda: all(answer.is_done for answer in answers))
    for pair, answer, words in zip(pairs, answers, prompts, strict=True):
        pair.assert_loaded(answer, words)
    pairs[0].assert_whole()


# -- shapes of engines

SHAPES = {
    "blocks 32-64": ("llama", {}, {"block": 64}),
    "blocks 64-32": ("llama", {"block": 64}, {}),
    "blocks 96-64": ("llama", {"block": 96}, {"block": 64}),
    "windows, blocks 32-64": ("gemma3", {}, {"block": 64}),
    "windows, blocks 64-32": ("gemma3", {"block": 64}, {}),
    "windows, blocks 96-64": ("gemma3", {"block": 96}, {"block": 64}),
    "states, prefix caches": ("nemotron_h", {"prefix_caching": True}, {"prefix_caching": True}),
    "states, blocks 512-256": ("nemotron_h", {"block": 512}, {}),
    "tp 1-2": ("llama", {}, {"tp": 2}),
    "tp 2-1": ("llama", {"tp": 2}, {}),
    "one head, tp 1-2": ("llama-1kv", {}, {"tp": 2}),
    "one head, tp 2-1": ("llama-1kv", {"tp": 2}, {}),
    "windows, tp 2-1": ("gemma3", {"tp": 2}, {}),
    "pp 2-1": ("llama", {"pp": 2}, {}),
    "pp 1-2": ("llama", {}, {"pp": 2}),
    "pp 2-3, uneven": ("llama", {"pp": 2}, {"pp": 3}),
    "windows, pp 2-1": ("gemma3", {"pp": 2}, {}),
    "windows, pp 2-3": ("gemma3", {"pp": 2}, {"pp": 3}),
    "tp 2 pp 2 - tp 1": ("llama", {"tp": 2, "pp": 2}, {"block": 64}),
    "async": ("gemma3", {"is_async": True}, {"is_async": True}),
    "async, pp 1-2": ("llama", {"is_async": True}, {"is_async": True, "pp": 2}),
    "producer and consumer": ("gemma3", {"role": "kv_producer"}, {"role": "kv_consumer"}),
}


@pytest.mark.parametrize(("family", "src", "dst"), SHAPES.values(), ids=SHAPES)
def test_shapes(docks: Docks, prompt: Prompt, family: str, src: dict, dst: dict):
    setup = FAMILIES.get(family, replace(FAMILIES["llama"], family=family))
    pair = own(docks, replace(setup, **src), replace(setup, **dst))
    for length in (5, 64, 131, 300):
        words = prompt(length)
        pair.assert_loaded(pair.ferry(words), words)
    pair.assert_whole()


# -- prefix caches

CACHING = [family for family in FAMILIES if FAMILIES[family].prefix_caching]


@pytest.fixture(params=CACHING)
def caching_pair(request, docks: Docks):
    setup = FAMILIES[request.param]
    pair = Pair(docks.shared("src", setup), docks.shared("dst", setup))
    yield pair
    assert_whole(pair.dst)


@pytest.mark.parametrize("length", [97, 160, 300])
def test_the_decoding_engine_has_the_whole_prompt(caching_pair: Pair, prompt: Prompt, length: int):
    """All but the block of the last token, which vLLM computes again if nobody brings it.

    Unless the prompt ends with a block: of a window, the blocks that lead up to that one were not loaded.
    """
    pair, words = caching_pair, prompt(length)
    pair.ferry(words)
    answer = pair.ferry(words)
    has_hit = length % 32 or pair.family == "llama"
    assert answer.num_local == ((length - 1) // 32 * 32 if has_hit else 0)
    pair.assert_loaded(answer, words)


@pytest.mark.parametrize("num_known", [32, 64, 160, 256])
def test_the_decoding_engine_has_a_part(caching_pair: Pair, prompt: Prompt, num_known: int):
    """Of a window, only its last blocks are in the cache: the others are holes."""
    pair, words = caching_pair, prompt(300)
    first = pair.dst.ask(words[: num_known + 1], 1)
    pair.dst.finish(first)
    answer = pair.ferry(words)
    assert answer.num_local == num_known
    pair.assert_loaded(answer, words)


def test_the_decoding_engine_has_all_that_a_ticket_brings(caching_pair: Pair, prompt: Prompt):
    """Nothing is loaded, so vLLM must not hear of a load; the ticket is not left to its lease."""
    pair, words = caching_pair, prompt(100)
    params = pair.prefill(words[:96])
    first = pair.dst.ask(words[:97], 1)
    pair.dst.finish(first)
    answer = pair.decode(words, params)
    assert (answer.num_local, answer.num_external) == (96, 0)
    pair.assert_right(answer, words)


def test_the_prefilling_engine_has_a_part(caching_pair: Pair, prompt: Prompt):
    pair, words = caching_pair, prompt(300)
    first = pair.src.ask(words[:200], 1)
    pair.src.finish(first)
    pair.assert_loaded(pair.ferry(words), words)


def test_two_tickets_of_one_prompt(caching_pair: Pair, prompt: Prompt):
    """They share blocks at the source; each is read by itself."""
    pair, words = caching_pair, prompt(200)
    tickets = [pair.prefill(words) for _ in range(2)]
    answers = [pair.dst.ask(words, params=params) for params in tickets]
    drive([pair.src, pair.dst], lambda: all(answer.is_done for answer in answers))
    for answer in answers:
        pair.assert_right(answer, words)


def test_a_loaded_prompt_is_cached(caching_pair: Pair, prompt: Prompt):
    """What was loaded serves the next request, and is right."""
    pair, words = caching_pair, prompt(200)
    pair.ferry(words)
    longer = [*words, *prompt(30)]
    answer = pair.dst.ask(longer)
    pair.dst.finish(answer)
    assert answer.num_local == 192
    pair.assert_right(answer, longer)


def test_the_decoding_engine_has_a_state(docks: Docks, prompt: Prompt):
    """Where states are cached, one is kept at the end of a block; a ticket has that of the prompt's end."""
    setup = replace(FAMILIES["nemotron_h"], prefix_caching=True)
    pair, words = own(docks, setup, setup), prompt(700)
    first = pair.dst.ask(words[:600], 1)
    pair.dst.finish(first)
    answer = pair.ferry(words)
    assert answer.num_local == 512
    pair.assert_loaded(answer, words)
    again = pair.dst.ask(words[:600])
    pair.dst.finish(again)
    pair.assert_right(again, words[:600])
    pair.assert_whole()


def test_a_request_that_reads_no_prefix_cache(pair: Pair, prompt: Prompt):
    """Whoever wants the prompt's log-probabilities has all of it computed; the ticket is not needed."""
    words = prompt(100)
    answer = pair.dst.ask(words, params=pair.prefill(words), prompt_logprobs=1)
    pair.drive(answer)
    assert answer.num_external == 0
    pair.assert_right(answer, words)


# -- routers with ideas of their own


def test_an_engine_reads_from_itself(pair: Pair, prompt: Prompt):
    """A router may choose one engine for both."""
    alone = Pair(pair.src, pair.src)
    words = prompt(100)
    alone.assert_right(alone.ferry(words), words)


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_the_prefill_goes_on_to_decode(pair: Pair, prompt: Prompt, num_tokens: int):
    """The prefilling engine was asked for more than one token: what is past the prompt is not handed out."""
    words = prompt(150)
    prefilled = pair.src.ask(words, num_tokens, dict(PREFILL))
    pair.drive(prefilled)
    answer = pair.decode(words, prefilled.params)
    if answer.finish_reason == "length":
        pair.assert_right(answer, words)
    else:
        assert (answer.finish_reason, answer.tokens) == ("error", [])


def test_a_prompt_of_one_token_goes_on_to_decode(pair: Pair, prompt: Prompt):
    """Its state is past the prompt by the time it is offered."""
    words = prompt(1)
    prefilled = pair.src.ask(words, 5, dict(PREFILL))
    pair.drive(prefilled)
    longer = [*words, *prompt(20)]
    answer = pair.decode(longer, prefilled.params)
    if answer.finish_reason == "length":
        pair.assert_right(answer, longer)
    else:
        assert (answer.finish_reason, answer.tokens) == ("error", [])


def test_an_engine_in_the_middle(pair: Pair, prompt: Prompt, docks: Docks):
    """It loads a prompt from one engine, and hands it on to another."""
    last = docks.own(pair.dst.setup)
    words = prompt(100)
    middle = pair.dst.ask(words, 1, pair.prefill(words) | {"do_remote_decode": True})
    pair.drive(middle)
    if pair.has_state:  # it would leave out one more token, and a state cannot go back
        assert middle.finish_reason == "error"
        return
    assert middle.finish_reason == "length"
    onward = Pair(pair.dst, last)
    answer = onward.decode(words, middle.params)
    onward.assert_right(answer, words)
    onward.assert_whole()


# -- little room


def test_a_request_waits_longer_than_its_lease(docks: Docks, prompt: Prompt):
    """The ticket is held while the decoding engine has no blocks for the request."""
    setup = FAMILIES["llama"]
    pair = own(docks, setup, replace(setup, blocks=34))
    hog = pair.dst.ask(prompt(800), 100)
    pair.dst.step()
    words = prompt(300)
    answer = pair.dst.ask(words, params=pair.prefill(words))
    started = time.monotonic()
    while not hog.is_done:
        pair.dst.step()
        time.sleep(2 * LEASE_SECONDS / 100)
    assert time.monotonic() - started > LEASE_SECONDS
    assert not answer.is_done
    pair.drive(answer)
    pair.assert_loaded(answer, words)
    pair.assert_whole()


def test_a_prefill_waits_for_pinned_blocks(docks: Docks, prompt: Prompt):
    """Nobody reads the tickets: their leases end, and the source goes on."""
    setup = FAMILIES["llama"]
    pair = own(docks, replace(setup, blocks=34), setup)
    for _ in range(5):
        pair.prefill(prompt(300))
    pair.assert_whole()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_loaded_request_is_preempted(docks: Docks, prompt: Prompt, family: str, is_async: bool):
    """It loses its blocks and its ticket is spent: it is computed again, and right."""
    setup = FAMILIES[family]
    blocks = {"llama": 15, "gemma3": 40, "nemotron_h": 8}[family]
    length, num_tokens = (200, 100) if family == "nemotron_h" else (100, 150)
    pair = own(docks, setup, replace(setup, blocks=blocks, longest=350, is_async=is_async))
    prompts = [prompt(length) for _ in range(3)]
    answers = [pair.dst.ask(words, num_tokens, pair.prefill(words)) for words in prompts]
    preemptions: set[str] = set()

    def is_over() -> bool:
        preemptions.update(
            r.request_id for r in pair.dst.core.scheduler.requests.values() if r.num_preemptions
        )
        return all(answer.is_done for answer in answers)

    drive([pair.src, pair.dst], is_over)
    assert preemptions
    for answer, words in zip(answers, prompts, strict=True):
        pair.assert_right(answer, words, num_tokens)
    pair.assert_whole()
