"""One rank of a source engine, one behaviour at a time."""

import msgspec
import pytest

from kvferry.runtime import Member, Released, Timing
from kvferry.runtime.member import Membership
from kvferry.runtime.values import Send
from kvferry.wire.messages import (
    PROTOCOL,
    Join,
    JoinAck,
    RankDescription,
    Rejected,
    ReleaseAck,
    ReleaseNotice,
)

JOIN = Join(PROTOCOL, "prefill", 3, "memory", b"m", RankDescription(b"layout", (), b"c"))
HERE = "authority"


@pytest.fixture
def member():
    return Member(HERE, JOIN, Timing(meet=10.0, retry=0.5))


@pytest.fixture
def joined(member):
    member.receive(0.0, HERE, JoinAck("prefill", 7))
    member.tick(0.0)
    return member


def notice(first, *names, generation=7):
    return ReleaseNotice(generation, first, tuple((name, "read") for name in names))


def test_it_asks_to_join_until_it_is_answered(member):
    assert member.tick(0.0) == [Send(HERE, JOIN)]
    assert member.tick(0.4) == []
    assert member.next_deadline() == 0.5
    assert member.tick(0.5) == [Send(HERE, JOIN)]
    assert member.num_unanswered == 2
    assert member.receive(0.6, HERE, JoinAck("prefill", 7)) == []
    assert (member.state, member.num_unanswered) == (Membership.JOINED, 0)


def test_who_is_turned_away_says_why_and_asks_no_more(member):
    member.receive(0.0, HERE, Rejected("join", "not one of ours"))
    assert (member.state, member.refusal) == (Membership.REFUSED, "join: not one of ours")
    assert member.next_deadline() == float("inf")
    assert member.tick(100.0) == []


def test_each_release_is_heard_once_and_confirmed_each_time(joined):
    assert joined.receive(1.0, HERE, notice(1, "a", "b")) == [
        Released("a", "read"),
        Released("b", "read"),
        Send(HERE, ReleaseAck(7, 3, 2)),
    ]
    assert joined.receive(1.1, HERE, notice(1, "a", "b")) == [Send(HERE, ReleaseAck(7, 3, 2))]
    assert joined.receive(1.2, HERE, notice(2, "b", "c"))[0] == Released("c", "read")


def test_notices_of_another_start_are_nobodys(joined):
    assert joined.receive(1.0, HERE, notice(1, "a", generation=6)) == []


@pytest.mark.parametrize(
    "message", [JoinAck("prefill", 9), Rejected("join", "no"), notice(1, "a"), Rejected("not-joined", "no")]
)
def test_only_its_authority_is_heard(message, joined):
    assert joined.receive(1.0, "another", message) == []
    assert joined.state is Membership.JOINED


def test_an_authority_that_started_anew_is_joined_again(joined):
    joined.receive(1.0, HERE, notice(1, "a"))
    assert joined.next_deadline() == 6.0
    assert joined.tick(6.0) == [Send(HERE, ReleaseAck(7, 3, 1))]  # is it still the same?
    again = msgspec.structs.replace(JOIN, previous=7)
    assert joined.receive(6.1, HERE, Rejected("not-joined")) == [Send(HERE, again)]
    assert joined.receive(6.2, HERE, Rejected("not-joined")) == []  # a copy
    joined.receive(6.3, HERE, JoinAck("prefill", 8))
    assert joined.state is Membership.JOINED
    assert joined.receive(7.0, HERE, notice(1, "b", generation=8))[0] == Released("b", "read")


def test_a_join_that_was_confirmed_twice_forgets_nothing(joined):
    joined.receive(1.0, HERE, notice(1, "a"))
    joined.receive(1.1, HERE, JoinAck("prefill", 7))
    assert joined.receive(1.2, HERE, notice(1, "a")) == [Send(HERE, ReleaseAck(7, 3, 1))]
