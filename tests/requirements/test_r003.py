"""R003: registration with and without an allocator that lets layers share tensors."""

from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvferry import BlockTable, Manifest, Request, Span, SpecError, lower, plan, prove, select
from kvferry.cli.processes import FABRICS
from kvferry.core.sample import sample_request
from kvferry.testing.oracle import check
from kvferry.transport.memory import placed
from kvferry.transport.nixl_agent import Agent
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import UCX_TRANSPORTS, Expose

TP_PAIRS = [(1, 1), (2, 2), (1, 2), (2, 4), (4, 4)]


def counts(manifest: Manifest) -> tuple[int, int]:
    """(layers, regions) of rank 0."""
    rank = manifest.ranks[0]
    return len({view.state.partition("/")[0] for view in rank.views}), len(rank.regions)


def test_memory_is_registered_once_per_allocation(engine):
    """R003-1: one region per allocation, however many layers point into it."""
    shared, separate = engine("gemma-3-4b-it"), engine("gemma-3-4b-it", "alloc=separate")
    for manifest in (shared, separate):
        rank = manifest.ranks[0]
        assert len({region.name for region in rank.regions}) == len(rank.regions)
        assert {view.region for view in rank.views} == {region.name for region in rank.regions}
    layers_in = [sum(v.region == r.name for v in shared.ranks[0].views) for r in shared.ranks[0].regions]
    assert sum(layers_in) == 2 * 34
    assert min(layers_in) > 2


@pytest.mark.parametrize("alloc", ["shared", "separate"])
@pytest.mark.parametrize("family", ["window", "shared-layers", "kda-mla", "mla-indexer"])
def test_the_fabric_hears_of_each_tensor_once(engine, family, alloc, monkeypatch):
    """R003-1, RA-9: NIXL registers every allocation once and whole, however many layers are in it."""
    pytest.importorskip("nixl", exc_type=ImportError)
    heard: Counter[tuple[int, int]] = Counter()
    register = Agent.register

    def listen(agent, kind, table):
        heard.update((int(address), int(num_bytes)) for address, num_bytes, _ in table)
        return register(agent, kind, table)

    monkeypatch.setattr(Agent, "register", listen)
    (rank,) = engine(family, f"alloc={alloc}").ranks
    tensors = {region.name: np.zeros(region.num_bytes, np.uint8) for region in rank.regions}
    monkeypatch.setenv(UCX_TRANSPORTS, FABRICS["cma"][UCX_TRANSPORTS])
    with closing(ProcessTransport(expose=Expose.FABRIC)) as transport:
        transport.register(placed(rank, tensors))
    given = Counter((tensor.ctypes.data, tensor.nbytes) for tensor in tensors.values())
    own = {at for at in heard if not any(_overlap(at, tensor) for tensor in given)}  # the transport's scratch
    assert len(own) <= 1
    assert Counter({at: n for at, n in heard.items() if at not in own}) == given


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < sum(other) and other[0] < sum(one)


@pytest.mark.parametrize(("src", "dst"), [("shared", "separate"), ("separate", "shared")])
@pytest.mark.parametrize("family", ["window", "gdn-gqa"])
def test_engines_with_and_without_the_allocator_understand_each_other(engine, move, family, src, dst):
    """R003-1: registration differs, what is moved does not."""
    move(engine(family, f"tp=2,alloc={src}"), engine(family, f"alloc={dst}"))


@pytest.mark.parametrize(
    ("model", "alloc", "expected"),
    [
        ("gpt2", "separate", (12, 12)),
        ("gpt2", "shared", (12, 12)),
        ("gpt2", "auto", (12, 12)),
        ("gemma-3-4b-it", "separate", (34, 34)),
        ("gemma-3-4b-it", "shared", (34, 5)),
        ("gemma-3-4b-it", "auto", (34, 5)),
    ],
)
def test_fewer_tensors_than_layers(engine, model, alloc, expected):
    """R003-2: 12 layers in 12 tensors either way; 34 layers in 34 tensors, or in 5."""
    assert counts(engine(model, f"alloc={alloc}")) == expected


def test_registering_and_describing_are_two_duties(engine):
    """R003-3: a region without a view changes no run; a view of an unregistered region is an error."""
    src, dst = engine("gqa", "tp=2"), engine("gqa")
    request = sample_request(src, dst, 37)
    (rank,) = dst.ranks
    extra = replace(rank.regions[0], name="weights, registered and never described")
    wider = replace(dst, ranks=(replace(rank, regions=(*rank.regions, extra)),))
    runs, again = (select(lower(prove(plan(src, d, 0))), request).reads for d in (dst, wider))
    assert {r: list(runs[r]) for r in runs} == {r: list(again[r]) for r in again}
    with pytest.raises(SpecError, match=r"unknown region 'layers\.0\.attn'"):
        replace(dst, ranks=(replace(rank, regions=rank.regions[1:]),))


@pytest.mark.parametrize("family", ["window", "kda-mla", "mla-indexer"])
def test_runs_stay_inside_registered_memory(engine, move, family):
    """R003-3: whatever is described per block lies in what was registered, on both sides."""
    src, dst = engine(family, "tp=2"), engine(family, "tp=4")
    for moved in move(src, dst):
        here = dst.rank(moved.plan.dst_rank).regions
        for src_rank, runs in moved.selection.reads.items():
            there = src.rank(src_rank).regions
            for src_region, src_at, dst_region, dst_at, num_bytes in runs:
                assert src_at + num_bytes <= there[src_region].num_bytes
                assert dst_at + num_bytes <= here[dst_region].num_bytes


@pytest.mark.parametrize(
    "layout", ["HND", "NHD", "HND-halves", "NHD-apart", "cross-layer", "cpu-vec", "LBNHKC", "BHLNC"]
)
def test_sizes_come_from_the_description(engine, move, layout):
    """R003-4: two blocks are the bytes that the states' cells say, whatever shape a backend's tensor has."""
    src, dst = engine("gqa", "tp=2"), engine("gqa", f"layout={layout}")
    (moved,) = move(src, dst, 32)
    assert moved.selection.total_bytes == 32 * sum(state.cell_bytes for state in dst.states)
    assert sum(region.num_bytes for region in dst.ranks[0].regions) == 24 * 16 * sum(
        state.cell_bytes for state in dst.states
    )


@pytest.mark.parametrize("family", ["unequal-heads", "mla-indexer", "mla+gqa"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 3), (4, 1)])
def test_tensors_of_unequal_size_are_legal(engine, move, family, src_tp, dst_tp):
    """R003-5: each tensor is described as it is; nothing assumes that all have one size."""
    src, dst = (engine(family, f"tp={tp},alloc=separate") for tp in (src_tp, dst_tp))
    assert len({region.num_bytes for region in src.ranks[0].regions}) > 1
    move(src, dst)


def test_each_layer_says_whose_block_ids_it_uses(engine):
    """R003-6: window layers and full layers have block lists of their own, of their own length."""
    src, dst = engine("window", "alloc=separate"), engine("window", "block=8,alloc=separate")
    groups = {view.state: view.group for view in dst.ranks[0].views}
    assert groups["layers.0.attn/k"] == "window-20"
    assert groups["layers.1.attn/k"] == "full"
    request = Request(
        src={"full": BlockTable.of([5, 3, 9]), "window-20": BlockTable.of([9, 0], first_token=16)},
        dst={"full": BlockTable.of([1, 7, 2, 8, 0]), "window-20": BlockTable.of([0, 6, 4], first_token=16)},
        need={"full": (Span(0, 38),), "window-20": (Span(18, 38),)},
    )
    planned = plan(src, dst, 0)
    selection = select(lower(prove(planned)), request)
    assert check(planned, request, selection) == []
    assert selection.total_bytes >= (38 + 20) * 2 * dst.state_by_name["layers.0.attn/k"].cell_bytes


@pytest.mark.parametrize("alloc", ["separate", "shared"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), TP_PAIRS)
def test_the_pairs_of_tensor_parallel_sizes(engine, move, src_tp, dst_tp, alloc):
    """R003-7: (1,1) (2,2) (1,2) (2,4) (4,4), tensors shared or not."""
    moves = move(*(engine("shared-layers", f"tp={tp},alloc={alloc}") for tp in (src_tp, dst_tp)))
    assert len(moves) == dst_tp
    for moved in moves:
        assert len(moved.selection.reads) == max(1, src_tp // dst_tp)


def test_layers_that_share_a_cache_are_one_state(engine):
    """R003-8: 35 layers, 20 caches; the other 15 are further names of two of them."""
    manifest = engine("gemma-3n-e4b")
    keys = [state for state in manifest.states if state.name.endswith("/k")]
    assert len(keys) == 20
    assert sum(1 + len(state.aliases) for state in keys) == 35
    assert {state.name for state in keys if state.aliases} == {"layers.18.attn/k", "layers.19.attn/k"}
    assert manifest.state_by_name["layers.34.attn/k"].name == "layers.19.attn/k"


@pytest.mark.parametrize("knows_both_names", [True, False])
def test_a_shared_cache_is_found_by_any_of_its_names(engine, knows_both_names):
    """R003-8: the source calls it by the name of another layer that shares it; it is moved once."""
    src, dst = engine("shared-layers"), engine("shared-layers", "tp=2")
    old, new = "layers.1.attn/k", "layers.3.attn/k"
    renamed = replace(
        src,
        states=tuple(
            replace(s, name=new, aliases=(old,) * knows_both_names) if s.name == old else s
            for s in src.states
        ),
        ranks=tuple(
            replace(r, views=tuple(replace(v, state=new) if v.state == old else v for v in r.views))
            for r in src.ranks
        ),
    )
    planned = plan(renamed, dst, 0)
    assert [piece.state for piece in planned.pieces].count(old) == 1
    request = sample_request(renamed, dst, 21)
    assert check(planned, request, select(lower(prove(planned)), request)) == []
