"""What vLLM shows of loads: its periodic log line, and its metrics."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

pytest.importorskip("vllm", reason="needs vLLM")

from kvferry.endpoint.metric_table import LEASES, LEASES_ENDED, METRICS, OFFERS, QUARANTINED, Changes
from kvferry.integrations.vllm.shared.stats import LoadMetrics, LoadStats
from kvferry.runtime.values import Record

GOOD = Record(
    "r1",
    "prefill",
    num_bytes=4_000_000,
    num_runs=30,
    num_sources=1,
    move_seconds=0.004,
    total_seconds=0.006,
    way="direct",
    outcome="read",
)
FAILED = replace(GOOD, outcome="lease-ended", move_seconds=9.0)


def metrics_in(registry):
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return LoadMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {0: ["0"]})


def test_the_periodic_line_has_what_a_person_wants_to_see():
    stats, other = LoadStats(), LoadStats()
    stats.add(GOOD)
    other.add(replace(GOOD, move_seconds=0.002, total_seconds=0.004))
    other.add(FAILED)
    assert stats.aggregate(other).reduce() == {
        "loads": 2,
        "failed loads": 1,
        "MB": 8.0,
        "runs": 60,
        "median ms": 5.0,
        "GB/s": 1.333,
    }


def test_an_interval_without_a_good_load_has_no_times():
    stats = LoadStats()
    assert stats.is_empty()
    stats.add(FAILED)
    stats.add(FAILED)
    shown = stats.reduce()
    assert (shown["loads"], shown["failed loads"], shown["median ms"], shown["GB/s"]) == (0, 2, 0.0, 0.0)


def test_the_metrics_say_where_the_time_of_loads_went():
    registry = CollectorRegistry()
    metrics = metrics_in(registry)
    stats = LoadStats()
    for record in (GOOD, FAILED, GOOD):
        stats.add(record)
    metrics.observe(stats.data)

    def sample(name, **labels):
        return registry.get_sample_value(f"vllm:kvferry_{name}", {"engine": "0", **labels})

    assert sample("loads_total", outcome="read", way="direct") == 2
    assert sample("loads_total", outcome="lease-ended", way="direct") == 1
    assert sample("load_bytes_sum") == 8_000_000
    assert (sample("load_seconds_count", part="move"), sample("load_seconds_sum", part="move")) == (3, 9.008)


def test_changes_of_all_processes_add_up_and_survive_the_way_to_the_front_end():
    """A producer's scheduler and the workers count for themselves; only changes travel."""
    registry = CollectorRegistry()
    metrics = metrics_in(registry)
    scheduler, worker, changes = LoadStats(), LoadStats(), Changes()
    ended = {(LEASES_ENDED.name, "expired"): 1, (OFFERS.name,): 5, (LEASES.name, "offered"): 4}
    scheduler.change(changes.since(ended))
    worker.change(Changes().since({(QUARANTINED.name,): 1}))
    worker.aggregate(scheduler)
    worker.aggregate(scheduler)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(worker.to_dict()))
    metrics.observe(sent)
    later = LoadStats()
    later.change(changes.since({**ended, (LEASES.name, "offered"): 1}))
    metrics.observe(later.data)

    def sample(name, **labels):
        return registry.get_sample_value(f"vllm:kvferry_{name}", {"engine": "0", **labels})

    assert sample("leases_ended_total", reason="expired") == 2
    assert sample("offers_total") == 10
    assert sample("leases", state="offered") == 5
    assert sample("quarantined") == 1
    assert LoadStats(sent).reduce() == {"offered": 10, "read": 0, "not read": 2, "denied": 0}
    assert LoadStats().is_empty()


def test_every_metric_of_the_table_is_there():
    registry = CollectorRegistry()
    metrics_in(registry)
    names = {metric.name for metric in registry.collect()}
    assert names == {f"vllm:{name}" for name in METRICS}
