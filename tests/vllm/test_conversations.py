"""Every answer of both engines is right, whatever was loaded, aborted, preempted or failed before.

``KVFERRY_STEPS`` says how many turns each pair gets; ``-s`` prints what a run came to.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvferry.endpoint.metric_table import UNCACHED_BLOCKS
from tests.vllm.conftest import Docks
from tests.vllm.conversations import Conversations
from tests.vllm.engine import Setup
from tests.vllm.pairs import assert_whole

STEPS = int(os.environ.get("KVFERRY_STEPS", "25"))
SEED = int(os.environ.get("KVFERRY_SEED", "0"))


def _pair(family: str, src: dict, dst: dict) -> tuple[Setup, Setup]:
    setup = Setup(family, longest=512, blocks=200)
    return replace(setup, **src), replace(setup, **dst)


PAIRS = {
    "gemma3, 32-64": _pair("gemma3", {}, {"block": 64, "policy": "recompute"}),
    "gemma3, 64-32, little room": _pair("gemma3", {"block": 64}, {"blocks": 48, "chunk": 128}),
    "gpt_oss, 64-32, tp 1-2": _pair("gpt_oss", {"block": 64}, {"tp": 2, "policy": "recompute"}),
    "gpt_oss, 96-64, chunked prefill": _pair(
        "gpt_oss", {"block": 96, "chunk": 100}, {"block": 64, "chunk": 64}
    ),
    "mistral, 32-96, one cache": _pair("mistral", {"prefix_caching": False}, {"block": 96, "blocks": 20}),
    "llama4, 32-96": _pair("llama4", {}, {"block": 96, "policy": "recompute"}),
    "llama, 96-64, little room": _pair("llama", {"block": 96}, {"block": 64, "blocks": 11}),
    "deepseek_v3, tp 1-2, little room": _pair(
        "deepseek_v3", {"block": None}, {"block": None, "blocks": 70, "tp": 2}
    ),
    "nemotron_h": _pair("nemotron_h", {"block": None}, {"block": None, "blocks": 30}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_conversations(docks: Docks, name: str):
    engines = [docks.own(setup) for setup in PAIRS[name]]
    outcome = Conversations(engines, SEED).run(STEPS)
    kept_out = [e.core.scheduler.connector._side.incoming.figures[(UNCACHED_BLOCKS.name,)] for e in engines]
    print(f"\n{name}: {dict(outcome.counts)}, kept out {kept_out}, hit rate {outcome.hit_rate:.3f}")
    assert outcome.wrong == []
    assert outcome.counts["answers"] >= STEPS / 2
    assert_whole(*engines)
