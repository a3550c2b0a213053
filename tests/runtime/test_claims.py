"""Claims of soft offers: each ends once, late answers pin nothing, and nobody else can answer."""

import pytest

from kvferry.core.request import BlockTable
from kvferry.runtime import Authority, Offers
from kvferry.runtime.authority import CLAIM_LEASES, CLAIM_SECONDS
from kvferry.runtime.claims import IDLE_SECONDS, MAX_CLAIMS, ClaimEnd, Claimer
from kvferry.runtime.values import HangUp, Send, Wanted
from kvferry.wire.messages import TOKEN_BYTES, Acquire, Claimed, ClaimOffer, Renew
from kvferry.wire.ticket import PART_TOKENS, digest_parts, num_common_tokens

ADDRESS = "tcp://127.0.0.1:5555"
TOKEN = bytes(TOKEN_BYTES)
TABLES = {"full": BlockTable.of([3, 4])}


def made():
    offers = Offers("decode", 7, b"key", ADDRESS, lease_ms=30_000)
    return offers, Authority(offers, 1), offers.make_soft("turn-1", 600, digest_parts(range(600)))


def claim(authority, ticket, *, now=0.0, nonce=1, num_tokens=512, reader="reader"):
    return authority.receive(now, reader, ClaimOffer(nonce, ticket, num_tokens))


def test_a_soft_offer_costs_nothing_and_is_exchanged_for_a_ticket():
    offers, authority, soft = made()
    assert soft.is_soft
    assert (len(offers), authority.num_leases) == (0, 0)
    (wanted,) = claim(authority, soft, num_tokens=9999)
    assert wanted == Wanted(1, soft, 600, CLAIM_SECONDS), "never more than was offered"
    ticket = offers.make("claim-1", TABLES, 32)
    authority.offer(0.1, ticket)
    assert authority.claimed(0.1, wanted.number, ticket, "") == [Send("reader", Claimed(1, ticket))]
    assert authority.num_leases == 1
    assert claim(authority, soft, now=0.2) == [Send("reader", Claimed(1, ticket))], "the same answer again"


def test_a_claim_is_not_renewed_for_ever():
    """Two engines may each wait for blocks that the other has claimed."""
    offers, authority, soft = made()
    (wanted,) = claim(authority, soft)
    ticket = offers.make("claim-1", TABLES, 32)
    authority.offer(0.0, ticket)
    authority.claimed(0.0, wanted.number, ticket, "")
    authority.receive(1.0, "reader", Acquire(2, ticket, "reader", 0, 1, 1, TOKEN))
    for now in range(2, CLAIM_LEASES * 30):
        authority.receive(float(now), "reader", Renew(3, 7, "reader", 0, ((ticket.ticket_id, TOKEN),)))
        authority.tick(float(now))
        assert authority.num_leases == 1, "a read that has begun has the time for it"
    released, *_ = authority.tick(CLAIM_LEASES * 30.0)
    assert (released.request_id, released.reason) == ("claim-1", "expired")


def test_an_engine_that_answers_too_late_gets_its_blocks_back():
    offers, authority, soft = made()
    (wanted,) = claim(authority, soft)
    assert authority.tick(CLAIM_SECONDS - 0.01) == []
    (denied,) = authority.tick(CLAIM_SECONDS)
    assert denied.message.ticket is None
    ticket = offers.make("claim-1", TABLES, 32)
    authority.offer(1.1, ticket)
    (released,) = authority.claimed(1.1, wanted.number, ticket, "")
    assert (released.request_id, released.reason) == ("claim-1", "withdrawn")
    assert authority.num_leases == 0
    assert authority.claimed(1.2, 99, None, "") == []


def test_a_second_answer_to_a_claim_counts_for_nothing_and_pins_nothing():
    offers, authority, soft = made()
    (wanted,) = claim(authority, soft)
    (denied,) = authority.claimed(0.1, wanted.number, None, "the engine is idle")
    assert denied.message.detail == "the engine is idle"
    ticket = offers.make("claim-1", TABLES, 32)
    authority.offer(0.2, ticket)
    (released,) = authority.claimed(0.2, wanted.number, ticket, "")
    assert (released.request_id, released.reason) == ("claim-1", "withdrawn")
    assert authority.num_leases == 0


@pytest.mark.parametrize(
    "changes", [{"num_tokens": 601}, {"engine": "other"}, {"generation": 8}, {"parts": b""}]
)
def test_what_this_engine_did_not_offer_is_not_claimed(changes):
    import msgspec

    _, authority, soft = made()
    (send,) = claim(authority, msgspec.structs.replace(soft, **changes))
    assert send.message.ticket is None


def test_a_ticket_with_blocks_is_no_soft_offer():
    offers, authority, _ = made()
    (send,) = claim(authority, offers.make("request", TABLES, 32))
    assert send.message.ticket is None


def test_a_flood_of_claims_is_bounded():
    _, authority, soft = made()
    for nonce in range(MAX_CLAIMS):
        (wanted,) = claim(authority, soft, nonce=nonce)
        assert isinstance(wanted, Wanted)
    (send,) = claim(authority, soft, nonce=MAX_CLAIMS)
    assert send.message.detail == "too many claims"
    assert len(authority.tick(CLAIM_SECONDS)) == MAX_CLAIMS


def test_a_reader_asks_again_and_hears_one_answer_from_the_right_source():
    _, _, soft = made()
    claimer = Claimer(patience=1.5, retry=0.5)
    asked = claimer.claim(0.0, 1, soft, 512)
    assert asked == [Send(ADDRESS, ClaimOffer(1, soft, 512))]
    assert claimer.tick(0.4) == []
    assert claimer.tick(0.5) == asked
    assert claimer.receive(0.0, "tcp://127.0.0.1:6", Claimed(1)) == []
    assert claimer.receive(0.0, ADDRESS, Claimed(1, soft)) == [ClaimEnd(1, soft)]
    assert claimer.receive(0.0, ADDRESS, Claimed(1, soft)) == []
    claimer.claim(1.0, 2, soft, 512)
    assert claimer.next_deadline() == 1.5
    assert [type(each) for each in claimer.tick(2.5)] == [ClaimEnd]
    assert claimer.next_deadline() == 1.0 + IDLE_SECONDS


def test_a_source_that_is_asked_nothing_is_hung_up_on():
    """A router names any address, and a source that is gone would be called for ever."""
    _, _, soft = made()
    claimer = Claimer(patience=1.5, retry=0.5)
    claimer.claim(0.0, 1, soft, 512)
    claimer.find(0.0, 2, "tcp://other", "name")
    now = 0.0
    while now < IDLE_SECONDS + 5.0:
        now += 0.5
        claimer.receive(now, "tcp://other", Claimed(2, is_pending=True))
        hung_up = [each for each in claimer.tick(now) if isinstance(each, HangUp)]
        assert hung_up == ([HangUp(ADDRESS)] if now == 1.0 + IDLE_SECONDS else [])
    claimer.cancel(2)
    assert claimer.next_deadline() == now + IDLE_SECONDS
    assert claimer.tick(now + IDLE_SECONDS) == [HangUp("tcp://other")]
    assert claimer.next_deadline() == float("inf")


def test_common_tokens_never_more_than_are_common():
    ours = list(range(2000))
    for parts_at in (0, 1, 255, 256, 257, 900, 1999):
        theirs = [*ours[:parts_at], -1, *ours[parts_at + 1 :]]
        found = num_common_tokens(digest_parts(ours), digest_parts(theirs))
        assert found == parts_at // PART_TOKENS * PART_TOKENS
    assert num_common_tokens(digest_parts(ours), digest_parts(ours, b"lora")) == 0


@pytest.mark.parametrize("num_tokens", [0, -1, -(2**40)])
def test_a_claim_of_no_tokens_reaches_no_engine(num_tokens):
    _, authority, soft = made()
    (answer,) = claim(authority, soft, num_tokens=num_tokens)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Claimed)
    assert answer.message.ticket is None


def test_soft_offers_leave_no_gap_in_the_numbers_of_leases():
    offers, _, soft = made()
    assert soft.ticket_id < 0
    assert [offers.make(f"r{i}", TABLES, 32).ticket_id for i in range(2)] == [1, 2]
