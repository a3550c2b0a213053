"""R004: geometry apart from the worker, built from whole values, each question answered once."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import kvferry
from kvferry import Manifest, explain, lower, plan, prove, select
from kvferry.core.sample import sample_request
from kvferry.models import describe
from kvferry.wire import manifest_from_json, manifest_to_json

PACKAGE = Path(kvferry.__file__).parent


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


QUESTIONS = {
    "which part of an axis does a rank hold": "layout/pages.py::held",
    "how many ranks does a topology have": "models/topology.py::num_ranks",
    "where in its topology does a rank stand": "models/describe.py::rank",
    "would an engine start with so many ranks": "models/topology.py::why_not_served",
    "how many tokens are in a block that ranks share": "models/describe.py::groups",
    "into how many shards do whole blocks divide": "models/model.py::as_opaque",
    "how many heads does a model of vLLM's have": "integrations/vllm/worker/describe.py::_total_heads",
    "whose turn at the tokens is it in vLLM": "integrations/vllm/worker/described_layer.py::_share",
    "which rank is a worker of vLLM's": "integrations/vllm/worker/side.py::register",
}
"""Every question for which sizes of a topology are multiplied or divided, and the place that answers it."""

SIZES = {
    *(
        "num_ranks",
        "world_size",
        "tp",
        "pp",
        "cp",
        "dcp",
        "ratio",
        "num_stages",
        "tp_rank",
        "cp_rank",
        "pp_rank",
    ),
    *("tp_size", "pp_size", "cp_size", "dcp_size", "tp_ratio", "tensor_parallel_size", "num_turns"),
    *("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"),
}


def test_a_topology_question_is_answered_in_one_place():
    """R004-4, RA-9: in no other function of any room is a size of a topology multiplied or divided."""
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}::{name}"
        for path in PACKAGE.rglob("*.py")
        for name, node in arithmetic(ast.parse(path.read_text(encoding="utf-8")))
        if SIZES & names_in(node)
    }
    assert found == set(QUESTIONS.values())


def test_the_core_knows_nothing_of_topologies():
    """R004-4: no file of the core names tensor parallelism, a ratio of it, or a number of ranks."""
    trees = {
        path.name: ast.parse(path.read_text(encoding="utf-8")) for path in (PACKAGE / "core").glob("*.py")
    }
    assert len(trees) > 15
    assert {name for name, tree in trees.items() if SIZES & names_in(tree)} == set()


def arithmetic(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every product, quotient and remainder, with the name of the function that computes it."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    is_divmod = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "divmod"
    if is_divmod or (isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, SCALING)):
        yield function, node
    for child in ast.iter_child_nodes(node):
        yield from arithmetic(child, function)


SCALING = ast.Mult | ast.Div | ast.FloorDiv | ast.Mod


def names_in(node: ast.AST) -> set[str]:
    """Every name that a piece of code uses."""
    fields = ("id", "attr", "arg")
    return {getattr(part, field) for part in ast.walk(node) for field in fields if hasattr(part, field)}


@pytest.mark.parametrize("model", ["gemma-4-31b", "kimi-linear-48b", "deepseek-v3.2"])
def test_a_description_follows_from_the_configuration_alone(engine, model):
    """R004-5: the same model and topology, the same description; and the same plan from two of them."""
    one, other = (engine(model, "tp=4,block=64") for _ in range(2))
    assert one == other
    dst = engine(model, "tp=2")
    assert plan(one, dst, 1).pieces == plan(other, dst, 1).pieces
