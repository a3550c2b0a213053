"""``benchmarks.rivals``: NIXL alone takes part and is checked, and the plot names everybody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.bench.cases import BlockOrder, grid
from kvferry.cli.bench.report import BenchReport, RivalTimes
from kvferry.cli.bench.sides import Rival

ROOT = Path(__file__).parents[1]


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
