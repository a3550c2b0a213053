"""R000: attention that is cut over ranks and attention that is whole on each, in one group."""

from collections import defaultdict
from dataclasses import replace

import pytest

from kvferry import AxisMap, Code, Digit, Manifest, Plan, Refused, Span, View, lower, plan, prove, select
from kvferry.core.sample import sample_request
from kvferry.testing.oracle import check

UNEQUAL = [(1, 2), (2, 1), (2, 3), (4, 2), (2, 4)]


def heads_by_source(planned: Plan, state: str) -> dict[int, tuple[Span, ...]]:
    """Source rank → the heads that it sends (of a state without heads: nothing)."""
    return {p.src_rank: dict(p.box.axes).get("head", ()) for p in planned.pieces if p.state == state}


def with_view(manifest: Manifest, state: str, change) -> Manifest:
    ranks = (
        replace(r, views=tuple(change(v) if v.state == state else v for v in r.views)) for r in manifest.ranks
    )
    return replace(manifest, ranks=tuple(ranks))


@pytest.mark.parametrize("family", ["gqa+mla", "mla+gqa"])
def test_heads_are_cut_and_latents_are_whole_in_one_group(engine, family):
    """R000-1: each source's heads at their offset, K and V; the latent whole, from one rank, at offset 0."""
    src, dst = engine(family, "tp=2"), engine(family)
    assert {group.name for group in src.groups} == {"full"}
    planned = plan(src, dst, 0)
    for state in planned.states:
        found = heads_by_source(planned, state)
        if state.endswith("/latent"):
            assert len(found) == 1
            (piece,) = (p for p in planned.pieces if p.state == state)
            assert dict(piece.box.axes)["channel"] == (Span(0, 8),)
        else:
            assert found == {0: (Span(0, 3),), 1: (Span(3, 6),)}
    assert {state.rpartition("/")[2] for state in planned.states} == {"k", "v", "latent"}


def test_each_layer_is_classified_from_its_own_description(engine):
    """R000-2: whole or cut is what a layer's own boxes say, also if only one layer says so."""
    src = engine("kimi-k2.5+kimi-k2.5-eagle3", "tp=4")
    boxes = defaultdict(set)
    for rank in src.ranks:
        for view in rank.views:
            boxes[view.state].add(str(view.box()))
    cut = {state for state, found in boxes.items() if len(found) == 4}
    assert cut == {"draft.layers.0.attn/k", "draft.layers.0.attn/v"}
    assert {len(found) for state, found in boxes.items() if state not in cut} == {1}


def test_no_flag_and_no_name_decides(engine):
    """R000-3: with every state renamed beyond recognition on both sides the plan is the same."""
    src, dst = engine("gqa+mla", "tp=2"), engine("gqa+mla", "tp=3")
    names = {state.name: f"x{i}" for i, state in enumerate(src.states)}

    def anonymous(manifest: Manifest) -> Manifest:
        return replace(
            manifest,
            model="",
            states=tuple(replace(s, name=names[s.name]) for s in manifest.states),
            ranks=tuple(
                replace(r, views=tuple(replace(v, state=names[v.state]) for v in r.views))
                for r in manifest.ranks
            ),
        )

    pieces = plan(anonymous(src), anonymous(dst), 1).pieces
    assert pieces == tuple(replace(p, state=names[p.state]) for p in plan(src, dst, 1).pieces)


@pytest.mark.parametrize("family", ["gqa+mla", "mla+gqa"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), UNEQUAL)
def test_a_mixed_group_is_exact_at_unequal_tp(engine, move, family, src_tp, dst_tp):
    """R000-4, R000-7: both directions, other block sizes and layouts too."""
    move(engine(family, f"tp={src_tp}"), engine(family, f"tp={dst_tp},block=8,layout=NHD"), 20)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 1), (2, 4)])
def test_a_homogeneous_model_is_untouched_by_its_neighbours(engine, src_tp, dst_tp):
    """R000-5: the pieces and runs of plain layers are the same with an MLA draft in their group."""
    runs = []
    for family in ("gqa", "gqa+mla"):
        src, dst = engine(family, f"tp={src_tp}"), engine(family, f"tp={dst_tp}")
        plain = {s.name for s in dst.states if s.name.startswith("layers.")}
        planned = plan(src, dst, 0, states=plain)
        reads = select(lower(prove(planned, states=plain)), sample_request(src, dst, 37)).reads
        runs.append((planned.pieces, {rank: list(some) for rank, some in reads.items()}))
    assert runs[0] == runs[1]


LATENT, K = "draft.layers.0.attn/latent", "layers.0.attn/k"


def _half_box(view: View) -> View:
    axes = dict(view.axes) | {"channel": AxisMap((Digit(4, 2),))}
    return View.of(view.state, view.group, view.region, block_stride=view.block_stride, axes=axes)


def _all_heads(view: View) -> View:
    axes = dict(view.axes) | {"head": AxisMap((Digit(6, view.axis("head").digits[0].stride),))}
    return View.of(view.state, view.group, view.region, block_stride=view.block_stride, axes=axes)


@pytest.mark.parametrize(
    ("state", "change", "code"),
    [
        (LATENT, _half_box, Code.NOT_HELD),
        (LATENT, lambda v: replace(v, block_stride=v.block_stride // 2), Code.CELLS_COLLIDE),
        (K, _all_heads, Code.CELLS_COLLIDE),
        (K, lambda v: replace(v, block_stride=v.block_stride * 2), Code.OUT_OF_BOUNDS),
    ],
    ids=["latent-cut-over-ranks", "latent-page-halved", "heads-not-cut", "page-not-halved"],
)
def test_a_length_wrongly_scaled_by_tp_is_refused(engine, state, change, code):
    """R000-6: replicated but scaled, sharded but not scaled: refused when the peers meet, by name."""
    src, dst = engine("gqa+mla", "tp=2"), engine("gqa+mla")
    prove(plan(src, dst, 0))
    with pytest.raises(Refused) as caught:
        prove(plan(with_view(src, state, change), dst, 0))
    assert code in caught.value.codes
    assert state in {finding.state for finding in caught.value.findings}


def test_heads_claimed_whole_in_a_whole_page_are_just_more_holders(engine):
    """R000-6: what is refused is the contradiction, not replication: pages as long as they say are fine."""
    src, dst = engine("gqa", "tp=1"), engine("gqa", "tp=2")
    both = replace(src, ranks=(src.ranks[0], replace(src.ranks[0], rank=1)))
    planned = plan(both, dst, 1)
    request = sample_request(both, dst, 37)
    assert check(planned, request, select(lower(prove(planned)), request)) == []


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(8, 4), (4, 8)])
def test_kimi_k25_with_its_draft(engine, src_tp, dst_tp):
    """R000-7: 61 MLA layers read once each, one draft layer of 64 heads cut over ranks; both directions."""
    name = "kimi-k2.5+kimi-k2.5-eagle3"
    src, dst = engine(name, f"tp={src_tp}"), engine(name, f"tp={dst_tp}")
    planned = plan(src, dst, 1)
    prove(planned)
    latents = [p for p in planned.pieces if p.state.endswith("/latent")]
    assert len(latents) == 61
    heads = heads_by_source(planned, "draft.layers.0.attn/k")
    assert heads == ({2: (Span(16, 24),), 3: (Span(24, 32),)} if src_tp == 8 else {0: (Span(8, 16),)})


def test_the_indexer_is_whole_and_of_its_own_size(engine):
    """R000-8: DeepSeek-V3.2: latents of 1152 bytes, indexer rows of 132, one group, whole on each rank."""
    src, dst = engine("deepseek-v3.2", "tp=8"), engine("deepseek-v3.2", "tp=4")
    (group,) = dst.groups
    pages = {}
    for view in dst.ranks[0].views:
        assert view.group == group.name
        pages[view.region] = view.block_stride
    assert set(pages.values()) == {64 * 1152, 64 * 132}
    planned = plan(src, dst, 2)
    prove(planned)
    assert len(planned.pieces) == 61 * 3  # latent, values, scales: each whole, from one rank


@pytest.mark.parametrize(("src_tp", "dst_tp"), UNEQUAL)
def test_the_indexer_is_exact_at_unequal_tp(engine, move, src_tp, dst_tp):
    """R000-8: values first, scales behind them, 5 + 4 bytes a token here."""
    move(engine("mla-indexer", f"tp={src_tp},block=16"), engine("mla-indexer", f"tp={dst_tp},block=24"))


def test_groups_replicate_differently(engine):
    """R000-9: Gemma-4 at TP 8: window layers have 2 of 16 heads a rank, full ones 1 of 4, twice."""
    src, dst = engine("gemma-4-31b", "tp=8"), engine("gemma-4-31b", "tp=2")
    held = {s: [dict(r.by_state[s].box().axes)["head"] for r in src.ranks] for s in src.ranks[0].by_state}
    assert held["layers.0.attn/k"] == [(Span(2 * r, 2 * r + 2),) for r in range(8)]
    assert held["layers.5.attn/k"] == [(Span(r // 2, r // 2 + 1),) for r in range(8)]
    planned = plan(src, dst, 1)
    prove(planned)
    window = heads_by_source(planned, "layers.0.attn/k")
    assert window == {r: (Span(2 * r, 2 * r + 2),) for r in (4, 5, 6, 7)}
    full = [heads_by_source(planned, f"layers.{i}.attn/k") for i in range(5, 60, 6)]
    assert all(len(found) == 2 for found in full)  # one of the two holders of each of two heads
    assert set().union(*full) == {4, 5, 6, 7}  # and over the layers, each holder has its turn


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 1), (1, 4), (6, 4)])
def test_unequal_replication_is_exact(engine, move, src_tp, dst_tp):
    """R000-9: 12 heads in window layers, 2 in full ones."""
    move(engine("unequal-heads", f"tp={src_tp}"), engine("unequal-heads", f"tp={dst_tp}"), 30)
