"""R004: geometry apart from the worker, built from whole values, each question answered once."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest

import kvferry
from kvferry import Manifest, explain, lower, plan, prove, select
from kvferry.core import shard
from kvferry.core.sample import sample_request
from kvferry.models import describe
from kvferry.wire import manifest_from_json, manifest_to_json

CORE = Path(kvferry.__file__).parent / "core"


def runs_of(route, request):
    selection = select(route, request)
    return {rank: list(runs) for rank, runs in selection.reads.items()}, list(selection.zeros)


def test_the_life_cycle_is_three_verbs(engine):
    """R004-1: describe at registration, plan and lower at the handshake, select per request."""
    src, dst = engine("window", "tp=2"), engine("window", "block=8")
    route = lower(prove(plan(src, dst, 0)))
    one, other = (sample_request(src, dst, num_tokens) for num_tokens in (5, 37))
    interleaved = [runs_of(route, request) for request in (one, other, one)]
    fresh = [runs_of(lower(prove(plan(src, dst, 0))), request) for request in (one, other, one)]
    assert interleaved == fresh  # a route keeps nothing of the requests it served
    assert interleaved[0] != interleaved[1]


@pytest.mark.parametrize("verb", [describe, plan, prove, lower, select, explain])
def test_builders_take_whole_values(verb):
    """R004-2: a model, a topology, two manifests, a request: at most three by position, one plain number."""
    parameters = [p for p in inspect.signature(verb).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert len(parameters) <= 3
    assert [p.name for p in parameters if p.annotation == "int"] in ([], ["dst_rank"])
    assert not [p.name for p in parameters if p.annotation == "bool"]


@pytest.mark.parametrize("family", ["kda-mla", "gqa+mla", "compressed"])
def test_geometry_needs_nothing_but_the_two_manifests(engine, family):
    """R004-3: what travelled as text gives the same plan and the same runs: no worker state is missed."""
    src, dst = engine(family, "tp=2"), engine(family, "tp=4")
    there, here = (manifest_from_json(manifest_to_json(m)) for m in (src, dst))
    request = sample_request(src, dst, 37)
    planned, again = plan(src, dst, 3), plan(there, here, 3)
    assert planned.pieces == again.pieces
    assert runs_of(lower(prove(planned)), request) == runs_of(lower(prove(again)), request)


def renumbered(manifest: Manifest, new: dict[int, int]) -> Manifest:
    return replace(manifest, ranks=tuple(replace(r, rank=new[r.rank]) for r in manifest.ranks))


@pytest.mark.parametrize("family", ["gqa", "mamba2-gqa"])
def test_who_holds_what_is_asked_of_boxes_never_of_rank_numbers(engine, family):
    """R004-4: with the source's ranks renumbered the same bytes come from the same memory."""
    src, dst = engine(family, "tp=6"), engine(family, "tp=2")
    new = {0: 12, 1: 0, 2: 3, 3: 5, 4: 11, 5: 4}
    other = renumbered(src, new)
    held = [p for p in plan(src, dst, 1).pieces if _holders(src, p) == 1]
    moved = [p for p in plan(other, dst, 1).pieces if _holders(other, p) == 1]
    assert held
    assert {replace(p, src_rank=new[p.src_rank]) for p in held} == set(moved)


def _holders(manifest: Manifest, piece) -> int:
    boxes = [r.by_state[piece.state].box() for r in manifest.ranks]
    return sum(bool(box & piece.box) for box in boxes)


def test_the_split_over_ranks_is_computed_in_one_place():
    """R004-4: no other file of the core knows tensor parallelism, a ratio of it, or a rank's share."""
    words = {"tp", "tp_size", "tp_ratio", "world_size", "num_ranks", "ratio"}
    knowing = {path.name for path in CORE.glob("*.py") if words & names_in(path)}
    assert knowing == {Path(shard.__file__).name}


def names_in(path: Path) -> set[str]:
    """Every name that the code uses; what its texts and examples say does not count."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    fields = ("id", "arg", "attr", "name")
    return {getattr(node, field) for node in nodes for field in fields if hasattr(node, field)}


@pytest.mark.parametrize("model", ["gemma-4-31b", "kimi-linear-48b", "deepseek-v3.2"])
def test_a_description_follows_from_the_configuration_alone(engine, model):
    """R004-5: the same model and topology, the same description; and the same plan from two of them."""
    one, other = (engine(model, "tp=4,block=64") for _ in range(2))
    assert one == other
    dst = engine(model, "tp=2")
    assert plan(one, dst, 1).pieces == plan(other, dst, 1).pieces
