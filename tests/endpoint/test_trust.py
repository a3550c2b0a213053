"""A closed door by default: without a secret an engine serves its own host, and says so to others."""

import logging
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest
import zmq

from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.endpoint.edges import Edges
from kvferry.endpoint.invitation import this_host
from kvferry.endpoint.secret_source import secret_from_environment, secret_from_file
from kvferry.errors import SpecError
from kvferry.models import Topology, describe
from kvferry.runtime import FailureCode, Timing
from kvferry.testing.small import small
from kvferry.transport import Hub, MemoryTransport
from kvferry.wire.messages import PROTOCOL, Join, RankDescription, decode_from_authority, encode
from kvferry.wire.secret import Purpose, Secret, Trust
from tests.endpoint.conftest import with_memory
from tests.endpoint.test_confirmed import until

FLEET = Trust(Secret(b"of this fleet, 128 bit"))


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:*", "tcp://10.0.0.7:5555", "tcp://[::]:*", "tcp://eth0:*"])
def test_without_a_secret_an_engine_listens_on_loopback_only(listen):
    with pytest.raises(
        SpecError,
        match="is reachable from other hosts, and this engine has no secret: set KVFERRY_SECRET_FILE",
    ):
        SourceEngine("prefill", 1, listen=listen, advertise="10.0.0.7")


def test_insecure_is_said_at_every_start(caplog):
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvferry"):
            engine = SourceEngine(
                "prefill", 1, listen="tcp://0.0.0.0:*", advertise="localhost", trust=Trust(insecure=True)
            )
            engine.close()
        assert "insecure: every host that reaches tcp://0.0.0.0:*" in caplog.text


def test_a_reader_with_another_loopback_says_so_at_once(pair_of):
    """Another pod of the same machine, or another machine: nobody is called, and the mend is named."""
    pair = pair_of(edges=Edges(host=lambda: "another pod"))
    handle = pair.fetch()
    failure = pair.reports()[handle].failure
    assert failure.code is FailureCode.ELSEWHERE
    assert "the source listens on loopback only" in failure.detail
    assert pair.destination.status()["peers"] == []


def test_this_host_is_the_boot_and_the_network_namespace():
    boot, _, namespace = this_host().partition("/")
    assert len(boot) == 36
    assert int(namespace) == os.stat("/proc/self/ns/net").st_ino
    again = subprocess.run(
        [sys.executable, "-c", "from kvferry.endpoint.invitation import this_host; print(this_host())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert again.stdout.strip() == this_host()


def test_engines_that_share_a_secret_serve_each_other(pair_of):
    pair = pair_of(trust=FLEET, engine_trust=FLEET)
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None


def test_a_ticket_without_the_secret_is_neither_called_nor_logged_without_end(pair_of, caplog):
    """What no seal proves never reaches the machine; ten thousand of them are 14 lines in the log."""
    pair = pair_of(trust=FLEET)
    ticket = pair.offer()
    with caplog.at_level(logging.WARNING, "kvferry"):
        for _ in range(10_000):
            pair.destination.hold(ticket)
    reports = pair.destination.poll()
    assert {report.failure.code for report in reports} == {FailureCode.FORGED}
    assert len(reports) == 10_000
    assert pair.destination.status()["fetches"] == {}
    assert len(caplog.records) == 14


class Stranger:
    """A process of this host that knows the address."""

    def __init__(self, address):
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def asks(self, message):
        self.socket.send(encode(message))
        assert self.socket.poll(5000)
        return decode_from_authority(self.socket.recv())


def test_nobody_takes_a_rank_s_place_before_it_joins():
    """On the old code the stranger was the rank, and its card went to every reader."""
    engine = SourceEngine("prefill", 1)
    try:
        stranger = Stranger(engine.address)
        join = Join(PROTOCOL, "prefill", 0, "nixl", b"a manifest", RankDescription(b"", (), b"a card"))
        for credential in (b"", b"guess", bytes(16)):
            answer = stranger.asks(msgspec.structs.replace(join, credential=credential))
            assert "credential" in answer.detail
        assert engine.status()["ranks"] == "0/1"
        stranger.socket.close()
    finally:
        engine.close()


def test_a_rank_with_another_secret_says_once_that_nobody_answers(caplog):
    engine = SourceEngine("prefill", 1, trust=FLEET)
    described, _ = with_memory(describe(small("gqa"), Topology(), "prefill"))
    rank = SourceRank(engine.invitation, described, MemoryTransport(Hub()), timing=Timing(retry=0.01))
    until(lambda: "does not answer: is it a source engine with the same secret?" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("does not answer") == 1
    assert not rank.is_joined
    rank.close()
    engine.close()


def test_an_invitation_does_not_show_its_credential():
    engine = SourceEngine("prefill", 1)
    engine.close()
    assert engine.invitation.credential.hex() not in repr(engine.invitation)
    assert repr(engine.invitation.credential)[2:-1] not in repr(engine.invitation)
    assert replace(engine.invitation, address="") != engine.invitation


# -- where a secret comes from

TEXT = "3q2-7wAAq83vEjRWeJCrzf7cuph2VDIQ"


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path, caplog):
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    for secret in (
        secret_from_file(path),
        secret_from_environment({"KVFERRY_SECRET_FILE": str(path)}),
        secret_from_environment({"KVFERRY_SECRET": TEXT}),
    ):
        assert secret is not None
        assert secret.key(Purpose.TICKETS) == Secret.from_text(TEXT).key(Purpose.TICKETS)
    assert secret_from_environment({}) is None
    assert not caplog.records
    path.chmod(0o644)
    secret_from_file(path)
    assert "every user of this host can read" in caplog.text
    assert TEXT not in caplog.text


@pytest.mark.parametrize("content", [b"", b"open sesame", b"\xff" * 64, b"x" * 5000, TEXT.encode()[:20]])
def test_a_weak_secret_is_refused_and_not_repeated(tmp_path, content):
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(SpecError, match="the secret file") as refused:
        secret_from_file(path)
    assert not content or content.decode("latin-1") not in str(refused.value)


def test_two_secrets_are_refused(tmp_path):
    with pytest.raises(SpecError, match="both set"):
        secret_from_environment({"KVFERRY_SECRET_FILE": str(tmp_path), "KVFERRY_SECRET": TEXT})
    with pytest.raises(SpecError, match="cannot be read"):
        secret_from_environment({"KVFERRY_SECRET_FILE": str(tmp_path / "none")})


def test_keygen_writes_what_is_read(tmp_path):
    path = tmp_path / "secret"
    argv = [sys.executable, "-m", "kvferry", "keygen"]
    subprocess.run([*argv, "-o", str(path)], check=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret_from_file(path).key(Purpose.TICKETS)
    first = path.read_text()
    again = subprocess.run([*argv, "-o", str(path)], capture_output=True, text=True, check=False)
    assert (again.returncode, path.read_text()) == (2, first)
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert secret_from_environment({"KVFERRY_SECRET": printed}) is not None
    assert printed != first
