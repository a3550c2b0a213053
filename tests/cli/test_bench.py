"""``kvferry bench``: what it runs and says, and that nothing wrong goes unnoticed."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from kvferry.cli import machine, reads
from kvferry.cli.bench import READ_BYTES, RUN_BYTES, environments, show
from kvferry.cli.machine import Gpus
from kvferry.cli.reads import (
    NUM_LAYERS,
    ReadCase,
    ReadsSeen,
    TimedRead,
    cache_memory,
    contents,
    first_wrong,
)
from kvferry.core.choices import Way
from kvferry.errors import TransportError
from kvferry.transport import nixl_agent

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("is_scattered", [True, False])
@pytest.mark.parametrize("num_blocks", [1, 3, 64])
def test_the_list_of_runs_leaves_what_is_expected(num_blocks, is_scattered):
    """The runs that are read and the bytes that are expected come from two rules."""
    case = ReadCase(512, num_blocks, is_scattered=is_scattered)
    source, copied = contents(case.pool_bytes), np.zeros(case.pool_bytes, np.uint8)
    runs = case.product().runs
    for _, src, _, dst, num_bytes in runs:
        copied[dst : dst + num_bytes] = source[src : src + num_bytes]
    assert len(runs) == case.num_runs
    assert first_wrong(case.expected(source), copied) == ""


@pytest.mark.parametrize("run_bytes", RUN_BYTES)
def test_every_length_of_a_run_reads_as_many_bytes_and_merges_nothing(run_bytes):
    case = ReadCase(run_bytes, READ_BYTES // NUM_LAYERS // run_bytes)
    assert case.total_bytes == READ_BYTES
    runs = case.product().runs
    assert len(runs) == case.num_runs == READ_BYTES // run_bytes
    for places in (runs.src, runs.dst):
        assert len(set(places.tolist())) == len(runs)
        assert np.diff(np.sort(places)).min() > run_bytes


def test_a_byte_between_the_blocks_is_looked_at():
    case = ReadCase(256, 4)
    source = contents(case.pool_bytes)
    memory = cache_memory("host", case.expected(source))
    assert first_wrong(case.expected(source), memory.read(0, case.pool_bytes)) == ""
    (host,) = memory.arrays()
    assert not host[:256].any()  # block 0 of layer 0 is nobody's
    host[7] = 1
    wrong = first_wrong(case.expected(source), memory.read(0, case.pool_bytes))
    assert wrong.startswith("1 of 4,096 cells wrong; the first, at byte 0, ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--memory gpu", "--memory gpu: available: host"),
        ("--memory cuda:99", "--memory cuda:99: available: "),
        ("--json nowhere/it.json", "--json nowhere/it.json: No such file or directory"),
        ("--json .", "--json .: Is a directory"),
        ("--json /proc/it.json", "--json /proc/it.json: No such file or directory"),
    ],
)
def test_bad_input_runs_nothing_and_writes_nothing(cli, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reads, "Worker", None)
    ran = cli("bench", *words.split())
    assert ran.code == 2
    assert message in ran.out + ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_is_measured_if_there_is_one(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: Gpus("13.0", ("one", "two")))
    assert machine.asked_memories([]) == ["host", "cuda:0"]
    assert machine.asked_memories(["cuda:1", "cuda:1"]) == ["cuda:1"]
    monkeypatch.setattr(machine, "gpus", lambda: Gpus("13.0", ("one",), "no module named cuda"))
    assert machine.asked_memories([]) == ["host"]


def seen(way, *milliseconds):
    """Reads of 16 MiB in runs of 4 KiB, where a plain copy takes 1 ms."""
    times = (TimedRead(4096, 4096, tuple(each / 1e3 for each in milliseconds)),)
    return ReadsSeen("host", way, times=times, copy_bytes_per_second=READ_BYTES / 1e-3)


def test_ratios_are_of_medians(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show([seen(Way.DIRECT, 8), seen(Way.PACKED, 1, 4, 2)], ["host, x: y"], "right", [])
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["4", "KiB", "packed", "2.00", "ms", "4.00×", "8.4", "GB/s", "0.50×"] in lines
    assert "skipped: host, x: y" in out
    assert out.splitlines()[-1] == "verified: 2 rows, every cell correct"


def test_a_quick_run(cli, tmp_path):
    pytest.importorskip("nixl", exc_type=ImportError)
    path = tmp_path / "bench.json"
    ran = cli("bench", "--quick", "--memory", "host", "--json", path)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["verdict"], found["wrong"], found["failures"]) == ("right", [], [])
    assert [one["way"] for one in found["rows"]] == ["direct", "packed"]
    for one in found["rows"]:
        assert min(one["seconds"]) > 0
        assert (one["total_bytes"], one["num_runs"]) == (READ_BYTES, 1024)
    keys = [*found, *found["machine"], *found["rows"][0]]
    assert [key for key in keys if f"`{key}`" not in PAGE] == []


def test_without_nixl_the_default_way_is_measured(monkeypatch):
    def missing():
        raise TransportError("no-nixl", "NIXL is not installed")

    monkeypatch.setattr(nixl_agent, "check_installed", missing)
    skipped: list[str] = []
    assert list(environments("host", skipped)) == ["packed"]
    assert skipped == ["host, direct: NIXL is not installed"]
    assert list(environments("cuda:0", skipped)) == ["packed", "mapped"]


SPOILED = """
from kvferry.cli.reads import ProbeReader

class Spoiled(ProbeReader):
    def read(self, case):
        seconds = super().read(case)
        if self.way == "direct":
            memory, size = self._memory.arrays()[0], case.run_bytes
            at = int(case.block_ids()[1][-1]) * size
            {spoil}
        return seconds

    def connect(self, source):
        connected = super().connect(source)
        self.way = connected.way
        return connected
"""
SPOILS = {
    "one bit of a cell": "memory[at + size - 1] ^= 1",
    "a block that was not read": "memory[at : at + size] = 0",
    "a byte of a block that is not the request's": "memory[0] ^= 1",
}


def spoil_reader(monkeypatch, folder, spoil):
    """Have the reader's process do something after each direct read: it imports this from a file."""
    (folder / "spoiled_reader.py").write_text(SPOILED.format(spoil=spoil), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "spoiled_reader", raising=False)
    monkeypatch.setattr(reads, "ProbeReader", import_module("spoiled_reader").Spoiled)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_read_that_leaves_a_cell_wrong_fails_loudly(cli, tmp_path, monkeypatch, spoil):
    pytest.importorskip("nixl", exc_type=ImportError)
    spoil_reader(monkeypatch, tmp_path, SPOILS[spoil])
    ran = cli("bench", "--quick", "--memory", "host")
    assert ran.code == 1
    assert "WRONG" in ran.out
    shown = " ".join(ran.out.split())
    assert "host, direct, 1,024 runs of 16,384 bytes: " in shown
    assert "host, packed, 1,024" not in shown
    assert "cells wrong; the first, at byte " in shown


def test_a_mode_that_fails_is_named_and_others_go_on(cli, tmp_path, monkeypatch):
    pytest.importorskip("nixl", exc_type=ImportError)
    spoil_reader(monkeypatch, tmp_path, 'raise RuntimeError("the dog ate it")')
    path = tmp_path / "bench.json"
    assert cli("bench", "--quick", "--memory", "host", "--json", path).code == 1
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["verdict"] == "failed"
    assert found["failures"] == ["host, direct: RuntimeError: the dog ate it"]
    assert {one["way"] for one in found["rows"]} == {"packed"}
