"""A soft offer over a real channel: claimed, granted as an ordinary ticket, read, and given back."""

import time

from kvferry.endpoint import Claimant
from kvferry.runtime.claims import ClaimEnd
from kvferry.runtime.values import Wanted
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import digest_parts
from tests.endpoint.test_confirmed import until

TOKENS = range(200)


def claimed(claimant, pair, ticket):
    """What becomes of a claim, and what the source's engine was asked."""
    pair.engine.claims()  # it looks
    number = claimant.claim(ticket, 192)
    asked, ends = [], []

    def is_over():
        for wanted in pair.engine.claims():
            asked.append(wanted)
            pair.answer(wanted)
        ends.extend(claimant.poll())
        return ends

    until(is_over)
    assert [end.number for end in ends] == [number]
    return ends[0], asked


def test_an_earlier_turn_is_claimed_and_fetched(pair_of):
    pair = pair_of()
    until(lambda: pair.engine.is_whole)
    soft = pair.engine.offer_soft("turn 1", 192, digest_parts(TOKENS))
    claimant = Claimant("prefill", trust=Trust())
    pair.answer = lambda wanted: pair.engine.grant(wanted, pair.offer())
    end, (wanted,) = claimed(claimant, pair, soft)
    assert (wanted.ticket.request_id, wanted.num_tokens) == ("turn 1", 192)
    handle = pair.fetch(end.ticket)
    assert pair.reports()[handle].failure is None
    pair.answer = lambda wanted: pair.engine.deny(wanted, "evicted")
    end, _ = claimed(claimant, pair, soft)
    assert (end.ticket, end.detail) == (None, "evicted")
    claimant.close()


def test_an_engine_that_does_not_look_denies_at_once(pair_of):
    pair = pair_of()
    until(lambda: pair.engine.is_whole)
    soft = pair.engine.offer_soft("turn 1", 192, digest_parts(TOKENS))
    claimant, began = Claimant("prefill", trust=Trust()), time.monotonic()
    number = claimant.claim(soft, 192)
    ends: list[ClaimEnd] = []

    def has_ended():
        ends.extend(claimant.poll())
        return bool(ends)

    until(has_ended)
    assert ends == [ClaimEnd(number, None, "the engine is idle")]
    assert time.monotonic() - began < 0.9
    claimant.close()


def test_a_claim_that_was_denied_as_late_reaches_no_engine(pair_of):
    """The engine would pin blocks for a reader that computes the prompt already."""
    pair = pair_of()
    until(lambda: pair.engine.is_whole)
    soft = pair.engine.offer_soft("turn 1", 192, digest_parts(TOKENS))
    claimant = Claimant("prefill", trust=Trust())
    pair.engine.claims()
    claimant.claim(soft, 192)
    until(claimant.poll)
    assert pair.engine.claims() == []
    claimant.close()


def test_an_engine_that_does_not_answer_is_given_up(pair_of):
    pair = pair_of()
    until(lambda: pair.engine.is_whole)
    soft = pair.engine.offer_soft("turn 1", 192, digest_parts(TOKENS))
    claimant, began = Claimant("prefill", trust=Trust()), time.monotonic()
    pair.answer = lambda wanted: None
    end, _ = claimed(claimant, pair, soft)
    assert (end.ticket, end.detail) == (None, "the engine is busy")
    assert time.monotonic() - began < 1.5
    pair.engine.close()
    claimant.claim(soft, 192)
    until(claimant.poll)
    claimant.close()


def test_what_is_granted_too_late_is_taken_back(pair_of):
    pair = pair_of()
    late: list[Wanted] = []
    until(lambda: pair.engine.is_whole)
    soft = pair.engine.offer_soft("turn 1", 192, digest_parts(TOKENS))
    claimant = Claimant("prefill", trust=Trust())
    pair.answer = late.append
    end, _ = claimed(claimant, pair, soft)
    assert end.ticket is None
    ticket = pair.offer()
    pair.engine.grant(late[0], ticket)
    until(lambda: [each.request_id for each in pair.engine.poll()] == [ticket.request_id])
    claimant.close()
