"""Growing leases, one behaviour at a time: a rank that reads while its source computes, and the authority."""

import msgspec
import pytest

from kvferry.core.request import BlockTable
from kvferry.core.span import Span
from kvferry.runtime import (
    Authority,
    Failure,
    FailureCode,
    Fetch,
    Offers,
    Released,
    Report,
    Timing,
    fetch_job,
)
from kvferry.runtime.claims import (
    FINDER_SECONDS,
    IDLE_SECONDS,
    MAX_FINDERS,
    ClaimEnd,
    Claimer,
    NamedPrefills,
)
from kvferry.runtime.values import FAR, Cancel, Drop, PostReads, Select, Send, Strike
from kvferry.wire.messages import (
    TOKEN_BYTES,
    Acquire,
    Claimed,
    Denial,
    FindTransfer,
    Grant,
    Grown,
    Outcome,
    Renew,
    Settle,
    SettleAck,
    Watch,
)
from kvferry.wire.ticket import NOT_SAID, Ticket, make_proofs, read_permit
from tests.runtime.test_reader import Driver, selection

TABLES = {"full": BlockTable.of([3])}
NUM_TOKENS = 20


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(fetch_job, "PART_TOKENS", 4)


def stage(complete=0, **changes):
    """A ticket of one growing lease; None: of its end."""
    complete = NOT_SAID if complete is None else complete
    ticket = Ticket("prefill", 7, 1, "r1", "src", NUM_TOKENS, {}, 30_000, complete=complete)
    return msgspec.structs.replace(ticket, **changes)


def fetch_of(ticket):
    need = {"full": (Span(0, NUM_TOKENS),), "state": (Span(0, 1),)}
    return Fetch(ticket, {}, need, early=frozenset({"full"}))


class Growing(Driver):
    """A reader that watches a lease."""

    def watched(self, complete=0):
        """Fetched, granted, met; the question whether it has grown."""
        self.granted_growing(complete)
        watch = self.only(Watch)
        self.met()
        self.watch = watch
        return watch

    def granted_growing(self, complete=0, *, is_whole=True):
        self.fetch(1, fetch_of(stage(complete)))
        return self.answer(Grant(self.only(Acquire).nonce, 1, 30_000, is_whole=is_whole))

    def grown(self, complete, **changes):
        """The authority answers the question that is open; the next question is remembered."""
        self.answer(Grown(self.watch.nonce, stage(complete, **changes)))
        asked = self.of(Watch)
        self.watch = asked[0] if asked else self.watch
        return self

    def select_and_read(self):
        """What was asked for is selected, and read."""
        self.selected(1, selection(1))
        (read,) = self.posted()
        return self.ended(read, "")


@pytest.fixture
def it():
    return Growing()


def tokens(selected):
    return selected.fetch.need["full"]


# -- the reader -----------------------------------------------------------------------------------


def test_each_part_is_read_when_it_is_written_and_the_whole_is_reported_once(it):
    watch = it.watched()
    assert (watch.ticket_id, watch.num_complete, watch.reader, watch.reader_rank) == (1, 0, "A", 0)
    assert it.of(Select) == [], "nothing is written yet"
    it.grown(9)
    part = it.only(Select).fetch
    assert part.need == {"full": (Span(0, 8),), "state": ()}, "whole parts of what is written"
    assert part.kept["full"] == (Span(8, FAR),)
    assert it.watch.num_complete == 9
    it.select_and_read()
    assert (it.of(Select), it.of(Settle), it.of(Report)) == ([], [], [])
    it.grown(None, tables={})
    rest = it.only(Select).fetch
    assert rest.need == {"full": (Span(8, 20),), "state": (Span(0, 1),)}
    assert rest.kept == {"full": (Span(0, 8),)}
    assert it.of(Watch) == [], "nothing more will come"
    it.select_and_read()
    assert it.outcome() is Outcome.READ
    it.confirmed()
    record = it.only(Report).record
    assert (it.only(Report).failure, record.num_bytes, record.early_bytes) == (None, 16, 8)
    assert it.reader.next_deadline() == float("inf")


def test_notices_that_come_while_a_part_is_read_are_merged(it):
    it.watched()
    it.grown(4)
    it.selected(1, selection(1))
    (read,) = it.posted()
    for complete in (5, 8, 9, 15):
        it.grown(complete)
        assert it.of(Select) == []
    it.ended(read, "")
    assert tokens(it.only(Select)) == (Span(4, 12),), "one part for all of them"


def test_less_than_a_part_is_waited_for(it):
    it.watched()
    for complete in (1, 2, 3):
        it.grown(complete)
        assert it.of(Select) == []
    it.grown(4)
    assert tokens(it.only(Select)) == (Span(0, 4),)


def test_a_close_while_a_part_is_read_has_the_rest_read_after_it(it):
    it.watched()
    it.grown(8)
    it.grown(None)
    assert it.of(Select) == []
    it.selected(1, selection(1))
    assert it.only(PostReads).after is None
    (read,) = it.posted()
    it.ended(read, "")
    assert tokens(it.only(Select)) == (Span(8, 20),)
    it.select_and_read()
    assert it.outcome() is Outcome.READ


def test_a_lease_that_was_closed_before_anything_was_read_is_read_as_a_whole(it):
    it.watched()
    it.grown(None)
    assert it.only(Select).fetch.need == fetch_of(stage()).need
    it.select_and_read()
    it.confirmed()
    assert it.only(Report).record.early_bytes == 0


def test_the_last_token_of_a_need_comes_with_the_rest(it):
    """A need may end before the prompt does; the rest clears what is behind it."""
    ticket = stage()
    it.fetch(1, Fetch(ticket, {}, {"full": (Span(0, 8),)}, early=frozenset({"full"})))
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.watch = it.only(Watch)
    it.met()
    it.grown(16)
    assert tokens(it.only(Select)) == (Span(0, 4),)


def test_what_is_not_read_early_waits_for_the_end(it):
    """Windows move on, and states change with every token."""
    ticket = stage()
    it.fetch(1, Fetch(ticket, {}, {"window": (Span(4, 20),), "state": (Span(0, 1),)}))
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.watch = it.only(Watch)
    it.met()
    it.grown(16)
    assert it.of(Select) == []
    it.grown(None)
    assert set(it.only(Select).fetch.need) == {"window", "state"}


def test_what_was_withdrawn_fails_though_nothing_is_being_read(it):
    it.watched()
    it.grown(8)
    it.select_and_read()
    it.answer(Denial(it.watch.nonce, 1, "ended", "the prefill was withdrawn"))
    assert it.outcome() is Outcome.FAILED
    assert it.failure() is FailureCode.ENDED
    it.answer(SettleAck(1, 0, it.reader.fetches.settlements._by_attempt.popitem()[0], "lease-ended"))
    assert it.effects == []


def test_what_was_withdrawn_while_a_part_is_read_is_reported_when_the_read_has_ended(it):
    it.watched()
    it.grown(8)
    it.selected(1, selection(1))
    (read,) = it.posted()
    it.answer(Denial(it.watch.nonce, 1, "ended"))
    assert (it.of(Report), it.only(Cancel).transfer) == ([], read)
    it.answer(Grown(it.watch.nonce, stage(None)))  # a late copy says nothing any more
    assert it.effects == []
    it.ended(read, "")
    assert it.failure() is FailureCode.ENDED


@pytest.mark.parametrize("code", ["ended", "restarted"])
def test_only_its_authority_withdraws_it(it, code):
    it.watched()
    denial = Denial(it.watch.nonce, 1, code)
    assert it.answer(denial, "somebody").effects == []
    assert it.answer(msgspec.structs.replace(denial, nonce=it.watch.nonce + 1)).effects == []
    assert it.answer(denial).failure() is FailureCode(code)


def test_a_part_that_cannot_be_selected_is_read_with_the_rest(it):
    """Its tables may lack a group that shares a block with it; only the whole has to fit."""
    it.watched()
    it.grown(8)
    it.not_selected(1, Failure(FailureCode.BAD_TABLES, "a table is missing"))
    assert it.effects == []
    it.grown(16)
    assert it.of(Select) == [], "not tried again"
    it.grown(None)
    assert tokens(it.only(Select)) == (Span(0, 20),)
    it.not_selected(1, Failure(FailureCode.BAD_TABLES, "a table is missing"))
    assert it.failure() is FailureCode.BAD_TABLES


def test_a_later_part_that_cannot_be_selected_leaves_the_first_one_read(it):
    it.watched()
    it.grown(8)
    it.select_and_read()
    it.grown(16)
    it.grown(None)
    it.not_selected(1, Failure(FailureCode.BAD_TABLES, "too many runs"))
    assert tokens(it.only(Select)) == (Span(8, 20),), "it was closed meanwhile"


def test_a_peer_that_is_gone_between_two_parts_fails_the_fetch(it):
    it.calling("src").connected("src")
    it.watched()
    it.grown(8)
    it.select_and_read()
    it.at(1.0).disconnected("src").at(5.0).tick()
    assert it.failure() is FailureCode.SOURCE_GONE


def test_a_peer_that_is_met_anew_between_two_parts_fails_the_fetch(it):
    it.watched()
    it.grown(8)
    it.select_and_read()
    it.reader.meetings.break_off(it.reader.fetches.get(1).peer)
    it.fetch(2, fetch_of(stage(ticket_id=2)))
    assert it.of(Drop), "nothing of it is read now"
    it.grown(16)
    assert it.failure() is FailureCode.TRANSPORT


def test_a_source_that_computes_nothing_more_is_given_up(it):
    it.watched()
    job = it.reader.fetches.get(1)
    job.covered_until, job.asked_at = 1e6, 1e6  # its renewals are answered
    it.at(100.0).grown(8)
    it.select_and_read()
    it.watch = it.at(219.0).tick().only(Watch)
    assert it.of(Report) == []
    it.at(220.0).tick()
    assert it.failure() is FailureCode.OVERDUE


@pytest.mark.parametrize("complete", [8, 4, NUM_TOKENS + 1, 2**62])
def test_a_source_that_says_again_what_it_said_is_given_up_all_the_same(it, complete):
    it.watched()
    job = it.reader.fetches.get(1)
    job.covered_until, job.asked_at = 1e6, 1e6
    it.at(100.0).grown(8)
    it.select_and_read()
    it.at(219.0).grown(complete)
    assert it.effects == [], "nor is it asked at once what it has just said"
    it.at(220.0).tick()
    assert it.failure() is FailureCode.OVERDUE


def test_a_question_is_repeated_under_its_number_until_it_is_answered(it):
    first = it.watched()
    assert it.at(0.4).tick().of(Watch) == []
    assert it.at(0.5).tick().only(Watch) == first
    assert it.reader.next_deadline() == 1.0
    assert it.at(1.0).tick().only(Watch) == first
    it.grown(4)
    assert it.only(Watch).nonce != first.nonce
    it.answer(Grown(first.nonce, stage(None)))
    assert it.effects == [], "answered already"


@pytest.mark.parametrize(
    "changes",
    [{"ticket_id": 2}, {"generation": 8}, {"request_id": "r2"}, {"num_tokens": 21}, {"engine": "other"}],
    ids=str,
)
def test_another_lease_is_no_stage_of_this_one(it, changes):
    it.watched()
    it.grown(8, **changes)
    assert it.effects == []


def test_an_earlier_stage_is_none(it):
    it.watched(complete=8)
    assert tokens(it.only(Select)) == (Span(0, 8),)
    it.grown(4)
    assert it.effects == []


def test_only_who_was_asked_says_that_it_has_grown(it):
    watch = it.watched()
    assert it.answer(Grown(watch.nonce, stage(8)), "somebody").effects == []
    assert it.answer(Grown(watch.nonce + 1, stage(8))).effects == []
    assert it.answer(Grown(0, stage(8))).effects == []


def test_what_is_held_is_not_watched_before_its_blocks_are_known(it):
    it.hold(1, stage(4))
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    assert it.of(Watch) == []
    it.met()
    assert it.reader.next_deadline() == 10.0, "only the renewal"
    it.at(1.0).supply(1, fetch_of(stage(4)))
    assert it.only(Watch).num_complete == 4
    assert tokens(it.only(Select)) == (Span(0, 4),)


def test_its_lease_is_renewed_while_nothing_can_be_read(it):
    it.watched()
    assert it.at(10.0).tick().of(Renew), "a third of it is gone"


def test_an_early_grant_is_not_watched_before_the_source_is_whole(it):
    it.granted_growing(is_whole=False)
    assert it.of(Watch) == []
    assert it.at(0.4).tick().of(Watch) == []
    it.fetch(2, fetch_of(stage(ticket_id=2)))  # the hello is sent again
    it.met()
    asked = it.only(Acquire)
    it.answer(Grant(asked.nonce, 1, 30_000))
    assert it.only(Watch).num_complete == 0


def test_a_late_grant_does_not_bring_old_proofs_back(it):
    it.granted_growing()
    watch, job = it.only(Watch), it.reader.fetches.get(1)
    it.at(0.5)
    again = it.tick().of(Acquire)
    it.met()
    it.answer(Grown(watch.nonce, stage(8), proofs={0: b"new"}))
    assert job.proofs == {0: b"new"}
    nonce = next(it.reader._numbers)
    it.reader._questions.ask(0.5, nonce, "src", [job])
    it.answer(Grant(nonce, 1, 30_000, proofs={0: b"old"}))
    assert job.proofs == {0: b"new"}
    assert not again


def test_permits_are_of_the_newest_stage(it):
    offers = Offers("prefill", 7, b"key", "src", 30_000)
    first = offers.make("r1", TABLES, NUM_TOKENS, complete=0)
    key = bytes(32)
    it.fetch(1, fetch_of(first))
    authority = Authority(offers, 1)
    authority.offer(0.0, first, "name")
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    watch = it.only(Watch)
    it.met()
    later = offers.stage(first, {"full": BlockTable.of([3, 4])}, 8)
    it.answer(Grown(watch.nonce, later, make_proofs(later, {0: key})))
    it.selected(1, selection(1))
    assert read_permit(it.only(PostReads).permits[0], key) == later.unsealed


@pytest.mark.parametrize("is_reading", [False, True])
def test_an_abort_between_parts_and_in_one_declines_the_lease(it, is_reading):
    it.watched()
    it.grown(8)
    if is_reading:
        it.selected(1, selection(1))
        (read,) = it.posted()
        assert it.abort(1).of(Report) == []
        it.ended(read, "cancelled")
    else:
        it.select_and_read()
        it.abort(1)
    settle = it.only(Settle)
    assert (settle.outcome, settle.declined) == (Outcome.FAILED, stage(8))
    assert it.failure() is FailureCode.ABORTED


# -- the authority --------------------------------------------------------------------------------


def message_of(effect):
    return effect.message


class Source(Authority):
    """An authority with a lease that grows, read by one rank."""

    def __init__(self, board=""):
        self.offers = Offers("prefill", 7, b"key", "here", 30_000)
        super().__init__(self.offers, 1, Timing(lease=30.0, retry=0.5), board)
        self.ticket = self.offers.make("r", TABLES, NUM_TOKENS, complete=0)
        self.opened = self.offer(0.0, self.ticket, "name")

    def acquired(self, rank=0, ranks=1, *, reader="A"):
        token = bytes([rank]) * TOKEN_BYTES
        ask = Acquire(5, self.ticket, reader, rank, ranks, 1, token)
        return message_of(self.receive(1.0, reader, ask)[-1])

    def asked(self, complete, rank=0, *, nonce=9, reply_to="A", **changes):
        watch = Watch(nonce, 7, self.ticket.ticket_id, "A", rank, bytes([rank]) * TOKEN_BYTES, complete)
        return self.receive(2.0, reply_to, msgspec.structs.replace(watch, **changes))

    def told(self, complete, now=3.0):
        stop = NOT_SAID if complete is None else complete
        self.ticket = self.offers.stage(self.ticket, TABLES, stop)
        return self.grow(now, self.ticket)

    def settled(self, outcome, rank=0):
        message = Settle(7, self.ticket.ticket_id, "A", rank, 1, bytes([rank]) * TOKEN_BYTES, outcome)
        return self.receive(4.0, "A", message)


def test_a_question_is_answered_when_there_is_more():
    source = Source()
    assert isinstance(source.acquired(), Grant)
    assert source.asked(0) == []
    (told,) = source.told(8)
    assert (told.to, told.message) == ("A", Grown(9, source.ticket))
    assert source.told(12) == [], "it was answered, and asks again"
    assert source.asked(8, nonce=10) == [Send("A", Grown(10, source.ticket))], "at once"
    assert source.asked(12, nonce=11) == []
    (told,) = source.told(None)
    assert (told.message.nonce, told.message.ticket.is_growing) == (11, False)
    assert source.asked(12, nonce=12)[0].message.ticket == source.ticket, "the end is said again"
    assert source.asked(20, nonce=13)[0].message.ticket == source.ticket


def test_a_question_that_is_repeated_is_answered_once_to_where_it_came_from_last():
    source = Source()
    source.acquired()
    assert source.asked(0) == source.asked(0, reply_to="A, elsewhere") == []
    (told,) = source.told(8)
    assert told.to == "A, elsewhere"


@pytest.mark.parametrize(
    "changes",
    [
        {"token": b"guess".ljust(TOKEN_BYTES)},
        {"reader": "B"},
        {"reader_rank": 1},
        {"ticket_id": 2},
        {"generation": 8},
    ],
    ids=str,
)
def test_a_stranger_hears_nothing_but_no(changes):
    source = Source()
    source.acquired()
    (answer,) = source.asked(0, **changes)
    assert isinstance(answer.message, Denial)
    assert source.told(8) == []


@pytest.mark.parametrize("outcome", [Outcome.UNREAD, Outcome.FAILED])
def test_who_is_through_with_a_lease_hears_no_more_of_it(outcome):
    """Its later stages, and their proofs, are for whoever reads it next."""
    source = Source()
    source.acquired(0, 2)
    source.acquired(1, 2)
    source.asked(0, rank=0, nonce=3)
    source.asked(0, rank=1, nonce=4)
    source.settled(outcome, rank=0)
    assert [message_of(each).nonce for each in source.told(8)] == [4]


def test_who_was_granted_nothing_watches_nothing():
    (answer,) = Source().asked(0)
    assert answer.message.code == "ended"


def test_whoever_watches_what_is_revoked_hears_of_it_at_once():
    source = Source()
    source.acquired(0, 2)
    source.acquired(1, 2)
    source.asked(0, rank=0, nonce=3)
    source.asked(0, rank=1, nonce=4)
    *denied, released = source.revoke(3.0, "r")
    assert [(message_of(each).nonce, message_of(each).code) for each in denied] == [
        (3, "ended"),
        (4, "ended"),
    ]
    assert released == Released("r", "withdrawn")
    assert source.settled(Outcome.READ)[0].message.code == "lease-ended", "no read of it counts"
    assert source.asked(0)[0].message.code == "ended"
    assert source.revoke(3.0, "r") == []


def test_what_is_revoked_grows_no_more():
    source = Source()
    source.revoke(1.0, "r")
    assert source.told(8) == source.told(None) == []
    assert source.num_leases == 0


def test_a_read_that_was_settled_before_its_source_took_the_blocks_away_counts():
    source = Source()
    source.acquired()
    source.told(None)
    assert source.settled(Outcome.READ)[0].message.code == ""
    assert source.revoke(5.0, "r") == []


def test_a_lease_that_grows_lasts():
    source = Source()
    for now in (20.0, 40.0, 60.0):
        assert source.tick(now) == []
        source.told(int(now / 10), now)
    assert source.tick(89.0) == []
    assert source.tick(90.0) == [Released("r", "expired")]


def test_no_board_shows_a_lease_that_can_be_revoked():
    """It is struck by a thread that the engine does not wait for."""
    source = Source(board="the board")
    assert source.acquired().board == ""
    assert source.revoke(3.0, "r")[0] == Strike(1)


def test_a_later_stage_is_acquired_too():
    """A reader may hear of the newest stage first."""
    source = Source()
    source.told(8)
    assert isinstance(source.acquired(), Grant)
    forged = msgspec.structs.replace(source.ticket, complete=16)
    ask = Acquire(5, forged, "A", 0, 1, 1, bytes(TOKEN_BYTES))
    assert message_of(source.receive(1.0, "A", ask)[-1]).code == "forged"


# -- names of prefills ----------------------------------------------------------------------------


def find(authority, name="name", *, now=0.0, nonce=1, reply_to="finder"):
    (answer,) = authority.receive(now, reply_to, FindTransfer(nonce, name))
    assert answer.to == reply_to
    return answer.message


def test_a_prefill_is_found_by_its_name_at_its_newest_stage():
    source = Source()
    assert source.opened == []
    assert find(source) == Claimed(1, source.ticket)
    source.told(8)
    assert find(source).ticket.num_complete == 8
    assert find(source, "another") == Claimed(1, is_pending=True)


def test_a_name_that_is_used_twice_is_the_later_prefills():
    source = Source()
    later = source.offers.make("later", TABLES, NUM_TOKENS, complete=0)
    source.offer(1.0, later, "name")
    source.told(8)
    assert find(source) == Claimed(1, later)


def test_who_asks_too_early_hears_when_it_begins():
    source = Source()
    assert find(source, "later", reply_to="one", nonce=3).is_pending
    assert find(source, "later", reply_to="two", nonce=4).is_pending
    assert find(source, "later", reply_to="one", nonce=5).is_pending
    ticket = source.offers.make("later", TABLES, NUM_TOKENS, complete=0)
    told = source.offer(1.0, ticket, "later")
    assert [message_of(send).ticket for send in told] == [ticket, ticket]
    assert sorted(message_of(send).nonce for send in told) == [4, 5]


def test_a_prefill_that_is_preempted_is_found_when_it_begins_anew():
    source = Source()
    source.revoke(1.0, "r")
    assert find(source).is_pending
    again = source.offers.make("r, again", TABLES, NUM_TOKENS, complete=0)
    assert message_of(source.offer(2.0, again, "name")[0]).ticket == again
    source._named.end("name", 1, may_come_again=True)  # the end of the first one says nothing of the second
    assert find(source).ticket == again


def test_who_seeks_what_was_refused_hears_why():
    source = Source()
    find(source, "never", nonce=2)
    (told,) = source.refuse("never", "the prefill was aborted")
    assert told == Send("finder", Claimed(2, detail="the prefill was aborted"))
    assert find(source, "never").detail == "the prefill was aborted"


def test_what_was_refused_and_begins_all_the_same_may_be_preempted():
    source = Source()
    source.refuse("later", "the prefill was aborted")
    source.offer(1.0, source.offers.make("later", TABLES, NUM_TOKENS, complete=0), "later")
    source.revoke(2.0, "later")
    assert find(source, "later").is_pending


@pytest.mark.parametrize("outcome", [Outcome.READ, Outcome.FAILED])
def test_who_seeks_what_was_read_does_not_wait_for_it(outcome):
    """It was computed to its end: nothing comes of that name any more."""
    source = Source()
    source.acquired()
    source.told(None)
    source.settled(outcome)
    answer = find(source)
    assert (answer.ticket, answer.is_pending, bool(answer.detail)) == (None, False, True)


def test_who_does_not_ask_again_is_forgotten():
    transfers = NamedPrefills()
    for number in range(MAX_FINDERS + 1):
        transfers.find(float(number), f"at {number}", FindTransfer(number, "name"))
    assert len(transfers._finders) == MAX_FINDERS
    transfers.tick(MAX_FINDERS + FINDER_SECONDS - 1)
    assert len(transfers._finders) == 1
    for number in range(MAX_FINDERS + 1):
        transfers.refuse(f"name {number}", "why")
    assert len(transfers._refused) == MAX_FINDERS


def test_a_finder_asks_on_as_long_as_it_may_come():
    claimer = Claimer(patience=1.5, retry=0.5)
    asked = claimer.find(0.0, 1, "src", "name")
    assert asked == [Send("src", FindTransfer(1, "name"))]
    now = 0.0
    for _ in range(20):
        now += 0.5
        assert claimer.tick(now) == asked
        assert claimer.receive(now, "src", Claimed(1, is_pending=True)) == []
    assert claimer.receive(now, "nobody", Claimed(1, stage())) == []
    assert claimer.receive(now, "src", Claimed(1, stage())) == [ClaimEnd(1, stage())]
    assert claimer.next_deadline() == now + IDLE_SECONDS


def test_a_finder_whose_source_is_silent_is_told():
    claimer = Claimer(patience=1.5, retry=0.5)
    claimer.find(0.0, 1, "src", "name")
    claimer.receive(1.0, "src", Claimed(1, is_pending=True))
    assert claimer.tick(10.9) == [Send("src", FindTransfer(1, "name"))]
    assert claimer.tick(11.0) == [ClaimEnd(1, None, "the source did not answer")]
    claimer.find(0.0, 2, "src", "name")
    for now in range(120):
        claimer.receive(now, "src", Claimed(2, is_pending=True))
    assert claimer.tick(120.0)[0] == ClaimEnd(2, None, "the source did not answer")


def test_a_finder_that_is_not_wanted_any_more_asks_no_more():
    claimer = Claimer(patience=1.5, retry=0.5)
    claimer.find(0.0, 1, "src", "name")
    claimer.cancel(1)
    assert claimer.tick(9.0) == claimer.receive(9.0, "src", Claimed(1, stage())) == []
