"""What a load leaves in the decode engine's prefix cache is right, whatever the two block sizes are.

A window needs a part of the first block that it loads. vLLM registers that block under the hash of all its
tokens, and the next request with the same head may hit it.
"""

from functools import partial

import pytest

from tests.e2e.conversations import (
    FIRST_TOKENS,
    NUM_REUSES,
    SHARED_TOKENS,
    Reference,
    Tally,
    play,
    reuse_steps,
)
from tests.e2e.docks import Docks, Side
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

BLOCKS = (32, 64, 96)
TPS = {"gemma3": (1, 1), "gpt_oss": (1, 2), "mistral": (2, 1)}
"""Each windowed family at one pair of TP sizes."""
CASES = [
    (family, Side(src_tp, src, prefixes="dense"), Side(dst_tp, dst, prefixes="dense"))
    for family, (src_tp, dst_tp) in TPS.items()
    for src in BLOCKS
    for dst in BLOCKS
]


@pytest.fixture(scope="module")
def references(docks: Docks) -> dict[str, Reference]:
    """Their answers last as long as the engines of this file; in fp32 equal means equal."""
    return {family: Reference(partial(docks.alone, family)) for family in TPS}


@pytest.mark.parametrize(
    ("family", "src_side", "dst_side"), CASES, ids=[f"{family}-{src}-{dst}" for family, src, dst in CASES]
)
def test_blocks_that_a_load_left_serve_other_requests(docks, references, family, src_side, dst_side, capsys):
    src, dst = docks.pair(family, src_side, dst_side)
    for engine in (src, dst):  # it may have served another pair before
        engine.forget()
    tally, reference = Tally(src, dst), references[family]
    takens = []
    for taken in play(reuse_steps(reference.tokens), src, dst, reference):
        tally.add(taken)
        takens.append(taken)
    summary = tally.summary()
    with capsys.disabled():
        hits = [[taken.answer.sources.cached for taken in takens[at::3]] for at in (1, 2)]
        print(
            f"\n{family} {src_side} -> {dst_side}: {summary}, hits of other prompts and second turns: {hits}"
        )
    assert [taken.evidence() for taken in (*tally.wrong, *tally.close)] == []
    # All but the last token of each first prompt was loaded, and nothing else was.
    assert summary["dst_tokens_loaded"] == NUM_REUSES * (FIRST_TOKENS - 1)
    assert min(taken.answer.sources.cached for taken in takens[2::3]) > max(SHARED_TOKENS)
