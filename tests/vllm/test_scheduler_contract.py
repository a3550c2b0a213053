"""What the connector takes for granted of vLLM: what it compares at start, and what only tests look at."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.request import Request, RequestStatus

from kvferry.errors import SpecError
from kvferry.integrations.vllm import KVFerryConnector
from kvferry.integrations.vllm.contract import LOADED_GROUPS, check_contract
from tests.vllm.conftest import Docks
from tests.vllm.pairs import FAMILIES

STATUSES = (
    "WAITING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_REMOTE_KVS WAITING_FOR_STREAMING_REQ RUNNING"
    " PREEMPTED FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED FINISHED_IGNORED FINISHED_ERROR"
    " FINISHED_REPETITION"
)
REQUEST = (
    "request_id prompt_token_ids _all_token_ids num_prompt_tokens num_computed_tokens max_tokens status"
    " kv_transfer_params mm_features lora_request prompt_embeds cache_salt num_preemptions"
)


BASES = (KVConnectorBase_V1, SupportsHMA)


def check() -> None:
    check_contract(vllm.__version__, KVFerryConnector, BASES, must_be_tested=False)


def test_this_vllm_is_what_the_connector_expects(caplog: pytest.LogCaptureFixture):
    logging.getLogger("kvferry").propagate = True
    check()
    assert not caplog.records, "a tested version has nothing new"


def test_a_renamed_hook_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KVConnectorBase_V1, "begin_load_kv", KVConnectorBase_V1.start_load_kv, raising=False)
    monkeypatch.delattr(KVConnectorBase_V1, "start_load_kv")
    with pytest.raises(SpecError, match="the hook start_load_kv is missing"):
        check()


def test_another_parameter_is_refused_by_name(docks: Docks, monkeypatch: pytest.MonkeyPatch):
    def with_more(self: Any, request: Any, num_computed_tokens: int, deadline: float) -> None: ...

    monkeypatch.setattr(KVConnectorBase_V1, "get_num_new_matched_tokens", with_more)
    expected = r"get_num_new_matched_tokens takes \(self, request, num_computed_tokens, deadline\), expected"
    with pytest.raises(SpecError, match=expected):
        docks.own(FAMILIES["llama"])


def test_a_missing_field_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(interface.KVCacheConfig, "transfer_group_ids")
    with pytest.raises(SpecError, match="KVCacheConfig has no transfer_group_ids"):
        check()


def test_a_new_hook_is_named_in_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    logging.getLogger("kvferry").propagate = True
    monkeypatch.setattr(KVConnectorBase_V1, "prefetch_kv", lambda self: None, raising=False)
    check()
    assert "hooks that kvferry does not know: prefetch_kv" in caplog.text


def test_windows_are_refused_where_vllm_does_not_ask_what_is_loaded(
    docks: Docks, monkeypatch: pytest.MonkeyPatch
):
    """As in 0.31."""
    monkeypatch.delattr(KVConnectorBase_V1, LOADED_GROUPS, raising=False)
    with pytest.raises(SpecError, match="or newer for this model"):
        docks.own(FAMILIES["gemma3"])
    docks.own(FAMILIES["llama"])


def test_the_cache_configuration_says_what_is_transferred():
    for name in ("transfer_group_ids", "has_mamba_layers", "needs_kv_cache_zeroing"):
        assert hasattr(interface.KVCacheConfig, name), name


def test_statuses():
    assert " ".join(status.name for status in RequestStatus) == STATUSES


def test_a_request_has(docks: Docks):
    engine = docks.shared("src", FAMILIES["llama"])
    asked = engine.ask([1, 2, 3])
    request: Request = engine.core.scheduler.requests[asked.request_id]
    assert [name for name in REQUEST.split() if not hasattr(request, name)] == []
    engine.finish(asked)


# -- what kills an engine core: the bed must die of it too, or its tests mean nothing


@pytest.mark.parametrize(
    ("results", "error"),
    [
        ({"finished_recving": {"nobody"}}, AssertionError),
        ({"finished_sending": {"nobody"}}, AssertionError),
        ({"finished_recving": {"running"}}, AssertionError),
        ({"finished_sending": {"running"}}, AssertionError),
    ],
    ids=str,
)
def test_a_report_that_kills_the_core(docks: Docks, results: dict[str, set[str]], error: type[Exception]):
    engine = docks.own(FAMILIES["llama"])
    engine.ask([1, 2, 3], 50, request_id="running")
    engine.step()
    worker = engine.workers[0].connector
    with (
        patch.object(worker, "get_transfer_results", return_value=KVConnectorTransferResults(**results)),
        pytest.raises(error),
    ):
        engine.step()


def test_a_report_of_blocks_kills_a_core_with_several_groups(docks: Docks):
    engine = docks.own(FAMILIES["gemma3"])
    engine.ask([1, 2, 3], 50)
    engine.step()
    worker = engine.workers[0].connector
    with (
        patch.object(worker, "get_block_ids_with_load_errors", return_value={1}),
        pytest.raises(RuntimeError),
    ):
        engine.step()
