"""Who is gone, by what a channel says of its connections."""

import pytest

from kvferry.runtime import Timing
from kvferry.runtime.connections import Connections

TIMING = Timing(meet=10.0, reconnect=0.5, silence=2.0)


@pytest.fixture
def known():
    return Connections(TIMING)


def test_whoever_answers_stays_however_long_it_says_nothing(known):
    known.calling(0.0, "a")
    known.connected("a")
    assert (known.tick(1e6), known.next_deadline()) == ([], float("inf"))


def test_a_connection_that_breaks_and_comes_back_is_nobodys_end(known):
    known.connected("a")
    known.broken(1.0, "a")
    known.broken(1.1, "a")
    assert known.tick(1.4) == []
    known.connected("a")
    assert (known.tick(9.0), known.gone("a")) == ([], "")


def test_a_connection_that_breaks_and_does_not_come_back_is_the_end(known):
    known.connected("a")
    known.broken(1.0, "a")
    known.broken(1.3, "a")  # the first of these counts
    assert known.next_deadline() == 1.5
    assert known.tick(1.5) == ["a"]
    assert "broke" in known.gone("a")
    assert "secret" not in known.gone("a"), "it has answered before"
    assert known.is_awaited("a")
    assert known.tick(1.6) == [], "said once"


def test_who_is_gone_is_there_again_when_it_answers(known):
    known.connected("a")
    known.broken(1.0, "a")
    known.tick(2.0)
    known.connected("a")
    assert (known.gone("a"), known.tick(100.0)) == ("", [])


def test_who_is_gone_is_called_anew_after_a_while(known):
    known.connected("a")
    known.broken(1.0, "a")
    known.tick(2.0)
    assert known.tick(11.9) == []
    assert known.tick(12.0) == []
    assert (known.gone("a"), len(known)) == ("", 0)


def test_who_never_answered_is_waited_for_only_if_it_was_silent(known):
    """It may stand still. Who refuses may be a forged address, and the port of something else."""
    known.calling(0.0, "refuses")
    known.broken(0.01, "refuses")
    known.calling(0.0, "silent")
    assert known.tick(0.5) == ["refuses"]
    assert known.gone("refuses").endswith("that both engines have the same secret")
    assert known.tick(1.9) == []
    assert known.tick(2.0) == ["silent"]
    assert "suspended" in known.gone("silent")
    assert known.is_awaited("silent")
    assert not known.is_awaited("refuses")
    known.broken(7.0, "silent")  # a call that was not answered is given up, and made again
    assert known.is_awaited("silent")
    known.closed("silent")
    known.calling(3.0, "silent")  # somebody sent something there all the same
    assert known.gone("silent")
    assert known.tick(12.0) == []
    assert not known.is_awaited("silent")
    assert len(known) == 0


def test_what_the_channel_gave_up_for_others_is_not_gone(known):
    known.connected("a")
    known.closed("a")
    assert (len(known), known.tick(100.0)) == (0, [])


def test_those_who_are_gone_are_not_remembered_without_end(known, monkeypatch):
    monkeypatch.setattr(Connections, "MAX_GONE", 2)
    for number in range(5):
        known.calling(0.0, str(number))
    known.tick(2.0)
    assert [name for name in map(str, range(5)) if known.gone(name)] == ["3", "4"]
