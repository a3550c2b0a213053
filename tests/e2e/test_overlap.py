"""Both legs of a request at once: the decode engine reads what the prefill engine has computed so far."""

import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from tests.e2e.conversations import Reference, Step, Way
from tests.e2e.docks import Docks, Side
from tests.e2e.harness import KVFERRY, PREFILL, Answer, Engine, EngineError, Params, until
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

NUM_AT_ONCE, NUM_TOKENS, CHUNK = 3, 12, 64
LENGTHS = (900, 700, 470)
"""Tokens of the prompts: up to 15 chunks."""


def legs(src: Engine, dst: Engine, where: Params, prompt: tuple[int, ...]) -> Answer:
    """The answer to a prompt whose legs are sent at once."""
    name = {"kvferry_transfer": secrets.token_hex(16)}
    wanted = {"do_remote_prefill": True, "do_remote_decode": False, **where, **name}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(dst.ask, prompt, NUM_TOKENS, wanted, has_logprobs=True)
        pool.submit(src.ask, prompt, 1, {**PREFILL, **name}).result()
        return answer.result()


def has_free(engine: Engine, num_blocks: int) -> bool:
    return engine.num_free_blocks() == num_blocks


SIDES = {
    "llama": (Side(1, 32), Side(1, 64)),
    "gemma3": (Side(1, 32), Side(1, 64)),
    "deepseek_v3": (Side(), Side()),
    "nemotron_h": (Side(1, 192), Side(1, 256)),
    "llama, tp 2-1": (Side(2, 64), Side(1, 32)),
    "llama, pp 2-1": (Side(stages=(2, 2)), Side()),
}


@pytest.mark.parametrize("name", SIDES)
def test_legs_at_once(docks: Docks, name: str, capsys: pytest.CaptureFixture[str]):
    family = name.split(",", maxsplit=1)[0]
    src, dst = docks.pair(family, replace(SIDES[name][0], chunk=CHUNK), SIDES[name][1])
    free = src.num_free_blocks(), dst.num_free_blocks()
    reference, draw = Reference(partial(docks.alone, family)), Random(1)
    docks.alone(family)
    params = src.ask(tuple(draw.choices(range(256), k=40)), 1, PREFILL).params
    assert params is not None
    assert params["kvferry_overlap"]
    where = {key: params[key] for key in ("remote_host", "remote_port")}
    before = dst.sources()
    prompts = [tuple(draw.choices(range(256), k=length)) for length in LENGTHS]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(partial(legs, src, dst, where), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        taken = reference.judge(Step(prompt, Way.LOADED, NUM_TOKENS), answer)
        assert taken.is_right, taken.evidence()
    after = dst.sources()
    assert after.external - before.external >= sum(LENGTHS) - len(LENGTHS)
    early, loaded = (sum(dst.totals(f"vllm:kvferry_loaded_{what}bytes").values()) for what in ("early_", ""))
    with capsys.disabled():
        print(f"\n{name}: {early} of {loaded} bytes were read before the prefills had ended")
    until(
        lambda: (src.num_free_blocks(), dst.num_free_blocks()) == free,
        f"both pools have {free} free blocks",
        seconds=40,
    )


@pytest.mark.parametrize("harm", [Engine.kill, Engine.stop])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_prefill_engine_is_harmed_between_chunks(
    docks: Docks, family: str, harm: Callable[[Engine], None]
):
    """Whatever was read by then never counts: the decode engine computes the prompt."""
    connector = {**KVFERRY, "kv_load_failure_policy": "recompute"}
    reference, draw = Reference(partial(docks.alone, family)), Random(2)
    docks.alone(family)
    for seconds in (0.02, 0.1, 0.25):
        src, dst = docks.pair(family, Side(1, 32, chunk=CHUNK), Side(1, 64), connector)
        where = src.ask(tuple(draw.choices(range(256), k=40)), 1, PREFILL).params
        assert where is not None
        transfer = {"kvferry_transfer": secrets.token_hex(16)}
        address = {key: where[key] for key in ("remote_host", "remote_port")}
        wanted = {"do_remote_prefill": True, "do_remote_decode": False, **address, **transfer}
        prompt, free = tuple(draw.choices(range(256), k=900)), dst.num_free_blocks()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(dst.ask, prompt, NUM_TOKENS, wanted, has_logprobs=True)
            prefill = pool.submit(src.ask, prompt, 1, {**PREFILL, **transfer})
            time.sleep(seconds)
            harm(src)
            taken = reference.judge(Step(prompt, Way.LOADED, NUM_TOKENS), answer.result())
            assert taken.is_right, taken.evidence()
            src.resume()
            with suppress(EngineError):
                prefill.result()
        until(partial(has_free, dst, free), "its blocks are back", seconds=40)
