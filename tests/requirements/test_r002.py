"""R002: one plan per remote engine; the path of a request knows no model families."""

import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

import kvferry
from kvferry import (
    BlockTable,
    Code,
    Kind,
    Manifest,
    Plan,
    Refused,
    RequestError,
    Span,
    SpecError,
    compare,
    lower,
    plan,
    prove,
    select,
)
from kvferry.core.manifest import VERSION
from kvferry.core.sample import Placement, sample_request
from kvferry.models import model_from_config
from kvferry.testing.oracle import check
from kvferry.testing.small import FAMILIES
from kvferry.wire import manifest_from_json, manifest_to_json

ROOT = Path(kvferry.__file__).parent


def sources(planned: Plan) -> dict[str, set[int]]:
    """The source ranks of each state."""
    found = defaultdict(set)
    for piece in planned.pieces:
        found[piece.state].add(piece.src_rank)
    return dict(found)


def kind_of(manifest: Manifest, state: str) -> Kind:
    return manifest.state_by_name[state].kind


@pytest.mark.parametrize("family", FAMILIES)
def test_one_route_serves_every_request_of_every_family(engine, family):
    """R002-1: planned once at the handshake; requests of any length then take the same path."""
    block = 128 if family == "compressed" else 16
    src, dst = engine(family, f"tp=2,blocks=80,block={block}"), engine(family, f"blocks=80,block={block}")
    planned = plan(src, dst, 0)
    route = lower(prove(planned))
    for num_tokens in (1, 15, 16, 33):
        request = sample_request(src, dst, num_tokens, placement=Placement.SCATTERED)
        assert check(planned, request, select(route, request)) == [], num_tokens


@pytest.mark.parametrize("name", ["plan", "prove", "lower", "select", "runs", "overlap"])
def test_the_core_names_no_model_family(name):
    """R002-1: outside of docstrings and comments, no family, attention kind or backend is named."""
    text = (ROOT / "core" / f"{name}.py").read_text(encoding="utf-8")
    code = re.sub(r'"""(?s:.*?)"""|#.*', "", text).lower()
    assert not re.findall(r"mla|mamba|kda|gdn|attention|sliding|eagle|flash|deepseek|hnd|nhd", code)


def test_each_group_has_its_own_sources(engine):
    """R002-2: two KV heads on four ranks: attention comes from two of them, recurrent state from all four."""
    src, dst = engine("gdn-gqa", "tp=4"), engine("gdn-gqa")
    planned = plan(src, dst, 0)
    for state, ranks in sources(planned).items():
        assert len(ranks) == (4 if kind_of(dst, state) is Kind.RECURRENT else 2), state


def test_the_plan_says_which_part_each_source_fills(engine):
    """R002-2: the parts of a state are apart, and together they are what the rank needs."""
    src, dst = engine("gdn-gqa", "tp=4"), engine("gdn-gqa", "tp=2")
    planned = plan(src, dst, 1)
    need = dst.rank(1).by_state["layers.0.linear/ssm"].box()
    parts = {p.src_rank: dict(p.box.axes)["head"] for p in planned.pieces if p.state == "layers.0.linear/ssm"}
    assert parts == {2: (Span(12, 18),), 3: (Span(18, 24),)}
    assert dict(need.axes)["head"] == (Span(12, 24),)


def test_a_short_source_list_fails_alone(engine):
    """R002-3: a request whose source lists too few blocks fails; the next on the same route does not."""
    src, dst = engine("gqa", "tp=2"), engine("gqa")
    planned = plan(src, dst, 0)
    route = lower(prove(planned))
    good = sample_request(src, dst, 37)
    short = replace(good, src={"full": BlockTable.of(good.src["full"].block_ids[:2])})
    with pytest.raises(RequestError) as caught:
        select(route, short)
    assert (caught.value.code, caught.value.group) == ("src-table-short", "full")
    assert check(planned, good, select(route, good)) == []


KERNEL = 16


def kernel_blocks_per_page(manifest: Manifest) -> int:
    """How many kernel blocks an attention page needs to be as large as a page of recurrent state."""
    sizes = {Kind.PAGED: 0, Kind.RECURRENT: 0}
    layers = {
        kind: next(s.name for s in manifest.states if s.kind is kind).partition("/")[0] for kind in sizes
    }
    for view in manifest.ranks[0].views:
        state = manifest.state_by_name[view.state]
        if view.state.startswith(f"{layers[state.kind]}/"):
            sizes[state.kind] += (
                view.box().num_cells() * state.item_bytes * (KERNEL if state.kind is Kind.PAGED else 1)
            )
    return -(-sizes[Kind.RECURRENT] // sizes[Kind.PAGED])


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 1), (1, 4)])
def test_kernel_blocks_per_block_differ_between_peers(engine, src_tp, dst_tp):
    """R002-4: Nemotron-30B needs 131 kernel blocks per block at TP4 and 261 at TP1; both meet."""
    model, expected = "nemotron-3-nano-30b-a3b", {4: 131, 1: 261}
    pair = []
    for tp in (src_tp, dst_tp):
        assert kernel_blocks_per_page(engine(model, f"tp={tp},dtype=fp8")) == expected[tp]
        tokens = expected[tp] * KERNEL
        made = engine(model, f"tp={tp},dtype=fp8,block={tokens},kernel={KERNEL}")
        (digits,) = {v.axis("token").digits for v in made.ranks[0].views if v.state.endswith("/k")}
        assert [digit.size for digit in digits] == [expected[tp], KERNEL]
        pair.append(made)
    src, dst = pair
    selection = select(lower(prove(plan(src, dst, 0))), sample_request(src, dst, 9000))
    attention = 9000 * 6 * 2 * (2 if dst_tp == 1 else 1) * 128
    state = 23 * ((4096 + 2048) * 3 * 2 + 64 * 64 * 128 * 4) // dst_tp
    assert selection.total_bytes - attention - state in range(2 * 128 * 6 * 2 * KERNEL)  # but for slack


@pytest.mark.parametrize(("src_blocks", "dst_blocks"), [("block=24", "block=40"), ("block=40", "block=16")])
def test_unequal_numbers_of_kernel_blocks_are_exact(engine, move, src_blocks, dst_blocks):
    """R002-4: three kernel blocks of 8 against five, and five against two."""
    src = engine("mamba2-gqa", f"tp=4,kernel=8,{src_blocks}")
    move(src, engine("mamba2-gqa", f"kernel=8,{dst_blocks}"), 75)


def test_kernel_blocks_that_do_not_divide_are_refused(engine):
    """R002-4: each engine's own block must be a whole number of its kernel blocks."""
    with pytest.raises(SpecError, match="token of 20 cannot be split into tiles of 8"):
        engine("mamba2-gqa", "block=20,kernel=8")


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 3), (3, 2), (4, 6), (6, 4), (1, 5), (5, 1)])
def test_splits_that_do_not_divide_are_exact(engine, move, src_tp, dst_tp):
    """R002-5: six heads over any two numbers of ranks."""
    move(engine("gqa", f"tp={src_tp}"), engine("gqa", f"tp={dst_tp}"), 20)


def test_a_head_that_straddles_two_ranks_is_on_both(engine):
    """R002-5: six heads over four ranks: one and a half each, so two, and nothing is cut off."""
    held = [dict(rank.views[0].box().axes)["head"] for rank in engine("gqa", "tp=4").ranks]
    assert held == [(Span(0, 2),), (Span(1, 3),), (Span(3, 5),), (Span(4, 6),)]


@pytest.mark.parametrize(("family", "tp"), [("mamba2", 5), ("kda-mla", 8), ("gdn-gqa", 7)])
def test_state_that_does_not_divide_is_refused(engine, family, tp):
    """R002-5: recurrent heads are cut evenly or not at all; nothing is truncated."""
    with pytest.raises(SpecError, match=f"cannot be split over {tp} ranks"):
        engine(family, f"tp={tp}")


def calls_of(function) -> int:
    """How many Python functions run while ``function`` does."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_the_hot_path_is_array_arithmetic(engine):
    """R002-6: a request of 200 times as many blocks runs no more Python than a short one."""
    src, dst = engine("llama-3.1-8b", "tp=2"), engine("llama-3.1-8b", "tp=4")
    route = lower(prove(plan(src, dst, 0)))
    short, long = (
        sample_request(src, dst, num_tokens, placement=Placement.SCATTERED) for num_tokens in (320, 64_000)
    )
    select(route, short)
    assert calls_of(lambda: select(route, long)) <= calls_of(lambda: select(route, short))


@pytest.mark.parametrize("blocks", [(12, 30), (30, 12)])
def test_attention_and_state_do_not_disturb_each_other(engine, blocks):
    """R002-7: the runs of both are the runs of each, whatever number of blocks either engine has."""
    src, dst = (engine("mamba2-gqa", f"tp={tp},blocks={n}") for tp, n in zip((2, 1), blocks, strict=True))
    request = sample_request(src, dst, 60)
    states = {kind: {s.name for s in dst.states if s.kind is kind} for kind in Kind}

    def bytes_of(some: set[str]) -> set[tuple[int, ...]]:
        reads = select(lower(prove(plan(src, dst, 0, states=some), states=some)), request).reads
        return {
            (r, *run[:2], *run[2:4], i) for r in reads for run in _single_bytes(reads[r]) for i in [run[4]]
        }

    attention, recurrent = bytes_of(states[Kind.PAGED]), bytes_of(states[Kind.RECURRENT])
    assert attention
    assert recurrent
    assert not attention & recurrent
    assert bytes_of(states[Kind.PAGED] | states[Kind.RECURRENT]) == attention | recurrent


def _single_bytes(runs):
    for src_region, src_at, dst_region, dst_at, num_bytes in runs:
        for i in range(num_bytes):
            yield src_region, src_at + i, dst_region, dst_at + i, 1


def test_the_size_of_the_pool_moves_no_run(engine):
    """R002-7: with one more block at the source every run starts where it did, region by region."""
    dst = engine("mamba2-gqa")
    small, large = (engine("mamba2-gqa", f"tp=2,blocks={blocks}") for blocks in (12, 13))
    request = sample_request(small, dst, 60)
    runs, again = (select(lower(prove(plan(src, dst, 0))), request).reads for src in (small, large))
    assert {rank: list(runs[rank]) for rank in runs} == {rank: list(again[rank]) for rank in again}


def test_an_unknown_kind_is_a_clear_error(engine):
    """R002-8: a family, a layer type, a kind of state that nobody knows is named, never guessed."""
    with pytest.raises(SpecError, match="model_type 'spline' is not supported"):
        model_from_config({"model_type": "spline"})
    config = {"model_type": "gemma3_text", "num_hidden_layers": 1, "layer_types": ["spline_attention"]}
    shape = {"num_attention_heads": 2, "head_dim": 4, "sliding_window": 8}
    with pytest.raises(SpecError, match="layer_types has 'spline_attention'"):
        model_from_config(config | shape)
    text = manifest_to_json(engine("mamba2")).replace(b'"recurrent"', b'"spline"')
    with pytest.raises(SpecError, match="spline"):
        manifest_from_json(text)


def test_state_is_sharded_by_its_own_description(engine, move):
    """R002-9: MLA is whole on each of four ranks while KDA is cut over them; a lone B/C group is whole."""
    kda = engine("kda-mla", "tp=4")
    mamba = engine("mamba2-one-group", "tp=4")
    boxes = {
        state: {str(rank.by_state[state].box()) for rank in manifest.ranks}
        for manifest in (kda, mamba)
        for state in manifest.ranks[0].by_state
    }
    assert len(boxes["layers.2.attn/latent"]) == 1
    assert all(len(boxes[f"layers.0.linear/{part}"]) == 4 for part in ("conv.q", "conv.k", "conv.v", "ssm"))
    assert len(boxes["layers.0.mamba/conv.x"]) == len(boxes["layers.0.mamba/ssm"]) == 4
    assert len(boxes["layers.0.mamba/conv.B"]) == len(boxes["layers.0.mamba/conv.C"]) == 1


@pytest.mark.parametrize("family", ["kda-mla", "gdn-gqa", "mamba2-one-group", "mamba2-gqa", "mamba1-gqa"])
@pytest.mark.parametrize(("src", "dst"), [("tp=4", "tp=1,conv=DS"), ("tp=2", "tp=6")])
def test_state_is_exact_at_unequal_tp(engine, move, family, src, dst):
    """R002-9: whatever attention does, both directions, time-major and channel-major."""
    move(engine(family, src), engine(family, dst), 20)


def test_states_of_one_group_keep_their_real_kinds(engine):
    """R002-10: one block table, and in it cells of 4 tokens, cells of 128 tokens, values and scales."""
    manifest = engine("deepseek-v4")
    by_group = defaultdict(set)
    for view in manifest.ranks[0].views:
        state = manifest.state_by_name[view.state]
        by_group[view.group].add((state.tokens_per_cell, state.item_bytes))
    mixed = [kinds for kinds in by_group.values() if {cells for cells, _ in kinds} >= {4, 128}]
    assert mixed
    assert all(len(kinds) >= 4 for kinds in mixed)


@pytest.mark.parametrize(("src", "dst"), [("tp=2", "tp=1"), ("tp=1,block=128", "tp=3")])
@pytest.mark.parametrize("num_tokens", [5, 130, 300])
def test_mixed_kinds_in_one_group_are_exact(engine, move, src, dst, num_tokens):
    """R002-10, R002-15: DeepSeek-V4-like caches, prompts shorter than one block of 256 too."""
    src, dst = (engine("compressed", f"blocks=200,{text}") for text in (src, dst))
    move(src, dst, num_tokens, ranks=[0])


def test_a_deepseek_v4_deployment_is_planned(engine):
    """R002-15: fp8 rows of 584 bytes, blocks of 256, an indexer of its own size; TP 8 to TP 4."""
    src, dst = engine("deepseek-v4", "tp=8,dtype=fp8"), engine("deepseek-v4", "tp=4,dtype=fp8")
    sizes = {s.name.split(".", 2)[2]: s.item_bytes for s in dst.states if s.name.startswith("layers.2.")}
    assert sizes["attn/values"] + sizes["attn/scales"] == 584
    assert sizes["indexer/values"] + sizes["indexer/scales"] == 132
    assert {g.tokens_per_block for g in dst.groups if g.name.startswith("full")} == {256}
    route = lower(prove(plan(src, dst, 3)))
    short, long = (select(route, sample_request(src, dst, n)) for n in (5, 3000))
    assert 0 < short.total_bytes < long.total_bytes


@pytest.mark.parametrize("num_kept", [0, 5, 16, 30])
def test_a_prefix_hit_reads_the_missing_tail(engine, move, num_kept):
    """R002-12: the head is dropped, per group; recurrent state is read whole."""
    src, dst = engine("mamba2-gqa", "tp=2"), engine("mamba2-gqa", "block=8")
    (moved,) = move(src, dst, 32, num_kept=num_kept)
    paged = sum(s.cell_bytes for s in dst.states if s.kind is Kind.PAGED)
    state = sum(s.cell_bytes for s in dst.states if s.kind is Kind.RECURRENT)
    assert moved.selection.total_bytes == (32 - num_kept) * paged + state


def test_a_prefix_hit_and_a_window_are_cut_per_group(engine, move):
    """R002-12: 30 tokens kept, a window of the last 20 of 40: ten of each group are read."""
    src, dst = engine("window"), engine("window", "tp=2")
    moved, _ = move(src, dst, 40, num_kept=30)
    assert moved.request.need == {"window-20": (Span(30, 40),), "full": (Span(30, 40),)}
    (fresh, _) = move(src, dst, 40)
    assert fresh.request.need == {"window-20": (Span(20, 40),), "full": (Span(0, 40),)}


def test_another_protocol_version_is_refused(engine):
    """R002-13: the version is compared before anything else, and named."""
    src, dst = replace(engine("gqa"), version=VERSION + 1), engine("mqa")
    (found,) = compare(src, dst)
    assert (found.code, found.src, found.dst) == (Code.VERSION, str(VERSION + 1), str(VERSION))
    with pytest.raises(Refused, match="version"):
        plan(src, dst, 0)


def picture(manifest: Manifest, region: str) -> str:
    """One block of a region: a line per state, a mark per 32 bytes."""
    lines = []
    for view in manifest.ranks[0].views:
        if view.region == region:
            state = manifest.state_by_name[view.state]
            stop = view.offset + sum(stride * (n - 1) for n, stride in view.steps()) + state.item_bytes
            bar = "".join("█" if view.offset < 32 * (i + 1) and stop > 32 * i else "·" for i in range(20))
            lines.append(f"{view.group:<8} {view.state:<22} {view.offset:>4}–{stop:<4} {bar}")
    return "\n".join(lines)


def test_the_picture_of_one_tensor_with_two_views(engine):
    """R002-14: the picture in the documentation is the description's own."""
    page = Path(__file__).parents[2] / "docs" / "lab" / "requirements.md"
    assert picture(engine("kda-mla", "block=16,conv=DS"), "pool.0") in page.read_text(encoding="utf-8")


def test_block_size_is_per_group(engine):
    """R002-16: Gemma-4's window layers in blocks of 32 there, 16 here; its full layers 16 there, 64 here."""
    src = engine("gemma-4-31b", "tp=8,block=16,block.window-1024=32")
    dst = engine("gemma-4-31b", "tp=4,block.full=64,block.window-1024=16")
    ratios = {
        (lane.src_group.tokens_per_block, lane.dst_group.tokens_per_block)
        for lane in lower(prove(plan(src, dst, 0))).lanes
    }
    assert ratios == {(32, 16), (16, 64)}


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (4, 1)])
def test_groups_of_unequal_block_sizes_are_exact(engine, move, src_tp, dst_tp):
    """R002-16: window 8 → 12 while full 16 → 4."""
    src = engine("unequal-heads", f"tp={src_tp},block=16,block.window-24=8,alloc=separate")
    dst = engine("unequal-heads", f"tp={dst_tp},block=4,block.window-24=12,alloc=separate")
    move(src, dst)
