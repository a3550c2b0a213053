"""A prompt is read while the prefill engine still computes it, and every answer stays right."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.config import VllmConfig

from kvferry.endpoint.source import GrowingOffer
from tests.vllm.conftest import Docks
from tests.vllm.engine import NUM_TOKENS, PREFILL, SECONDS, Answer, Engine, Params, Setup
from tests.vllm.pairs import assert_whole

Prompts = Callable[[int], list[int]]
CHUNKED = Setup(chunk=96, policy="recompute")


def address(engine: Engine) -> Params:
    """Where a router has the decode engine ask, from the answer to an earlier request."""
    source = engine.core.scheduler.connector._side.outgoing._source
    host, _, port = source.address.removeprefix("tcp://").rpartition(":")
    return {"remote_host": host, "remote_port": int(port)}


def both_legs(
    src: Engine, dst: Engine, prompt: Sequence[int], num_tokens: int = NUM_TOKENS
) -> tuple[Answer, Answer]:
    """What a router does that sends both legs at once: (prefill, answer)."""
    name = {"kvferry_transfer": secrets.token_hex(16)}
    answer = dst.ask(
        prompt, num_tokens, {"do_remote_prefill": True, "do_remote_decode": False, **address(src), **name}
    )
    return src.ask(prompt, 1, {**PREFILL, **name}), answer


def slowly(src: Engine, dst: Engine, *answers: Answer, seconds: float = 0.03) -> None:
    """The prefill engine takes a step now and then, the other one as many as it can."""

    def step() -> bool:
        src.step()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            dst.step()
        return all(answer.is_done for answer in answers)

    deadline = time.monotonic() + SECONDS
    while not step():
        assert time.monotonic() < deadline


def records(engine: Engine) -> list[dict[str, Any]]:
    """Of all loads that the engine has told vLLM's metrics of."""
    told = (stats.kv_connector_stats for stats in engine.reported)
    return [record for each in told if each for record in each.get("records", ())]


PAIRS = {
    "llama, 32-64": (CHUNKED, replace(CHUNKED, block=64)),
    "llama, 64-32": (replace(CHUNKED, block=64), CHUNKED),
    "llama, async": (replace(CHUNKED, is_async=True),) * 2,
    "llama, late": (replace(CHUNKED, is_async=True, is_late=True),) * 2,
    "llama, pp 2-1, late": (replace(CHUNKED, is_async=True, is_late=True, pp=2), CHUNKED),
    "llama, tp 2-1": (replace(CHUNKED, tp=2), CHUNKED),
    "llama, tp 1-2": (CHUNKED, replace(CHUNKED, tp=2)),
    "llama, pp 2-1": (replace(CHUNKED, pp=2), CHUNKED),
    "gemma3, 32-64": (replace(CHUNKED, family="gemma3"), replace(CHUNKED, family="gemma3", block=64)),
    "deepseek_v3": (replace(CHUNKED, family="deepseek_v3", block=None),) * 2,
    "nemotron_h": (replace(CHUNKED, family="nemotron_h", block=None, prefix_caching=False),) * 2,
}


@pytest.mark.parametrize("name", PAIRS)
def test_prompts_are_read_while_they_are_computed(docks: Docks, prompt: Prompts, name: str):
    src, dst = (docks.own(setup) for setup in PAIRS[name])
    texts = [prompt(num) for num in (900, 700, 300, 100)]
    legs = [both_legs(src, dst, text) for text in texts]
    slowly(src, dst, *(leg for both in legs for leg in both))
    for text, (_, answer) in zip(texts, legs, strict=True):
        assert answer.finish_reason == "length"
        assert answer.tokens == dst.right(text)
        assert len(text) - answer.num_external in (0, 1)
    assert_whole(src, dst)
    found = records(dst)
    parts = sum(record["early_bytes"] for record in found) / sum(record["num_bytes"] for record in found)
    print(f"\n{name}: {parts:.0%} of the bytes were read before the prefills had ended")
    assert parts > 0.1


def test_after_a_reset_a_prefill_that_runs_is_not_read(docks: Docks, prompt: Prompts):
    """Weights may have changed: the decode engine computes the prompt, and the prefill's blocks come back."""
    src, dst = docks.own(CHUNKED), docks.own(CHUNKED)
    prefilled, answer = both_legs(src, dst, text := prompt(300))
    dst.step()
    assert dst.core.scheduler.reset_prefix_cache(reset_connector=True)
    dst.finish(answer)
    assert answer.tokens == dst.right(text)
    assert not answer.num_external
    slowly(src, dst, prefilled)
    assert_whole(src, dst)


def test_what_a_draft_model_writes_again_is_not_complete(
    docks: Docks, prompt: Prompts, monkeypatch: pytest.MonkeyPatch
):
    """The later of several MTP modules write the last tokens of a chunk again with the next chunk."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", 4)
    chunked = replace(CHUNKED, chunk=256)
    src, dst = docks.own(chunked), docks.own(chunked)
    told, grow = [], GrowingOffer.grow

    def noted(offer: GrowingOffer, tables: Any, num_complete: int) -> None:
        (request,) = src.core.scheduler.running
        told.append((num_complete, request.num_computed_tokens))
        grow(offer, tables, num_complete)

    monkeypatch.setattr(GrowingOffer, "grow", noted)
    text = prompt(1000)
    legs = both_legs(src, dst, text)
    slowly(src, dst, *legs)
    assert legs[1].tokens == dst.right(text)
    assert len(text) - legs[1].num_external == 3
    assert told
    assert all(num_complete <= num_computed - 3 for num_complete, num_computed in told)


def test_a_preempted_prefill_is_offered_anew_and_its_first_reads_never_count(docks: Docks, prompt: Prompts):
    """Its blocks are taken away between any two chunks, and written by other requests."""
    options = (*CHUNKED.options, ("lease_seconds", 1.0))
    src = docks.own(replace(CHUNKED, prefix_caching=False, options=options))
    dst = docks.own(CHUNKED)
    for num_steps in range(2, 9):
        text = prompt(900)
        prefill, answer = both_legs(src, dst, text)
        slowly(src, dst, Until(iter(range(num_steps))))
        assert src.core.scheduler.reset_prefix_cache(reset_running_requests=True)
        others = [src.ask(prompt(500), 1) for _ in range(3)]
        slowly(src, dst, prefill, answer, *others, seconds=0.005)
        assert answer.finish_reason == "length"
        assert answer.tokens == dst.right(text)
        assert_whole(src, dst)


class Until(Answer):
    """Done after so many looks."""

    def __init__(self, steps: Iterator[int]) -> None:
        super().__init__("")
        self._steps = steps

    @property
    def is_done(self) -> bool:
        return next(self._steps, None) is None


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_either_leg_may_be_aborted_between_any_two_chunks(docks: Docks, prompt: Prompts, side: str):
    long_lease = replace(CHUNKED, options=(*CHUNKED.options, ("lease_seconds", 300.0)))
    src, dst = docks.own(long_lease), docks.own(CHUNKED)
    for num_steps in range(11):
        text, other = prompt(900), prompt(800)
        legs = both_legs(src, dst, text)
        slowly(src, dst, Until(iter(range(num_steps))), seconds=0.01)
        if side == "prefill":
            src.abort(legs[0].request_id)
            slowly(src, dst, legs[1])
            assert legs[1].tokens == dst.right(text), "the decode engine computes it"
        else:
            dst.abort(legs[1].request_id)
            slowly(src, dst, legs[0])
        more = both_legs(src, dst, other)
        slowly(src, dst, *more, seconds=0.002)
        assert more[1].tokens == dst.right(other)
    assert_whole(src, dst)


def test_the_prefill_engine_may_die_between_any_two_chunks(docks: Docks, prompt: Prompts):
    """What was read so far never counts: the decode engine computes the prompt."""
    dst = docks.own(CHUNKED)
    for num_steps in range(11):
        src, text = docks.own(CHUNKED), prompt(900)
        _, answer = both_legs(src, dst, text)
        slowly(src, dst, Until(iter(range(num_steps))), seconds=0.01)
        is_early = not answer.is_done
        src.close()
        docks._own.remove(src)
        dst.finish(answer)
        assert is_early
        assert answer.finish_reason == "length"
        assert answer.tokens == dst.right(text)
        assert_whole(dst)


def test_a_decode_that_comes_first_waits_for_the_prefill_without_blocks(docks: Docks, prompt: Prompts):
    src, dst = docks.own(CHUNKED), docks.own(CHUNKED)
    text, name = prompt(900), {"kvferry_transfer": secrets.token_hex(16)}
    answer = dst.ask(text, NUM_TOKENS, {"do_remote_prefill": True, **address(src), **name})
    slowly(src, dst, Until(iter(range(50))))
    assert dst.num_free == dst.num_free_at_start
    prefill = src.ask(text, 1, {**PREFILL, **name})
    slowly(src, dst, prefill, answer)
    assert answer.tokens == dst.right(text)
    assert answer.num_external >= 899
    assert_whole(src, dst)


def test_a_decode_that_is_sent_again_reads_what_the_first_one_asked_for(docks: Docks, prompt: Prompts):
    """A router gives up a decode leg while the prefill is queued, and sends it again: the first one's
    question is still open, and whoever asks last is answered first. That must not return the ticket.
    """
    src, dst = docks.own(CHUNKED), docks.own(replace(CHUNKED, policy="fail"))
    text, name = prompt(900), {"kvferry_transfer": secrets.token_hex(16)}
    params = {"do_remote_prefill": True, **address(src), **name}
    first = dst.ask(text, NUM_TOKENS, params)
    slowly(src, dst, Until(iter(range(8))))
    dst.abort(first.request_id)
    again = dst.ask(text, NUM_TOKENS, params)
    slowly(src, dst, Until(iter(range(3))))
    asked = dst.core.scheduler.connector._side.incoming._claiming._claimer._open
    dst.run(lambda: asked[1].sent_at > asked[2].sent_at)
    slowly(src, dst, Until(iter(range(1))))
    prefill = src.ask(text, 1, {**PREFILL, **name})
    slowly(src, dst, prefill, again)
    assert (again.finish_reason, again.tokens) == ("length", dst.right(text))
    assert again.num_external >= 899
    assert_whole(src, dst)


def test_an_unknown_address_is_computed_or_fails(docks: Docks, prompt: Prompts):
    src, dst = docks.own(CHUNKED), docks.own(CHUNKED)
    for params in (
        {"remote_host": "127.0.0.1", "remote_port": 9},
        {"remote_host": "192.0.2.1", "remote_port": 5555},
        {"remote_port": "junk"},
        {},
    ):
        text = prompt(300)
        answer = dst.ask(text, params={"do_remote_prefill": True, "kvferry_transfer": "0" * 32, **params})
        slowly(src, dst, answer, seconds=0.002)
        assert answer.tokens == dst.right(text)
    assert_whole(src, dst)
