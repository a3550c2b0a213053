"""The source side of the API, without a reader."""

import time
from dataclasses import replace

import msgspec
import pytest

from kvferry import BlockTable, SpecError
from kvferry.endpoint import SourceEngine
from kvferry.models import Topology, describe
from kvferry.runtime import Authority, FailureCode, Released, Timing
from kvferry.testing.small import small
from kvferry.wire.outline import join_of as join_of_manifest


def test_an_address_that_nobody_could_call_is_refused():
    with pytest.raises(SpecError, match="advertise"):
        SourceEngine("prefill", 1, listen="tcp://0.0.0.0:*")


def test_tickets_carry_the_advertised_host():
    engine = SourceEngine("prefill", 1, listen="tcp://127.0.0.1:*", advertise="localhost")
    try:
        assert engine.address.startswith("tcp://localhost:")
    finally:
        engine.close()


def test_an_address_is_written_plainly():
    engine = SourceEngine("prefill", 1)
    try:
        assert engine.address.startswith("tcp://127.0.0.1:")
    finally:
        engine.close()


@pytest.fixture
def engine():
    engine = SourceEngine("prefill", 1, timing=Timing(meet=1.0, retry=0.05))
    yield engine
    engine.close()


TABLES = {"full": BlockTable.of([1, 2])}


def until(is_so, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (so := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return so


def test_an_offer_is_pinned_at_once_and_until_the_engine_has_heard_of_its_end(engine):
    """vLLM asks how many requests are pinned in the same breath, and must go on polling until none is."""
    engine.offer("a", TABLES, 20)
    assert engine.num_leases == 1
    with pytest.raises(SpecError, match="already"):
        engine.offer("a", TABLES, 20)
    engine.withdraw("a")
    assert until(engine.poll) == [Released("a", "withdrawn")]
    assert engine.num_leases == 0
    engine.offer("a", TABLES, 20)


def test_an_engine_takes_its_own_tickets_back_and_no_others(engine):
    ticket = engine.offer("a", TABLES, 20)
    assert not engine.take_back(msgspec.structs.replace(ticket, num_tokens=21))
    assert engine.take_back(ticket)
    assert until(engine.poll) == [Released("a", "withdrawn")]


def test_an_old_ticket_that_comes_back_ends_no_later_offer_of_its_request(engine):
    """Clients may name requests, and send their tickets again."""
    old = engine.offer("a", TABLES, 20)
    engine.withdraw("a")
    assert until(engine.poll) == [Released("a", "withdrawn")]
    engine.offer("a", TABLES, 20)
    assert engine.take_back(old), "it is one of its own"
    engine.offer("b", TABLES, 20)
    engine.withdraw("b")
    assert until(engine.poll) == [Released("b", "withdrawn")]
    assert engine.status()["offered"] == 1


def test_a_rank_that_leaves_too_much_unheard_stops_the_offers(engine, monkeypatch):
    monkeypatch.setattr(Authority, "MAX_UNHEARD", 2)
    for name in ("a", "b"):
        engine.offer(name, TABLES, 20)
        engine.withdraw(name)
    until(lambda: engine._offers.refusal)
    with pytest.raises(SpecError, match="rank 0 has not acknowledged 2 release notices"):
        engine.offer("c", TABLES, 20)


def join_of(rank=0, **changes):
    manifest = describe(small("gqa"), Topology(tp=2, block=8, blocks=9), "prefill")
    own = replace(manifest, ranks=(manifest.rank(rank),))
    return join_of_manifest(own, "memory", b"card")


def test_ranks_that_are_admitted_hear_of_releases_through_poll():
    engine = SourceEngine("prefill", 2)
    try:
        engine.admit(join_of(0))
        assert not engine.is_whole
        engine.admit(join_of(1))
        assert engine.is_whole
        engine.offer("a", TABLES, 20)
        engine.withdraw("a")
        until(engine.poll)
        assert engine.status()["unheard"] == 0
    finally:
        engine.close()


def test_a_rank_that_does_not_fit_is_not_admitted(engine):
    with pytest.raises(SpecError, match="rank 1 cannot join: this engine is prefill, with 1 rank, "):
        engine.admit(join_of(1))
    elsewhere = msgspec.structs.replace(join_of(0).description, memory=())
    wrong = msgspec.structs.replace(join_of(0), description=elsewhere)
    with pytest.raises(SpecError, match="rank 0 cannot join: rank 0: 3 regions, but 0 addresses"):
        engine.admit(wrong)
    engine.admit(join_of(0))
    assert engine.is_whole


def test_an_authority_that_starts_anew_at_its_address_is_joined_by_its_living_ranks(pair_of):
    pair = pair_of(rank_timing=Timing(meet=0.4, retry=0.05))
    first = pair.fetch()
    assert pair.reports()[first].failure is None
    invitation, old = pair.engine.invitation, pair.offer()
    pair.engine.close()
    pair.engine = SourceEngine("prefill", 1, listen=invitation.address, credential=invitation.credential)
    until(lambda: pair.engine.is_whole)
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None
    assert until(pair.rank.poll)[-1].reason == "read"
    late = pair.fetch(old)
    assert pair.reports()[late].failure.code is FailureCode.RESTARTED
