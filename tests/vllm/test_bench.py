"""``benchmarks.rivals`` with vLLM: the worker of its own connector takes part, and is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_worker_of_vllms_own_connector_takes_part(tmp_path):
    """Two lengths of runs: the second has caches of another shape, and a worker of its own."""
    path = tmp_path / "bench.json"
    words = "--quick --memory host --run-bytes 256 --run-bytes 16384 --runs 64 --only vllm --only nixl"
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals", *words.split(), "--json", path],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["not_run"] == []
    times = [one for one in found["times"] if one["rival"] == "vllm"]
    assert [one["run_bytes"] for one in times] == [256] * 3 + [16384] * 3
    assert {one["num_runs"] for one in times} == {64}  # it merges nothing
