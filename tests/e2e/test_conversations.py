"""Random conversations with shared heads: every answer of both engines is that of an engine that never loads.

KVFERRY_STEPS=500 pytest -m "" tests/e2e/test_conversations.py
"""

import os
from functools import partial

import pytest

from tests.e2e.conversations import Reference, Tally, conversation_steps, play
from tests.e2e.docks import Docks, Side
from tests.e2e.harness import until
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

NUM_STEPS = int(os.environ.get("KVFERRY_STEPS", "40"))
"""Of each family."""
SEED = int(os.environ.get("KVFERRY_SEED", "0"))
LEASE_SECONDS = 40.0
"""A ticket that was not read is released by then."""
SIDES = {
    "gemma3": (Side(1, 64, prefixes="sparse"), Side(1, 32, prefixes="sparse")),
    "gpt_oss": (Side(1, 32, prefixes="dense"), Side(2, 64, prefixes="dense")),
    "llama": (Side(2, 64, prefixes="sparse"), Side(1, 96, prefixes="sparse")),
    "nemotron_h": (Side(1, 192), Side(1, 256)),
}
"""With prefix caching, vLLM's CPU build cannot serve Nemotron-H, with or without a connector."""


@pytest.mark.parametrize("family", SIDES)
def test_random_conversations(docks: Docks, family: str, capsys: pytest.CaptureFixture[str]):
    src, dst = docks.pair(family, *SIDES[family])
    free = src.num_free_blocks(), dst.num_free_blocks()
    reference = Reference(partial(docks.alone, family))
    tally = Tally(src, dst)
    for taken in play(conversation_steps(SEED, NUM_STEPS, reference.tokens), src, dst, reference):
        tally.add(taken)
    summary = tally.summary()
    with capsys.disabled():
        print(f"\n{family} {' -> '.join(map(str, SIDES[family]))}, seed {SEED}: {summary}")
    assert [taken.evidence() for taken in (*tally.wrong, *tally.close)] == []
    assert summary["dst_tokens_loaded"] > 0
    assert (summary["dst_tokens_cached"] > 0) == bool(SIDES[family][1].prefixes)
    until(
        lambda: (src.num_free_blocks(), dst.num_free_blocks()) == free,
        f"both pools have {free} free blocks",
        seconds=LEASE_SECONDS,
    )
