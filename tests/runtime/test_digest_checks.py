"""Digests of fetches, one behaviour at a time: who is asked, who may answer, and what an answer does."""

import numpy as np
import pytest

from kvferry.core.box import Box
from kvferry.core.digest import DigestPart, TakenDigest
from kvferry.core.span import Span
from kvferry.models import Topology, describe
from kvferry.runtime import Failure, FailureCode, Reader, Report
from kvferry.runtime.digest_checks import DigestRelay
from kvferry.runtime.lease import Lease
from kvferry.runtime.values import Send, TakeDigest
from kvferry.testing.small import small
from kvferry.wire.messages import (
    Acquire,
    DigestAnswer,
    DigestRequest,
    DigestResult,
    DigestTask,
    Outcome,
    Renew,
    Renewal,
    Settle,
)
from kvferry.wire.ticket import TableDoc, Ticket
from tests.runtime.test_reader import KEY, TIMING, Driver, is_empty

MANIFEST = describe(small("gqa"), Topology(), "decode")
PART = DigestPart("layers.0.attn/k", "layers.0.attn/k", Box(()), (Span(0, 20),))
OURS = TakenDigest(MANIFEST, dict.fromkeys((0, 1), ((PART,), (np.array([7], np.uint64),))))
SUMS = (7).to_bytes(8, "little")


class Checking(Driver):
    """A fetch of two source ranks whose reads have ended, and which is checked."""

    def __init__(self):
        super().__init__()
        self.reader = Reader("A", 0, 2, TIMING, key=KEY, digest_every=1)
        for transfer in self.reading(num_sources=2):
            self.ended(transfer, "")
        assert self.only(TakeDigest).handle == 1
        self.digest_asked(1, {0: b"what 0 sent", 1: b"what 1 sent"})
        self.asked = self.of(DigestRequest)


@pytest.fixture
def it():
    return Checking()


def test_each_source_rank_is_asked_and_the_fetch_goes_on_when_all_are_equal(it):
    assert [(ask.src_rank, ask.question, ask.ticket_id) for ask in it.asked] == [
        (0, b"what 0 sent", 1),
        (1, b"what 1 sent", 1),
    ]
    assert it.digest_taken(1, OURS).effects == []
    assert it.answer(DigestAnswer(it.asked[1].nonce, SUMS)).effects == []
    assert it.at(2.0).answer(DigestAnswer(it.asked[0].nonce, SUMS)).outcome() is Outcome.READ
    record = it.at(2.5).confirmed().only(Report).record
    assert (record.outcome, record.digest) == ("read", "equal")
    assert (record.digest_seconds, record.confirm_seconds) == (2.0, 0.5)
    assert is_empty(it.reader)


def test_our_own_digest_may_come_last(it):
    for ask in it.asked:
        assert it.answer(DigestAnswer(ask.nonce, SUMS)).effects == []
    assert it.digest_taken(1, OURS).outcome() is Outcome.READ


@pytest.mark.parametrize("sums", [(8).to_bytes(8, "little"), b"", SUMS[:7], b"\0" * 8])
def test_other_sums_fail_the_fetch(it, sums):
    it.digest_taken(1, OURS)
    it.answer(DigestAnswer(it.asked[0].nonce, SUMS))
    it.answer(DigestAnswer(it.asked[1].nonce, sums))
    assert (it.failure(), it.outcome()) == (FailureCode.DIGEST_DIFFERS, Outcome.FAILED)
    report = it.only(Report)
    assert "layers.0.attn/k, tokens [0, 20): the bytes differ from those of rank 1" in report.failure.detail
    assert report.record.digest == "differs"


def test_only_who_was_asked_can_answer(it):
    it.digest_taken(1, OURS)
    it.answer(DigestAnswer(it.asked[0].nonce, b"other"), reply_to="stranger")
    it.answer(DigestAnswer(it.asked[0].nonce + 99, b"other"))
    assert it.effects == []
    for ask in it.asked:
        it.answer(DigestAnswer(ask.nonce, SUMS))
    assert it.outcome() is Outcome.READ


def test_a_question_is_repeated_until_it_is_answered_and_the_lease_is_kept(it):
    it.answer(DigestAnswer(it.asked[0].nonce, SUMS))
    assert it.reader.next_deadline() <= 0.5
    assert it.at(0.6).tick().of(DigestRequest) == it.asked[1:]
    assert it.at(0.7).tick().of(DigestRequest) == []
    renew = it.at(11.0).tick().only(Renew)
    assert it.answer(Renewal(renew.nonce, 30_000, (1,), ())).effects == []


def test_a_lease_that_ends_meanwhile_ends_the_fetch(it):
    renew = it.at(11.0).tick().only(Renew)
    it.answer(Renewal(renew.nonce, 30_000, (), (1,)))
    assert it.failure() is FailureCode.LEASE_ENDED


def test_no_answer_in_time_fails_the_fetch(it):
    it.digest_taken(1, OURS)
    it.answer(DigestAnswer(it.asked[0].nonce, SUMS))
    it.at(120.0).tick()
    report = it.only(Report)
    assert report.failure == Failure(
        FailureCode.NO_DIGEST, "rank 1 of prefill computed no digest within 120 s"
    )
    assert report.record.digest == "missing"


def test_a_rank_without_a_digest_fails_the_fetch(it):
    it.answer(DigestAnswer(it.asked[1].nonce, detail="no host memory"))
    assert it.only(Report).failure == Failure(
        FailureCode.NO_DIGEST, "rank 1 of prefill returned no digest: no host memory"
    )
    it.answer(DigestAnswer(it.asked[0].nonce, SUMS)).digest_taken(1, OURS)
    assert it.of(Report) == []


def test_a_digest_that_cannot_be_taken_here_fails_the_fetch(it):
    it.not_digested(1, Failure(FailureCode.NO_DIGEST, "why"))
    assert it.failure() is FailureCode.NO_DIGEST
    it.not_digested(1, Failure(FailureCode.NO_DIGEST, "why"))
    assert it.effects == []


def test_a_source_that_is_gone_ends_the_check(it):
    it.connected("src").disconnected("src").at(5.0).tick()
    assert it.failure() is FailureCode.SOURCE_GONE


def test_an_abort_ends_the_check(it):
    assert it.abort(1).failure() is FailureCode.ABORTED
    assert it.digest_asked(1, {0: b"late"}).effects == []
    assert it.digest_taken(1, OURS).effects == []


# -- the authority's part -------------------------------------------------------------------------

TICKET = Ticket("prefill", 7, 1, "r1", "src", 20, {"full": TableDoc((3,))}, 30_000)
TOKEN = bytes(16)
ASK = DigestRequest(5, 7, 1, "A", 0, TOKEN, 1, b"what 1 sent")
RANKS = {0: "rank 0", 1: "rank 1"}


@pytest.fixture
def lease():
    lease = Lease(TICKET, 30.0, 3600.0)
    lease.bind(Acquire(4, TICKET, "A", 0, 1, 1, TOKEN))
    return lease


def refusal(effects):
    """Why the reader gets no sums."""
    (send,) = effects
    assert (send.to, send.message.sums) == ("reader", b"")
    return send.message.detail


def changed(ask, **changes):
    return DigestRequest(**{name: getattr(ask, name) for name in ask.__struct_fields__} | changes)


def test_a_question_goes_to_its_rank_and_the_answer_to_whoever_asked(lease):
    relay = DigestRelay(7)
    task = DigestTask(7, 1, TICKET.tables, b"what 1 sent", ticket_id=1)
    assert relay.ask("reader", ASK, lease, RANKS) == [Send("rank 1", task)]
    assert relay.ask("reader", ASK, lease, RANKS) == [Send("rank 1", task)]  # repeated: the same number
    for reply_to, result in (
        ("rank 0", DigestResult(7, 0, 1, b"sums")),
        ("rank 1", DigestResult(6, 1, 1, b"sums")),
        ("rank 1", DigestResult(7, 1, 2, b"sums")),
    ):
        assert relay.answer(reply_to, result) == []
    answer = [Send("reader", DigestAnswer(5, b"sums"))]
    assert relay.answer("rank 1", DigestResult(7, 1, 1, b"sums")) == answer
    assert relay.answer("rank 1", DigestResult(7, 1, 1, b"sums")) == []


@pytest.mark.parametrize(
    "changes", [{"token": b"x" * 16}, {"reader": "B"}, {"reader_rank": 1}, {"generation": 6}, {"src_rank": 2}]
)
def test_only_who_holds_the_ticket_is_answered(lease, changes):
    assert refusal(DigestRelay(7).ask("reader", changed(ASK, **changes), lease, RANKS))


def test_a_ticket_that_was_settled_is_not_digested(lease):
    lease.reading.settle(Settle(7, 1, "A", 0, 1, TOKEN, Outcome.READ))
    for none in (lease, None):
        assert "holds no lease" in refusal(DigestRelay(7).ask("reader", ASK, none, RANKS))


def test_what_nobody_answers_is_forgotten(lease, monkeypatch):
    monkeypatch.setattr(DigestRelay, "MAX_WAITING", 3)
    relay = DigestRelay(7)
    for nonce in range(9):
        relay.ask("reader", changed(ASK, nonce=nonce), lease, RANKS)
    assert len(relay) == 3
