"""``kvferry status``."""

import tempfile
import threading
from dataclasses import replace

import numpy as np
import pytest

from kvferry.cli.status import asking
from kvferry.endpoint import Destination, SourceEngine
from kvferry.endpoint.asking import ask_status
from kvferry.endpoint.status import open_status
from kvferry.models import Topology, describe
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport, placed


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path_factory):
    tmp_path_factory.getbasetemp()  # made now, and not below this folder, which goes
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.delenv("KVFERRY_SECRET_FILE", raising=False)
        monkeypatch.delenv("KVFERRY_SECRET", raising=False)
        yield


@pytest.fixture
def engine():
    engine = SourceEngine("prefill\x1b[2J", 1)
    yield engine
    engine.close()


def test_every_engine_of_this_user_is_shown(cli, engine):
    ran = cli("status")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("SOURCE  prefill\\x1b[2J\n")
    assert f"at       {engine.address}\n" in ran.out
    assert "0/1 joined" in ran.out
    assert "0 offered, 0 being read, 0 B" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_sources_come_first_and_a_destination_that_never_loaded_says_so(cli):
    """An engine that only prefills has both, and is known by what it does."""
    engine = SourceEngine("prefill", 1)
    manifest = describe(small("gqa"), Topology(blocks=2), "decode")
    (rank,) = manifest.ranks
    memory = {region.name: np.zeros(region.num_bytes, np.uint8) for region in rank.regions}
    manifest = replace(manifest, ranks=(replace(rank, regions=placed(rank, memory)),))
    destination = Destination(manifest, 0, MemoryTransport(Hub()), reader="a reader, first by name")
    try:
        ran = cli("status")
    finally:
        destination.close()
        engine.close()
    assert ran.out.index("SOURCE  prefill") < ran.out.index("DESTINATION  a reader")
    shown = ran.out.partition("DESTINATION")[2]
    assert "loads    none so far\n" in shown
    assert "in flight" not in shown
    assert "sources" not in shown


def test_a_lease_without_an_end_is_shown(cli, engine, monkeypatch):
    (answer,) = cli("status", "--json").answer["engines"]
    lease = {"request_id": "cmpl-7", "num_tokens": 9, "reader": "", "seconds_left": None}
    monkeypatch.setattr(asking, "read_status", lambda path: {**answer, "leases": [lease]})
    shown = cli("status").out
    (row,) = (line for line in shown.splitlines() if line.startswith("cmpl-7"))
    assert row.split() == ["cmpl-7", "9", "none", "yet", "–"]


def test_one_engine_is_asked_by_its_file_or_its_address(cli, engine):
    (report,) = cli("status", "--json").answer["engines"]
    assert (report["side"], report["ranks"], report["address"]) == ("source", "0/1", engine.address)
    (by_file,) = cli("status", report["socket"], "--json").answer["engines"]
    (by_address,) = cli("status", engine.address, "--json").answer["engines"]
    assert by_file["pid"] == by_address["pid"] == report["pid"]


def test_where_nobody_is(cli, tmp_path):
    ran = cli("status")
    assert ran.code == 1
    assert "no running engine of this user" in ran.out
    assert cli("status", "--json").answer == {"engines": []}
    ran = cli("status", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert str(tmp_path) in ran.err


def test_an_engine_of_another_version_hides_no_other(cli, engine):
    other = open_status("another", lambda: {"side": "source", "kvferry": "0.9"})
    assert other is not None
    ran, raw = cli("status"), cli("status", "--json").answer["engines"]
    other.close()
    assert [each["side"] for each in raw if each["kvferry"] == "0.9"] == ["source"]
    assert ran.code == 0
    assert f"at       {engine.address}\n" in ran.out
    assert "it runs kvferry 0.9; use `kvferry status` of that version" in ran.out


def test_engines_are_asked_at_once_and_one_must_answer(cli):
    both_asked = threading.Barrier(2, timeout=10)

    def report():
        return {"error": f"asked as number {both_asked.wait()}"}

    opened = [open_status(name, report) for name in ("one", "other")]
    ran = cli("status")
    for each in opened:
        assert each is not None
        each.close()
    assert "asked as number 0" in ran.out
    assert "asked as number 1" in ran.out
    assert ran.code == 2


@pytest.mark.parametrize("watch", [(), ("--watch", "--count", "1")], ids=["once", "watch"])
def test_a_file_that_is_no_socket_is_named_and_kept(cli, tmp_path, watch):
    file = tmp_path / "secret"
    file.write_text("kept")
    (tmp_path / "link").symlink_to(file)
    for path in (file, tmp_path / "link", tmp_path):
        ran = cli("status", path, *watch)
        assert f"{path}: not a socket" in ran.out + ran.err
        assert (ran.code == 0) == bool(watch)
    assert file.read_text() == "kept"
    assert (tmp_path / "link").is_symlink()


def test_an_address_where_nobody_listens(cli, monkeypatch):
    monkeypatch.setattr(ask_status, "__defaults__", (0.3,))
    ran = cli("status", "tcp://127.0.0.1:9")
    assert ran.code == 2
    assert "tcp://127.0.0.1:9 did not answer within 0.3 s: check that it is running" in ran.err
