"""Ours and vLLM's OffloadingConnector inside vLLM's MultiConnector, in vLLM's own engine core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from kvferry.integrations.vllm import KVFerryConnector
from kvferry.integrations.vllm.shared.stats import LoadStats
from tests.vllm.conftest import Docks
from tests.vllm.engine import Engine, Setup, drive
from tests.vllm.pairs import FAMILIES, LEASE_SECONDS, Pair, assert_whole

Prompt = Callable[[int], list[int]]
PLACES = ["before", "behind"]
OFFLOADED = ["llama", "gemma3"]
"""vLLM offloads states only with prefix caching, which its CPU build does not have for them."""
LENGTHS = (70, 130, 300)


def pair_of(docks: Docks, family: str, place: str, **more: Any) -> Pair:
    """Two engines that offload, too."""
    setup = replace(FAMILIES[family], beside=place)
    pair = Pair(docks.own(setup), docks.own(replace(setup, **more)))
    assert all(isinstance(worker.connector, MultiConnector) for worker in pair.dst.workers)
    return pair


def evict(engine: Engine) -> None:
    """Empty the device's prefix cache; what is offloaded stays. First, let every save end."""
    connectors = engine.core.scheduler.connector._connectors
    others = [each for each in connectors if type(each) is not KVFerryConnector]
    engine.run(lambda: not any(other.has_pending_push_work() for other in others))
    engine.run(engine.core.scheduler.reset_prefix_cache)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", ["OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleConnector"])
def test_vllms_connectors_agree_with_our_layout(other: str, place: str) -> None:
    """vLLM compares the words of all connectors before any of them is made."""
    config = Setup(beside=place).config()
    for connector in config.kv_transfer_config.kv_connector_extra_config["connectors"]:
        if connector["kv_connector"] == "OffloadingConnector":
            connector["kv_connector"] = other
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", OFFLOADED)
def test_prompts_are_loaded_offloaded_and_read_again(
    docks: Docks, prompt: Prompt, family: str, place: str
) -> None:
    """Tokens are right from the other engine and from the host's memory, and all blocks come back."""
    pair = pair_of(docks, family, place)
    prompts = [prompt(length) for length in LENGTHS]
    for text in prompts:
        pair.assert_loaded(pair.ferry(text), text)
    evict(pair.dst)
    for worker in pair.dst.workers:
        for cache in worker.caches.values():
            cache.zero_()
    for text in prompts:
        answer = pair.decode(text, None)
        pair.assert_right(answer, text)
        assert answer.num_external >= len(text) // 2
    pair.assert_whole()
    found = pair.dst.totals()
    assert found["kv_offload_store_bytes_total"] >= found["kv_offload_load_bytes_total"] > 0
    assert found["kvferry_loads_total"] == len(prompts)
    assert 0 <= sum(LENGTHS) - found["prompt_tokens_cached_by_source_total p2p"] <= len(LENGTHS)
    assert found["prompt_tokens_cached_by_source_total host"] >= sum(LENGTHS) // 2
    assert found["prompt_tokens_cached_by_source_total external_unspecified"] == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", OFFLOADED)
def test_the_first_connector_loads_and_an_unused_ticket_is_given_back(
    docks: Docks, prompt: Prompt, family: str, place: str
) -> None:
    """Where both have the prompt, vLLM takes the first; nothing waits for the other's lease."""
    pair = pair_of(docks, family, place)
    text = prompt(300)
    pair.assert_loaded(pair.ferry(text), text)
    evict(pair.dst)
    pair.assert_right(pair.ferry(text), text)
    assert_whole(pair.src, pair.dst, seconds=LEASE_SECONDS / 2)
    found = pair.dst.totals()
    assert bool(found["prompt_tokens_cached_by_source_total host"]) == (place == "before")
    assert found["kvferry_loads_total"] == (1 if place == "before" else 2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", OFFLOADED)
def test_loaded_requests_are_preempted_while_they_are_offloaded(
    docks: Docks, prompt: Prompt, family: str, place: str
) -> None:
    blocks = {"llama": 15, "gemma3": 40}[family]
    pair = pair_of(docks, family, place, blocks=blocks, longest=350)
    prompts = [prompt(100) for _ in range(3)]
    answers = [pair.dst.ask(text, 150, pair.prefill(text)) for text in prompts]
    preempted: set[str] = set()

    def is_over() -> bool:
        preempted.update(r.request_id for r in pair.dst.core.scheduler.requests.values() if r.num_preemptions)
        return all(answer.is_done for answer in answers)

    drive([pair.src, pair.dst], is_over)
    assert preempted
    for answer, text in zip(answers, prompts, strict=True):
        pair.assert_right(answer, text, 150)
    pair.assert_whole()


def test_figures_find_their_way_through_another_process() -> None:
    """vLLM rebuilds them there by the connectors' names, which must be known to it."""
    data = {"KVFerryConnector": LoadStats().data, "OffloadingConnector": OffloadingConnectorStats().data}
    rebuilt = MultiConnector.build_kv_connector_stats(data)
    assert isinstance(rebuilt, MultiKVConnectorStats)
    assert isinstance(rebuilt["KVFerryConnector"], LoadStats)
    assert isinstance(rebuilt["OffloadingConnector"], OffloadingConnectorStats)
