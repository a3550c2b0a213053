"""Ours and another connector inside vLLM's MultiConnector, in vLLM's own engine core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)

import kvferry.integrations.vllm  # noqa: F401
from kvferry.integrations.vllm.shared.stats import LoadStats
from tests.vllm.conftest import Docks
from tests.vllm.offloader import Offloader
from tests.vllm.pairs import FAMILIES, Pair, assert_whole

Prompt = Callable[[int], list[int]]


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_connector_may_save_beside_ours(
    docks: Docks, prompt: Prompt, family: str, place: str
) -> None:
    """Tokens are right, and the blocks are back once both connectors are through with them."""
    setup = replace(FAMILIES[family], beside=place)
    pair = Pair(docks.own(setup), docks.own(setup))
    assert all(isinstance(worker.connector, MultiConnector) for worker in pair.dst.workers)
    num_saved = Offloader.num_saved
    for num_tokens in (5, 64, 300):
        text = prompt(num_tokens)
        answer = pair.ferry(text)
        assert answer.tokens == pair.dst.right(text)
        assert answer.num_external > 0
    assert_whole(pair.src, pair.dst)
    assert Offloader.num_saved - num_saved == 6, "each request of either engine"


def test_figures_find_their_way_through_another_process() -> None:
    """vLLM rebuilds them there by the connector's name, which must be known to it."""
    rebuilt = MultiConnector.build_kv_connector_stats({"KVFerryConnector": LoadStats().data})
    assert isinstance(rebuilt, MultiKVConnectorStats)
    assert isinstance(rebuilt["KVFerryConnector"], LoadStats)
