"""``kvferry bench``: what it runs and says, and that nothing wrong goes unnoticed."""

import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from kvferry.cli.bench import measure
from kvferry.cli.bench.cases import (
    NUM_LAYERS,
    RUN_BYTES,
    BenchCase,
    BlockOrder,
    CacheShape,
    Medium,
    cache_manifest,
    cache_memory,
    contents,
    expected_pages,
    expected_whole,
    first_wrong_in,
    grid,
    wipe,
)
from kvferry.cli.bench.report import BenchReport, NotRun, RivalTimes, show
from kvferry.cli.bench.sides import Rival
from kvferry.core.manifest import Region
from kvferry.core.sample import sample_request
from kvferry.core.select import select
from kvferry.transport.cuda import has_cuda

KEYS = {
    "format",
    "verdict",
    "machine",
    "versions",
    "times",
    "not_run",
    "failures",
    "wrong",
    "checked_bytes",
}
TIME_KEYS = {
    "medium": str,
    "rival": str,
    "way": str,
    "run_bytes": int,
    "num_pages": int,
    "order": str,
    "num_runs": int,
    "total_bytes": int,
    "num_turns": int,
    "median_s": float,
    "min_s": float,
    "max_s": float,
    "gb_per_s": float,
    "predicted_s": type(None),
}
HOST_RIVALS = {"direct", "packed", "fetch", "copy"}


# -- the grid


@pytest.mark.parametrize("order", BlockOrder)
@pytest.mark.parametrize("num_pages", [16, 48, 1024])
def test_a_case_says_the_same_by_its_list_and_by_its_blocks(order, num_pages):
    """What is posted comes from one rule, what is checked from another."""
    (case,) = next(grid([512], [num_pages], [order], 1 << 30))
    source, copied = contents(case.shape.total_bytes), np.zeros(case.shape.total_bytes, np.uint8)
    for _, src, _, dst, num_bytes in case.product().runs:
        copied[dst : dst + num_bytes] = source[src : src + num_bytes]
    for stretch in expected_pages(case, source):
        assert (copied[stretch.start : stretch.start + len(stretch.wanted)] == stretch.wanted).all()
        copied[stretch.start : stretch.start + len(stretch.wanted)] = 0
    assert not copied.any()


@pytest.mark.parametrize(
    ("order", "num_runs"), [("scattered", 1024), ("half-consecutive", 528), ("consecutive", 16)]
)
def test_neighbours_are_merged(order, num_runs):
    (case,) = next(grid([4096], [1024], [BlockOrder(order)], 1 << 30))
    assert len(case.product().runs) == num_runs
    assert case.product().total_bytes == case.total_bytes == 4 << 20


@pytest.mark.parametrize("run_bytes", RUN_BYTES)
def test_a_run_is_a_block_of_a_layer_as_engines_describe_it(run_bytes):
    import kvferry

    shape = CacheShape(run_bytes, 2)
    memory = Region("kv", shape.total_bytes, 1 << 30)
    src, dst = (cache_manifest(name, shape, memory) for name in ("src", "dst"))
    assert [region.address for region in dst.rank(0).regions] == [
        memory.address + i * shape.layer_bytes for i in range(NUM_LAYERS)
    ]
    route = kvferry.lower(kvferry.prove(kvferry.plan(src, dst, 0)))
    (runs,) = select(route, sample_request(src, dst, 32)).reads.values()
    assert set(runs.num_bytes.tolist()) == {run_bytes}
    assert len(runs) == NUM_LAYERS


def test_a_byte_between_the_blocks_is_looked_at():
    case = BenchCase(CacheShape(256, 8), 64, BlockOrder.SCATTERED)
    source = contents(case.shape.total_bytes)
    memory = cache_memory("cpu", np.zeros_like(source))
    (host,) = memory.arrays()
    wanted = expected_pages(case, source)
    wipe(memory, wanted)
    for stretch in wanted:
        host[stretch.start : stretch.start + len(stretch.wanted)] = stretch.wanted
    assert first_wrong_in(memory, wanted) == ""
    assert not host[:256].any()  # block 0 of layer 0 is nobody's
    host[7] = 1
    assert first_wrong_in(memory, wanted).startswith("1 of 256 cells wrong; the first, at byte 0, ")
    assert first_wrong_in(memory, expected_whole(case, source)) != ""


# -- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--run-bytes 300", "runs of 300 bytes: say a power of two from 256 to 1048576"),
        ("--run-bytes 2097152", "runs of 2097152 bytes"),
        ("--runs 17", "17 runs: say a multiple of 16"),
        ("--run-bytes 1048576 --runs 16384", "no case fits: one may have 64 MiB at most"),
        ("--memory gpu", "--memory gpu: say host, or cuda:N for a GPU"),
        ("--memory cuda:99", "--memory cuda:99: "),
        ("--only nobody", "--only nobody: say one of direct, mapped, packed, fetch, copy"),
        ("--over pigeon", "pigeon"),
        ("--turns 2", "--turns"),
        ("--link nowhere.json", "nowhere.json: No such file or directory"),
        ("--json nowhere/it.json", "--json nowhere/it.json: there is no folder nowhere"),
    ],
)
def test_bad_input_runs_nothing_and_writes_nothing(cli, tmp_path, monkeypatch, words, message):
    pytest.importorskip("nixl", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "Worker", None)
    ran = cli("bench", "--memory", "host", *words.split())
    assert ran.code == 2
    assert message in ran.out + ran.err
    assert list(tmp_path.iterdir()) == []


# -- what is said


def made_up() -> BenchReport:
    machine = {"processor": "abacus", "num_cores": 2, "system": "Linux", "device": "", "load": 0.5}
    report = BenchReport(machine, {"python": "3.11"})
    for run_bytes in (4096, 65536):
        for case in next(grid([run_bytes], [1024], list(BlockOrder), 1 << 30)):
            for rival, milli in ((Rival.DIRECT, 8), (Rival.COPY, 1), ("nixl", 4)):
                seconds = (milli * 1e-3, milli * 2e-3, milli * 0.5e-3)
                report.times.append(RivalTimes("host-cma", case, rival, str(rival), 1024, seconds))
    report.not_run.append(NotRun("cuda:0", "", "there is none"))
    return report


def test_ratios_are_of_medians(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show(made_up())
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert [
        "1,024",
        "4",
        "KiB",
        "scattered",
        "8.00",
        "ms",
        "4.00×",
        "0.52",
        "GB/s",
        "0.12×",
        "0.50×",
    ] in lines
    assert "not run   cuda:0: there is none" in out
    assert out.splitlines()[-1].startswith("right: 18 reads checked")


def test_the_verdict_is_the_worst():
    report = made_up()
    assert report.verdict == "right"
    report.failures.append("host-cma, direct: no")
    assert report.verdict == "failed"
    report.wrong.append("host-cma, direct: 1 cell")
    assert report.verdict == report.as_object()["verdict"] == "wrong"
    assert BenchReport({}, {}).verdict == "failed"  # nobody ran: nothing was shown


# -- over NIXL


def test_a_quick_run(cli, tmp_path):
    pytest.importorskip("nixl", exc_type=ImportError)
    path = tmp_path / "bench.json"
    ran = cli("bench", "--quick", "--memory", "host", "--runs", "64", "--json", path)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found.keys() == KEYS
    assert (found["verdict"], found["wrong"], found["failures"]) == ("right", [], [])
    assert {one["rival"] for one in found["times"]} >= HOST_RIVALS
    assert {one["order"] for one in found["times"]} == set(BlockOrder)
    for one in found["times"]:
        assert {key: type(value) for key, value in one.items()} == TIME_KEYS
        assert 0 < one["min_s"] <= one["median_s"] <= one["max_s"]
        assert (one["total_bytes"], one["num_turns"]) == (1 << 20, 3)
    ways = {one["rival"]: one["way"] for one in found["times"]}
    assert ways["copy"] == "copy"
    assert ways["direct"] == ways["fetch"] == "direct"
    assert ways["packed"] == "packed"
    assert {one["rival"] for one in found["not_run"]} >= {"mapped"}
    assert found["checked_bytes"] == len(found["times"]) << 20
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    keys = [*found, *found["machine"], *found["times"][0], *found["not_run"][0]]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_over_tcp_nothing_of_nixl_takes_part(cli, tmp_path):
    path = tmp_path / "bench.json"
    ran = cli("bench", "--quick", "--memory", "host", "--over", "tcp", "--runs", "64", "--json", path)
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {one["rival"]: one["way"] for one in found["times"]} == {
        "packed": "packed",
        "fetch": "packed",
        "copy": "copy",
    }
    assert {one["rival"] for one in found["not_run"]} >= {"direct", "mapped"}


def test_without_nixl_the_default_way_is_measured(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "no_nixl", lambda: "NIXL is not installed")
    report = measure.new_report()
    assert [medium.name for medium in measure.asked_media(["host"], ["cma", "tcp"], report)] == ["host-tcp"]
    assert report.not_run == [NotRun("host-cma", "", "NIXL is not installed")]


def test_a_run_beside_what_was_predicted(cli, tmp_path):
    """An earlier run predicts the next one; whether it is right is not the test's affair."""
    pytest.importorskip("nixl", exc_type=ImportError)
    words = "--quick --memory host --only direct --only packed --only copy --run-bytes 4096"
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert cli("bench", *words.split(), "--runs", 64, "--runs", 256, "--json", before).code == 0
    ran = cli("bench", *words.split(), "--runs", 128, "--link", before, "--json", after)
    assert ran.code == 0
    assert ran.out.count("by the profile: ") == 2
    for one in json.loads(after.read_text(encoding="utf-8"))["times"]:
        assert (one["predicted_s"] is None) == (one["rival"] == "copy")
        assert one["predicted_s"] is None or 0 < one["predicted_s"] < 10


SPOILED = """
from kvferry.cli.bench.sides import BenchReader

class Spoiled(BenchReader):
    def turn(self, rival, case, offer):
        done = super().turn(rival, case, offer)
        if rival == "direct":
            memory, size = self._memory.arrays()[0], case.shape.run_bytes
            block = int(case.block_ids()[1][-1])
            at = case.shape.layer_bytes + block * size
            {spoil}
        return done
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
    monkeypatch.setattr(measure, "BenchReader", import_module("spoiled_reader").Spoiled)


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_read_that_leaves_a_cell_wrong_fails_loudly(cli, tmp_path, monkeypatch, spoil):
    pytest.importorskip("nixl", exc_type=ImportError)
    spoil_reader(monkeypatch, tmp_path, SPOILS[spoil])
    words = "--quick --memory host --runs 64 --only direct --only copy"
    ran = cli("bench", *words.split())
    assert ran.code == 1
    assert "WRONG" in ran.out
    told = " ".join(ran.out.split())
    assert "host-cma, direct, 64 runs of 16 KiB, scattered: " in told
    assert "host-cma, copy, 64" not in told
    assert "cells wrong; the first, at byte " in told


def test_a_rival_that_fails_is_named_and_others_go_on(cli, tmp_path, monkeypatch):
    pytest.importorskip("nixl", exc_type=ImportError)
    spoil_reader(monkeypatch, tmp_path, 'raise RuntimeError("the dog ate it")')
    path = tmp_path / "bench.json"
    words = "--quick --memory host --runs 64 --only direct --only copy"
    assert cli("bench", *words.split(), "--json", path).code == 1
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["verdict"], found["failures"]) == (
        "failed",
        ["host-cma, direct: RuntimeError: the dog ate it"],
    )
    assert {one["rival"] for one in found["times"]} == {"copy"}


def test_what_is_not_there_is_named_when_nobody_asked_for_it():
    from kvferry.cli.bench.measure import asked_media, asked_rivals, new_report

    report = new_report()
    media = asked_media([], ["cma", "tcp"], report)
    assert [medium.name for medium in media][:2] == ["host-cma", "host-tcp"]
    if not has_cuda():
        assert [(one.medium, one.rival) for one in report.not_run] == [("cuda:0", "")]
    rivals = asked_rivals(Medium.host("cma"), [], report)
    assert Rival.MAPPED not in rivals
    assert NotRun("host-cma", "mapped", "host memory is not mapped, device memory is") in report.not_run
