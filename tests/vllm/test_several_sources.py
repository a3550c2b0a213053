"""One prompt is loaded from several prefill engines, and is right whatever becomes of one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from tests.vllm.conftest import Docks
from tests.vllm.engine import PREFILL, Answer, Engine, Params, Setup, drive
from tests.vllm.pairs import assert_whole
from tests.vllm.test_overlap import records
from tests.vllm.test_read_back import BOTH, counts

Prompts = Callable[[int], list[int]]
PLAIN = Setup(policy="recompute")


def prefilled(src: Engine, prompt: Sequence[int]) -> Params:
    """What a router gets for the first tokens of a prompt."""
    prefill = src.ask(prompt, 1, dict(PREFILL))
    src.finish(prefill)
    return prefill.params or {}


def together(*found: Params | str) -> Params:
    """What a router hands on that has prefilled one prompt on several engines, each further than the last."""
    texts = [each if isinstance(each, str) else each["kvferry_ticket"] for each in found]
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvferry_tickets": texts}


def answered(engines: Sequence[Engine], dst: Engine, prompt: Sequence[int], params: Params) -> Answer:
    answer = dst.ask(prompt, params=params)
    drive([*engines, dst], lambda: answer.is_done)
    assert answer.tokens == dst.right(prompt)
    return answer


SETUPS = {
    "llama, 32-64": (PLAIN, replace(PLAIN, block=64), PLAIN, replace(PLAIN, block=64)),
    "llama, tp 1-2": (PLAIN, PLAIN, PLAIN, replace(PLAIN, tp=2)),
    "gemma3": (replace(PLAIN, family="gemma3"),) * 4,
    "deepseek_v3": (replace(PLAIN, family="deepseek_v3", block=None),) * 4,
    "nemotron_h": (replace(PLAIN, family="nemotron_h", block=None, prefix_caching=False),) * 4,
}


@pytest.mark.parametrize("name", SETUPS)
def test_three_sources_for_one_prompt(docks: Docks, prompt: Prompts, name: str):
    *sources, dst = (docks.own(setup) for setup in SETUPS[name])
    text = prompt(900)
    lengths = (300, 600, 900)
    found = [prefilled(src, text[:num]) for src, num in zip(sources, lengths, strict=True)]
    answer = answered(sources, dst, text, together(*found))
    assert len(text) - answer.num_external in (0, 1)
    assert all(record["engine"].count("+") == 2 for record in records(dst))
    assert_whole(*sources, dst)


def killed(middle: Engine, found: Params, docks: Docks) -> Params | str:
    middle.close()
    docks._own.remove(middle)
    return found


def expired(middle: Engine, found: Params, docks: Docks) -> Params | str:
    middle.run(lambda: middle.num_free == middle.num_free_at_start)
    return found


def lying(middle: Engine, found: Params, docks: Docks) -> Params | str:
    """Its ticket is for another prompt."""
    return prefilled(middle, [7] * 600)


def forged(middle: Engine, found: Params, docks: Docks) -> Params | str:
    return "AAAA" + found["kvferry_ticket"]


@pytest.mark.parametrize("trouble", [killed, expired, lying, forged])
def test_of_three_sources_the_middle_one_fails(docks: Docks, prompt: Prompts, trouble: Callable):
    short = replace(PLAIN, options=(*PLAIN.options, ("lease_seconds", 1.0)))
    first, middle, last, dst = (docks.own(setup) for setup in (PLAIN, short, PLAIN, PLAIN))
    text = prompt(900)
    found = trouble(middle, prefilled(middle, text[:600]), docks)
    others = prefilled(first, text[:300]), prefilled(last, text)
    answer = answered([first, last], dst, text, together(others[0], found, others[1]))
    assert answer.num_external == 900
    (record,) = records(dst)
    assert record["outcome"] == "read"
    assert record["engine"].count("+") == 1
    if trouble in (lying, forged):
        assert sum(counts(dst, "rejected_tickets").values()) == 1
    assert_whole(first, last, dst)


def test_a_prompt_whose_end_nobody_has_is_loaded_up_to_there(docks: Docks, prompt: Prompts):
    first, second, dst = (docks.own(PLAIN) for _ in range(3))
    text = prompt(900)
    found = prefilled(first, text[:300]), prefilled(second, text[:600])
    assert answered([first, second], dst, text, together(*found)).num_external == 600


def test_without_a_ticket_that_can_be_used_the_prompt_is_computed(docks: Docks, prompt: Prompts):
    dst = docks.own(PLAIN)
    text = prompt(300)
    for params in (together("forged", "too"), together(*["x"] * 9), {**together(), "kvferry_tickets": 7}):
        assert answered([], dst, text, params).num_local == 0
        assert dst.core.reset_prefix_cache()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_request_that_ends_early_leaves_nothing_pinned(docks: Docks, prompt: Prompts, num_steps: int):
    long_lease = replace(PLAIN, options=(*PLAIN.options, ("lease_seconds", 300.0)))
    first, second, dst = (docks.own(setup) for setup in (long_lease, long_lease, PLAIN))
    text = prompt(900)
    answer = dst.ask(text, params=together(prefilled(first, text[:300]), prefilled(second, text)))
    for _ in range(num_steps):
        dst.step()
    dst.abort(answer.request_id)
    assert_whole(first, second, dst)


def test_earlier_turns_on_two_engines_are_read_together(docks: Docks, prompt: Prompts):
    """Soft offers of two engines: one has the first turn, the other one went on with it."""
    first, second, src = (docks.own(BOTH) for _ in range(3))
    text = prompt(800)
    offers = []
    for engine, num_tokens in ((first, 400), (second, 700)):
        drive([engine], partial(getattr, engine, "is_whole"))
        turn = engine.ask(text[:num_tokens], 2, {"do_remote_decode": False})
        engine.finish(turn)
        offers.append((turn.params or {})["kvferry_ticket"])
    prefill = src.ask(text, 1, {**PREFILL, "kvferry_tickets": offers})
    drive([first, second, src], lambda: prefill.is_done)
    assert prefill.tokens == src.right(text, 1)
    assert prefill.num_external == 640
    assert counts(src, "read_backs") == {"claimed": 2}
    assert [record["engine"].count("+") for record in records(src)] == [1]
    assert_whole(first, second, src)


def test_of_two_samples_of_one_prompt_one_loads_from_the_ticket(docks: Docks, prompt: Prompts):
    """Both wait for their claims before either is known to use it; it is good for one load."""
    first, second, dst = docks.own(BOTH), docks.own(BOTH), docks.own(BOTH)
    text = prompt(900)
    turn = second.ask(text[:400], 2, {"do_remote_decode": False})
    second.finish(turn)
    params = together(prefilled(first, text), turn.params or {})
    samples = [dst.ask(text, params=params) for _ in range(2)]
    drive([first, second, dst], lambda: all(each.is_done for each in samples))
    assert all(each.tokens == dst.right(text) for each in samples)
    assert [record["outcome"] for record in records(dst)] == ["read", "read"]
    assert sorted(each.num_external for each in samples) == [384, 900]
    assert_whole(first, second, dst)
