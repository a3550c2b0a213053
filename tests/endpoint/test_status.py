"""What a running engine tells of itself, and to whom."""

import json
import os
import socket
import stat
import tempfile
import time

import pytest

from kvferry.endpoint import SourceEngine
from kvferry.endpoint.asking import ask_status
from kvferry.endpoint.status import (
    MAX_FILES,
    live_sockets,
    open_status,
    read_status,
    status_folder,
)
from kvferry.errors import SpecError
from kvferry.wire.messages import PROTOCOL
from kvferry.wire.secret import Secret, Trust
from kvferry.wire.ticket import to_text

FLEET = Trust(Secret(bytes(range(32))))


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path_factory):
    """Engines of others are not looked at. A socket's address is short, and a test's folder is not."""
    tmp_path_factory.getbasetemp()  # made now, and not below this folder, which goes
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_both_sides_tell_what_they_are_doing(pair_of):
    pair = pair_of()
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None
    ticket = pair.offer()
    pair.destination.hold(ticket)
    until(lambda: pair.destination.status()["fetches"] == {"holding": 1})
    destination, source = map(read_status, live_sockets())
    assert (destination["side"], source["side"]) == ("destination", "source")
    for report in (destination, source):
        assert (report["pid"], report["host"], report["protocol"]) == (
            os.getpid(),
            socket.gethostname(),
            PROTOCOL,
        )
    (known,) = destination["sources"]
    assert (known["engine"], known["address"]) == ("prefill", pair.engine.address)
    assert (known["state"], known["way"], known["ranks"]) == ("met", "memory", [0])
    assert destination["ended"] == {"read memory": 1}
    assert destination["read_bytes"] == {"memory": 5760}
    (load,) = destination["loads"]
    assert (load["request_id"], load["phase"]) == (ticket.request_id, "holding")
    assert (source["address"], source["being_read"], source["ranks"]) == (pair.engine.address, 1, "1/1")
    (lease,) = source["leases"]
    assert (lease["request_id"], lease["num_tokens"]) == (ticket.request_id, 20)
    counts = {each["metric"]: each["value"] for each in source["figures"]}
    assert counts["kvferry_grants_total"] == 2
    assert ask_status(pair.engine.address, None)["being_read"] == 1


def test_a_source_that_is_gone_is_shown_with_the_reason(pair_of):
    pair = pair_of()
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None
    pair.engine.close()
    (path,) = live_sockets()
    until(lambda: [each["state"] for each in read_status(path)["sources"]] == ["gone"])
    (known,) = read_status(path)["sources"]
    assert "Check that it is running" in known["why"]


def test_no_secret_is_told(pair_of):
    pair = pair_of(trust=FLEET, engine_trust=FLEET)
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None
    ticket = pair.offer()
    pair.destination.hold(ticket)
    until(lambda: pair.destination.status()["fetches"] == {"holding": 1})
    told = [json.dumps(read_status(path)) for path in live_sockets()]
    told.append(json.dumps(ask_status(pair.engine.address, FLEET.secret)))
    card = pair.rank._transport.card()
    hidden = [ticket.mac, ticket.seal, card, pair.engine.invitation.credential, bytes(range(32))]
    assert all(hidden)
    for text in told:
        assert to_text(ticket) not in text
        assert not [one for one in hidden if one.hex() in text or repr(one)[2:-1] in text]


def test_without_the_secret_nothing_is_told():
    engine = SourceEngine("prefill", 1, trust=FLEET)
    try:
        for secret in (None, Secret(bytes(range(1, 33)))):
            with pytest.raises(SpecError, match=r"did not answer within 0\.5 s"):
                ask_status(engine.address, secret, seconds=0.5)
    finally:
        engine.close()


def test_an_insecure_engine_tells_the_network_nothing():
    insecure = Trust(insecure=True)
    engine = SourceEngine("prefill", 1, listen="tcp://0.0.0.0:*", advertise="127.0.0.1", trust=insecure)
    try:
        with pytest.raises(SpecError, match="run kvferry status on its host"):
            ask_status(engine.address, None)
        (path,) = live_sockets()
        assert read_status(path)["address"] == engine.address
    finally:
        engine.close()


def test_the_socket_is_this_user_s_alone_and_goes_with_its_engine():
    engine = SourceEngine("a name/with: odd characters" * 4, 1)
    (path,) = live_sockets()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    engine.close()
    assert live_sockets() == []
    with pytest.raises(SpecError, match="No such file"):
        read_status(path)


def test_what_killed_processes_left_is_swept():
    for n in range(MAX_FILES):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(status_folder() / f"dead-{n}.sock"))
    opened = open_status("engine", dict)
    assert opened is not None
    assert len(live_sockets()) == 1
    opened.close()


def test_a_socket_is_not_swept_before_it_listens(monkeypatch):
    class SweptSocket(socket.socket):
        def listen(self, *arguments):
            live_sockets()
            super().listen(*arguments)

    monkeypatch.setattr(socket, "socket", SweptSocket)
    opened = open_status("engine", dict)
    assert opened is not None
    assert len(live_sockets()) == 1
    opened.close()


def test_only_sockets_are_swept():
    file = status_folder() / "kept.sock"
    file.touch()
    assert live_sockets() == []
    assert file.exists()


def test_an_engine_that_cannot_be_asked_works_all_the_same(monkeypatch, own_folder, caplog):
    monkeypatch.setattr(tempfile, "tempdir", f"{own_folder}/is/not/there")
    caplog.set_level("INFO", "kvferry")
    engine = SourceEngine("prefill", 1)
    engine.close()
    assert "unavailable for source-prefill; transfers are not affected" in caplog.text


def test_a_caller_that_says_nothing_keeps_nobody_out(pair_of):
    pair = pair_of()
    path, _ = live_sockets()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(path))
        assert read_status(path)["side"] == "destination"
    assert pair.destination.status()["rank"] == 0
