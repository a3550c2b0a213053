"""Two real engines, kvferry's connector between them: the decode engine answers as one engine alone would.

Tokens are greedy and in fp32, so that equal means equal; the tiny models are such that a wrong cache is a
wrong token. In bf16 the reference is the decode engine itself, or vLLM's own connector.
"""

from itertools import pairwise

import pytest

from tests.e2e.docks import Docks, Side
from tests.e2e.harness import KVFERRY, PROMPTS, STOCK, Engine, Params, ferry, until
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

NUM_SURE_BF16 = 4
"""Tokens that rounding does not change. GDN runs in bf16 only, and one engine alone rounds once less: there
the last prompt token is part of the prefill, here it is a step of its own."""

STATEFUL = {"nemotron_h", "granite", "falcon_h1", "qwen3_next"}
WINDOWED = {"gemma3", "gemma3n", "gpt_oss"}

Case = tuple[str, Side, Side]
ONE, TWO, BF16 = Side(1), Side(2), Side(dtype="bfloat16")

SAME_BLOCKS: list[Case] = [
    *(("llama", src, dst) for src in (ONE, TWO) for dst in (ONE, TWO)),
    *(
        (family, src, dst)
        for family in ("gemma3", "deepseek_v3", "nemotron_h")
        for src, dst in ((ONE, ONE), (TWO, ONE), (ONE, TWO))
    ),
    *((family, ONE, ONE) for family in ("gpt_oss", "granite", "falcon_h1")),
    ("qwen3_next", BF16, BF16),
]
"""What vLLM's own connector gets right too."""

UNEQUAL = ((64, 32), (32, 64), (96, 64), (64, 96))
BEYOND_STOCK: list[Case] = [
    ("llama-1kv", TWO, ONE),
    ("llama-1kv", ONE, TWO),
    *(
        (family, Side(1, src, dtype), Side(1, dst, dtype))
        for dtype in ("float32", "bfloat16")
        for family in ("llama", "gemma3")
        for src, dst in UNEQUAL
    ),
    ("llama", Side(2, 64), Side(1, 32)),
    ("llama", Side(1, 32), Side(2, 64)),
    ("llama", Side(1, 64, "bfloat16", has_fp8_cache=True), Side(1, 32, "bfloat16", has_fp8_cache=True)),
    *(
        ("deepseek_v3", Side(1, src, "bfloat16"), Side(1, dst, "bfloat16"))
        for src, dst in ((32, 64), (64, 32))
    ),
    *(
        ("nemotron_h", Side(1, src), Side(1, dst))
        for src, dst in ((192, 256), (256, 192), (288, 512), (512, 288), (192, 512))
    ),
    ("nemotron_h", Side(1, 192), Side(2, 256)),
    ("nemotron_h", Side(2, 512), Side(1, 288)),
]
"""What it refuses, or gets wrong without a word."""

STAGES: list[Case] = [
    ("llama", Side(stages=(2, 2)), ONE),
    ("llama", ONE, Side(stages=(1, 3))),
    ("llama", Side(stages=(1, 3)), Side(stages=(3, 1))),
    ("llama", Side(stages=(3, 1), block=64), Side(2, 32)),
    ("gemma3", Side(stages=(4, 2)), ONE),
    ("nemotron_h", Side(stages=(4, 4)), ONE),
]
"""Pipeline parallelism on either side, or both, cut unevenly."""

SHARED_AND_DRAFT: list[Case] = [
    ("gemma3n", Side(1, 64), Side(1, 32)),
    ("gemma3n", ONE, TWO),
    ("gemma3n", TWO, ONE),
    ("llama", Side(1, 64, draft="eagle"), Side(1, 32, draft="eagle")),
    ("llama", Side(draft="draft_model"), Side(2, draft="draft_model")),
]
"""Layers that read another's cache; layers that draft."""


def name(case: Case) -> str:
    family, src, dst = case
    return f"{family}-{src}-{dst}"


@pytest.mark.parametrize(("family", "src", "dst"), SAME_BLOCKS, ids=map(name, SAME_BLOCKS))
def test_same_blocks(docks, family, src, dst):
    """R001-8: plain attention, too, is what it was."""
    agree(docks, family, src, dst)


@pytest.mark.parametrize(("family", "src", "dst"), BEYOND_STOCK, ids=map(name, BEYOND_STOCK))
def test_beyond_stock(docks, family, src, dst):
    agree(docks, family, src, dst)


@pytest.mark.parametrize(("family", "src", "dst"), STAGES, ids=map(name, STAGES))
def test_stages(docks, family, src, dst):
    agree(docks, family, src, dst)


@pytest.mark.parametrize(("family", "src", "dst"), SHARED_AND_DRAFT, ids=map(name, SHARED_AND_DRAFT))
def test_shared_caches_and_draft_layers(docks, family, src, dst):
    agree(docks, family, src, dst)


DIGESTED: list[Case] = [
    ("llama", Side(1, 64), Side(1, 32)),
    ("llama", TWO, ONE),
    ("llama-1kv", ONE, TWO),
    ("gemma3", Side(1, 64), Side(1, 96)),
    ("deepseek_v3", ONE, TWO),
    ("nemotron_h", Side(1, 192), Side(2, 256)),
    ("granite", ONE, ONE),
    ("llama", Side(stages=(1, 3)), Side(stages=(3, 1))),
    ("gemma3n", TWO, ONE),
]
"""Every load is compared on both sides, whatever they are."""
DIGESTING = {**KVFERRY, "kv_connector_extra_config": {"digest": "full"}}


@pytest.mark.parametrize(("family", "src", "dst"), DIGESTED, ids=map(name, DIGESTED))
def test_digests_of_every_load(docks, family, src, dst):
    """RB-1: no alarm is false, and no load is left out."""
    engines = docks.pair(family, src, dst, DIGESTING)
    compare(docks, family, dst, *engines)
    lines = load_lines(engines[1], dst)
    assert all(", digest equal;" in line for line in lines)


DIRECT = {**KVFERRY, "kv_connector_extra_config": {"expose": "fabric", "way": "direct", "digest": "full"}}


@pytest.mark.parametrize(("family", "src", "dst"), DIGESTED[:6], ids=map(name, DIGESTED[:6]))
def test_direct_reads(docks, family, src, dst):
    engines = docks.pair(family, src, dst, DIRECT)
    compare(docks, family, dst, *engines)
    lines = load_lines(engines[1], dst)
    assert all(", direct, in " in line and ", digest equal;" in line for line in lines)


def load_lines(engine: Engine, side: Side) -> list[str]:
    """The last lines of loads in an engine's log: each rank has one for each prompt of each pair so far."""
    lines = [line for line in engine.log.read_text().splitlines() if "kvferry: load of " in line]
    num_lines = len(PROMPTS) * side.tp * max(1, len(side.stages))
    assert lines
    assert len(lines) % num_lines == 0
    return lines[-num_lines:]


def test_a_draft_goes_on_from_the_cache_that_was_moved(docks):
    """Greedy tokens do not depend on the draft; how many of its tokens are right does.

    Llama drafts for itself, so that nearly all are: as many after a load as after a prefill of its own.
    """
    src, dst = docks.pair("llama", Side(1, 64, draft="itself"), Side(1, 32, draft="itself"))

    def spoil(params: Params) -> Params:
        src.spoil("draft")
        return params

    for prompt in PROMPTS:
        counts = [dst.num_accepted()]
        dst.ask(prompt)
        counts.append(dst.num_accepted())
        ferry(src, dst, prompt)
        counts.append(dst.num_accepted())
        ferry(src, dst, prompt, between=spoil)
        counts.append(dst.num_accepted())
        own, ferried, spoiled = (after - before for before, after in pairwise(counts))
        assert own == ferried > spoiled


def test_roles(docks):
    """One engine only produces, the other only consumes."""
    src, dst = (
        docks.nursery.start(docks.nursery.make("llama"), {**KVFERRY, "kv_role": role})
        for role in ("kv_producer", "kv_consumer")
    )
    compare(docks, "llama", ONE, src, dst)
    src.close()
    dst.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "nemotron_h", "gemma3n"])
def test_tokens_depend_on_what_was_moved(docks, family):
    """The control: a cache that is zeroed between prefill and decode gives other tokens."""
    src, dst = docks.pair(family, ONE, ONE)
    expected = docks.expected(family, ONE, dst)

    def spoil(params):
        src.spoil()
        return params

    spoiled = [ferry(src, dst, prompt, between=spoil).tokens for prompt in PROMPTS]
    assert all(wrong != right for wrong, right in zip(spoiled, expected, strict=True))
    assert any(wrong[0] != right[0] for wrong, right in zip(spoiled, expected, strict=True))


def test_the_harness_with_stock(docks):
    """If this fails, it is not kvferry."""
    compare(docks, "llama", ONE, *docks.pair("llama", ONE, ONE, STOCK))


def agree(docks: Docks, family: str, src_side: Side, dst_side: Side) -> None:
    """A pair cut in this way answers as it should."""
    compare(docks, family, dst_side, *docks.pair(family, src_side, dst_side))


def compare(docks: Docks, family: str, side: Side, src: Engine, dst: Engine) -> None:
    """Each answer is the expected one, nothing was recomputed, and both pools are whole again."""
    expected = docks.expected(family, side, dst)
    before = src.num_free_blocks(), dst.num_free_blocks()
    num_sure = NUM_SURE_BF16 if family in STATEFUL and side.dtype == "bfloat16" else None
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        answer = ferry(src, dst, prompt)
        assert answer.tokens[:num_sure] == tokens[:num_sure], f"{len(prompt)} tokens of prompt"
        assert answer.finish_reason == "length"
        # A model with a state or a window moves all but the last token, and takes that step itself.
        assert answer.sources.computed == (family in STATEFUL | WINDOWED)
        assert answer.sources.external == len(prompt) - answer.sources.computed
    until(
        lambda: (src.num_free_blocks(), dst.num_free_blocks()) == before,
        f"both pools have {before} free blocks",
    )
