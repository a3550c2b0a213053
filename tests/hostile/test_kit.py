"""The attack kit in short: an engine with a secret on another host, attacked by outsiders and by a member.

``python -m tests.hostile.siege`` runs all of it, for longer.
"""

from __future__ import annotations

import os

import pytest

from tests.hostile.siege import attack_proxy, besieged

pytestmark = pytest.mark.timed

SECONDS = 1.0
NAMES = (
    "zmq-silent",
    "zmq-half-handshakes",
    "zmq-wrong-key",
    "streams-idle",
    "streams-guess",
    "junk",
    "member-open-streams",
    "member-status",
)


def test_an_engine_on_another_host() -> None:
    with besieged() as siege:
        found = siege.scan()
        assert {*found} == siege.documented() == siege.owned()
        assert sorted(found.values()) == ["streams", "zmq", "zmq"], "none of them is UCX's"
        for name in NAMES:
            one = siege.attack(name, SECONDS)
            print(one.row())
            assert one.is_fine, f"{one.row()} {one.fared.errors[:3]} {dict(one.counts)}"


def test_a_proxy() -> None:
    one = attack_proxy("http-half-headers", SECONDS)
    assert one.is_fine, one.row()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_of_the_host_reaches_nothing_but_ports() -> None:
    with besieged(is_same_host=True) as siege:
        siege.world.source.ask("descriptors")
        found = siege.local()
        assert "descriptors" in found
        assert "DONE" not in found.values(), found
