"""What a live engine says of its cache: a manifest for the corpus that CI replays without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import kvferry
from kvferry.core.manifest import Manifest
from kvferry.core.sample import Placement, sample_request
from kvferry.wire import manifest_from_json, manifest_to_json
from tests.e2e.harness import Engine
from tests.gpu.cases import DescribeCase, Kind
from tests.gpu.engines import Engines
from tests.gpu.pairs import Wrong
from tests.gpu.results import Results

NUM_TOKENS = 300


def run_describe(engines: Engines, case: DescribeCase, found: dict[str, Any]) -> None:
    """The manifest without addresses, which mean nothing elsewhere; that it can be planned; its runs."""
    # No answer is asked for: on a GPU a first one may wait minutes for kernels that are compiled.
    with engines.started(case.family, {"one": case.setting}, until=Engine.wait_ready) as started:
        engine = started["one"]
        manifest = replace(
            portable(manifest_from_json(engine.workers("manifest")[0])), model=case.family, engine="engine"
        )
        found["kernels"] = sorted(engine.kernels())
        found["layouts"] = layouts = engine.workers("layouts")[0]
        found["register_seconds"] = engine.workers("register_seconds")[0]
    if layouts["wrong"] or layouts["unnoticed"]:
        raise Wrong(f"the check of layouts: {layouts['wrong'] or layouts['unnoticed']}")
    found |= {"manifest": json.loads(manifest_to_json(manifest)), "states": len(manifest.states)}
    proved = kvferry.prove(kvferry.plan(manifest, manifest, 0))
    request = sample_request(manifest, manifest, NUM_TOKENS, placement=Placement.SCATTERED)
    selection = kvferry.select(kvferry.lower(proved), request)
    found["runs_to_itself"] = sum(len(runs.src) for runs in selection.reads.values())


def portable(manifest: Manifest) -> Manifest:
    """Without the addresses of one process."""
    ranks = tuple(
        replace(rank, regions=tuple(replace(region, address=0) for region in rank.regions))
        for rank in manifest.ranks
    )
    return replace(manifest, ranks=ranks)


def save_manifests(results: Results, folder: Path) -> list[Path]:
    """Each manifest as a file of its own, under the name of its case."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, result in sorted(results.by_case.items()):
        if manifest := result.found.get("manifest"):
            stem = name.removeprefix(f"{Kind.DESCRIBE}/").replace("/", "-")
            paths.append(folder / f"{stem}.json")
            paths[-1].write_bytes(manifest_to_json(manifest_from_json(json.dumps(manifest).encode())))
    return paths
