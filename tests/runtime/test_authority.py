"""The lease authority, one behaviour at a time."""

import contextlib
import threading

import msgspec
import pytest

from kvferry.core.request import BlockTable
from kvferry.errors import SpecError
from kvferry.runtime import Authority, Offers, Released, Timing
from kvferry.runtime.lease import EndedReadings
from kvferry.runtime.values import Merge, Send, Show, Strike
from kvferry.wire.messages import (
    MAX_BATCH,
    OLDEST_PROTOCOL,
    PROTOCOL,
    TOKEN_BYTES,
    Acquire,
    Denial,
    DescribeRanks,
    Grant,
    Hello,
    Join,
    JoinAck,
    Outcome,
    RankDescription,
    RankDescriptions,
    Rejected,
    ReleaseAck,
    ReleaseNotice,
    Renew,
    Renewal,
    Settle,
    Welcome,
)

LEASE = 30.0
TIMING = Timing(lease=LEASE, retry=0.5)


def rank_of(card):
    return RankDescription(b"layout", ((4096, "cpu"),), card)


RANK = rank_of(b"c")
READ, FAILED, UNREAD = Outcome.READ, Outcome.FAILED, Outcome.UNREAD


class Source(Authority):
    """An authority, and where its tickets are made."""

    def __init__(self, num_ranks, generation, board=""):
        self.offers = Offers("prefill", generation, b"key", "here", int(LEASE * 1000))
        super().__init__(self.offers, num_ranks, TIMING, board)


def authority(num_ranks=1, generation=7):
    return Source(num_ranks, generation)


def offered(source, request_id="r", now=0.0):
    ticket = source.offers.make(request_id, {"full": BlockTable.of([1, 2])}, 20)
    assert source.offer(now, ticket) == []
    return ticket


def one(effects):
    (effect,) = effects
    return effect.message


def token_of(reader, rank):
    """What a rank of a reader shows."""
    return f"{reader}/{rank}".ljust(TOKEN_BYTES).encode()


def acquire(source, ticket, reader="A", rank=0, ranks=1, *, now=1.0, attempt=1, token=None):
    token = token_of(reader, rank) if token is None else token
    return one(source.receive(now, "reply_to", Acquire(5, ticket, reader, rank, ranks, attempt, token)))


def said(source, ticket, outcome, reader="A", rank=0, *, now=2.0, attempt=1, generation=7, token=None):
    """What is answered to a settlement, and the releases that follow."""
    token = token_of(reader, rank) if token is None else token
    message = Settle(generation, ticket.ticket_id, reader, rank, attempt, token, outcome)
    ack, *rest = source.receive(now, "reply_to", message)
    assert (ack.message.ticket_id, ack.message.reader_rank) == (ticket.ticket_id, rank)
    assert ack.message.attempt == attempt
    return ack.message.code, [effect for effect in rest if isinstance(effect, Released)]


def settle(source, ticket, outcome, *args, **kwargs):
    return said(source, ticket, outcome, *args, **kwargs)[1]


def renew(source, reader, *tickets, now, generation=7, rank=0, token=None):
    token = token_of(reader, rank) if token is None else token
    named = tuple((ticket.ticket_id, token) for ticket in tickets)
    return one(source.receive(now, "reply_to", Renew(9, generation, reader, rank, named)))


def join(source, rank=0, now=0.0, **changes):
    """What is answered; the manifests that are to be merged are, at once."""
    message = msgspec.structs.replace(Join(PROTOCOL, "prefill", rank, "memory", b"m", RANK), **changes)
    effects = source.receive(now, f"rank {rank}", message)
    if [type(effect) for effect in effects] == [Merge]:
        effects = source.merged(now, b"+".join(each.manifest for each in effects[0].joins.values()))
    return [effect.message for effect in effects if effect.to == f"rank {rank}"]


# -- who may read ---------------------------------------------------------------------------------


def test_a_ticket_binds_to_its_first_reader():
    source = authority()
    ticket = offered(source)
    assert acquire(source, ticket, "A") == Grant(5, ticket.ticket_id, 30_000, is_whole=False)
    assert acquire(source, ticket, "B").code == "taken"
    assert acquire(source, ticket, "A").ticket_id == ticket.ticket_id  # asked twice: the same answer
    assert source.figures()[("kvferry_grants",)] == 1  # and counted once


def test_a_lease_stands_on_the_board_until_it_ends():
    """It is shown before its grant is sent, and struck before anybody hears of its end."""
    source = Source(1, 7, board="the board")
    ticket = offered(source)
    ask = Acquire(5, ticket, "A", 0, 1, 1, token_of("A", 0))
    mark = source.offers.mark(ticket.ticket_id)
    assert mark != source.offers.mark(ticket.ticket_id + 1)
    shown, *sent = source.receive(1.0, "reply_to", ask)
    assert shown == Show(ticket.ticket_id, mark)
    assert (one(sent).board, one(sent).mark) == ("the board", mark)
    expired = source.tick(1.0 + LEASE)
    assert expired[0] == Strike(ticket.ticket_id)
    assert [type(effect) for effect in expired[1:]] == [Released]


def test_leases_that_end_together_are_all_struck_before_one_is_released():
    """What a rank that gathers says to the first notice releases the others at once."""
    source = Source(1, 7, board="the board")
    join(source, rank_key=b"key")
    tickets = [offered(source, f"request-{i}") for i in range(3)]
    effects = source.tick(LEASE)
    assert [effect for effect in effects if isinstance(effect, Strike)] == effects[:3]
    assert effects[:3] == [Strike(ticket.ticket_id) for ticket in tickets]


def test_unread_by_every_rank_frees_it_for_another_reader():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    acquire(source, ticket, "A", 1, 2)
    assert settle(source, ticket, UNREAD, "A", 0) == []
    assert acquire(source, ticket, "B").code == "taken"
    assert settle(source, ticket, UNREAD, "A", 1) == []
    assert isinstance(acquire(source, ticket, "B"), Grant)


def test_a_late_copy_of_an_earlier_attempt_changes_nothing():
    """Else the repeated "unread" of a given-up fetch would end the lease of the next one, while it reads."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", attempt=1)
    settle(source, ticket, UNREAD, attempt=1)
    assert isinstance(acquire(source, ticket, "A", attempt=4), Grant)
    assert settle(source, ticket, UNREAD, attempt=1) == []
    assert acquire(source, ticket, "B").code == "taken"
    assert [e.reason for e in settle(source, ticket, READ, attempt=4)] == ["read"]


def test_a_late_acquire_of_an_earlier_attempt_binds_nothing():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", attempt=1)
    settle(source, ticket, UNREAD, attempt=1)
    assert acquire(source, ticket, "A", attempt=1).code == "spent"
    assert isinstance(acquire(source, ticket, "B"), Grant)


def test_a_rank_that_was_granted_nothing_settles_nothing():
    """Nobody can know whether it is that rank: its lease then ends by its deadline."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    assert said(source, ticket, UNREAD, "A", 1, attempt=3) == ("lease-ended", [])
    assert settle(source, ticket, READ, "A", 0) == []
    assert [e.reason for e in source.tick(LEASE + 1)] == ["expired"]


def test_a_settle_of_an_attempt_that_was_not_granted_settles_nothing():
    """A forged ticket has a genuine number: giving it up must not end the read of the genuine one."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", attempt=3)
    assert settle(source, ticket, UNREAD, attempt=5) == []
    assert acquire(source, ticket, "B").code == "taken"
    assert len(settle(source, ticket, READ, attempt=3)) == 1


def test_a_rank_that_read_nothing_may_try_anew_before_the_others_gave_up():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2, attempt=1)
    settle(source, ticket, UNREAD, "A", 0, attempt=1)
    assert isinstance(acquire(source, ticket, "A", 0, 2, attempt=2), Grant)
    acquire(source, ticket, "A", 1, 2)
    settle(source, ticket, UNREAD, "A", 1)
    assert source.num_leases == 1
    assert acquire(source, ticket, "B").code == "taken"


@pytest.mark.parametrize("outcome", [READ, FAILED])
def test_a_rank_that_read_is_through_with_it(outcome):
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    settle(source, ticket, outcome, "A", 0)
    assert acquire(source, ticket, "A", 0, 2, attempt=2).code == "spent"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"generation": 6}, "restarted"),
        ({"engine": "other"}, "restarted"),
        ({"num_tokens": 21}, "forged"),
        ({"lease_ms": 1 << 40}, "forged"),
        ({"mac": b""}, "forged"),
    ],
)
def test_only_what_was_handed_out_is_granted(changes, code):
    source = authority()
    ticket = msgspec.structs.replace(offered(source), **changes)
    assert isinstance(acquire(source, ticket), Denial)
    assert acquire(source, ticket).code == code


@pytest.mark.parametrize(("reader", "rank", "ranks"), [("", 0, 1), ("A", -1, 1), ("A", 1, 1), ("A", 0, 0)])
def test_a_reader_has_a_name_and_a_rank(reader, rank, ranks):
    """A nameless one would hold a grant for a lease that is bound to nobody."""
    source = authority()
    assert acquire(source, offered(source), reader, rank, ranks).code == "reader"


def test_the_ranks_of_a_reader_agree_on_their_number():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    assert acquire(source, ticket, "A", 1, 3).code == "reader"


def test_what_is_over_is_not_granted_even_before_the_tick():
    source = authority()
    ticket = offered(source)
    assert acquire(source, ticket, now=LEASE).code == "ended"
    assert [e.reason for e in source.tick(LEASE)] == ["expired"]
    assert acquire(source, ticket, now=LEASE).code == "ended"


# -- how long -------------------------------------------------------------------------------------


def test_one_renewal_answers_for_many_tickets():
    source = authority()
    mine, others, gone = offered(source, "1"), offered(source, "2"), offered(source, "3")
    acquire(source, mine, "A")
    acquire(source, others, "B")
    acquire(source, gone, "A")
    settle(source, gone, READ)
    answer = renew(source, "A", mine, others, gone, now=20.0)
    assert answer == Renewal(9, 30_000, (mine.ticket_id,), (others.ticket_id, gone.ticket_id))
    assert [e.request_id for e in source.tick(LEASE + 1)] == ["2"]
    assert source.tick(49.9) == []
    assert [e.request_id for e in source.tick(50.0)] == ["1"]


def test_what_is_over_is_not_renewed_even_before_the_tick():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, now=1.0)
    assert renew(source, "A", ticket, now=31.0).ended == (ticket.ticket_id,)
    assert [e.reason for e in source.tick(31.0)] == ["expired"]


def test_nobody_renews_what_is_bound_to_nobody():
    source = authority()
    ticket = offered(source)
    assert renew(source, "", ticket, now=20.0).kept == ()


def test_a_renewal_of_another_start_keeps_nothing():
    """Tickets are numbered from 1 at each start: the same number is another request."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A")
    assert renew(source, "A", ticket, now=2.0, generation=6).kept == ()


def test_leases_never_shrink():
    source = authority()
    ticket = offered(source, now=10.0)
    acquire(source, ticket, now=4.0)  # a clock that stepped back
    assert source.tick(39.9) == []
    assert renew(source, "A", ticket, now=39.9).kept == (ticket.ticket_id,)


def test_leases_expire_independently_of_order():
    source = authority()
    tickets = [offered(source, str(n), now=float(n)) for n in range(3)]
    acquire(source, tickets[0], now=20.0)  # the first offered now ends last
    assert [e.request_id for e in source.tick(31.0)] == ["1"]
    assert [e.request_id for e in source.tick(100.0)] == ["2", "0"]
    assert source.tick(200.0) == []
    assert source.next_deadline() == float("inf")  # nor is anything remembered


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcomes", "reason"), [((READ, READ), "read"), ((READ, FAILED), "failed"), ((UNREAD, READ), "failed")]
)
def test_released_once_every_rank_is_through(outcomes, reason):
    source = authority()
    ticket = offered(source, "the source's own name")
    acquire(source, ticket, "A", 0, 2)
    acquire(source, ticket, "A", 1, 2)
    assert settle(source, ticket, outcomes[0], "A", 0) == []
    assert settle(source, ticket, outcomes[0], "A", 0) == []  # said twice
    assert settle(source, ticket, outcomes[1], "A", 1) == [Released("the source's own name", reason)]
    assert settle(source, ticket, outcomes[1], "A", 1) == []
    assert source.num_leases == 0


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_settles_nothing(rank):
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    settle(source, ticket, READ, "A", 0)
    assert settle(source, ticket, READ, "A", rank) == []


def test_a_settle_of_another_start_settles_nothing():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A")
    assert settle(source, ticket, READ, generation=6) == []
    assert source.num_leases == 1


# -- capabilities, not names ----------------------------------------------------------------------

WRONG = [b"", b"\0" * TOKEN_BYTES, token_of("A", 1), token_of("A", 0)[:-1], token_of("A", 0) + b" "]


@pytest.mark.parametrize("token", WRONG)
def test_a_settlement_without_the_token_of_its_grant_settles_nothing(token):
    """Reader, rank, attempt, generation and ticket id can all be guessed; the token cannot."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A")
    assert said(source, ticket, READ, token=token) == ("lease-ended", [])
    assert (source.num_leases, said(source, ticket, READ)[0]) == (1, "")


@pytest.mark.parametrize("token", WRONG)
def test_a_renewal_without_the_token_of_its_grant_keeps_nothing(token):
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A")
    assert renew(source, "A", ticket, now=2.0, token=token).kept == ()
    assert renew(source, "A", ticket, now=2.0, rank=1, token=token_of("A", 0)).kept == ()
    assert renew(source, "B", ticket, now=2.0, token=token_of("A", 0)).kept == ()
    assert renew(source, "A", ticket, now=2.0).kept == (ticket.ticket_id,)


def test_a_copy_of_the_ticket_does_not_take_the_place_of_a_rank_that_reads_it():
    """Else who sees a ticket would ask for it under the reader's name, and settle it with a token of its own.

    The place of a rank that has not asked yet can be taken, as can the ticket as a whole before anybody has
    asked: that rank is told so, and reads nothing.
    """
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    forged = token_of("forger", 0)
    assert acquire(source, ticket, "A", 0, 2, attempt=1 << 40, token=forged).code == "taken"
    assert acquire(source, ticket, "A", 0, 2, attempt=1, token=forged).code == "taken"
    assert isinstance(acquire(source, ticket, "A", 1, 2, token=forged), Grant)
    assert acquire(source, ticket, "A", 1, 2).code == "taken"


@pytest.mark.parametrize("token", [b"", b"short", bytes(TOKEN_BYTES + 1)])
def test_a_token_has_its_length(token):
    source = authority()
    assert acquire(source, offered(source), token=token).code == "reader"


# -- confirmed after the last byte ----------------------------------------------------------------


def test_a_read_that_is_settled_while_its_lease_is_held_is_confirmed_whatever_the_clock_says():
    """The blocks are the engine's own again when the release is said, and not when a clock says so."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, now=1.0)
    assert said(source, ticket, READ, now=1e6) == ("", [Released("r", "read")])


def test_a_read_that_is_settled_after_its_lease_does_not_count():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, now=1.0)
    assert [e.reason for e in source.tick(31.0)] == ["expired"]
    assert said(source, ticket, READ, now=31.0) == ("lease-ended", [])
    assert said(source, ticket, READ, now=0.0) == ("lease-ended", [])


def test_a_confirmation_is_remembered_for_a_lease():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket)
    assert said(source, ticket, READ, now=2.0) == ("", [Released("r", "read")])
    for now in (2.5, 31.9):
        source.tick(now)
        assert said(source, ticket, READ, now=now) == ("", []), "asked again: the same answer"
    assert said(source, ticket, READ, now=3.0, token=token_of("B", 0))[0] == "lease-ended"
    assert said(source, ticket, READ, now=3.0, attempt=2)[0] == "lease-ended"
    assert said(source, ticket, FAILED, now=3.0)[0] == "lease-ended", "it was not what it said before"
    assert source.next_deadline() == 2.0 + LEASE
    source.tick(2.0 + LEASE)
    assert said(source, ticket, READ, now=33.0)[0] == "lease-ended"
    assert source.next_deadline() == float("inf")


def test_each_rank_is_confirmed_for_itself():
    """One that was in time has right bytes, also if another was late; its engine fails the load."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    acquire(source, ticket, "A", 1, 2)
    assert said(source, ticket, READ, "A", 0) == ("", [])
    source.tick(LEASE + 1)
    assert said(source, ticket, READ, "A", 0)[0] == ""
    assert said(source, ticket, READ, "A", 1)[0] == "lease-ended"


def test_a_new_start_confirms_nothing_of_the_last_one():
    source = authority(generation=8)
    ticket = offered(source)
    acquire(source, ticket)
    assert said(source, ticket, READ, generation=7) == ("restarted", [])


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(EndedReadings, "MAX_READINGS", 2)
    source = authority()
    tickets = [offered(source, str(number)) for number in range(3)]
    for ticket in tickets:
        acquire(source, ticket)
        settle(source, ticket, READ)
    assert [said(source, ticket, READ)[0] for ticket in tickets] == ["lease-ended", "", ""]


# -- withdrawn, offered again ---------------------------------------------------------------------


def test_withdrawn_at_once_if_nobody_reads_it():
    source = authority()
    ticket = offered(source)
    assert source.withdraw(1.0, "r") == [Released("r", "withdrawn")]
    assert source.withdraw(1.0, "r") == []
    assert acquire(source, ticket).code == "ended"


# -- tickets that are not needed -------------------------------------------------------------------


def decline(source, ticket, reader="A", rank=0, ranks=1, *, attempt=1, outcome=UNREAD, token=None):
    """What the reader is told, and what is released."""
    token = token_of(reader, rank) if token is None else token
    who = ticket.generation, ticket.ticket_id, reader, rank, attempt, token
    ack, *rest = source.receive(2.0, "reply_to", Settle(*who, outcome, ranks, declined=ticket))
    return ack.message.code, [effect.reason for effect in rest if isinstance(effect, Released)]


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_declined_ticket_is_released_at_once(is_granted):
    """Also if its reader has not asked for it, or is heard the wrong way round."""
    source = authority()
    ticket = offered(source)
    if is_granted:
        acquire(source, ticket, "A")
    assert decline(source, ticket, "A") == ("", ["declined"])
    assert decline(source, ticket, "A") == ("", [])  # said twice
    assert acquire(source, ticket, "A").code == "ended"
    assert acquire(source, ticket, "B").code == "ended"
    assert source.num_leases == 0


def test_a_declined_ticket_is_released_when_every_rank_is_through():
    """One rank may still read: what it reads stays where it is."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 0, 2)
    acquire(source, ticket, "A", 1, 2)
    assert decline(source, ticket, "A", 0, 2) == ("", [])
    assert acquire(source, ticket, "A", 0, 2).code == "spent"  # a late copy of what it asked before
    assert [e.reason for e in settle(source, ticket, READ, "A", 1)] == ["declined"]


def test_one_rank_declines_for_all_that_could_not_read():
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", 1, 2)
    assert decline(source, ticket, "A", 0, 2) == ("", [])
    assert [e.reason for e in settle(source, ticket, UNREAD, "A", 1)] == ["declined"]


def test_a_ticket_that_was_left_is_declined_by_a_later_attempt():
    """The meeting failed, so that another engine may try; then this one has computed it."""
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A", attempt=1)
    assert settle(source, ticket, UNREAD, attempt=1) == []
    assert decline(source, ticket, attempt=1)[1] == []  # as late as its first attempt
    assert decline(source, ticket, attempt=2) == ("", ["declined"])


@pytest.mark.parametrize(
    "changes",
    [{"reader": "B"}, {"token": b"x" * TOKEN_BYTES}, {"attempt": 0}, {"rank": 5, "ranks": 6}],
    ids=["another engine", "a guess", "an earlier attempt", "a rank more"],
)
def test_nobody_declines_for_its_reader(changes):
    source = authority()
    ticket = offered(source)
    acquire(source, ticket, "A")
    told = {"reader": "A", "attempt": 1, **changes}
    assert decline(source, ticket, **told) == ("lease-ended", [])
    assert [e.reason for e in settle(source, ticket, READ, "A")] == ["read"]


def test_a_forged_ticket_declines_nothing():
    source = authority()
    ticket = offered(source)
    forged = msgspec.structs.replace(ticket, num_tokens=1)
    assert decline(source, forged, "A") == ("lease-ended", [])
    other = msgspec.structs.replace(offered(source, "another"), ticket_id=ticket.ticket_id)
    assert decline(source, other, "A") == ("lease-ended", [])
    assert isinstance(acquire(source, ticket, "B"), Grant)


@pytest.mark.parametrize(("outcome", "reason"), [(READ, "read"), (FAILED, "failed"), (UNREAD, "withdrawn")])
def test_withdrawn_while_read_waits_for_the_reader(outcome, reason):
    source = authority()
    ticket = offered(source)
    acquire(source, ticket)
    assert source.withdraw(1.0, "r") == []
    assert [e.reason for e in settle(source, ticket, outcome)] == [reason]


def test_withdrawn_while_read_waits_no_longer_than_the_deadline():
    source = authority()
    acquire(source, offered(source), now=1.0)
    source.withdraw(1.0, "r")
    assert source.tick(30.9) == []
    assert source.tick(31.0) == [Released("r", "expired")]


def test_a_request_is_offered_once_at_a_time():
    source = authority()
    offered(source)
    with pytest.raises(SpecError, match="already"):
        offered(source)
    source.withdraw(0.0, "r")
    with pytest.raises(SpecError, match="already"):  # the engine would not know which of the two is released
        offered(source)
    source.offers.forget("r")  # it has heard of the release
    assert offered(source).request_id == "r"


def test_offers_are_bounded(monkeypatch):
    monkeypatch.setattr(Offers, "MAX_OPEN", 2)
    source = authority()
    offered(source, "1")
    offered(source, "2")
    with pytest.raises(SpecError, match="2 requests"):
        offered(source, "3")


def test_offers_from_many_threads_have_numbers_and_names_of_their_own():
    offers, made, start = authority().offers, [], threading.Barrier(8)

    def offer():
        start.wait()
        for number in range(200):
            with contextlib.suppress(SpecError):  # another thread was first
                made.append(offers.make(f"request {number}", {}, 20))

    threads = [threading.Thread(target=offer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({ticket.ticket_id for ticket in made}) == len(made) == len(offers) == 200


# -- its own ranks --------------------------------------------------------------------------------


def test_readers_are_welcomed_once_every_rank_has_joined():
    source = authority(num_ranks=2)
    hello = Hello(PROTOCOL, "A")
    assert join(source, 1) == [JoinAck("prefill", 7)]
    assert one(source.receive(0.0, "x", hello)) == Rejected("not-ready", "ranks joined: 1 of 2")
    join(source, 0, manifest=b"n")
    welcome = one(source.receive(0.0, "x", hello))
    assert welcome == Welcome(PROTOCOL, "prefill", 7, "memory", b"m+n")
    assert one(source.receive(0.0, "x", Hello(PROTOCOL + 1, "A"))) == welcome, (
        "it speaks so that we understand"
    )
    for other in (OLDEST_PROTOCOL - 1, PROTOCOL + 2):
        refusal = one(source.receive(0.0, "x", Hello(other, "A")))
        assert refusal == Rejected(
            "protocol", f"this engine speaks protocol {PROTOCOL}, the reader protocol {other}"
        )


def test_ranks_are_described_to_whoever_asks_as_many_as_fit(monkeypatch):
    source = authority(num_ranks=3)
    for number in range(3):
        join(source, number, description=rank_of(b"%d" % number))

    def cards(*ranks, generation=7):
        answer = one(source.receive(0.0, "x", DescribeRanks(4, generation, ranks)))
        assert (answer.nonce, answer.generation) == (4, 7)
        return {number: each.card for number, each in answer.ranks.items()}

    assert cards(2, 0) == {2: b"2", 0: b"0"}
    assert cards(1, 3, -1, 1) == {1: b"1"}  # what does not exist is not described, nor anything twice
    assert cards(0, 1, generation=6) == {}
    monkeypatch.setattr(Authority, "MAX_DESCRIBED_BYTES", 2 * RANK.num_bytes)
    assert cards(0, 1, 2) == {0: b"0", 1: b"1"}
    monkeypatch.setattr(Authority, "MAX_DESCRIBED_BYTES", 1)
    assert cards(2, 1) == {2: b"2"}, "at least one, however long"


def test_an_engine_that_is_not_whole_describes_nothing():
    source = authority(num_ranks=2)
    join(source, 0)
    assert one(source.receive(0.0, "x", DescribeRanks(4, 7, (0,)))) == RankDescriptions(4, 7, {})


@pytest.mark.parametrize("changes", [{"rank": 1}, {"rank": -1}, {"protocol": 0}, {"engine": "another"}])
def test_who_does_not_belong_here_does_not_join(changes):
    source = authority()
    (answer,) = join(source, **changes)
    assert (answer.code, source.is_whole) == ("join", False)


@pytest.mark.parametrize(
    "changes", [{"manifest": b"x"}, {"description": rank_of(b"x")}, {"transport": "nixl"}]
)
def test_a_rank_does_not_change_its_memory(changes):
    source = authority()
    join(source)
    assert join(source) == [JoinAck("prefill", 7)]
    assert join(source, **changes)[0].code == "join"


def test_ranks_that_do_not_fit_together_are_turned_away():
    source = authority(num_ranks=2)
    join(source, 0)
    last = Join(PROTOCOL, "prefill", 1, "memory", b"misfit", RANK)
    (merge,) = source.receive(0.0, "rank 1", last)
    assert {number: each.manifest for number, each in merge.joins.items()} == {0: b"m", 1: b"misfit"}
    assert source.receive(0.5, "rank 1", last) == []  # repeated meanwhile: answered when it is known
    (answer,) = source.not_merged(1.0, "two different models")
    assert answer == Send("rank 1", Rejected("join", "two different models"))
    assert join(source, 1) == [JoinAck("prefill", 7)]
    assert not source.is_whole  # rank 0 may have ended meanwhile: it has to say that it is there
    join(source, 0)
    assert source.is_whole


def test_ranks_of_different_transports_do_not_fit_together():
    source = authority(num_ranks=2)
    join(source, 0)
    assert join(source, 1, transport="nixl")[0].code == "join"


def test_a_rank_that_another_start_knew_is_told_to_join():
    """An authority that starts anew at its address is joined again by the ranks that live on."""
    source = authority(generation=8)
    assert hear(source, 3) == [Rejected("not-joined", "the rank has not joined since the engine started")]
    join(source)
    assert hear(source, 0, generation=8) == []
    assert [m.code for m in hear(source, 0, generation=8, reply_to="left over")] == ["not-joined"]


def test_a_new_rank_takes_the_place_of_one_that_is_left_over():
    """An engine starts anew while the ranks of its last start are still ending: theirs is not its memory."""
    source = authority(num_ranks=2, generation=8)
    assert join(source, 0, description=rank_of(b"old"), previous=7) == [JoinAck("prefill", 8)]
    assert join(source, 0, description=rank_of(b"new")) == [JoinAck("prefill", 8)]
    assert join(source, 0, description=rank_of(b"old"), previous=7)[0].code == "join"
    join(source, 1)
    welcome = one(source.receive(0.0, "x", Hello(PROTOCOL, "A")))
    assert welcome.outline == b"m+m"
    described = one(source.receive(0.0, "x", DescribeRanks(3, 8, (0, 1))))
    assert {number: each.card for number, each in described.ranks.items()} == {0: b"new", 1: b"c"}
    assert join(source, 0, description=rank_of(b"newer"))[0].code == "join"  # readers have seen the other one


def test_every_rank_hears_of_a_release_under_the_sources_own_name():
    # R002-11, R001-4
    """R002-11: also those that nothing was read from."""
    source = authority(num_ranks=3)
    for rank in range(3):
        join(source, rank)
    ticket = offered(source, "mine")
    acquire(source, ticket)
    effects = source.receive(2.0, "x", Settle(7, ticket.ticket_id, "A", 0, 1, token_of("A", 0), READ))
    notices = [e for e in effects if isinstance(e, Send) and isinstance(e.message, ReleaseNotice)]
    assert notices == [Send(f"rank {n}", ReleaseNotice(7, 1, (("mine", "read"),), (1,))) for n in range(3)]


def released(source, *names, now=0.0):
    """Offer and withdraw requests; what the ranks are told of it."""
    effects = []
    for name in names:
        offered(source, name, now=now)
        effects += source.withdraw(now, name)
        source.offers.forget(name)
    return [e.message for e in effects if isinstance(e, Send)]


def hear(source, number, now=0.0, generation=7, reply_to="rank 0"):
    return [e.message for e in source.receive(now, reply_to, ReleaseAck(generation, 0, number))]


def test_notices_stop_and_wait_and_then_come_together():
    source = authority()
    join(source)
    assert released(source, "1", "2", "3") == [ReleaseNotice(7, 1, (("1", "withdrawn"),), (1,))]
    assert source.tick(0.4) == []
    assert hear(source, 1, now=0.4) == [ReleaseNotice(7, 2, (("2", "withdrawn"), ("3", "withdrawn")), (2, 3))]
    assert hear(source, 1, now=0.4) == []  # a copy
    assert [e.message.first for e in source.tick(0.9)] == [2]  # repeated until heard
    assert source.next_deadline() == 1.4
    assert hear(source, 3, now=1.0) == []
    assert source.status()["unheard"] == 0


def test_a_notice_has_at_most_a_batch():
    source = authority()
    released(source, *map(str, range(MAX_BATCH + 2)))
    _, notice = join(source)
    assert len(notice.requests) == MAX_BATCH
    (rest,) = hear(source, MAX_BATCH)
    assert (rest.first, len(rest.requests)) == (MAX_BATCH + 1, 2)


def test_a_rank_that_joins_late_hears_what_ended_before():
    source = authority()
    assert released(source, "early") == []
    assert source.next_deadline() == LEASE  # nothing to repeat to nobody
    assert join(source) == [JoinAck("prefill", 7), ReleaseNotice(7, 1, (("early", "withdrawn"),), (1,))]


def test_nobody_has_heard_what_was_not_said():
    source = authority()
    join(source)
    released(source, "1", "2")
    assert [m.first for m in hear(source, 99)] == [2]
    assert [m.code for m in hear(source, 99, generation=6)] == ["not-joined"]
    assert source.status()["unheard"] == 1


def test_a_rank_that_does_not_listen_stops_the_offers(monkeypatch):
    monkeypatch.setattr(Authority, "MAX_UNHEARD", 2)
    source = authority()
    join(source)
    assert source.overload == ""
    released(source, "1", "2")
    assert "rank 0 has not acknowledged 2 release notices" in source.overload
    source.offers.refusal = source.overload
    with pytest.raises(SpecError, match="not acknowledged"):
        offered(source, "3")


# -- nothing is kept without end -------------------------------------------------------------------


def kept_until(source, ticket, now, step=5.0):
    """Until when a reader that never ends can renew; its blocks are released a lease later."""
    while renew(source, "A", ticket, now=now).kept:
        assert now < 10_000, "it is renewed without end"
        now += step
    return now


def test_a_withdrawn_lease_is_not_renewed_without_end():
    """On the old code a reader kept the blocks of a withdrawn offer for as long as it liked."""
    source = authority()
    ticket = offered(source)
    assert isinstance(acquire(source, ticket), Grant)
    assert source.withdraw(10.0, "r") == []
    last = kept_until(source, ticket, 10.0)
    assert TIMING.read <= last - 10.0 <= TIMING.read + 5.0, "a read of the longest kind still fits"
    assert Released("r", "expired") in source.tick(last + TIMING.lease)


def test_no_lease_is_renewed_without_end():
    source = authority()
    ticket = offered(source)
    assert isinstance(acquire(source, ticket), Grant)
    last = kept_until(source, ticket, 1.0)
    assert TIMING.life <= last <= TIMING.life + 5.0
    assert acquire(source, ticket, rank=0, now=last).code == "ended"
    assert Released("r", "expired") in source.tick(last + TIMING.lease)


def test_a_reader_has_only_so_many_ranks():
    source = authority()
    assert acquire(source, offered(source), rank=0, ranks=2**40).code == "reader"


# -- ranks that gather for readers ------------------------------------------------------------------


def heard(source, rank, number, now=3.0):
    effects = source.receive(now, f"rank {rank}", ReleaseAck(7, rank, number))
    return [effect.request_id for effect in effects if isinstance(effect, Released)]


def test_the_engine_hears_of_a_release_after_every_rank_that_gathers():
    """Its blocks could be another request's while a rank still gathers them for the old one's reader."""
    source = authority(num_ranks=3)
    for rank, key in enumerate((b"key", b"key", b"")):
        join(source, rank, rank_key=key)
    first, second = offered(source, "first"), offered(source, "second")
    for ticket in (first, second):
        acquire(source, ticket)
        assert settle(source, ticket, READ) == []
    assert heard(source, 0, 1) == []
    assert heard(source, 1, 1) == ["first"]
    assert heard(source, 1, 2) == []
    assert heard(source, 0, 2) == ["second"]


def test_a_rank_that_says_nothing_holds_a_release_up_for_a_lease():
    source = authority()
    join(source, rank_key=b"key")
    ticket = offered(source)
    acquire(source, ticket)
    assert settle(source, ticket, READ, now=2.0) == []
    assert source.next_deadline() <= 2.0 + LEASE
    assert not [effect for effect in source.tick(1.9 + LEASE) if isinstance(effect, Released)]
    told = [effect for effect in source.tick(2.0 + LEASE) if isinstance(effect, Released)]
    assert [released.request_id for released in told] == ["r"]
