"""One rank of a destination engine, one behaviour at a time."""

import msgspec
import numpy as np
import pytest

from kvferry.core.runs import NO_RUNS, Runs
from kvferry.core.select import Selection
from kvferry.errors import SpecError
from kvferry.runtime import Failure, FailureCode, Fetch, Reader, Report, Timing
from kvferry.runtime.meetings import Meeting
from kvferry.runtime.values import (
    Build,
    Cancel,
    Drop,
    FindRanks,
    HangUp,
    LookUp,
    Peer,
    PostReads,
    Select,
    Send,
)
from kvferry.wire.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Acquire,
    Denial,
    DescribeRanks,
    Grant,
    Hello,
    Outcome,
    RankDescription,
    RankDescriptions,
    Rejected,
    Renew,
    Renewal,
    Settle,
    SettleAck,
    Welcome,
)
from kvferry.wire.ticket import Ticket

TIMING = Timing(lease=30.0, meet=10.0, read=120.0, retry=0.5)
PEER = Peer("prefill", 7, "src")
KEY = bytes(range(32))
RUNS = Runs(*(np.array([n], np.int64) for n in (0, 0, 8)))


def ticket(ticket_id=1, *, generation=7, authority="src", engine="prefill", lease_ms=30_000):
    return Ticket(engine, generation, ticket_id, f"r{ticket_id}", authority, 20, {}, lease_ms)


def fetch_of(*args, **kwargs):
    return Fetch(ticket(*args, **kwargs), {}, {})


def selection(num_sources, zeros=NO_RUNS):
    return Selection.of(dict.fromkeys(range(num_sources), RUNS), zeros)


class Driver:
    """A reader, and what it did last."""

    def __init__(self):
        self.reader = Reader("A", 0, 2, TIMING, key=KEY)
        self.effects = []
        self.now = 0.0

    def __getattr__(self, name):
        """Call the reader, or the part of it that the event is for; keep the effects."""
        parts = self.reader, self.reader.fetches, self.reader.meetings
        event = next(getattr(part, name) for part in parts if hasattr(part, name))

        def call(*args):
            self.effects = event(self.now, *args)
            return self

        return call

    def calling(self, address):
        self.reader.connections.calling(self.now, address)
        return self

    def connected(self, address):
        self.reader.connections.connected(address)
        return self

    def disconnected(self, address):
        self.reader.connections.broken(self.now, address)
        return self

    def answer(self, message, reply_to="src"):
        return self.receive(reply_to, message)

    def at(self, now):
        self.now = now
        return self

    def of(self, kind):
        """The effects, or the messages sent, of a kind."""
        sent = [e.message for e in self.effects if isinstance(e, Send)]
        return [thing for thing in (*self.effects, *sent) if isinstance(thing, kind)]

    def only(self, kind):
        (thing,) = self.of(kind)
        return thing

    def failure(self):
        return self.only(Report).failure.code

    def outcome(self):
        return self.only(Settle).outcome

    # -- longer ways ------------------------------------------------------------------------------

    def granted(self, handle=1, ticket_id=1):
        """Fetched and granted, the peer not met."""
        self.fetch(handle, fetch_of(ticket_id))
        return self.answer(Grant(self.only(Acquire).nonce, ticket_id, 30_000))

    def met(self):
        self.answer(welcome())
        self.found(self.only(FindRanks).peer, (0, 3))
        self.answer(described(self.only(DescribeRanks)))
        return self.built(self.only(Build).peer)

    def reading(self, num_sources=1, handle=1, ticket_id=1):
        """All the way to posted reads."""
        self.granted(handle, ticket_id)
        if not self.of(Select):
            self.met()
        self.selected(handle, selection(num_sources))
        return self.posted()

    def confirmed(self, code="", detail=""):
        """The authority's answer to the settlement that was sent last."""
        settle = self.only(Settle)
        return self.answer(SettleAck(settle.ticket_id, settle.reader_rank, settle.attempt, code, detail))

    def posted(self):
        """The slack is zeroed; the transfers that follow."""
        post = self.only(PostReads)
        self.ended(post.clear, "")
        return list(post.reads)


@pytest.fixture
def it():
    return Driver()


def welcome(**changes):
    fields = {
        "protocol": PROTOCOL,
        "engine": "prefill",
        "generation": 7,
        "transport": "memory",
        "outline": b"o",
    }
    return Welcome(**{**fields, **changes})


DESCRIBED = RankDescription(b"layout", ((4096, "cpu"),), b"card")


def described(question, ranks=None, generation=7):
    """What is answered, for all ranks or for some."""
    ranks = question.ranks if ranks is None else ranks
    return RankDescriptions(question.nonce, generation, dict.fromkeys(ranks, DESCRIBED))


def is_empty(reader):
    fetches = reader.fetches
    return not (fetches.by_handle or fetches.by_ticket or fetches.transfers or fetches.settlements)


# -- the common way -------------------------------------------------------------------------------


def test_a_fetch_leases_meets_selects_reads_and_settles(it):
    it.fetch(1, fetch_of())
    ask = it.only(Acquire)
    assert (ask.reader, ask.reader_rank, ask.reader_ranks) == ("A", 0, 2)
    assert it.only(Hello) == Hello(PROTOCOL, "A")
    it.answer(Grant(ask.nonce, 1, 30_000))
    assert it.effects == []  # the peer is not met yet
    it.at(0.5).answer(welcome())
    assert it.only(FindRanks) == FindRanks(PEER, b"o")
    it.found(PEER, (3, 0))
    question = it.only(DescribeRanks)
    assert (question.generation, question.ranks) == (7, (0, 3))
    it.at(1.0).answer(described(question))
    assert it.only(Build) == Build(PEER, "memory", b"o", {0: DESCRIBED, 3: DESCRIBED})
    it.built(PEER)
    assert it.only(Select).handle == 1
    it.at(1.5).selected(1, selection(2))
    first, second = it.at(2.0).posted()
    it.at(3.0).ended(first, "")
    assert it.effects == []
    it.at(4.0).ended(second, "")
    assert it.effects == [Send("src", Settle(7, 1, "A", 0, ask.attempt, ask.token, Outcome.READ))]
    it.at(4.5).confirmed()
    report = it.only(Report)
    assert report.failure is None
    record = report.record
    assert (record.meet_seconds, record.post_seconds, record.move_seconds) == (1.0, 0.5, 2.5)
    assert (record.confirm_seconds, record.total_seconds) == (0.5, 4.5)
    assert (record.num_sources, record.num_bytes, record.outcome) == (2, 16, "read")
    assert is_empty(it.reader)


def test_a_lease_that_was_seen_to_stand_needs_no_answer(it):
    """The board is looked at before the authority hears that it may end the lease."""
    it.fetch(1, fetch_of())
    ask = it.only(Acquire)
    it.answer(Grant(ask.nonce, 1, 30_000, board="its board", mark=b"mark"))
    it.met()
    it.only(Select)
    it.selected(1, selection(1))
    it.ended(*it.posted(), "")
    settle = Send("src", Settle(7, 1, "A", 0, ask.attempt, ask.token, Outcome.READ))
    assert it.effects == [LookUp(1, 1, "its board", b"mark"), settle]
    it.stood(1)
    assert it.only(Report).failure is None
    it.stood(1)
    assert it.effects == [], "reported once"
    it.at(0.6).tick()
    assert settle in it.effects, "said again until it is heard"
    it.answer(SettleAck(1, 0, ask.attempt))
    assert is_empty(it.reader)


def test_a_grant_of_an_engine_that_was_not_whole_is_asked_for_again(it):
    """Ranks that joined later make proofs, too; without them they gather nothing."""
    it.fetch(1, fetch_of())
    ask = it.only(Acquire)
    it.answer(Grant(ask.nonce, 1, 30_000, is_whole=False))
    it.met()
    again = it.only(Acquire)
    assert (again.attempt, again.token) == (ask.attempt, ask.token)
    it.answer(Grant(again.nonce, 1, 30_000, {0: b"proof"}))
    assert it.only(Select).handle == 1


def test_an_early_grant_is_not_used_before_the_next_one_has_come(it):
    """Also if blocks are supplied meanwhile."""
    it.hold(1, ticket())
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000, is_whole=False))
    it.met()
    again = it.only(Acquire)
    it.supply(1, fetch_of())
    assert it.of(Select) == []
    it.answer(Grant(again.nonce, 1, 30_000, {0: b"proof"}, is_whole=False))
    assert it.only(Select).handle == 1, "whoever was met is whole"


def test_a_held_ticket_is_leased_and_met_before_its_blocks_are_known(it):
    it.hold(1, ticket())
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.met()
    assert it.effects == []
    for now in range(10, 600, 10):  # long after the first grant, and every deadline
        it.at(float(now)).tick()
        it.answer(Renewal(it.only(Renew).nonce, 30_000, (1,), ()))
    it.supply(1, fetch_of())
    assert it.only(Select).handle == 1
    it.at(601.0).selected(1, selection(1))
    it.ended(*it.posted(), "").confirmed()
    report = it.only(Report)
    assert report.failure is None
    assert report.record.total_seconds == 11.0, "counted from the supply, not from the hold"


def test_a_renewal_that_gets_no_answer_is_repeated_soon(it):
    it.hold(1, ticket())
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.met()
    assert it.at(9.0).tick().of(Renew) == []
    lost = it.at(10.0).tick().only(Renew)
    assert it.at(10.4).tick().of(Renew) == []
    again = it.at(10.5).tick().only(Renew)
    it.answer(Renewal(again.nonce, 30_000, (1,), ()))
    assert it.at(20.0).tick().of(Renew) == []
    it.answer(Renewal(lost.nonce, 30_000, (1,), ()))  # late, and worth no more than when it was asked for
    assert it.at(20.5).tick().of(Renew) != []


def test_blocks_may_be_known_before_the_lease_and_the_peer(it):
    it.hold(1, ticket())
    ask = it.only(Acquire)
    assert it.supply(1, fetch_of()).of(Select) == []
    it.answer(Grant(ask.nonce, 1, 30_000))
    it.met()
    assert it.only(Select).handle == 1


def test_a_held_ticket_that_fails_is_reported_once_and_never_fetched(it):
    it.hold(1, ticket())
    it.answer(Denial(it.only(Acquire).nonce, 1, "taken"))
    assert it.failure() == "taken"
    assert it.supply(1, fetch_of()).effects == []
    assert is_empty(it.reader)


def test_only_the_ticket_that_is_held_can_be_fetched_under_its_handle(it):
    it.hold(1, ticket())
    assert it.supply(1, fetch_of(2)).failure() == "ticket"
    assert it.supply(1, fetch_of()).effects == []


def test_a_held_ticket_meets_a_broken_peer_anew(it):
    (transfer,) = it.reading()
    it.hold(2, ticket(2))
    it.answer(Grant(it.only(Acquire).nonce, 2, 30_000))
    it.ended(transfer, "gone")
    it.supply(2, fetch_of(2))
    assert it.of(Select) == []
    it.met()
    assert it.only(Select).handle == 2


def test_slack_and_reads_are_one_effect(it):
    """So that nobody can come between."""
    it.granted()
    selected = selection(2, zeros=RUNS)
    it.met().selected(1, selected)
    (post,) = it.effects
    assert (post.peer, post.zeros) == (PEER, selected.blank)
    assert list(post.reads.values()) == list(selected.products.items())


@pytest.mark.parametrize("is_aborted", [False, True])
def test_blocks_whose_slack_is_still_being_zeroed_are_not_given_back(it, is_aborted):
    """Law 6 holds for our own writes, too, and where nothing is read."""
    it.granted()
    it.met().selected(1, selection(0, zeros=RUNS))
    post = it.only(PostReads)
    if is_aborted:
        it.abort(1)
    assert it.of(Report) == []
    it.at(3.0).ended(post.clear, "")
    if not is_aborted:
        it.confirmed()
    assert (it.only(Report).failure is None) is not is_aborted


def test_slack_that_cannot_be_zeroed_fails_the_fetch_and_not_the_peer(it):
    it.granted()
    it.met().selected(1, selection(1, zeros=RUNS))
    post = it.only(PostReads)
    assert it.ended(post.clear, "no").of(Report) == []
    it.ended(*post.reads, "not submitted")
    assert (it.failure(), it.reader.meetings.state(PEER)) == ("transport", Meeting.MET)


def test_a_met_peer_serves_the_next_fetch_at_once(it):
    it.reading()
    it.granted(2, 2)
    assert it.only(Select).handle == 2


def test_a_record_is_right_whatever_the_clock_says(it):
    it.at(-1000.0).fetch(1, fetch_of())
    it.at(-990.0).abort(1)
    record = it.only(Report).record
    assert (record.meet_seconds, record.move_seconds, record.total_seconds) == (0.0, 0.0, 10.0)


# -- leases ---------------------------------------------------------------------------------------


def test_an_unanswered_acquire_is_repeated_until_the_deadline(it):
    it.fetch(1, fetch_of())
    first = it.only(Acquire)
    assert it.reader.next_deadline() == 0.5
    it.at(0.5).tick()
    assert it.only(Acquire).nonce != first.nonce
    assert it.only(Acquire).attempt == first.attempt
    it.at(10.0).tick()
    assert (it.failure(), it.outcome()) == ("no-answer", Outcome.UNREAD)


def test_a_lease_counts_from_the_moment_of_asking(it):
    it.fetch(1, fetch_of())
    nonce = it.only(Acquire).nonce
    it.at(31.0).answer(Grant(nonce, 1, 30_000))
    it.met()
    assert it.of(Select) == []


@pytest.mark.parametrize(
    ("reply_to", "nonce", "ticket_id"), [("another", 0, 1), ("src", 1, 1), ("src", 0, 2)]
)
def test_only_who_was_asked_grants_what_was_asked(it, reply_to, nonce, ticket_id):
    it.fetch(1, fetch_of())
    asked = it.only(Acquire).nonce
    it.answer(Grant(asked + nonce, ticket_id, 30_000), reply_to)
    it.met()
    assert it.of(Select) == []


def test_one_renewal_per_peer_when_a_third_is_gone(it):
    it.reading()
    it.granted(2, 2)
    it.at(9.9).tick()
    assert it.of(Renew) == []
    it.at(10.0).tick()
    renew = it.only(Renew)
    assert (renew.generation, renew.reader, renew.reader_rank) == (7, "A", 0)
    (first, _), (second, _) = renew.tickets
    assert (first, second) == (1, 2)


def test_what_the_source_does_not_renew_fails(it):
    (transfer,) = it.reading()
    it.at(10.0).tick()
    it.answer(Renewal(it.only(Renew).nonce, 30_000, (), (1,)))
    assert it.of(Report) == []  # its read is still under way
    it.ended(transfer, "")
    assert (it.failure(), it.outcome()) == ("lease-ended", Outcome.FAILED)


def test_nothing_is_posted_under_a_lapsed_lease(it):
    it.granted()
    it.met()
    it.at(30.0).selected(1, selection(1))
    assert (it.of(PostReads), it.failure(), it.outcome()) == ([], "lease-lapsed", Outcome.UNREAD)


@pytest.mark.parametrize("code", ["forged", "taken", "ended", "spent", "reader"])
def test_a_denial_is_reported_and_there_is_nothing_to_settle(it, code):
    it.fetch(1, fetch_of())
    it.answer(Denial(it.only(Acquire).nonce, 1, code))
    assert (it.failure(), it.of(Settle)) == (code, [])
    assert is_empty(it.reader)


@pytest.mark.parametrize("code", ["aborted", "kvferry_fetches_total", "unexpected", ""])
def test_what_a_source_says_never_becomes_a_code_that_it_may_not_give(it, code):
    """Codes are labels of metrics: a peer must not make new ones, nor speak for this side."""
    it.fetch(1, fetch_of())
    it.answer(Denial(it.only(Acquire).nonce, 1, code, "why"))
    failure = it.only(Report).failure
    assert (failure.code, failure.detail) == (FailureCode.DENIED, f"{code}: why")
    assert it.only(Report).record.outcome == "denied"


def test_a_denial_of_a_granted_fetch_is_settled(it):
    """The authority does hold something for it: the answer to another ask said so."""
    it.fetch(1, fetch_of())
    first = it.only(Acquire).nonce
    it.at(0.5).tick()
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.answer(Denial(first, 1, "ended"))
    assert (it.failure(), it.outcome()) == ("ended", Outcome.UNREAD)


def test_a_ticket_is_fetched_once_at_a_time(it):
    it.fetch(1, fetch_of())
    it.fetch(2, fetch_of())
    assert (it.failure(), it.of(Settle)) == ("spent", [])
    it.fetch(3, fetch_of(generation=8))  # the same number of another start is another ticket
    assert it.of(Report) == []


def test_a_forged_ticket_with_the_number_of_a_good_one_takes_no_place_of_it(it):
    """Whoever reads a number can write it down; what comes of the forged one is its own affair."""
    forged = msgspec.structs.replace(ticket(), mac=b"none")
    tokens = [it.fetch(1, Fetch(forged, {}, {})).only(Acquire).token]
    it.fetch(2, fetch_of())
    assert it.of(Report) == []
    good = it.only(Acquire)
    assert good.token not in tokens
    it.answer(Grant(good.nonce, 1, 30_000))
    it.abort(1)
    assert {settle.token for settle in it.of(Settle)} == set(tokens), "the good one's lease is not given back"
    it.met()
    assert it.only(Select).handle == 2


def test_a_handle_is_used_once_at_a_time(it):
    it.fetch(1, fetch_of())
    with pytest.raises(SpecError, match="handle 1"):
        it.fetch(1, fetch_of(2))


def test_an_answer_to_an_earlier_use_of_a_handle_is_not_for_the_later_one(it):
    it.fetch(1, fetch_of())
    nonce = it.only(Acquire).nonce
    it.abort(1)
    it.fetch(1, fetch_of())
    it.answer(Grant(nonce, 1, 30_000))
    it.met()
    assert it.of(Select) == []


# -- confirmed after the last byte ----------------------------------------------------------------


def test_nothing_counts_before_the_source_has_said_so(it):
    (transfer,) = it.reading()
    settle = it.ended(transfer, "").only(Settle)
    assert it.of(Report) == []
    assert it.reader.status()["fetches"] == {"confirming": 1}
    it.answer(SettleAck(1, 0, settle.attempt), "another")
    it.answer(SettleAck(1, 0, settle.attempt + 1))
    it.answer(SettleAck(2, 0, settle.attempt))
    it.answer(SettleAck(1, 1, settle.attempt))
    assert it.of(Report) == []
    it.answer(SettleAck(1, 0, settle.attempt))
    assert it.only(Report).failure is None


@pytest.mark.parametrize(("code", "told"), [("lease-ended", "lease-ended"), ("restarted", "restarted")])
def test_what_the_source_does_not_confirm_does_not_count(it, code, told):
    (transfer,) = it.reading()
    it.ended(transfer, "").confirmed(code)
    assert (it.failure(), it.of(Settle), is_empty(it.reader)) == (told, [], True)


def test_a_clock_that_stopped_makes_no_late_read_count(it):
    """The reader's clock says that no time has passed; the source, that the lease is long over."""
    (transfer,) = it.reading()
    it.at(0.0).ended(transfer, "")
    assert it.of(Report) == []
    assert it.confirmed("lease-ended").failure() == "lease-ended"


def test_a_clock_that_runs_too_fast_makes_no_read_fail_that_the_source_confirms(it):
    (transfer,) = it.reading()
    it.at(100.0).ended(transfer, "").confirmed()
    assert it.only(Report).failure is None


def test_a_confirmation_that_does_not_come_is_asked_for_again_and_given_up_in_the_end(it):
    (transfer,) = it.reading()
    settle = it.at(5.0).ended(transfer, "").only(Settle)
    assert it.at(5.5).tick().only(Settle) == settle
    assert it.at(34.9).tick().of(Report) == []
    assert it.at(35.0).tick().failure() == "unconfirmed"
    assert is_empty(it.reader)


def test_no_lease_is_renewed_for_a_read_that_is_over(it):
    (transfer,) = it.reading()
    it.at(5.0).ended(transfer, "")
    assert it.at(10.0).tick().of(Renew) == []


def test_what_was_asked_before_the_end_does_not_decide_after_it(it):
    """The lease that is not renewed any more may have ended because the read was settled."""
    it.fetch(1, fetch_of())
    first = it.only(Acquire).nonce
    it.at(0.5).tick()
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.met().selected(1, selection(1))
    (transfer,) = it.posted()
    renew = it.at(20.0).tick().only(Renew)
    settle = it.ended(transfer, "").only(Settle)
    assert it.answer(Renewal(renew.nonce, 30_000, (), (1,))).effects == []
    assert it.answer(Denial(first, 1, "spent")).effects == []
    it.answer(SettleAck(1, 0, settle.attempt))
    assert it.only(Report).failure is None


def test_an_abort_while_it_is_being_confirmed_is_reported_at_once_and_settled_once(it):
    (transfer,) = it.reading()
    settle = it.ended(transfer, "").only(Settle)
    assert it.abort(1).failure() == "aborted"
    assert it.of(Settle) == []
    assert it.at(0.5).tick().only(Settle) == settle, "the source must hear of it"
    assert it.answer(SettleAck(1, 0, settle.attempt)).effects == []
    assert is_empty(it.reader)


def test_a_token_is_of_one_ticket_and_shown_to_its_authority_alone(it):
    """A forged ticket that names another authority must not tell it what the real one is shown."""
    same = [it.fetch(handle, fetch_of()).only(Acquire).token for handle in (1,)]
    it.abort(1)
    same.append(it.fetch(2, fetch_of()).only(Acquire).token)
    others = [
        it.fetch(3, fetch_of(2)).only(Acquire).token,
        it.fetch(4, fetch_of(generation=8)).only(Acquire).token,
        it.fetch(5, fetch_of(authority="elsewhere")).only(Acquire).token,
        it.fetch(6, fetch_of(engine="another")).only(Acquire).token,
        Reader("A", 0, 2, key=KEY[::-1])._token(PEER, ticket().fingerprint),
    ]
    assert same[0] == same[1]
    assert len({same[0], *others}) == 6
    assert {len(token) for token in others} == {16}


# -- meeting --------------------------------------------------------------------------------------


def test_not_ready_is_tried_again_until_the_deadline(it):
    it.granted()
    it.answer(Rejected("not-ready"))
    it.at(0.5).tick()
    assert it.of(Hello)
    it.at(10.0).tick()
    assert it.failure() == "no-answer"
    assert it.of(Drop) == [Drop(PEER)]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Rejected("protocol"), "protocol"),
        (welcome(protocol=PROTOCOL + 2), "protocol"),
        (welcome(protocol=OLDEST_PROTOCOL - 1), "protocol"),
        (welcome(generation=8), "restarted"),
        (welcome(engine="another"), "restarted"),
    ],
)
def test_a_peer_that_cannot_be_met_is_forgotten_whole(it, message, code):
    it.granted()
    it.answer(message)
    assert (it.failure(), it.of(Drop), len(it.reader.meetings)) == (code, [Drop(PEER)], 0)


def describing(it, ranks=(0, 3)):
    """Greeted and planned for; the question that came of it."""
    it.granted().answer(welcome())
    return it.found(PEER, ranks).only(DescribeRanks)


def test_ranks_come_in_several_answers_each_asked_for(it):
    question = describing(it, (0, 1, 2))
    it.answer(described(question, [1]))
    rest = it.only(DescribeRanks)
    assert (rest.nonce, rest.ranks) == (question.nonce, (0, 2))
    assert it.answer(described(question, [1])).effects == [], "a copy asks for nothing"
    it.answer(described(question, [0, 5]))  # nobody asked for 5
    assert it.only(DescribeRanks).ranks == (2,)
    it.answer(described(question, [0, 2]))
    assert sorted(it.only(Build).ranks) == [0, 1, 2]
    assert it.answer(described(question)).effects == [], "late: it is being built"


def test_an_unanswered_question_for_ranks_is_repeated_until_the_deadline(it):
    question = describing(it)
    it.answer(described(question, [3]))
    it.at(0.4).tick()
    assert it.of(DescribeRanks) == []
    it.at(0.5).tick()
    assert it.only(DescribeRanks).ranks == (0,)
    it.at(10.0).tick()
    assert (it.failure(), it.of(Drop)) == ("no-answer", [Drop(PEER)])


@pytest.mark.parametrize(("nonce", "reply_to"), [(1, "src"), (0, "another")])
def test_only_who_was_asked_describes_what_was_asked(it, nonce, reply_to):
    question = describing(it)
    other = RankDescriptions(question.nonce + nonce, 7, {0: DESCRIBED, 3: DESCRIBED})
    assert it.answer(other, reply_to).effects == []


def test_ranks_of_another_start_are_not_taken(it):
    """Law 7. Nor does its answer concern a meeting with the start that gives it."""
    question = describing(it)
    it.fetch(2, fetch_of(2, generation=8))
    it.answer(welcome(generation=8, outline=b"new"))
    it.answer(described(question, generation=8))
    assert [(r.handle, r.failure.code) for r in it.of(Report)] == [(1, "restarted")]
    assert it.of(Drop) == [Drop(PEER)]
    assert list(it.reader.fetches.by_handle) == [2]


def test_ranks_that_are_too_long_to_be_kept_fail_the_meeting(it, monkeypatch):
    monkeypatch.setattr("kvferry.runtime.meetings.MAX_RANKS_BYTES", 2 * DESCRIBED.num_bytes - 1)
    it.answer(described(describing(it)))
    assert (it.failure(), it.of(Build), it.of(Drop)) == ("bad-manifest", [], [Drop(PEER)])


def test_a_peer_that_nothing_is_read_from_needs_no_description(it):
    it.granted().answer(welcome())
    assert it.found(PEER, ()).only(Build).ranks == {}


def test_a_slow_plan_leaves_the_peer_its_time_to_answer(it):
    it.granted().answer(welcome())
    it.at(11.0).tick()
    assert (it.failure(), it.of(Drop)) == ("no-answer", [])
    it.granted(2, 2)
    question = it.found(PEER, (0,)).only(DescribeRanks)
    assert it.tick().of(Report) == []
    it.answer(described(question))
    assert it.built(PEER).only(Select).handle == 2


def test_a_plan_for_a_peer_that_was_forgotten_is_nobodys(it):
    assert it.found(PEER, (0,)).effects == []


def test_a_denial_because_of_a_restart_forgets_the_peer(it):
    it.reading()
    it.fetch(2, fetch_of(2))
    it.answer(Denial(it.only(Acquire).nonce, 2, "restarted"))
    assert (it.failure(), it.of(Drop)) == ("restarted", [Drop(PEER)])
    assert list(it.reader.fetches.by_handle) == [1]  # what is under way ends by itself


def test_a_refused_plan_fails_everybody_who_waits_and_nobody_else(it):
    it.granted(1, 1)
    it.granted(2, 2)
    it.fetch(3, fetch_of(1, authority="elsewhere"))
    it.at(1.0).answer(welcome())
    it.not_built(PEER, Failure(FailureCode.REFUSED, "why"))
    assert [(r.handle, r.failure.code) for r in it.of(Report)] == [(1, "refused"), (2, "refused")]
    assert list(it.reader.fetches.by_handle) == [3]


def test_a_slow_build_fails_its_fetch_and_serves_the_next(it):
    it.granted().answer(welcome())
    it.at(10.0).tick()
    assert (it.failure(), it.of(Drop)) == ("no-answer", [])
    it.at(11.0).granted(2, 2)
    assert it.of(Hello) == []
    it.built(PEER)
    assert it.only(Select).handle == 2


def test_a_build_that_nobody_waits_for_any_more_is_dropped(it):
    assert it.built(PEER).effects == [Drop(PEER)]


def test_a_meeting_that_was_given_up_does_not_fail_a_later_fetch(it):
    it.fetch(1, fetch_of())
    it.abort(1)
    assert it.reader.next_deadline() < 1.0  # somebody looks after it
    it.at(10.0).tick()
    assert len(it.reader.meetings) == 0


def test_selection_has_a_deadline_and_a_late_one_posts_nothing(it):
    it.granted()
    it.met()
    it.at(10.0).tick()
    assert (it.failure(), it.outcome()) == ("overdue", Outcome.UNREAD)
    assert it.selected(1, selection(1)).effects == []


def test_a_request_that_does_not_fit_fails_alone(it):
    """R002-3."""
    it.granted(1, 1)
    it.met()
    it.granted(2, 2)
    it.not_selected(1, Failure(FailureCode.REQUEST, "too few blocks"))
    assert (it.failure(), it.outcome()) == ("request", Outcome.UNREAD)
    assert list(it.reader.fetches.by_handle) == [2]


def test_too_many_peers_at_once(it, monkeypatch):
    monkeypatch.setattr(Reader, "MAX_PEERS", 1)
    it.reading()
    it.fetch(2, fetch_of(authority="elsewhere"))
    assert it.failure() == "too-many-peers"


def test_an_idle_peer_makes_room(it, monkeypatch):
    """Else each restart of a peer would take a place for good."""
    monkeypatch.setattr(Reader, "MAX_PEERS", 1)
    (transfer,) = it.reading()
    it.ended(transfer, "").confirmed()
    it.fetch(2, fetch_of(generation=8))
    assert (it.of(Drop), it.of(Report)) == ([Drop(PEER)], [])


# -- a source that is gone ------------------------------------------------------------------------


def lost(it, at=1.0):
    """The connection breaks, and does not come back in time."""
    it.at(at).disconnected("src")
    return it.at(at + 0.5).tick()


def test_who_waits_for_a_source_that_is_gone_is_told_at_once(it):
    it.calling("src").connected("src")
    it.granted(1, 1)
    it.met().granted(2, 2).selected(2, selection(1))  # 1 is selecting, 2 is reading
    it.hold(3, ticket(3))
    it.fetch(4, fetch_of(authority="elsewhere"))
    lost(it)
    codes = {report.handle: report.failure.code for report in it.of(Report)}
    assert codes == {1: "source-gone", 3: "source-gone"}
    assert "prefill at src is gone" in it.of(Report)[0].failure.detail
    assert sorted(it.reader.fetches.by_handle) == [2, 4]


def test_the_next_fetch_from_it_fails_at_once_and_nobody_is_called(it):
    it.connected("src")
    it.granted()
    lost(it)
    it.fetch(2, fetch_of(2))
    assert (it.failure(), it.of(Send)) == ("source-gone", [])
    it.hold(3, ticket(3))
    assert (it.failure(), it.of(Send)) == ("source-gone", [])
    assert not it.reader.fetches.by_handle


def test_it_serves_again_when_it_answers_again(it):
    it.connected("src")
    lost(it)
    it.connected("src")
    it.fetch(1, fetch_of())
    assert (it.of(Report), len(it.of(Acquire))) == ([], 1)


def test_reads_in_flight_end_as_the_transport_says_though_the_source_is_gone(it):
    it.connected("src")
    first, second = it.reading(2)
    assert lost(it).of(Report) == []
    it.ended(first, "")
    assert it.of(Report) == []
    it.ended(second, "")
    assert it.failure() == "source-gone", "nobody is there to confirm it"


def test_a_read_is_good_if_its_source_is_there_again_at_its_end(it):
    it.connected("src")
    (transfer,) = it.reading()
    lost(it)
    it.connected("src").ended(transfer, "").confirmed()
    assert it.only(Report).failure is None


def test_who_waits_for_a_confirmation_is_told_too(it):
    it.connected("src")
    (transfer,) = it.reading()
    it.ended(transfer, "")
    assert lost(it).failure() == "source-gone"


def test_what_could_not_be_settled_is_said_when_the_source_is_there_again(it):
    it.connected("src")
    it.granted()
    lost(it)
    settle = it.only(Settle)
    assert it.at(3.0).tick().of(Settle) == []
    it.connected("src")
    assert it.at(4.0).tick().of(Settle) == [settle]


def test_where_nobody_ever_answered_nothing_is_left_behind(it):
    it.fetch(1, fetch_of()).calling("src")
    it.at(2.0).tick()
    assert (it.failure(), it.of(HangUp), it.of(Settle)) == ("source-gone", [], [])
    assert is_empty(it.reader)
    assert len(it.reader.meetings) == 0
    assert it.at(11.9).tick().of(HangUp) == []  # it may only stand still
    assert it.at(12.0).tick().only(HangUp) == HangUp("src")


def test_a_source_that_stood_still_at_the_first_contact_serves_as_soon_as_it_goes_on(it):
    it.fetch(1, fetch_of()).calling("src")
    assert it.at(2.0).tick().failure() == "source-gone"
    assert it.of(HangUp) == []  # else nobody would notice
    assert it.at(3.0).fetch(2, fetch_of(2)).failure() == "source-gone"
    it.connected("src")
    assert it.fetch(3, fetch_of(3)).of(Acquire)


def test_a_meeting_that_gets_on_is_not_given_up(it):
    """On a busy machine each answer takes seconds; together they may take longer than one may."""
    it.fetch(1, fetch_of())
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.at(8.0).answer(welcome())
    peer = it.only(FindRanks).peer
    it.at(16.0).tick()
    assert it.of(Report) == []
    it.found(peer, (0, 3))
    it.at(24.0).answer(described(it.only(DescribeRanks)))
    it.at(30.0).built(it.only(Build).peer)
    assert it.only(Select).handle == 1


def test_a_meeting_that_stands_still_is_given_up(it):
    it.fetch(1, fetch_of())
    it.answer(Grant(it.only(Acquire).nonce, 1, 30_000))
    it.at(8.0).answer(welcome())
    it.at(17.9).tick()
    assert it.of(Report) == []
    it.at(18.0).tick()
    assert it.failure() == "no-answer"


def test_an_unused_peer_that_is_gone_is_forgotten_whole(it):
    it.connected("src")
    (transfer,) = it.reading()
    it.ended(transfer, "").confirmed()
    assert lost(it).of(Drop) == [Drop(PEER)]


def test_a_peer_that_is_gone_is_kept_while_it_is_read_from(it):
    it.connected("src")
    it.reading()
    assert (lost(it).of(Drop), it.reader.meetings.state(PEER)) == ([], Meeting.BROKEN)


@pytest.mark.parametrize("error", ["", "flushed"])
def test_a_peer_that_is_gone_is_forgotten_when_the_last_read_from_it_has_ended(it, error):
    """Else what is mapped of a dead engine stays taken until its reader ends, too."""
    it.connected("src")
    first, second = it.reading(2)
    lost(it)
    assert it.ended(first, error).tick().of(Drop) == []
    assert it.ended(second, error).tick().of(Drop) == [Drop(PEER)]
    assert it.tick().of(Drop) == []


@pytest.mark.parametrize("is_planning", [True, False])
def test_a_peer_that_died_while_it_was_being_met_leaves_nothing_mapped(it, is_planning):
    """Somebody is at work for it, and says so only when it is gone."""
    it.connected("src")
    it.granted()
    it.answer(welcome())
    if is_planning:
        lost(it)
    it.found(PEER, (0, 3))
    if is_planning:
        it.at(30.0).tick()
    else:
        it.answer(described(it.only(DescribeRanks)))
        assert lost(it).failure() == "source-gone"
        it.built(PEER).tick()
    assert it.of(Drop) == [Drop(PEER)]
    assert len(it.reader.meetings) == 0


# -- ends -----------------------------------------------------------------------------------------


def test_one_of_four_sources_fails_and_the_report_waits_for_the_other_three(it):
    transfers = it.reading(4)
    it.ended(transfers[1], "flushed")
    assert it.effects == [Cancel(transfers[n]) for n in (0, 2, 3)]
    it.ended(transfers[0], "").ended(transfers[3], "")
    assert it.of(Report) == []
    it.ended(transfers[2], "")
    assert (it.failure(), it.outcome()) == ("transport", Outcome.FAILED)


def test_an_end_that_nobody_knows_is_nobodys(it):
    (transfer,) = it.reading(handle=0)
    it.ended(999, "flushed")
    it.ended(transfer, "").confirmed()
    assert it.only(Report).failure is None
    assert it.ended(transfer, "").effects == []


def test_abort_before_anything_is_posted_gives_the_ticket_back(it):
    it.granted()
    it.abort(1)
    assert (it.failure(), it.outcome()) == ("aborted", Outcome.UNREAD)
    assert (it.only(Settle).declined, it.only(Settle).reader_ranks) == (ticket(), 2)
    assert it.abort(1).effects == []


def test_a_fetch_that_could_not_begin_leaves_its_ticket_to_another_engine(it):
    it.granted()
    it.at(10.0).tick()
    assert (it.failure(), it.only(Settle).declined) == ("no-answer", None)


def test_an_abort_that_nobody_has_answered_is_said_again(it):
    """What asked for the lease may be lost; what gives it up proves itself."""
    it.hold(1, ticket()).abort(1)
    told = it.only(Settle)
    assert told.declined == ticket()
    assert it.at(0.5).tick().only(Settle) == told
    it.confirmed()
    assert it.at(1.0).tick().of(Settle) == []
    assert is_empty(it.reader)


def test_an_abort_is_not_said_for_long_to_who_was_never_there(it):
    it.hold(1, made_up(1)).abort(1)
    assert it.at(9.9).tick().of(Settle)
    assert it.at(10.0).tick().only(HangUp) == HangUp("tcp://nobody:1")
    assert is_empty(it.reader)


def test_a_ticket_is_declined_without_being_held(it):
    it.decline(1, ticket())
    told = it.only(Settle)
    assert (told.declined, told.outcome, told.reader_ranks) == (ticket(), Outcome.UNREAD, 2)
    assert it.confirmed().effects == []
    assert it.tick().only(HangUp) == HangUp("src")
    assert is_empty(it.reader)


def test_a_ticket_that_is_under_way_is_not_declined_beside(it):
    it.granted()
    assert it.decline(2, ticket()).effects == []


def test_abort_after_the_post_waits_for_the_end(it):
    first, second = it.reading(2)
    assert it.abort(1).effects == [Cancel(first), Cancel(second)]
    it.ended(first, "cancelled")
    assert it.effects == []
    it.ended(second, "")
    assert (it.failure(), it.outcome()) == ("aborted", Outcome.FAILED)
    assert it.only(Settle).declined == ticket()  # for its source, too, nothing has failed


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_read_that_does_not_end_is_quarantined_and_never_reported_as_good(it, is_aborted):
    (transfer,) = it.reading()
    if is_aborted:
        it.abort(1)
    it.at(120.0).tick()
    assert (it.of(Report), it.reader.num_quarantined) == ([], 1)
    assert it.of(Cancel) == ([] if is_aborted else [Cancel(transfer)])  # said once
    assert it.reader.status()["fetches"] == {"quarantined": 1}
    it.abort(1)
    it.at(10_000.0).tick()
    assert (it.of(Report), it.of(Renew), it.reader.num_quarantined) == ([], [], 1)
    it.ended(transfer, "")  # late, but an end
    assert it.failure() == ("aborted" if is_aborted else "overdue")
    assert it.reader.num_quarantined == 0


def test_a_broken_peer_is_met_anew(it):
    (transfer,) = it.reading()
    it.ended(transfer, "flushed")
    it.fetch(2, fetch_of(2))
    assert it.of(Drop) == [Drop(PEER)]
    assert it.of(Hello)
    it.answer(Grant(it.only(Acquire).nonce, 2, 30_000))
    assert it.of(Select) == []  # the old connection serves nobody
    it.met()
    assert it.only(Select).handle == 2


def test_a_fetch_that_was_given_up_does_not_break_its_peer(it):
    """Its reads ended with an error because we cancelled them."""
    (transfer,) = it.reading()
    it.abort(1)
    it.ended(transfer, "cancelled")
    it.granted(2, 2)
    assert it.only(Select).handle == 2


def test_a_late_end_does_not_break_the_next_meeting(it):
    first, late = it.reading(2)
    it.ended(first, "flushed")
    it.at(120.0).tick()  # the other one is quarantined
    it.granted(2, 2)
    it.ended(late, "flushed")
    it.met()
    assert it.reader.meetings.state(PEER) is Meeting.MET


@pytest.mark.parametrize("is_selecting", [False, True])
def test_a_broken_peer_is_kept_while_something_needs_it(it, is_selecting):
    first, _ = it.reading(2)
    if is_selecting:
        it.granted(2, 2)
        it.ended(first, "flushed").ended(first + 1, "")
    else:
        it.ended(first, "flushed")
    assert it.fetch(3, fetch_of(3)).of(Drop) == []


def test_a_quarantined_read_does_not_keep_a_broken_peer(it):
    first, _ = it.reading(2)
    it.ended(first, "flushed")
    it.at(120.0).tick()
    it.fetch(2, fetch_of(2))
    assert it.of(Drop) == [Drop(PEER)]


# -- settling -------------------------------------------------------------------------------------


def test_settle_is_repeated_until_noted(it):
    it.granted().abort(1)
    settle = it.only(Settle)
    it.at(0.4).tick()
    assert it.of(Settle) == []
    it.at(0.5).tick()
    assert it.of(Settle) == [settle]
    it.answer(SettleAck(1, 0, settle.attempt), "another")
    it.answer(SettleAck(1, 0, settle.attempt + 1))
    it.at(1.0).tick()
    assert it.of(Settle) == [settle]
    it.answer(SettleAck(1, 0, settle.attempt))
    it.at(1.5).tick()
    assert it.of(Settle) == []


def test_settle_is_repeated_no_longer_than_a_lease(it):
    it.granted().abort(1)
    it.at(30.0).tick()
    assert (it.of(Settle), is_empty(it.reader)) == ([], True)


def test_a_forged_lease_does_not_make_it_repeat_forever(it):
    it.fetch(1, fetch_of(lease_ms=1 << 60)).abort(1)
    it.at(120.0).tick()
    assert is_empty(it.reader)


def test_two_fetches_of_one_ticket_settle_each_for_itself(it):
    it.granted().abort(1)
    first = it.only(Settle)
    it.granted(2).abort(2)
    second = it.only(Settle)
    assert first.attempt < second.attempt
    it.answer(SettleAck(1, 0, second.attempt))
    it.at(0.5).tick()
    assert it.of(Settle) == [first]


def test_idle_means_that_nothing_is_to_be_done(it):
    assert it.reader.next_deadline() == float("inf")
    (transfer,) = it.reading()
    it.ended(transfer, "").confirmed()
    assert it.reader.next_deadline() == float("inf")


@pytest.mark.parametrize(("name", "rank", "ranks"), [("", 0, 1), ("A", 1, 1), ("A", -1, 1)])
def test_a_reader_has_a_name_and_a_rank(name, rank, ranks):
    with pytest.raises(SpecError, match="a name and a rank"):
        Reader(name, rank, ranks, key=KEY)


@pytest.mark.parametrize("key", [b"", b"guess me"])
def test_a_reader_has_a_key_that_nobody_guesses(key):
    with pytest.raises(SpecError, match="needs at least 16 bytes"):
        Reader("A", 0, 1, key=key)


# -- tickets that name engines which nobody has ever seen ------------------------------------------


def made_up(number):
    return msgspec.structs.replace(
        ticket(number), engine=f"engine-{number}", authority=f"tcp://nobody:{number}"
    )


def test_engines_that_nobody_has_met_take_no_room_from_those_that_were(it):
    it.granted()
    it.met()
    for number in range(2, 2 + Reader.MAX_UNMET):
        assert it.hold(number, made_up(number)).of(Hello)
    assert it.hold(1000, made_up(1000)).failure() == "too-many-peers"
    assert it.effects == it.of(Report), "nobody is called or told anything"
    assert it.fetch(1001, fetch_of(1001)).of(Acquire), "a peer that was met always has room"
    it.at(10.0).tick()
    assert len(it.of(Report)) >= Reader.MAX_UNMET
    assert it.hold(1002, made_up(1002)).of(Hello), "there is room again"


def test_only_so_many_fetches_wait_for_engines_that_were_not_met(it, monkeypatch):
    monkeypatch.setattr(Reader, "MAX_WAITING", 3)
    for number in (1, 2, 3):
        it.hold(number, ticket(number))
    assert it.hold(4, ticket(4)).failure() == "too-many-peers"
    it.answer(Denial(1, 1, "taken"))
    it.abort(2)
    assert it.hold(5, ticket(5)).of(Acquire)
    it.met()
    assert it.hold(6, ticket(6)).of(Acquire)
    assert it.hold(7, ticket(7)).of(Acquire)


def test_who_never_answered_is_told_once_and_not_called_any_more(it):
    """A ticket may name any port: it was called for a lease and longer, at the ticket's own wish."""
    it.hold(1, made_up(1))
    it.at(10.0).tick()
    assert it.failure() == "no-answer"
    assert it.outcome() is Outcome.UNREAD
    assert it.only(HangUp) == HangUp("tcp://nobody:1")
    assert it.at(60.0).tick().effects == []
    assert is_empty(it.reader)


def test_who_has_answered_is_called_until_it_has_heard_the_end(it):
    it.granted()
    it.abort(1)
    assert it.at(5.0).tick().of(Settle)
    assert not it.of(HangUp), "it does not know yet"
    it.confirmed()
    assert not it.at(9.0).tick().of(HangUp), "its meeting is under way"
    it.at(10.0).tick()
    assert it.only(HangUp) == HangUp("src")


def test_a_ticket_of_another_start_has_its_source_called_anew(it):
    """Its engine has started again at its address, and the channel may not have noticed yet."""
    it.connected("src")
    it.granted()
    lost(it)
    assert it.fetch(2, fetch_of(2)).failure() == "source-gone"
    it.fetch(3, fetch_of(3, generation=8))
    assert (it.of(HangUp), len(it.of(Acquire)), it.of(Report)) == ([HangUp("src")], 1, [])
