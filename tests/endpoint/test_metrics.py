"""What an operator sees of fetches."""

import logging
from dataclasses import replace

from prometheus_client import CollectorRegistry

from kvferry.endpoint.metrics import FetchMetrics, account
from kvferry.runtime import Failure, FailureCode, Report
from kvferry.runtime.values import Record

RECORD = Record(
    "request-1",
    "prefill",
    num_bytes=4096,
    num_runs=3,
    num_sources=2,
    move_seconds=0.25,
    predicted_seconds=0.2,
    total_seconds=0.3,
    outcome="read",
)


def test_a_good_fetch_is_counted(caplog):
    # RB-7
    registry = CollectorRegistry()
    with caplog.at_level(logging.INFO, "kvferry"):
        account(Report(1, None, RECORD), FetchMetrics(registry))
    assert registry.get_sample_value("kvferry_fetches_total", {"outcome": "read"}) == 1
    assert registry.get_sample_value("kvferry_fetched_bytes_total") == 4096
    assert registry.get_sample_value("kvferry_fetched_runs_total") == 3
    assert registry.get_sample_value("kvferry_fetch_seconds_sum", {"part": "move"}) == 0.25
    assert registry.get_sample_value("kvferry_fetch_seconds_sum", {"part": "predicted"}) == 0.2
    assert registry.get_sample_value("kvferry_fetch_move_ratio_sum") == 1.25
    (line,) = caplog.messages
    assert line.endswith("; moved in 250.0 ms, predicted 200.0; 300.0 ms in all")
    assert line.startswith("fetched request-1 from prefill: read; 4096 bytes in 3 runs from 2 ranks; ")


def test_what_was_not_predicted_is_not_compared(caplog):
    registry = CollectorRegistry()
    with caplog.at_level(logging.INFO, "kvferry"):
        account(Report(1, None, replace(RECORD, predicted_seconds=0.0)), FetchMetrics(registry))
    assert registry.get_sample_value("kvferry_fetch_move_ratio_count") == 0
    assert "predicted" not in caplog.text


def test_a_failed_fetch_counts_no_bytes(caplog):
    registry = CollectorRegistry()
    with caplog.at_level(logging.WARNING, "kvferry"):
        record = replace(RECORD, outcome="lease-ended", detail="the source did not renew it")
        failure = Failure(FailureCode.LEASE_ENDED, "the source did not renew it")
        account(Report(1, failure, record), FetchMetrics(registry))
    assert registry.get_sample_value("kvferry_fetches_total", {"outcome": "lease-ended"}) == 1
    assert registry.get_sample_value("kvferry_fetched_bytes_total") == 0
    assert registry.get_sample_value("kvferry_fetch_move_ratio_count") == 0
    (line,) = caplog.messages
    assert line.startswith("fetched request-1 from prefill: lease-ended: the source did not renew it; 4096 ")
