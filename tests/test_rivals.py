"""``benchmarks.rivals``: NIXL alone takes part and is checked, and the plot names everybody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rival_cases import (
    NUM_LAYERS,
    RUN_BYTES,
    BenchCase,
    BlockOrder,
    CacheShape,
    cache_manifest,
    expected_pages,
    expected_whole,
    first_wrong_in,
    grid,
    wipe,
)
from benchmarks.rival_report import BenchReport, RivalTimes
from benchmarks.rival_sides import Rival
from kvferry.cli.reads import cache_memory, contents
from kvferry.core.manifest import Region
from kvferry.core.sample import sample_request
from kvferry.core.select import select

ROOT = Path(__file__).parents[1]


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


def test_a_byte_between_two_blocks_is_looked_at():
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


def test_nixl_alone_takes_part(tmp_path):
    pytest.importorskip("nixl", exc_type=ImportError)
    path = tmp_path / "bench.json"
    words = "--quick --memory host --runs 64 --only nixl --only nixl-one-run --only direct"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals", *words.split(), "--json", path],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    assert (found["verdict"], found["wrong"], found["not_run"]) == ("right", [], [])
    ways = {one["rival"]: one["way"] for one in found["times"]}
    assert ways == {"direct": "direct", "nixl": "nixl", "nixl-one-run": "nixl"}


def test_a_plot_names_everybody_and_is_the_same_twice(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.rivals import Foreign, draw

    report = BenchReport({}, {})
    for case in next(grid([4096], [1024], list(BlockOrder), 1 << 30)):
        for rival in (Rival.DIRECT, Foreign.NIXL, Rival.COPY):
            report.times.append(RivalTimes("host-cma", case, rival, rival.value, 1024, (1e-3,)))
    for name in ("one.svg", "two.svg", "it.png"):
        draw(report, tmp_path / name)
    text = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert [name for name in ("kvferry, direct", "NIXL, same list", "plain copy") if name not in text] == []
    assert "host-cma, half-consecutive" in text
    assert text == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
