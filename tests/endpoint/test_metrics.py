"""What an operator sees of loads and leases: lines of the log, and metrics."""

import logging
import re
import time
from dataclasses import replace
from pathlib import Path

import metrics_page
import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvferry.endpoint import Claimant
from kvferry.endpoint.logs import LoadLog, log_line
from kvferry.endpoint.metric_table import (
    LOADED_EARLY_BYTES,
    METRICS,
    READ_BACK_TOKENS,
    READ_BACKS,
    UNCACHED_BLOCKS,
    MetricKind,
)
from kvferry.endpoint.metrics import EngineMetrics
from kvferry.runtime import Failure, FailureCode, Report, Timing
from kvferry.runtime.figures import Figures
from kvferry.runtime.values import Record
from kvferry.wire.secret import Trust
from tests.support.faults import Faults, FaultyHub

RECORD = Record(
    "request-1",
    "prefill",
    num_bytes=4096,
    num_runs=3,
    num_sources=2,
    move_seconds=0.25,
    confirm_seconds=0.01,
    total_seconds=0.3,
    way="direct",
    outcome="read",
    address="tcp://10.0.0.7:5555",
)
LOST = Failure(FailureCode.NO_ANSWER, "prefill was not met within 10 s")


@pytest.fixture
def registry():
    return CollectorRegistry()


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- the log ---------------------------------------------------------------------------------------


def test_the_line_of_a_good_load():
    assert log_line(Report(1, None, RECORD)) == (
        "load of request-1 from prefill at tcp://10.0.0.7:5555: 4,096 bytes in 3 runs from 2 ranks, direct,"
        " in 250.0 ms; 300.0 ms in all"
    )


def test_the_line_of_a_failed_load_says_first_that_it_failed():
    """It was "fetched request-1 from prefill: no-answer: …"."""
    unread = replace(RECORD, way="", num_bytes=0, num_runs=0, num_sources=0, outcome="no-answer")
    assert log_line(Report(1, LOST, unread)) == (
        "load of request-1 from prefill at tcp://10.0.0.7:5555 failed: no-answer: prefill was not met within"
        " 10 s; nothing was read; 300.0 ms in all"
    )
    one = replace(RECORD, num_bytes=1, num_runs=1, num_sources=1)
    assert "; 1 byte in 1 run from 1 rank, direct, in 250.0 ms, discarded;" in log_line(Report(1, LOST, one))


def test_what_the_engine_gave_up_is_no_failure(caplog):
    caplog.set_level(logging.DEBUG, "kvferry")
    given_up = replace(RECORD, way="", outcome="aborted")
    LoadLog().ended(0.0, Report(1, Failure(FailureCode.ABORTED), given_up))
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert " was aborted by this engine: aborted; nothing was read;" in record.getMessage()


def test_failures_are_warnings_and_do_not_fill_the_log(caplog):
    caplog.set_level(logging.DEBUG, "kvferry")
    lines = LoadLog()
    for _ in range(1000):
        lines.ended(0.0, Report(1, None, RECORD))
        lines.ended(0.0, Report(1, LOST, RECORD))
    lines.ended(9.0, Report(1, LOST, RECORD))
    levels = [record.levelno for record in caplog.records]
    assert [levels.count(level) for level in (logging.INFO, logging.DEBUG)] == [100, 900]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 102
    assert warnings[-1] == "kvferry: 900 more failed loads were not logged"
    assert all(message.startswith("kvferry: ") for message in caplog.messages)
    assert caplog.records[0].kvferry["way"] == "direct"


def test_every_line_comes_through_the_one_door():
    """So that each has the product's name: a logger of one's own would not have it."""
    folder = Path(__file__).parents[2] / "src" / "kvferry"
    known = {"log.py", "integrations/vllm/connector.py", "proxy/metrics.py"}
    own = {path for path in folder.rglob("*.py") if "getLogger(" in path.read_text(encoding="utf-8")}
    others = {str(path.relative_to(folder)) for path in own} - known
    assert others == set(), "write log = log_of(__name__) there (kvferry.log)"


def test_what_was_not_read_is_a_warning_of_the_source(pair_of, caplog):
    caplog.set_level(logging.INFO, "kvferry")
    pair = pair_of(source_timing=Timing(lease=0.2))
    until(lambda: pair.engine.is_whole)
    ticket = pair.offer()
    until(pair.engine.poll)
    assert (
        "kvferry: request-1 of prefill was not read: its lease expired: no reader acquired or renewed it in"
        " time"
    ) in caplog.messages
    handle = pair.fetch(ticket)
    assert pair.reports()[handle].failure.code is FailureCode.ENDED
    denied, *_ = (line for line in caplog.messages if " denied " in line)  # a slow machine asks again
    assert denied.startswith("kvferry: prefill denied a lease for its ticket 1: ended:")
    (failed,) = (line for line in caplog.messages if " failed: " in line)
    address = pair.engine.address
    assert failed.startswith(f"kvferry: load of request-1 from prefill at {address} failed: ended: ")


# -- metrics ---------------------------------------------------------------------------------------


def test_a_good_load_is_counted(registry):
    # RB-7
    EngineMetrics(registry).count(Report(1, None, RECORD))
    sample = registry.get_sample_value
    assert sample("kvferry_loads_total", {"outcome": "read", "way": "direct"}) == 1
    assert sample("kvferry_loaded_bytes_total") == 4096
    assert sample("kvferry_loaded_runs_total") == 3
    assert sample("kvferry_load_bytes_sum") == 4096
    assert sample("kvferry_load_runs_sum") == 3
    for part, seconds in (("move", 0.25), ("confirm", 0.01), ("total", 0.3)):
        assert sample("kvferry_load_seconds_sum", {"part": part}) == seconds


def test_a_failed_load_counts_no_bytes(registry):
    record = replace(RECORD, outcome="lease-ended", way="")
    EngineMetrics(registry).count(Report(1, Failure(FailureCode.LEASE_ENDED), record))
    assert registry.get_sample_value("kvferry_loads_total", {"outcome": "lease-ended", "way": "none"}) == 1
    assert registry.get_sample_value("kvferry_loaded_bytes_total") == 0


def test_gauges_of_several_ranks_add_up(registry):
    """The last one to speak was shown for all of them."""
    metrics = EngineMetrics(registry)
    quarantined, grants = ("kvferry_quarantined",), ("kvferry_grants",)
    figures: dict[str, Figures] = {"one": {quarantined: 2, grants: 5}, "two": {quarantined: 3}}
    metrics.watch("one", lambda: figures["one"])
    metrics.watch("two", lambda: figures["two"])
    assert registry.get_sample_value("kvferry_quarantined") == 5
    figures["one"] = {quarantined: 1, grants: 6}
    assert registry.get_sample_value("kvferry_quarantined") == 4
    metrics.forget("one")
    assert registry.get_sample_value("kvferry_quarantined") == 3
    assert registry.get_sample_value("kvferry_grants_total") == 6


class Watched:
    """A pair of engines whose metrics are looked at after each thing that can happen to them."""

    def __init__(self, pair_of, registry):
        self.registry, self.faults = registry, Faults()
        self.metrics = EngineMetrics(registry)
        self.timing = Timing(lease=3.0, retry=0.02, read=0.3)
        self.pair = pair_of(
            hub=FaultyHub(self.faults),
            timing=self.timing,
            source_timing=self.timing,
            metrics=self.metrics,
            source_metrics=self.metrics,
            digest_every=1,
        )
        until(lambda: self.pair.engine.is_whole)

    def alive(self):
        """The metrics that were seen with another value than 0, with the values of their labels."""
        return {
            sample.name: sample.labels
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.value and not sample.name.endswith("_created")
        }


def say_nonsense(address):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(address)
        stranger.send(b"nonsense")
        stranger.setsockopt(zmq.LINGER, 5000)


def exposed(metric):
    return f"{metric.name}_count" if metric.kind is MetricKind.HISTOGRAM else metric.exposed


def test_every_metric_of_the_table_is_alive_in_a_real_run(pair_of, registry):
    """One that nothing ever moves would be a promise that nobody keeps."""
    world = Watched(pair_of, registry)
    pair, seen = world.pair, set()

    def do_until(act, *names):
        """Do something, again and again if the machine was too slow for it, until metrics have moved."""
        wanted, times = {exposed(METRICS[f"kvferry_{name}"]) for name in names}, [0.0]

        def are_seen():
            if time.monotonic() > times[-1] + 3:
                times.append(time.monotonic())
                act()
            seen.update(world.alive())
            return wanted <= seen

        until(are_seen, 60)

    do_until(pair.fetch, "loads", "load_bytes", "grants", "offers", "leases_ended", "peers", "load_seconds")
    do_until(pair.fetch, "load_digests")
    num_blocks, num_granted = pair.src.groups[0].num_blocks, len(pair.request.src["full"].block_ids)
    pool_bytes = sum(region.num_bytes for region in pair.src.ranks[0].regions)
    granted = registry.get_sample_value("kvferry_granted_bytes_total")
    assert granted % (pool_bytes * num_granted / num_blocks) == 0
    names = ("renewals", "leases", "pinned_bytes", "loads_under_way")
    do_until(lambda: pair.destination.hold(pair.offer()), *names)
    spent = pair.offer()
    pair.engine.withdraw(spent.request_id)
    do_until(lambda: pair.fetch(spent), "denials")
    elsewhere = msgspec.structs.replace(spent, host="another host")
    do_until(lambda: pair.fetch(elsewhere), "rejected_tickets")
    do_until(lambda: say_nonsense(pair.engine.address), "refused_messages")
    soft = pair.engine.offer_soft("an earlier turn", 64, bytes(16))
    claimant = Claimant("claimant", trust=Trust())
    do_until(lambda: claimant.claim(soft, 64), "soft_offers", "claims")
    claimant.close()
    world.faults.stall()
    do_until(pair.fetch, "reads_in_flight", "quarantined")
    world.faults.calm()
    pair.rank.close()  # so that nobody confirms what is released
    do_until(lambda: pair.engine.withdraw(pair.offer().request_id), "unheard_releases")
    pair.engine.close()
    do_until(lambda: pair.fetch(spent), "retries")
    in_vllm = UNCACHED_BLOCKS, READ_BACKS, READ_BACK_TOKENS
    tested_elsewhere = {exposed(each) for each in (*in_vllm, LOADED_EARLY_BYTES)}
    assert {exposed(metric) for metric in METRICS.values()} - seen == tested_elsewhere


def test_the_page_for_people_is_what_the_table_says():
    assert metrics_page.PAGE.read_text(encoding="utf-8") == metrics_page.page(), (
        "run python tools/metrics_page.py, and commit docs/metrics.md"
    )


def test_no_metric_has_a_name_that_prometheus_would_change():
    for metric in METRICS.values():
        assert metric.name.startswith("kvferry_")
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created"))
        assert not metric.help.endswith(".")


def test_machines_count_by_names_that_the_table_has():
    folder = Path(__file__).parents[2] / "src" / "kvferry" / "runtime"
    named = {
        name for path in folder.glob("*.py") for name in re.findall(r'"(kvferry_\w+)"', path.read_text())
    }
    assert len(named) == 16
    assert named <= METRICS.keys()
