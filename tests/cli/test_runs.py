"""``kvferry runs``: what it prints moves the bytes, with a loop and a copy."""

import json

import numpy as np
import pytest

import kvferry
from kvferry import pattern
from kvferry.core.runs import place
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe
from kvferry.testing import oracle
from kvferry.testing.small import small
from kvferry.wire import manifest_to_json
from tests.support.requests import request_to_json

PAIRS = {
    "gqa": ("tp=2,block=4,blocks=40", "tp=3,block=6,blocks=40,layout=NHD"),
    "kda-mla": ("tp=2,block=8,blocks=40", "tp=3,block=4,blocks=40,conv=DS"),
    "mla-indexer": ("tp=2,block=4,blocks=40", "tp=1,block=8,blocks=40,layout=cross-layer"),
    "window": ("tp=1,block=4,blocks=80,cp=2", "tp=4,block=8,blocks=80"),
    "shared-layers": ("tp=2,block=4,blocks=80", "tp=1,pp=2,block=6,blocks=80"),
}
NUM_TOKENS, NUM_KEPT = 43, 12


@pytest.fixture(params=PAIRS)
def case(request, tmp_path):
    """Two manifests and a request, in memory and as files."""
    model = small(request.param)
    src, dst = (
        describe(model, Topology.parse(text), name)
        for name, text in zip(("src", "dst"), PAIRS[request.param], strict=True)
    )
    asked = sample_request(src, dst, NUM_TOKENS, num_kept=NUM_KEPT, placement=Placement.SCATTERED)
    files = [tmp_path / name for name in ("src.json", "dst.json", "request.json")]
    for file, text in zip(
        files, (manifest_to_json(src), manifest_to_json(dst), request_to_json(asked)), strict=True
    ):
        file.write_bytes(text)
    return src, dst, asked, files


def words(files, dst_rank):
    return ("runs", files[0], files[1], "--dst-rank", dst_rank, "--request", files[2])


def test_the_runs_are_right_by_the_oracle(cli, case):
    src, dst, asked, files = case
    for rank in dst.ranks:
        ran = cli(*words(files, rank.rank), "--json")
        assert ran.code == 0
        answer, plan = ran.answer, kvferry.plan(src, dst, rank.rank)
        reads: dict[int, list[tuple[int, int, int]]] = {}
        for run in answer["runs"]:
            at_src = place(src.rank(run["src_rank"]).region_index[run["src_region"]], run["src_offset"])
            at_dst = place(rank.region_index[run["dst_region"]], run["dst_offset"])
            reads.setdefault(run["src_rank"], []).append((at_src, at_dst, run["num_bytes"]))
        zeros = [
            2 * (place(rank.region_index[zero["dst_region"]], zero["dst_offset"]),) + (zero["num_bytes"],)
            for zero in answer["zeros"]
        ]
        selection = kvferry.Selection.of(
            {src_rank: table(rows) for src_rank, rows in reads.items()}, table(zeros)
        )
        assert oracle.check(plan, asked, selection) == []
        assert answer["total_bytes"] == selection.total_bytes
        assert answer["num_runs"] == selection.num_runs
        assert answer["zeroed_bytes"] == selection.zeros.total_bytes


def table(rows):
    return kvferry.Runs(*np.array(rows, np.int64).reshape(-1, 3).T)


def test_a_loop_and_a_copy_move_the_bytes(cli, case):
    src, dst, asked, files = case
    tokens = {group.name: (kvferry.Span(0, NUM_TOKENS),) for group in src.groups}
    memory = {rank.rank: empty(rank) for rank in src.ranks}
    for src_rank, buffers in memory.items():
        pattern.fill_rank(buffers, src, src_rank, asked.src, tokens)
    for rank in dst.ranks:
        target = empty(rank)
        answer = cli(*words(files, rank.rank), "--json").answer
        for run in answer["runs"]:
            start, size = run["src_offset"], run["num_bytes"]
            source = memory[run["src_rank"]][run["src_region"]][start : start + size]
            target[run["dst_region"]][run["dst_offset"] : run["dst_offset"] + size] = source
        for zero in answer["zeros"]:
            target[zero["dst_region"]][zero["dst_offset"] : zero["dst_offset"] + zero["num_bytes"]] = 0
        plan = kvferry.plan(src, dst, rank.rank)
        names = {state: plan.src_name(state) for state in plan.states}
        checked = pattern.check_rank(target, dst, rank.rank, asked.dst, asked.need, names)
        assert checked.num_cells > 0
        assert checked.first is None


def empty(rank):
    return {region.name: np.full(region.num_bytes, 0xEE, np.uint8) for region in rank.regions}


def test_the_table_has_the_same_rows(cli, case):
    *_, files = case
    answer = cli(*words(files, 0), "--json").answer
    lines = cli(*words(files, 0)).out.splitlines()
    rows = [line.split() for line in lines[1:-1]]
    runs = [[str(value) for value in run.values()] for run in answer["runs"]]
    assert rows == runs + [["zero", *map(str, zero.values())] for zero in answer["zeros"]]
    assert lines[-1].startswith(f"{len(answer['runs'])} runs, {answer['total_bytes']} bytes; ")


def test_a_pair_that_differs_is_refused(cli, case, tmp_path):
    *_, files = case
    other = describe(small("gqa"), Topology.parse("dtype=fp8,blocks=40"), "other")
    (tmp_path / "other.json").write_bytes(manifest_to_json(other))
    ran = cli("runs", tmp_path / "other.json", files[1], "--dst-rank", 0, "--request", files[2], "--json")
    assert ran.code == 1
    assert ran.answer["verdict"] == "refused"
    assert ran.answer["findings"][0].keys() == {"code", "state", "field", "src", "dst", "note"}
    for_people = cli("runs", tmp_path / "other.json", files[1], "--dst-rank", 0, "--request", files[2])
    assert for_people.code == 1
    assert ran.answer["findings"][0]["code"] in for_people.out


def test_a_request_that_does_not_fit_is_bad_input(cli, case):
    *_, files = case
    document = json.loads(files[2].read_text())
    group = next(name for name, table in document["src"].items() if len(table["block_ids"]) > 1)
    document["src"][group]["block_ids"].pop()
    files[2].write_text(json.dumps(document))
    ran = cli(*words(files, 0))
    assert ran.code == 2
    assert ran.err.startswith(f"kvferry: {files[2]}: src-table-short: group {group}: ")
