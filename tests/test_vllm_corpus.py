"""Manifests that real vLLM engines gave of themselves, planned, proved and counted without vLLM.

``tests/vllm/corpus/dump.py`` says how they were made; ``make gpu`` makes those of GPUs. ``golden.txt`` has
a line for each pair of one model: the runs that each rank of the destination reads and the time predicted, or
why they cannot talk. ``python -m tests.vllm.corpus.golden`` adds manifests, and writes it anew.
"""

import shutil

import pytest

from tests.vllm.corpus.golden import CORPUS, GOLDEN, OF_GPUS, add, manifests, outcome, pairs, write_golden

MANIFESTS = manifests()
PAIRS = pairs(MANIFESTS)
LINES = dict(line.split(": ", 1) for line in (CORPUS / GOLDEN).read_text().splitlines())


def test_every_pair_has_its_line():
    assert sorted(LINES) == sorted(f"{src} -> {dst}" for src, dst in PAIRS)


def test_manifests_of_a_gpu_join_by_one_command(tmp_path):
    """As the command does it, in a corpus of one: a line for each way between the two."""
    corpus, found = tmp_path / "corpus", tmp_path / "cuda.manifests"
    for folder, name in ((corpus, "llama-b32"), (found, "llama-b64")):
        folder.mkdir()
        shutil.copy(CORPUS / f"{name}.json", folder)
    assert add(found, corpus) == [corpus / f"{OF_GPUS}llama-b64.json"]
    assert write_golden(corpus) == 2
    there, back = (corpus / GOLDEN).read_text().splitlines()
    assert there == "gpu-llama-b64 -> llama-b32: " + LINES["llama-b64 -> llama-b32"]
    assert back == "llama-b32 -> gpu-llama-b64: " + LINES["llama-b32 -> llama-b64"]


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=" to ".join)
def test_a_pair_is_proved_and_takes_its_runs(src: str, dst: str):
    assert outcome(MANIFESTS[src], MANIFESTS[dst]) == LINES[f"{src} -> {dst}"]


@pytest.mark.parametrize("name", [name for name in MANIFESTS if "-pp2" in name])
def test_stages_hold_layers_of_their_own_and_share_their_groups(name: str):
    """A stage lists the model's groups, also those of which it has no layer."""
    manifest = MANIFESTS[name]
    first, last = ({view.state for view in rank.views} for rank in manifest.ranks)
    assert first
    assert last
    assert not first & last
    assert first | last == {state.name for state in manifest.states}


def test_pages_of_one_allocation_are_used_by_several_groups():
    groups = {view.group for view in MANIFESTS["gemma3-b64"].ranks[0].views if view.offset == 0}
    assert groups == {"group-0", "group-1", "group-2"}
