"""RB: what users of the field ask for beyond the five documents, as far as the core can give it."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from kvferry import (
    BlockTable,
    Code,
    Refused,
    Request,
    Slack,
    Span,
    compare,
    explain,
    lower,
    plan,
    prove,
    select,
)
from kvferry.core.sample import Placement, sample_request
from kvferry.errors import SpecError
from kvferry.testing.oracle import check


def test_only_what_was_proved_can_be_lowered(engine):
    """RB-1: a plan has no bytes; the proof of it has."""
    planned = plan(engine("gqa", "tp=2"), engine("gqa"), 0)
    with pytest.raises(SpecError, match=r"lower needs a proof: lower\(prove\(plan\)\), got Plan"):
        lower(planned)  # type: ignore[arg-type]
    with pytest.raises(Refused):
        lower(prove(replace(planned, pieces=planned.pieces[1:])))
    assert lower(prove(planned)).plan is planned


def test_every_difference_is_named_not_only_the_first(engine):
    """RB-2: which state, which field, both values; all of them."""
    src, dst = engine("gqa+mla"), engine("gqa+mla", "dtype=fp8")
    found = compare(src, dst)
    assert {finding.state for finding in found} == {state.name for state in dst.states}
    assert {(f.code, f.field, f.src, f.dst) for f in found} == {
        (Code.STATE_DIFFERS, "dtype", "bf16", "fp8_e4m3"),
        (Code.STATE_DIFFERS, "item_bytes", "2", "1"),
    }


@pytest.mark.parametrize(
    ("layout", "expected"), [("HND", 80), ("NHD", 80), ("HND-apart", 160), ("cross-layer", 1)]
)
def test_neighbouring_blocks_are_one_run(engine, layout, expected):
    """RB-3: 128 blocks of 80 layers: a run per tensor, or one for all of it where blocks hold all layers."""
    src = dst = engine("llama-3.1-70b", f"tp=8,layout={layout}")
    selection = select(lower(prove(plan(src, dst, 0))), sample_request(src, dst, 2048))
    assert selection.num_runs == expected
    assert selection.total_bytes == 2048 * 80 * 2 * 128 * 2


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "num_runs"),
    [
        ([4, 5, 6], [7, 8, 9], 1),
        ([4, 9, 2], [7, 8, 9], 3),
        ([4, 5, 6], [7, 1, 9], 3),
        ([6, 4, 5], [7, 8, 9], 2),
    ],
)
@pytest.mark.parametrize("src_tp", [1, 2])
def test_blocks_are_merged_only_where_both_sides_touch(engine, src_tp, src_ids, dst_ids, num_runs):
    """RB-3: whole blocks in a row on both sides are one run; parts of blocks never are."""
    src, dst = engine("gqa", f"tp={src_tp}"), engine("gqa")
    planned = plan(src, dst, 0)
    request = Request(
        {"full": BlockTable.of(src_ids)}, {"full": BlockTable.of(dst_ids)}, {"full": (Span(0, 48),)}
    )
    selection = select(lower(prove(planned)), request)
    assert check(planned, request, selection) == []
    assert selection.num_runs == 3 * (num_runs if src_tp == 1 else 6)


def test_the_number_of_runs_is_known_and_bounded_before_running(engine):
    """RB-3: a plan that would move in crumbs is refused with the number, or allowed by a larger budget."""
    planned = plan(engine("gqa"), engine("gqa", "layout=LBCNHK"), 0)
    runs = 16 * 6 * 4  # of one state and block: tokens, heads, channels
    with pytest.raises(Refused, match=f"{runs} runs per block of 16 cells, the budget is {runs - 1}"):
        lower(prove(planned), max_runs_per_block=runs - 1)
    lower(prove(planned), max_runs_per_block=runs)


@pytest.mark.parametrize("layout", ["NHD", "HND-halves", "cross-layer", "cpu-vec", "LKBHNC"])
@pytest.mark.parametrize(
    ("src", "dst"), [("tp=2,block=16", "tp=3,block=24"), ("tp=4,block=24", "tp=6,block=16")]
)
def test_any_ratio_and_any_layout_at_once(engine, move, src, dst, layout):
    """RB-4: TP 2 to 3 and 4 to 6, blocks 16 to 24 and back, five layouts."""
    move(engine("gqa", src), engine("gqa", f"{dst},layout={layout}"), 30)


def test_pipeline_context_and_tensor_parallel_at_once(engine, move):
    """RB-4: uneven stages and turns at the tokens against neither."""
    src = engine("mla+gqa", "tp=2,pp=1+2,cp=2,interleave=4")
    assert len(src.ranks) == 8
    move(src, engine("mla+gqa", "tp=3"), 40)
    move(src, engine("mla+gqa", "tp=3"), 40, num_kept=5, ranks=[1])
    move(engine("mla+gqa", "tp=3"), src, 40, ranks=[0, 5, 7])


@pytest.mark.parametrize("num_tokens", [5, 32, 37])
def test_opaque_blocks_move_as_they_are_or_not_at_all(engine, move, num_tokens):
    """RB-4: an unknown kernel's layout: equal blocks move whole, begun ones too; others are refused."""
    src = engine("gqa", "tp=2,layout=opaque")
    moves = move(src, engine("gqa", "tp=2,layout=opaque,blocks=30"), num_tokens)
    page = src.ranks[0].views[0].block_stride
    assert {moved.selection.total_bytes for moved in moves} == {3 * page * -(-num_tokens // 16)}
    for other in ("tp=1,layout=opaque", "tp=2,layout=opaque,block=8", "tp=2"):
        with pytest.raises(Refused):
            plan(src, engine("gqa", other), 0)


def test_a_verdict_and_a_picture_without_an_engine(engine):
    """RB-5: two descriptions in; who reads what from whom, as text."""
    src, dst = engine("kimi-linear-48b", "tp=4"), engine("kimi-linear-48b", "tp=2")
    lines = explain(plan(src, dst, 1)).splitlines()
    ssm = "{0-2,4-6,8-10,12-14,16-18,20-22,24-25}.linear/ssm"
    assert f"dst 1 <- src 2  layers.{ssm}  channel [0, 128) × head [16, 24) × state [0, 128)" in lines
    assert f"dst 1 <- src 3  layers.{ssm}  channel [0, 128) × head [24, 32) × state [0, 128)" in lines
    assert len(lines) == 10  # four states from two ranks, latents split between two


PREFLIGHT = """
import json, sys
from kvferry import lower, plan, prove, select
from kvferry.core.sample import sample_request
from kvferry.models import Topology, describe, model_named
model = model_named("deepseek-v3.2")
src, dst = (describe(model, Topology.parse(text)) for text in ("tp=8", "tp=4"))
selection = select(lower(prove(plan(src, dst, 0))), sample_request(src, dst, 4096))
heavy = {"torch", "nixl", "zmq", "vllm"} & set(sys.modules)
print(json.dumps([selection.num_runs, selection.total_bytes, sorted(heavy)]))
"""


def test_the_bill_needs_no_gpu_and_no_engine():
    """RB-5: runs and bytes of a real deployment, from a bare interpreter."""
    done = subprocess.run([sys.executable, "-c", PREFLIGHT], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [122, 4096 * 61 * (1152 + 132), []]


@pytest.mark.parametrize("slack", Slack)
def test_what_a_request_will_move_is_counted(engine, slack):
    """RB-7: bytes and runs of each request, source rank by source rank, before anything is posted."""
    src, dst = engine("gqa", "tp=2"), engine("gqa", "layout=NHD")
    planned = plan(src, dst, 0)
    request = sample_request(src, dst, 37, placement=Placement.SCATTERED)
    selection = select(lower(prove(planned)), request, slack=slack)
    assert check(planned, request, selection, cleared=slack is Slack.CLEAR) == []
    assert selection.total_bytes == sum(runs.total_bytes for runs in selection.reads.values())
    assert selection.total_bytes >= 37 * sum(state.cell_bytes for state in dst.states)
    assert selection.num_runs == sum(len(list(runs)) for runs in selection.reads.values())
    assert bool(len(selection.zeros)) is (slack is Slack.CLEAR)
