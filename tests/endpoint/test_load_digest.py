"""Digests of loads, between two engines of this process: asked under the lease, compared before it counts."""

import logging
import time
from dataclasses import replace

import numpy as np
import pytest

from kvferry import Span, SpecError, plan
from kvferry.core.digest import digest_parts
from kvferry.core.sample import sample_request
from kvferry.endpoint import Destination, SourceEngine, SourceRank, load_digest
from kvferry.endpoint import load_digest as digest_memory
from kvferry.endpoint.edges import WorkerThreads
from kvferry.endpoint.load_digest import (
    LoadDigest,
    NotWanted,
    answer_digest,
    check_digest_every,
    default_digest_every,
)
from kvferry.endpoint.logs import LoadLog
from kvferry.errors import TransportError
from kvferry.models import Topology, describe
from kvferry.pattern import fill_rank
from kvferry.runtime import FailureCode
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport, placed
from kvferry.wire.messages import DigestTask
from kvferry.wire.outline import join_of
from kvferry.wire.rank_asks import question_to_msgpack
from kvferry.wire.ticket import TableDoc
from tests.endpoint.conftest import IDENTITY
from tests.support.faults import Faults, FaultyHub


def fetched(pair, **kwargs):
    handle = pair.fetch(**kwargs)
    return pair.reports()[handle]


def waited_for(poll, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (found := poll()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


def spoiling_hub():
    """A fabric that spoils one bit of each run, and says nothing."""
    faults = Faults()
    faults.spoil()
    return FaultyHub(faults)


def test_equal_digests_are_told(pair_of, caplog):
    pair = pair_of(digest_every=1)
    with caplog.at_level(logging.INFO, "kvferry"):
        report = fetched(pair)
    assert (report.failure, report.record.digest) == (None, "equal")
    assert 0 < report.record.digest_seconds < report.record.total_seconds
    assert pair.check()[1] == 0
    assert any(", digest equal;" in record.message for record in caplog.records)


def test_a_silent_fault_fails_the_load_and_names_its_place(pair_of):
    """Law 5, RB-1: the fabric said that all went well."""
    report = fetched(pair_of(hub=spoiling_hub(), digest_every=1))
    assert report.failure.code is FailureCode.DIGEST_DIFFERS
    assert "layers.0.attn/" in report.failure.detail
    assert "tokens [0, 20)" in report.failure.detail
    assert "rank 0 of prefill" in report.failure.detail
    assert (report.record.digest, report.record.outcome) == ("differs", "digest-differs")


def test_without_a_digest_the_same_fault_is_not_seen(pair_of):
    pair = pair_of(hub=spoiling_hub())
    report = fetched(pair)
    assert (report.failure, report.record.digest) == (None, "")
    assert pair.check()[1] > 0


def test_one_of_so_many_loads_is_checked(pair_of):
    pair = pair_of(digest_every=3)
    assert [fetched(pair).record.digest for _ in range(6)] == ["", "", "equal", "", "", "equal"]


def test_a_failed_check_frees_the_source_blocks(pair_of):
    pair = pair_of(hub=spoiling_hub(), digest_every=1)
    fetched(pair)
    released = waited_for(pair.engine.poll)
    assert [(one.request_id, one.reason) for one in released] == [("request-1", "failed")]  # and not expired


def test_a_rank_that_takes_no_digest_fails_the_load(engines):
    """Whoever asked for a check does not get an unchecked load for a good one."""
    hub = Hub()
    transport = MemoryTransport(hub)
    transport.register(engines.src.rank(0).regions)
    engine = SourceEngine("prefill", 1)
    engine.admit(join_of(engines.src, transport.kind, transport.card()))
    destination = Destination(engines.dst, 0, MemoryTransport(hub), digest_every=1)
    ticket = engine.offer("request", engines.request.src, 20)
    destination.fetch(ticket, engines.request.dst, engines.request.need)
    reports = waited_for(destination.poll)
    assert reports[0].failure is not None
    assert reports[0].failure.code is FailureCode.NO_DIGEST
    assert "rank 0 of prefill returned no digest: the rank has joined" in reports[0].failure.detail
    assert reports[0].record.digest == "missing"
    for each in (destination, engine):
        each.close()


def test_memory_that_nobody_here_reaches_is_refused_by_name(engines, monkeypatch):
    def no_device(index):
        raise TransportError("no-cuda", "none here")

    (rank,) = engines.dst.ranks
    regions = tuple(replace(region, device="cuda:0") for region in rank.regions)
    manifest = replace(engines.dst, ranks=(replace(rank, regions=regions),))
    monkeypatch.setattr(digest_memory, "digest_kernel", no_device)
    with pytest.raises(SpecError, match=r"region .* on cuda:0 cannot be digested: no-cuda: none here"):
        Destination(manifest, 0, MemoryTransport(Hub()), digest_every=1)
    assert (default_digest_every(rank), default_digest_every(manifest.ranks[0])) == (100, 0)
    answer = answer_digest(manifest, 0, DigestTask(7, 3, {}, question_to_msgpack(0, [])), lambda: True)
    assert "on cuda:0 cannot be digested" in answer.detail
    other = replace(manifest.ranks[0], regions=tuple(replace(r, device="hpu:0") for r in regions))
    with pytest.raises(SpecError, match=r"memory on hpu:0 .* cannot be digested"):
        check_digest_every(1, other)
    assert answer_digest(engines.dst, 0, DigestTask(7, 3, {}, b"junk"), lambda: True).detail
    with pytest.raises(SpecError, match="digest_every must be an integer"):
        Destination(engines.dst, 0, MemoryTransport(Hub()), digest_every=-1)


def with_memory(manifest):
    """Memory for every rank of an engine, and its manifest with the addresses of that."""
    memory = [{r.name: np.zeros(r.num_bytes, np.uint8) for r in rank.regions} for rank in manifest.ranks]
    ranks = [replace(rank, regions=placed(rank, of)) for rank, of in zip(manifest.ranks, memory, strict=True)]
    return replace(manifest, ranks=tuple(ranks), identity=IDENTITY), memory


@pytest.mark.parametrize("family", ["gqa", "kda-mla", "window", "mla-indexer"])
@pytest.mark.parametrize("spoils", [False, True])
def test_several_source_ranks_are_asked_whatever_they_hold(family, spoils):
    """Heads over two ranks to one, MLA from either, states in slots, windows; other blocks and layouts."""
    src, src_memory = with_memory(
        describe(small(family), Topology.parse("tp=2,block=8,blocks=20"), "prefill")
    )
    dst, _ = with_memory(describe(small(family), Topology.parse("tp=1,block=12,blocks=20"), "decode"))
    request, hub = sample_request(src, dst, 50), spoiling_hub() if spoils else Hub()
    tokens = {group.name: (Span(0, 50),) for group in src.groups}
    for number, memory in enumerate(src_memory):
        fill_rank(memory, src, number, request.src, tokens)
    engine = SourceEngine("prefill", 2)
    ranks = [
        SourceRank(engine.invitation, replace(src, ranks=(one,)), MemoryTransport(hub)) for one in src.ranks
    ]
    destination = Destination(dst, 0, MemoryTransport(hub), digest_every=1)
    destination.fetch(engine.offer("request", request.src, 50), request.dst, request.need)
    reports = waited_for(destination.poll)
    destination.close()
    for rank in ranks:
        rank.close()
    engine.close()
    assert reports[0].record.num_sources == 2
    assert reports[0].record.digest == ("differs" if spoils else "equal")


def test_a_load_is_logged_before_its_blocks_can_be_used_again(pair_of, monkeypatch):
    pair, polled = pair_of(hub=spoiling_hub(), digest_every=1), []
    ended = LoadLog.ended

    def logged(log, now, report):
        polled.extend(pair.destination.poll())
        ended(log, now, report)

    monkeypatch.setattr(LoadLog, "ended", logged)
    assert fetched(pair).failure is not None
    assert polled == []


def test_a_digest_that_nobody_wants_any_more_is_not_taken(engines):
    parts = digest_parts(plan(engines.src, engines.dst, 0), engines.request)[0]
    with pytest.raises(NotWanted):
        LoadDigest(engines.src, 0, "src", lambda: False).sums(engines.request.src, parts, 7)


def asked(manifest, tables, parts):
    """What a rank answers, and in how many seconds."""
    task = DigestTask(7, 3, tables, question_to_msgpack(0, parts))
    started = time.monotonic()
    answer = answer_digest(manifest, 0, task, lambda: True)
    return answer.detail, time.monotonic() - started


def test_a_question_asks_for_no_more_than_the_blocks_of_its_ticket(engines):
    """625 KiB of it once kept a rank busy for 30 s, beyond the end of the lease."""
    request = engines.request
    parts = digest_parts(plan(engines.src, engines.dst, 0), request)[0]
    tables = {
        name: TableDoc(tuple(map(int, table.block_ids)), table.first_token)
        for name, table in request.src.items()
    }
    assert "bytes requested" not in asked(engines.src, tables, parts)[0]
    detail, seconds = asked(engines.src, tables, list(parts) * 1000)
    assert "bytes requested, the ticket's blocks on this rank have" in detail
    assert seconds < 5
    far = [replace(part, cells=(Span(0, 1 << 39),)) for part in parts]
    assert "bytes requested" in asked(engines.src, tables, far)[0]


class OneAtATime(WorkerThreads):
    """Workers that do a job when told to."""

    def __init__(self):
        self.jobs = []

    def submit(self, key, job):
        self.jobs.append(job)

    def close(self, seconds):
        return True


def test_tickets_take_turns_and_a_released_one_is_not_digested(engines, monkeypatch):
    taken, workers = [], OneAtATime()
    monkeypatch.setattr(
        load_digest,
        "answer_digest",
        lambda _, rank, task, is_wanted: taken.append((task.number, is_wanted())),
    )
    service = load_digest.DigestService(engines.src, 0, workers, lambda result: None)
    for number, ticket_id in ((1, 7), (2, 7), (3, 7), (4, 8), (5, 9), (1, 7)):
        service.take(DigestTask(1, number, {}, b"", ticket_id))
    service.release(9)
    for job in workers.jobs:
        job()
    assert taken == [(1, True), (4, True), (2, True), (3, True)]


def test_a_digest_stops_when_its_ticket_is_released(engines, monkeypatch):
    workers, wanted = OneAtATime(), []

    def answer(_, rank, task, is_wanted):
        wanted.append(is_wanted())
        service.release(task.ticket_id)
        wanted.append(is_wanted())

    monkeypatch.setattr(load_digest, "answer_digest", answer)
    service = load_digest.DigestService(engines.src, 0, workers, lambda result: None)
    service.take(DigestTask(1, 1, {}, b"", 7))
    workers.jobs[0]()
    assert wanted == [True, False]
