"""What ``offload`` cases call wrong, without engines."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import offloads
from tests.gpu.cases import OffloadCase, Order, all_cases
from tests.gpu.offloads import HOST, PEER, Trial
from tests.gpu.pairs import Wrong

USED = {
    "vllm:kv_offload_store_bytes": {"": 9},
    "vllm:kv_offload_load_bytes": {"": 9},
    "vllm:kvferry_load_digests": {"equal": 20},
    "vllm:prompt_tokens_cached_by_source": {HOST: 9, PEER: 9},
}


def trial_of(totals: dict[str, dict[str, int]]) -> Trial:
    engine: Any = SimpleNamespace(totals=lambda name, label="": totals[name])
    nobody: Any = None
    return Trial(engine, engine, nobody, {})


@pytest.mark.parametrize(
    ("counted", "why"),
    [
        ({}, ""),
        ({"vllm:kv_offload_store_bytes": {}}, "stored_bytes"),
        ({"vllm:kv_offload_load_bytes": {"": 0}}, "not used: loaded_bytes of"),
        ({"vllm:kvferry_load_digests": {"equal": 20, "differs": 1}}, "differs"),
        ({"vllm:kvferry_load_digests": {}}, "digests"),
    ],
)
def test_a_tier_that_was_not_used_is_a_failure(counted, why):
    with pytest.raises(Wrong, match=why) if why else nullcontext():
        offloads._check_counters(trial_of({**USED, **counted}))


@pytest.mark.parametrize(
    ("tiers", "is_right"),
    [({HOST: 64, PEER: 0}, True), ({HOST: 32, PEER: 0}, False), ({HOST: 64, PEER: 1}, False)],
)
def test_a_prompt_must_come_from_where_it_is_expected(monkeypatch, tiers, is_right):
    monkeypatch.setattr(Trial, "ask", lambda self, prompt, is_loaded: (None, tiers))
    with nullcontext() if is_right else pytest.raises(Wrong, match="came from host"):
        offloads._must_come(trial_of(USED), (1,) * 100, HOST, is_loaded=False)


def test_each_engine_runs_in_both_orders():
    cases = [case for case in all_cases() if isinstance(case, OffloadCase)]
    assert {case.family for case in cases} == set(offloads.POOL_TOKENS)
    by_order = [[(c.family, c.setting) for c in cases if c.order is order] for order in Order]
    assert by_order[0] == by_order[1]
    first, second = (offloads._connectors(o, {})["kv_connector_extra_config"]["connectors"] for o in Order)
    assert [one["kv_connector"] for one in first] == ["KVFerryConnector", "OffloadingConnector"]
    assert second == first[::-1]
