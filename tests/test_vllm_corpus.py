"""Manifests that real vLLM engines gave of themselves, planned, proved and counted without vLLM.

``tests/vllm/corpus/dump.py`` says how they were made. ``golden.txt`` has a line for each pair of one model:
the runs that each rank of the destination reads, or why they cannot talk.
"""

from functools import cache
from itertools import permutations
from pathlib import Path

import pytest

import kvferry
from kvferry.core.manifest import Manifest, compare
from kvferry.core.sample import Placement, sample_request
from kvferry.core.select import Selection
from kvferry.wire import manifest_from_json

CORPUS = Path(__file__).parent / "vllm" / "corpus"
NUM_TOKENS = 300


@cache
def load(name: str) -> Manifest:
    return manifest_from_json((CORPUS / f"{name}.json").read_bytes())


NAMES = sorted(path.stem for path in CORPUS.glob("*.json"))
PAIRS = [(src, dst) for src, dst in permutations(NAMES, 2) if load(src).model == load(dst).model]
GOLDEN = dict(line.split(": ", 1) for line in (CORPUS / "golden.txt").read_text().splitlines())


def selections(src: Manifest, dst: Manifest) -> list[Selection]:
    request = sample_request(src, dst, NUM_TOKENS, placement=Placement.SCATTERED)
    plans = [kvferry.plan(src, dst, dst_rank=rank.rank) for rank in dst.ranks]
    return [kvferry.select(kvferry.lower(kvferry.prove(plan)), request) for plan in plans]


def outcome(src: Manifest, dst: Manifest) -> str:
    if findings := compare(src, dst):
        return f"refused, {len(findings)} findings, the first: {findings[0]}"
    counts = [sum(len(runs.src) for runs in s.reads.values()) for s in selections(src, dst)]
    return " ".join(map(str, counts)) + " runs"


def test_every_pair_has_its_line():
    assert sorted(GOLDEN) == sorted(f"{src} -> {dst}" for src, dst in PAIRS)


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=" to ".join)
def test_a_pair_is_proved_and_takes_its_runs(src: str, dst: str):
    assert outcome(load(src), load(dst)) == GOLDEN[f"{src} -> {dst}"]


@pytest.mark.parametrize("name", [name for name in NAMES if "-pp2" in name])
def test_stages_hold_layers_of_their_own_and_share_their_groups(name: str):
    """A stage lists the model's groups, also those of which it has no layer."""
    manifest = load(name)
    first, last = ({view.state for view in rank.views} for rank in manifest.ranks)
    assert first
    assert last
    assert not first & last
    assert first | last == {state.name for state in manifest.states}


def test_pages_of_one_allocation_are_used_by_several_groups():
    groups = {view.group for view in load("gemma3-b64").ranks[0].views if view.offset == 0}
    assert groups == {"group-0", "group-1", "group-2"}
