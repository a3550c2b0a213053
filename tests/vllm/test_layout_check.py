"""The check at start: a wrong rule is caught, a right one is not, and nothing is left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
import vllm
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvferry.core.state import Kind
from kvferry.errors import SpecError
from kvferry.integrations.vllm.worker.describe import WorkerRank, described_layers
from kvferry.integrations.vllm.worker.described_layer import DescribedLayer
from kvferry.integrations.vllm.worker.layout_check import LayoutCheck, LayoutDiffers, Untried, look
from tests.vllm.conftest import Docks
from tests.vllm.engine import Engine, Setup
from tests.vllm.pairs import FAMILIES, Pair, case
from tests.vllm.sabotage import sabotaged

DTYPE = torch.float32
TRUSTING = LayoutCheck(DTYPE, is_tested=True)
SETUPS = {
    **FAMILIES,
    "two ranks": Setup(tp=2),
    "long blocks": Setup(block=96),
}


def layers_of(engine: Engine) -> Iterator[DescribedLayer]:
    for rank, worker in enumerate(engine.workers):
        with worker.inside():
            place = WorkerRank("engine", rank, rank, len(engine.workers))
            yield from described_layers(worker.vllm_config, worker._config, worker.caches, place)


def attention(engine: Engine) -> list[DescribedLayer]:
    return [layer for layer in layers_of(engine) if layer.page.kind is Kind.PAGED]


@pytest.mark.parametrize("name", SETUPS)
def test_every_rule_holds_and_nothing_is_left_behind(docks: Docks, name: str) -> None:
    engine = docks.own(SETUPS[name])
    for layer in attention(engine):
        memory = torch.empty(0, dtype=torch.uint8).set_(layer.cache.tensor.untyped_storage())
        before = memory.clone()
        look(layer, DTYPE)
        assert torch.equal(memory, before)


@pytest.mark.parametrize("name", SETUPS)
def test_every_mistake_in_a_rule_is_caught(docks: Docks, name: str) -> None:
    engine, num_mistakes = docks.own(SETUPS[name]), 0
    for layer in attention(engine):
        for what, wrong in sabotaged(layer):
            num_mistakes += 1
            with case(what), pytest.raises(LayoutDiffers):
                look(wrong, DTYPE)
    assert num_mistakes >= len(attention(engine))


def test_states_cannot_be_tried_and_are_believed_of_tested_versions_only(
    docks: Docks, caplog: pytest.LogCaptureFixture
) -> None:
    engine = docks.own(FAMILIES["nemotron_h"])
    layers = list(layers_of(engine))
    states = [layer for layer in layers if layer.page.kind is Kind.RECURRENT]
    assert states
    for layer in states:
        with pytest.raises(Untried, match="only its kernels know its internal layout"):
            look(layer, DTYPE)
    caplog.set_level(logging.INFO, "kvferry")
    logging.getLogger("kvferry").propagate = True
    assert TRUSTING.settle(layers) == layers
    assert "layout check: 1 of 2 kinds of caches checked" in caplog.text
    untested = replace(TRUSTING, is_tested=False).settle(layers)
    changed = [layer.page.kind for layer, was in zip(untested, layers, strict=True) if layer != was]
    assert changed == [Kind.RECURRENT] * len(states)


def test_a_fused_writer_makes_a_layer_opaque(docks: Docks) -> None:
    layers = attention(docks.own(FAMILIES["llama"]))
    settled = replace(TRUSTING, fused="fuse_rope_kvcache").settle(layers)
    assert all(layer.page.is_whole_block for layer in settled)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that stores the channels of keys in another order than the one that we know."""
    update = CPUAttentionBackendImpl.do_kv_cache_update

    def turning(
        self: Any,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        update(self, layer, key.flip(-1), value, kv_cache, slot_mapping)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", turning)


def option(setup: Setup, name: str, value: str) -> Setup:
    return replace(setup, options=(*setup.options, (name, value)))


@pytest.mark.usefixtures("turned")
def test_another_order_inside_blocks_is_noticed_at_start(
    docks: Docks, prompt: Callable[[int], list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("kvferry").propagate = True
    llama = FAMILIES["llama"]
    src, equal, longer = docks.own(llama), docks.own(llama), docks.own(replace(llama, block=64))
    lines = {each.message for each in caplog.records if "not laid out as kvferry expects" in each.message}
    assert len(lines) == 2, "one line for each kind of cache"
    assert all("only identically configured engines" in line for line in lines)
    text = prompt(100)
    pair = Pair(src, equal)
    pair.assert_loaded(pair.ferry(text), text)
    unequal = Pair(src, longer)
    answer = unequal.ferry(text)
    assert answer.finish_reason == "error", "whole blocks do not fit"


@pytest.mark.usefixtures("turned")
def test_an_engine_that_requires_the_check_does_not_start(docks: Docks) -> None:
    with pytest.raises(SpecError, match="not laid out as kvferry expects"):
        docks.own(option(FAMILIES["llama"], "layout_check", "required"))


def test_an_untested_version_starts_if_all_is_as_expected(
    docks: Docks, prompt: Callable[[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    llama = FAMILIES["llama"]
    pair = Pair(docks.own(llama), docks.own(replace(llama, block=64)))
    text = prompt(100)
    pair.assert_loaded(pair.ferry(text), text)
    with pytest.raises(SpecError, match="was not tested with this kvferry"):
        docks.own(option(llama, "vllm_version", "tested"))
