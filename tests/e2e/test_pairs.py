"""Two real engines, kvferry's connector between them: the decode engine answers as one engine alone would.

Tokens are greedy and in fp32, so that equal means equal; the tiny models are such that a wrong cache is a
wrong token.
"""

import importlib.util
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import (
    KVFERRY,
    MLA_ARGS,
    PROMPTS,
    STOCK,
    Engine,
    Nursery,
    ferry,
    until,
)


def _is_there(module: str) -> bool:
    """Without importing it, which takes longer than the quick suite."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


pytestmark = pytest.mark.slow
for module in ("vllm", "nixl", "kvferry.integrations.vllm"):
    if not _is_there(module):
        pytest.skip(f"{module} is not installed", allow_module_level=True)

MAX_ENGINES = 4
"""That run at a time."""
NUM_SURE_BF16 = 4
"""Tokens that rounding does not change. GDN runs in bf16 only, and one engine alone rounds once less: there
the last prompt token is part of the prefill, here it is a step of its own."""

FAMILY_ARGS: dict[str, dict[str, Any]] = {"deepseek_v3": MLA_ARGS, "qwen3_next": {"dtype": "bfloat16"}}
STATEFUL = {"nemotron_h", "granite", "falcon_h1", "qwen3_next"}


@dataclass(frozen=True, slots=True)
class Side:
    """How one of the two engines is cut; no block size means vLLM's choice."""

    tp: int = 1
    block: int | None = None

    def args(self) -> dict[str, Any]:
        block = {} if self.block is None else {"block_size": self.block}
        return {"tensor_parallel_size": self.tp, **block}

    def __str__(self) -> str:
        return f"tp{self.tp}" + ("" if self.block is None else f"b{self.block}")


@dataclass
class Docks:
    """Engines for one test after another: the least recently used ones make room."""

    nursery: Nursery
    _engines: dict[tuple, Engine] = field(default_factory=dict)
    _expected: dict[str, list[list[int]]] = field(default_factory=dict)

    def pair(
        self, family: str, src: Side, dst: Side, connector: Mapping[str, Any] = KVFERRY
    ) -> tuple[Engine, Engine]:
        """Two engines that are ready."""
        both = [self._begin(family, side, role, connector) for side, role in ((src, "src"), (dst, "dst"))]
        for engine in both:
            engine.wait_ready()
        return both[0], both[1]

    def expected(self, family: str, dst: Engine) -> list[list[int]]:
        """What one engine alone answers to each prompt; in bf16, what the decode engine itself answers."""
        if family == "qwen3_next":
            return [dst.ask(prompt).tokens for prompt in PROMPTS]
        if family not in self._expected:
            alone = self.nursery.start(self.nursery.make(family), **FAMILY_ARGS.get(family, {}))
            self._expected[family] = [alone.ask(prompt).tokens for prompt in PROMPTS]
            alone.close()
        return self._expected[family]

    def _begin(self, family: str, side: Side, role: str, connector: Mapping[str, Any]) -> Engine:
        key = (family, side, role, *sorted(connector.items()))
        engine = self._engines.pop(key, None)
        if engine is None or not engine.is_alive:
            while len(self._engines) >= MAX_ENGINES:
                self._engines.pop(next(iter(self._engines))).close()
            args = {**FAMILY_ARGS.get(family, {}), **side.args()}
            engine = self.nursery.begin(self.nursery.make(family), connector, **args)
        self._engines[key] = engine
        return engine


@pytest.fixture(scope="module")
def docks(tmp_path_factory):
    logs: Path = tmp_path_factory.mktemp("logs")
    with Nursery(logs) as nursery:
        yield Docks(nursery)


ONE, TWO = Side(1), Side(2)

SAME_BLOCKS = [
    *(("llama", src, dst) for src in (ONE, TWO) for dst in (ONE, TWO)),
    *(
        (family, src, dst)
        for family in ("gemma3", "deepseek_v3", "nemotron_h")
        for src, dst in ((ONE, ONE), (TWO, ONE), (ONE, TWO))
    ),
    *((family, ONE, ONE) for family in ("gpt_oss", "granite", "falcon_h1", "qwen3_next")),
]
"""What vLLM's own connector gets right too."""

BEYOND_STOCK = [
    ("llama-1kv", TWO, ONE),
    ("llama-1kv", ONE, TWO),
    *(
        (family, Side(1, src), Side(1, dst))
        for family in ("llama", "gemma3")
        for src, dst in ((64, 32), (32, 64), (96, 64), (64, 96))
    ),
    ("llama", Side(2, 64), Side(1, 32)),
    ("llama", Side(1, 32), Side(2, 64)),
]
"""What it refuses, or gets wrong without a word."""


def name(case) -> str:
    family, src, dst = case
    return f"{family}-{src}-{dst}"


@pytest.mark.parametrize(("family", "src", "dst"), SAME_BLOCKS, ids=map(name, SAME_BLOCKS))
def test_same_blocks(docks, family, src, dst):
    agree(docks, family, *docks.pair(family, src, dst))


@pytest.mark.parametrize(("family", "src", "dst"), BEYOND_STOCK, ids=map(name, BEYOND_STOCK))
def test_beyond_stock(docks, family, src, dst):
    engines = docks.pair(family, src, dst)
    for engine, side in zip(engines, (src, dst), strict=True):
        if side.block is not None:
            assert {group.block_size for group in engine.groups()} == {side.block}
    agree(docks, family, *engines)


def test_roles(docks):
    """One engine only produces, the other only consumes."""
    src, dst = (
        docks.nursery.start(docks.nursery.make("llama"), {**KVFERRY, "kv_role": role})
        for role in ("kv_producer", "kv_consumer")
    )
    agree(docks, "llama", src, dst)
    src.close()
    dst.close()


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "nemotron_h"])
def test_tokens_depend_on_what_was_moved(docks, family):
    """The control: a cache that is zeroed between prefill and decode gives other tokens."""
    src, dst = docks.pair(family, ONE, ONE)
    expected = docks.expected(family, dst)

    def spoil(params):
        src.spoil()
        return params

    spoiled = [ferry(src, dst, prompt, between=spoil).tokens for prompt in PROMPTS]
    assert all(wrong != right for wrong, right in zip(spoiled, expected, strict=True))
    assert any(wrong[0] != right[0] for wrong, right in zip(spoiled, expected, strict=True))


def test_the_harness_with_stock(docks):
    """If this fails, it is not kvferry."""
    agree(docks, "llama", *docks.pair("llama", ONE, ONE, STOCK))


def agree(docks: Docks, family: str, src: Engine, dst: Engine) -> None:
    """Each answer is the expected one, nothing was recomputed, and both pools are whole again."""
    expected = docks.expected(family, dst)
    before = src.num_free_blocks(), dst.num_free_blocks()
    num_sure = NUM_SURE_BF16 if family == "qwen3_next" else None
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        answer = ferry(src, dst, prompt)
        assert answer.tokens[:num_sure] == tokens[:num_sure], f"{len(prompt)} tokens of prompt"
        assert answer.finish_reason == "length"
        # A model with a recurrent state moves all but the last token, and takes that step itself.
        assert answer.sources.computed == (family in STATEFUL)
        assert answer.sources.external == len(prompt) - answer.sources.computed
    until(
        lambda: (src.num_free_blocks(), dst.num_free_blocks()) == before,
        f"both pools have {before} free blocks",
    )
