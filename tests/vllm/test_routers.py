"""The requests of other projects' routers, as their sources have them; and the name that Dynamo wants."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from kvferry.integrations.vllm import KVFerryConnector
from tests.vllm.conftest import Docks
from tests.vllm.engine import NUM_TOKENS, Answer, Engine, Setup
from tests.vllm.pairs import FAMILIES, LEASE_SECONDS, Pair, assert_whole
from tests.vllm.routers import DYNAMO_NAMES, FLOWS, Body, Flow

Prompt = Callable[[int], list[int]]
AS_NIXL = ("NixlConnector", "kvferry.integrations.vllm.as_nixl")
CONV_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


@pytest.fixture
def _conv_layout() -> Iterator[None]:
    """vLLM sets it for a connector of this name, and leaves it set."""
    before = os.environ.pop(CONV_LAYOUT, None)
    yield
    os.environ.pop(CONV_LAYOUT, None)
    if before is not None:
        os.environ[CONV_LAYOUT] = before


def post(engine: Engine, body: Body, request_id: str) -> Answer:
    """What vLLM's OpenAI server makes of a body."""
    request = CompletionRequest(**json.loads(json.dumps(body)))
    sampling = request.to_sampling_params(request.max_tokens, {})
    return engine.submit(request.prompt, sampling, f"cmpl-{request_id}-0")


def route(pair: Pair, flow: Flow, text: list[int]) -> tuple[Answer, Answer]:
    """The two requests of a router, and their answers."""
    body: dict[str, Any] = {
        "prompt": text,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prefilled = post(pair.src, flow.to_prefill(body), "7c2")
    pair.drive(prefilled)
    decoded = post(pair.dst, flow.to_decode(body, prefilled.params), "7c2")
    pair.drive(decoded)
    return prefilled, decoded


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_router_works_unchanged(docks: Docks, prompt: Prompt, flow: Flow, family: str) -> None:
    """Exact tokens; the prompt is loaded, not computed, and the prefill engine's blocks are free at once."""
    pair = Pair(docks.shared("src", FAMILIES[family]), docks.shared("dst", FAMILIES[family]))
    for length in (5, 64, 300):
        text = prompt(length)
        prefilled, decoded = route(pair, flow, text)
        assert len(prefilled.tokens) == 1
        pair.assert_right(decoded, text)
        if flow.decode_params is None:
            assert (prefilled.params, decoded.num_external) == (None, 0), "no router asked for a transfer"
        else:
            pair.assert_loaded(decoded, text)
        assert_whole(pair.src, pair.dst, seconds=LEASE_SECONDS / 2)


# -- the name NixlConnector ----------------------------------------------------------------------------------


def test_vllm_finds_our_class_by_the_other_name() -> None:
    connector, module = AS_NIXL
    config = KVTransferConfig(kv_connector=connector, kv_connector_module_path=module, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is KVFerryConnector
    assert KVConnectorFactory.supports_hma_config(config)
    assert KVFerryConnector.__name__ == "KVFerryConnector", "vLLM looks up statistics by this name"


@pytest.mark.usefixtures("_conv_layout")
@pytest.mark.parametrize("beside", ["", "before", "behind"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_engines_of_either_name_serve_each_other(
    docks: Docks, prompt: Prompt, family: str, beside: str
) -> None:
    """Dynamo takes the configuration, alone or in a MultiConnector; loads are in vLLM's metrics as ever."""
    renamed = replace(FAMILIES[family], name=AS_NIXL, beside=beside)
    transfer = renamed.config().kv_transfer_config
    children = transfer.kv_connector_extra_config.get("connectors", [])
    names = [child["kv_connector"] for child in children] or [transfer.kv_connector]
    assert sum(name in DYNAMO_NAMES for name in names) == 1
    pair = Pair(docks.shared("src", FAMILIES[family]), docks.own(renamed))
    dynamo = next(flow for flow in FLOWS if flow.name == "dynamo")
    text = prompt(300)
    pair.assert_loaded(route(pair, dynamo, text)[1], text)
    pair.assert_whole()
    totals = pair.dst.totals()
    assert totals["kvferry_loads_total"] == 1
    assert 299 <= totals["prompt_tokens_cached_by_source_total p2p"] <= 300


@pytest.mark.usefixtures("_conv_layout")
@pytest.mark.parametrize(("name", "layout"), [(Setup().name, ("SD", None)), (AS_NIXL, ("DS",))])
def test_the_name_makes_vllm_choose_another_layout_of_states(
    name: tuple[str, str], layout: tuple[str | None, ...]
) -> None:
    """On a CPU, of the states of convolutions; kvferry moves between both."""
    Setup(name=name).config()
    assert os.environ.get(CONV_LAYOUT) in layout


@pytest.mark.usefixtures("_conv_layout")
def test_states_in_the_layout_that_the_name_makes_vllm_choose(docks: Docks, prompt: Prompt) -> None:
    setup = replace(FAMILIES["nemotron_h"], name=AS_NIXL)
    pair = Pair(docks.own(setup), docks.own(setup))
    for length in (5, 64, 300):
        text = prompt(length)
        pair.assert_loaded(pair.ferry(text), text)
    pair.assert_whole()
