"""Who sends what: the one intersection rule, seen from every family that it replaces."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from kvferry import Code, Refused, Span, View, lower, plan, prove
from kvferry.layout.pages import Sharding, held

LAYERS = tuple(f"layers.{i}/k" for i in range(12))


def spread(num_ranks, heads=8):
    parts = (held(Sharding.SPREAD, heads, rank, num_ranks) for rank in range(num_ranks))
    return [(part.start, part.stop) for part in parts]


def heads_by_source(made):
    return [(piece.src_rank, piece.state, dict(piece.box.axes)["head"]) for piece in made.pieces]


def bytes_by_source(src, dst):
    sent = Counter({rank.rank: 0 for rank in src.ranks})
    for rank in dst.ranks:
        for piece in plan(src, dst, rank.rank).pieces:
            sent[piece.src_rank] += piece.box.num_cells()
    return sent


# R002-2
def test_heads_split_over_ranks_come_from_the_ranks_that_hold_them(engine):
    made = plan(engine(holds=spread(4)), engine(holds=spread(2)), 1)
    assert heads_by_source(made) == [(2, "k", (Span(4, 6),)), (3, "k", (Span(6, 8),))]


@pytest.mark.parametrize(("src_tp", "dst_tp"), [*product([1, 2, 3, 4, 6, 8, 16], repeat=2)])
# R003-7
def test_any_pair_of_sizes_is_planned_and_proved(engine, src_tp, dst_tp):
    src, dst = engine(holds=spread(src_tp)), engine(holds=spread(dst_tp))
    for rank in range(dst_tp):
        made = prove(plan(src, dst, rank)).plan
        heads = sorted(
            i for *_, spans in heads_by_source(made) for s in spans for i in range(s.start, s.stop)
        )
        start, stop = spread(dst_tp)[rank]
        assert heads == list(range(start, stop))


# R002-5
def test_uneven_boxes_are_cut_where_they_end(engine):
    made = plan(engine(holds=[(0, 3), (3, 7), (7, 8)]), engine(holds=[(2, 8)]), 0)
    assert heads_by_source(made) == [
        (0, "k", (Span(2, 3),)),
        (1, "k", (Span(3, 7),)),
        (2, "k", (Span(7, 8),)),
    ]


@pytest.mark.parametrize(("num_holders", "num_readers"), [(4, 1), (4, 2), (2, 4), (3, 4), (6, 4)])
# R000-1
def test_a_replicated_state_is_read_evenly_from_its_holders(engine, num_holders, num_readers):
    src = engine(holds=[(0, 8)] * num_holders, states=LAYERS)
    dst = engine(holds=[(0, 8)] * num_readers, states=LAYERS)
    sent = bytes_by_source(src, dst)
    one_layer = 8 * 4
    assert max(sent.values()) - min(sent.values()) <= one_layer
    assert sum(sent.values()) == num_readers * len(LAYERS) * one_layer


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(16, 8), (16, 4), (16, 16), (16, 1), (64, 48)])
def test_replicated_heads_are_read_evenly_from_their_holders(engine, src_tp, dst_tp):
    sent = bytes_by_source(
        engine(holds=spread(src_tp), states=LAYERS), engine(holds=spread(dst_tp), states=LAYERS)
    )
    assert max(sent.values()) <= 1.5 * min(sent.values())


def test_partly_shared_coordinates_are_written_once(engine):
    prove(plan(engine(holds=[(0, 5), (2, 8), (1, 4)]), engine(), 0))


def test_pipeline_stages_are_matched_by_name(engine):
    src = engine(holds=[(0, 8)] * 2, states=LAYERS, where={s: [i // 5 > 0] for i, s in enumerate(LAYERS)})
    dst = engine(holds=[(0, 8)] * 3, states=LAYERS, where={s: [i // 4] for i, s in enumerate(LAYERS)})
    made = plan(src, dst, 1)
    assert [(piece.src_rank, piece.state) for piece in made.pieces] == [
        (0, LAYERS[4]),
        (1, LAYERS[5]),
        (1, LAYERS[6]),
        (1, LAYERS[7]),
    ]


def test_turns_of_unequal_length_are_split_by_residue(engine):
    src = engine(holds=[(0, 8)] * 2, turns=(2, 1))
    dst = engine(holds=[(0, 8)] * 2, turns=(2, 2))
    made = prove(plan(src, dst, 1)).plan
    assert [(p.src_rank, dict(p.box.axes)["token"], p.box.period) for p in made.pieces] == [
        (0, (Span(2, 3),), 4),
        (1, (Span(3, 4),), 4),
    ]


# R003-8
def test_an_alias_is_read_under_the_sources_name(engine):
    made = plan(engine(states=("a/k",)), engine(states=("b/k",), aliases=("a/k",)), 0)
    assert [(piece.state, made.src_name(piece.state)) for piece in made.pieces] == [("b/k", "a/k")]
    assert [view.state for view in made.views(made.pieces[0])] == ["a/k", "b/k"]


def test_what_no_source_holds_is_refused_with_the_interval_and_what_there_is(engine):
    with pytest.raises(Refused) as refused:
        plan(engine(holds=[(0, 3), (5, 8)]), engine(), 0)
    (found,) = refused.value.findings
    assert (found.code, found.state, found.field) == (Code.NOT_HELD, "k", "head [3, 5)")
    assert "head [0, 3) [5, 8) on ranks [0, 1]" in found.src


def test_a_state_that_no_listed_rank_has_is_refused(engine):
    with pytest.raises(Refused) as refused:
        plan(replace(engine(), ranks=()), engine(), 0)
    assert refused.value.codes == ("not-held",)


def test_differences_are_refused_before_planning(engine):
    with pytest.raises(Refused, match="dtype: source has a, destination has b"):
        plan(engine(dtype="a"), engine(dtype="b"), 0)


def test_a_need_is_narrowed_to_the_named_states(engine):
    both = engine(states=("k", "v"))
    made = prove(plan(both, both, 0, states=["v"]), states=["v"]).plan
    assert (made.states, [piece.state for piece in made.pieces]) == (("v",), ["v"])


def test_a_narrowed_need_does_not_ask_for_the_states_left_out(engine):
    """A destination with draft layers may still read the rest from a source that has none."""
    made = plan(engine(states=("k",)), engine(states=("k", "draft/k")), 0, states=["k"])
    assert [piece.state for piece in made.pieces] == ["k"]


def test_narrowing_to_a_state_that_the_rank_lacks_is_refused(engine):
    with pytest.raises(Refused, match="missing-state: q: rank 0 of engine does not hold it"):
        plan(engine(), engine(), 0, states=["q"])


def test_an_unknown_destination_rank_is_refused(engine):
    with pytest.raises(Refused) as refused:
        plan(engine(), engine(), 3)
    assert refused.value.codes == ("unknown-rank",)


# R000-1
def test_one_group_may_hold_a_split_state_beside_a_replicated_one(engine):
    def mixed(num_ranks):
        split = engine(holds=spread(num_ranks), states=("gqa/k",), group=None)
        whole = engine(holds=[(0, 8)] * num_ranks, states=("mla/kv",))
        ranks = tuple(
            replace(a, regions=a.regions + b.regions, views=a.views + b.views)
            for a, b in zip(split.ranks, whole.ranks, strict=True)
        )
        return replace(split, states=split.states + whole.states, ranks=ranks)

    made = prove(plan(mixed(4), mixed(2), 0)).plan
    sources = {state: [p.src_rank for p in made.pieces if p.state == state] for state in made.states}
    assert sources["gqa/k"] == [0, 1]
    assert len(sources["mla/kv"]) == 1


def test_all_plans_of_two_engines_look_at_each_rank_once(engine, monkeypatch):
    """The ranks of both sides are indexed once for all plans, and equal boxes of a rank are made once."""
    asked: Counter[int] = Counter()
    make = View.box

    def counted(view):
        asked[id(view.axes)] += 1
        return make(view)

    monkeypatch.setattr(View, "box", counted)
    src, dst = (engine(holds=spread(tp), states=LAYERS) for tp in (12, 8))
    for rank in dst.ranks:
        lower(prove(plan(src, dst, rank.rank)))
    assert len(asked) == asked.total() <= 12 * (12 + 8)
    assert src.holders[LAYERS[0]] is src.holders[LAYERS[-1]]
