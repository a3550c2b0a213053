"""``kvferry demo`` between processes: all is right, and nothing wrong or left behind goes unnamed."""

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from kvferry.cli.demo import moves
from kvferry.cli.demo.engines import BlockPool
from kvferry.cli.demo.moves import DemoTransfers
from kvferry.cli.processes import FABRICS, Worker
from kvferry.core.request import BlockTable
from kvferry.transport.cuda import has_cuda

QUICK = ("demo", "--model", "llama-3.1-8b", "--src", "block=16", "--dst", "block=24,layout=NHD")
FEW = ("--layers", "1", "--tokens", "200", "--requests", "2")

SCRIPT = """
import sys
from kvferry.cli import main

if __name__ == "__main__":
    sys.exit(main())
"""
"""What pip makes of the package's console script."""


def started(*words):
    env = {**os.environ, "COLUMNS": "80"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=env)


def assert_verified(ran, num_requests):
    assert (ran.returncode, ran.stderr) == (0, "")
    last = ran.stdout.splitlines()[-1]
    assert last.startswith("verified: ")
    assert f" cells of {num_requests} requests, 0 wrong; nothing left over" in last


def test_two_engines_of_processes():
    """KDA and MLA on shared tensors, four ranks to two."""
    ran = started("-m", "kvferry", "demo", "--requests", "5", "--tokens", "1500", "--layers", "2")
    assert_verified(ran, 5)
    assert "kimi-linear-48b" in ran.stdout
    assert "packed reads of cpu memory, 7 processes" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80


def test_the_console_script_starts_processes_too(tmp_path):
    script = tmp_path / "kvferry"
    script.write_text(SCRIPT)
    assert_verified(started(script, *QUICK, *FEW), 2)


def blocked_signals():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


WHEN_IMPORTED = blocked_signals()


class SignalMask:
    def close(self):
        pass

    def when_imported(self):
        return WHEN_IMPORTED


def test_ctrl_c_is_the_parent_s_alone_even_while_a_worker_imports():
    before = blocked_signals()
    with closing(Worker("mask", SignalMask)) as worker:
        assert signal.SIGINT in worker.call("when_imported")
    assert blocked_signals() == before


def test_the_account_as_json(cli):
    ran = cli(*QUICK, *FEW, "--json")
    assert ran.code == 0
    answer = ran.answer
    assert (answer["verdict"], answer["num_requests"], answer["num_wrong"]) == ("verified", 2, 0)
    assert answer["num_cells"] > 0
    assert (answer["leaks"], answer["failures"], answer["ways"]) == ([], [], ["packed"])


def test_by_nixl_where_that_is_asked_for(cli, monkeypatch):
    pytest.importorskip("nixl", exc_type=ImportError)
    for name, value in FABRICS["cma"].items():
        monkeypatch.setenv(name, value)
    ran = cli(*QUICK, *FEW, "--json")
    assert ran.code == 0
    assert ran.answer["ways"] == ["direct"]


# -- sabotage --------------------------------------------------------------------------------------


@pytest.fixture
def offers(monkeypatch):
    """Have something done before each offer: ``offers(change)``, with the transfers, tables and tokens."""
    offer = DemoTransfers.offer

    def install(change):
        def changed(transfers, request_id, tables, num_tokens):
            return offer(transfers, request_id, change(transfers, tables, num_tokens), num_tokens)

        monkeypatch.setattr(DemoTransfers, "offer", changed)
        return offer

    monkeypatch.setattr(moves, "SETTLED_SECONDS", 1.0)
    return install


def test_a_wrong_block_is_found_and_named(cli, offers):
    """The source offers its blocks in another order than it wrote them."""

    def swapped(_transfers, tables, _num_tokens):
        ids = tables["full"].block_ids.copy()
        ids[[3, 4]] = ids[[4, 3]]
        return {"full": BlockTable.of(ids)}

    offers(swapped)
    ran = cli(*QUICK, *FEW)
    assert (ran.code, ran.err) == (1, "")
    assert "WRONG" in ran.out
    place = "first: llama-3.1-8b, request-1: dst rank 0: layers.0.attn/k cell 48 channel 0 head 0: "
    assert place in " ".join(ran.out.split())
    assert "verified" not in ran.out


def test_a_lease_that_is_left_is_told(cli, offers):
    def with_another(transfers, tables, num_tokens):
        if not hasattr(transfers, "is_ghostly"):
            transfers.is_ghostly = True
            offer(transfers, "nobody-fetches-this", tables, num_tokens)
        return tables

    offer = offers(with_another)
    ran = cli(*QUICK, *FEW)
    assert ran.code == 1
    assert "LEAKED" in ran.out
    assert "1 leases outstanding" in ran.out


def test_blocks_that_are_left_are_told(cli, monkeypatch):
    monkeypatch.setattr(moves, "SETTLED_SECONDS", 1.0)
    monkeypatch.setattr(BlockPool, "give_back", lambda pool, tables: None)
    ran = cli(*QUICK, *FEW, "--json")
    assert ran.code == 1
    assert ran.answer["verdict"] == "leaked"
    assert {leak.partition(" ")[2] for leak in ran.answer["leaks"]} == {
        "source blocks not returned",
        "destination blocks not returned",
    }


def test_a_source_that_dies_fails_the_demo(cli, offers):
    num_offers = 0

    def killing(transfers, tables, _num_tokens):
        nonlocal num_offers
        num_offers += 1
        if num_offers == 2:  # the first request has arrived
            transfers.sources[0].kill()
        return tables

    offers(killing)
    ran = cli(*QUICK, *FEW)
    assert (ran.code, ran.err) == (1, "")
    assert "FAILED" in ran.out
    assert "request-2: dst rank 0: transport" in ran.out


# -- what cannot be shown here ---------------------------------------------------------------------


@pytest.mark.skipif(has_cuda(), reason="this machine has a CUDA device")
def test_without_a_gpu_that_is_said(cli):
    ran = cli("demo", "--device", "cuda")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("kvferry: --device cuda: this host has no CUDA driver")


def test_a_pair_that_is_refused_starts_nothing(cli, monkeypatch):
    monkeypatch.setattr(moves, "DemoTransfers", None)
    ran = cli(*QUICK[:-1], "block=24,dtype=fp8", *FEW)
    assert ran.code == 1
    assert "REFUSED" in ran.out
    assert "fp8_e4m3" in ran.out


def test_a_pool_that_is_too_small_is_bad_input(cli):
    ran = cli(*QUICK[:-1], "block=24,blocks=3", *FEW)
    assert (ran.code, ran.out) == (2, "")
    assert "--dst: the block pool is too small for 2 requests of 200 tokens" in ran.err
