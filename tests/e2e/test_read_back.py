"""Conversations between two live engines: each turn is read back from the engine that decoded the last."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

import pytest

from tests.e2e.conversations import Reference, Step, Way
from tests.e2e.docks import Docks, Side
from tests.e2e.harness import KVFERRY, PREFILL, Params, until
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

RECOMPUTE = {
    **KVFERRY,
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
}
NUM_TURNS, NUM_AT_ONCE, NUM_TOKENS = 4, 3, 20
SIDES = {
    "llama": (Side(2, 64, prefixes="sparse"), Side(1, 96, prefixes="sparse")),
    "gemma3": (Side(1, 32, prefixes="dense"), Side(1, 64, prefixes="dense")),
}


@pytest.mark.parametrize("family", SIDES)
def test_turns_are_read_back(docks: Docks, family: str, capsys: pytest.CaptureFixture[str]):
    src, dst = docks.pair(family, *SIDES[family], RECOMPUTE)
    free = src.num_free_blocks(), dst.num_free_blocks()
    reference, draw = Reference(partial(docks.alone, family)), Random(1)
    texts = [tuple(draw.choices(range(256), k=200)) for _ in range(NUM_AT_ONCE)]
    offers: list[Params] = [{} for _ in texts]
    before = src.sources()
    docks.alone(family)  # started here: not by several threads at once

    def take(at: int) -> None:
        prefill = src.ask(texts[at], 1, {**offers[at], **PREFILL})
        answer = dst.ask(texts[at], NUM_TOKENS, prefill.params, has_logprobs=True)
        taken = reference.judge(Step(texts[at], Way.LOADED, NUM_TOKENS), answer)
        assert taken.is_right, taken.evidence()
        assert answer.params is not None
        more = draw.choices(range(256), k=30)
        texts[at], offers[at] = (*texts[at], *answer.tokens, *more), answer.params

    for _ in range(NUM_TURNS):
        with ThreadPoolExecutor() as pool:
            list(pool.map(take, range(NUM_AT_ONCE)))
        src.forget()
    after = src.sources()
    with capsys.disabled():
        print(f"\n{family}: {after.external - before.external} tokens read back, of {sum(map(len, texts))}")
    assert after.external - before.external > NUM_AT_ONCE * (NUM_TURNS - 1) * 128
    until(
        lambda: (src.num_free_blocks(), dst.num_free_blocks()) == free,
        f"both pools have {free} free blocks",
        seconds=40,
    )
