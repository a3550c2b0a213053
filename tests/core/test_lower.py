"""Patterns: one per shape, fused over states, within a budget, whatever the size of the pool."""

from dataclasses import replace

import pytest

from kvferry import BlockTable, Code, Group, Refused, Request, Span, lower, plan, prove, select
from kvferry.core import lower as lower_module
from kvferry.core.check import Shape

BLOCK = 4 * 8 * 4
"""Bytes of a block of one state: tokens × heads × channels."""


def route(src, dst, **budget):
    return lower(prove(plan(src, dst, 0)), **budget)


def whole_block(made):
    return [list(bundle.pattern(Shape(0, 0, 4))) for lane in made.lanes for bundle in lane.bundles]


def test_a_block_that_looks_alike_on_both_sides_is_one_run(engine):
    assert whole_block(route(engine(), engine())) == [[(0, 0, 0, 0, BLOCK)]]


def test_states_side_by_side_on_both_sides_are_fused(engine):
    both = engine(states=("k", "v"), packed=True)
    assert whole_block(route(both, both)) == [[(0, 0, 0, 0, 2 * BLOCK)]]


def test_states_side_by_side_on_one_side_only_are_not_fused(engine):
    apart, together = engine(states=("k", "v")), engine(states=("k", "v"), packed=True)
    assert whole_block(route(apart, together)) == [[(0, 0, 0, 0, BLOCK), (1, 0, 0, BLOCK, BLOCK)]]


def test_states_in_opposite_order_are_not_fused(engine):
    kv = engine(states=("k", "v"), packed=True)
    vk = engine(states=("v", "k"), packed=True)
    (runs,) = whole_block(route(kv, vk))
    assert runs == [(0, BLOCK, 0, 0, BLOCK), (0, 0, 0, BLOCK, BLOCK)]


def test_a_transposed_block_moves_in_its_common_runs(engine):
    """Token-major to head-major: the channels of one (token, head) are what both keep together."""
    (runs,) = whole_block(route(engine(), engine(order="head token channel")))
    assert len(runs) == 4 * 8
    assert {size for *_, size in runs} == {4}
    token, head = 3, 2
    assert (0, (token * 8 + head) * 4, 0, (head * 4 + token) * 4, 4) in runs


def test_a_plan_that_shatters_is_refused_with_the_number_of_runs(engine):
    src, dst = engine(), engine(order="head token channel")
    with pytest.raises(Refused) as refused:
        route(src, dst, max_runs_per_block=31)
    (found,) = refused.value.findings
    assert (found.code, found.state) == (Code.TOO_MANY_RUNS, "k")
    assert "32 runs per block of 4 cells, the budget is 31" in found.note
    assert route(src, dst, max_runs_per_block=32).lanes


def test_the_budget_counts_every_source_block_that_a_destination_block_takes(engine):
    large = engine(group=Group("large", 8, tokens_per_block=16))
    with pytest.raises(Refused, match="4 runs per block of 16 cells, the budget is 3"):
        route(engine(), large, max_runs_per_block=3)


# R002-7
def test_patterns_do_not_depend_on_the_size_of_the_pool(engine):
    few, many = (engine(group=Group("full", n, 4), order="head token channel") for n in (2, 1 << 20))
    assert whole_block(route(engine(), few)) == whole_block(route(engine(), many))


def test_groups_that_flow_into_one_another_make_one_lane_each(engine):
    def engine_of_two(a, b, name):
        first = engine(name, states=("k",), group=Group(a, 8, 4))
        second = engine(name, states=("v",), group=Group(b, 8, 4))
        rank = replace(
            first.ranks[0],
            regions=first.ranks[0].regions + second.ranks[0].regions,
            views=first.ranks[0].views + second.ranks[0].views,
        )
        return replace(
            first, states=first.states + second.states, groups=first.groups + second.groups, ranks=(rank,)
        )

    lanes = route(engine_of_two("a", "b", "src"), engine_of_two("b", "a", "dst")).lanes
    assert [(lane.src_group.name, lane.dst_group.name) for lane in lanes] == [("a", "b"), ("b", "a")]


# R002-1
def test_one_plan_serves_every_request_without_growing(engine):
    made = route(engine(), engine())
    for block in range(8):
        tables = {"full": BlockTable.of([block])}
        select(made, Request(tables, tables, {"full": (Span(0, 4),)}))
    (lane,) = made.lanes
    assert sum(len(bundle._fused_patterns._runs) for bundle in lane.bundles) == 1


def test_a_refused_plan_is_refused_again_and_leaves_nothing_behind(engine):
    src, dst = engine(), engine(order="head token channel")
    for _ in range(2):
        with pytest.raises(Refused):
            route(src, dst, max_runs_per_block=1)
    assert whole_block(route(src, dst))


def test_patterns_are_forgotten_when_they_have_become_too_many(engine, monkeypatch):
    monkeypatch.setattr(lower_module, "MAX_RUNS_KEPT", 60)
    made = route(engine(order="head token channel", group=Group("full", 8, 16)), engine())
    (bundle,) = made.lanes[0].bundles
    for num_cells in (1, 2, 3, 4) * 2:
        assert len(bundle.pattern(Shape(0, 0, num_cells))) == 8 * num_cells
        assert 1 <= len(bundle._fused_patterns._runs) <= 3
