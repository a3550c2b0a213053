"""Each law of a plan has a plan that breaks it, and the proof says which and where."""

import random
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import (
    AxisMap,
    Code,
    Digit,
    Group,
    Manifest,
    Rank,
    Refused,
    Region,
    Span,
    State,
    View,
    plan,
    prove,
)
from kvferry.core.box import Box
from kvferry.core.prove import _pairs_not_apart
from kvferry.core.span import normal


def findings(made):
    with pytest.raises(Refused) as refused:
        prove(made)
    return refused.value.findings


def head(box, *spans):
    return replace(box, axes=tuple((n, spans if n == "head" else s) for n, s in box.axes))


@pytest.fixture
def made(engine):
    return plan(engine(holds=[(0, 4), (4, 8)]), engine(), 0)


def test_a_gap_is_named_by_axis_and_interval(made):
    (found,) = findings(replace(made, pieces=made.pieces[1:]))
    assert (found.code, found.state, found.field) == (Code.GAP, "k", "head [0, 4)")


def test_a_gap_on_no_single_axis_is_counted_in_cells(made):
    """Each head and each channel comes from somewhere, but half of the pairs do not."""
    first, second = made.pieces
    halves = [
        replace(
            piece, box=replace(piece.box, axes=tuple((n, (span,) if n == "channel" else s) for n, s in axes))
        )
        for piece, axes, span in ((first, first.box.axes, Span(0, 2)), (second, second.box.axes, Span(2, 4)))
    ]
    (found,) = findings(replace(made, pieces=tuple(halves)))
    assert (found.code, found.field) == (Code.GAP, "16 of 32 cells")


def test_a_state_without_pieces_is_a_gap(made):
    assert [f.code for f in findings(replace(made, pieces=()))] == [Code.GAP]


def test_a_cell_written_twice_is_refused(made):
    assert Code.WRITTEN_TWICE in [f.code for f in findings(replace(made, pieces=made.pieces * 2))]


def test_a_gap_hidden_by_an_overlap_is_still_refused(made):
    first = made.pieces[0]
    assert findings(replace(made, pieces=(first, first)))


def test_a_piece_of_a_rank_that_does_not_hold_it_is_refused(made):
    pieces = (made.pieces[0], replace(made.pieces[1], src_rank=0))
    assert [f.code for f in findings(replace(made, pieces=pieces))] == [Code.WRONG_SOURCE]


def test_a_piece_past_the_need_is_refused(engine):
    made = plan(engine(), engine(holds=[(0, 4)]), 0)
    pieces = (replace(made.pieces[0], box=head(made.pieces[0].box, Span(0, 5))),)
    assert [f.code for f in findings(replace(made, pieces=pieces))] == [Code.NOT_NEEDED]


def test_a_piece_of_another_destination_rank_is_refused(engine):
    dst = engine(holds=[(0, 8)] * 2)
    made = plan(engine(), dst, 0)
    assert findings(replace(made, pieces=tuple(replace(p, dst_rank=1) for p in made.pieces)))


def test_pieces_of_a_state_that_is_not_needed_are_refused(made):
    assert Code.NOT_NEEDED in [f.code for f in findings(replace(made, states=()))]


ONE_GROUP = (Group("a", 4, 4),)


def bytes_manifest(*views, region_bytes=64, groups=ONE_GROUP):
    """One rank, one region of bytes; states are single bytes per token."""
    states = tuple(State(view.state, (), 1, "u8") for view in views)
    return Manifest("e", states, groups, (Rank(0, (Region("r", region_bytes),), views),))


def view(state, group="a", *, offset=0, token=1, block=4):
    axes = {"token": AxisMap((Digit(4, token),))}
    return View.of(state, group, "r", block_stride=block, offset=offset, axes=axes)


def apart(manifest):
    """The same engine with a region for each view."""
    regions = tuple(Region(state.name, 64) for state in manifest.states)
    views = tuple(replace(v, region=v.state, offset=0, block_stride=4) for v in sound_maps(manifest))
    return replace(manifest, ranks=(Rank(0, regions, views),))


def sound_maps(manifest):
    return (replace(v, axes=(("token", AxisMap((Digit(4, 1),))),)) for v in manifest.ranks[0].views)


def codes(manifest):
    pairs = ((manifest, apart(manifest)), (apart(manifest), manifest))
    return [{f.code for f in findings(plan(*pair, 0))} for pair in pairs]


# R001-2
def test_a_view_past_its_region_is_refused_on_either_side():
    assert codes(bytes_manifest(view("k"), region_bytes=15)) == [{Code.OUT_OF_BOUNDS}] * 2


def test_two_cells_on_one_byte_are_refused_on_either_side():
    assert codes(bytes_manifest(view("k", token=0))) == [{Code.CELLS_COLLIDE}] * 2
    assert codes(bytes_manifest(view("k", block=3))) == [{Code.CELLS_COLLIDE}] * 2


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (view("k", token=0), "the stride of token is 0 bytes, smaller steps span 1 byte"),
        (view("k", block=3), "the stride of block is 3 bytes, smaller steps span 4 bytes"),
        # Tokens at 0, 2, 4, 6: blocks 3 bytes apart weave for a while, then two cells meet.
        (view("k", token=2, block=3), "the stride of block is 3 bytes, smaller steps span 7 bytes"),
    ],
)
def test_the_stride_that_is_too_short_is_named(bad, named):
    manifest = bytes_manifest(bad)
    assert {f.note for f in findings(plan(apart(manifest), manifest, 0))} == {
        f"two cells share a byte: {named}"
    }


def test_of_strides_that_weave_the_one_that_collides_is_named():
    """0, 2, 4 and 3 more each share no byte, though 3 is less than 5: too short is the block's stride."""
    axes = {"token": AxisMap((Digit(2, 3), Digit(3, 2)))}
    woven = View.of("k", "a", "r", block_stride=5, axes=axes)
    manifest = bytes_manifest(woven, groups=(Group("a", 4, 6),))
    (found,) = {f.note for f in findings(plan(manifest, manifest, 0))}
    assert found == ("two cells share a byte: the stride of block is 5 bytes, smaller steps span 8 bytes")


def test_two_states_on_one_byte_are_refused_on_either_side():
    assert (
        codes(bytes_manifest(view("k", block=8), view("v", offset=3, block=8))) == [{Code.VIEWS_OVERLAP}] * 2
    )


def test_two_states_side_by_side_or_interleaved_are_sound():
    apart = bytes_manifest(view("k", block=8), view("v", offset=4, block=8))
    woven = bytes_manifest(view("k", token=2, block=8), view("v", offset=1, token=2, block=8))
    prove(plan(apart, woven, 0))


NUM_STATES = 2000


@pytest.mark.timed
@pytest.mark.parametrize(
    ("pool_of", "shift", "found"),
    [
        (lambda _: None, 0, 2 * 1999),
        (lambda _: None, 1, 2 * (2000 - 125)),
        (lambda i: f"pool {i}", 0, 2 * 1999),
        (lambda i: f"pool {i % 2}", 0, 2 * 1000),
        (lambda _: "one pool", 0, 0),
        (lambda _: "one pool", 1, 2 * (2000 - 125)),
    ],
    ids=["one group", "one group, shifted", "pools", "two pools", "one pool", "one pool, shifted"],
)
def test_thousands_of_states_on_the_same_bytes_are_refused_in_no_time(pool_of, shift, found):
    """Each is named once, and counted: not each pair of them."""
    names = [f"s{i}" for i in range(NUM_STATES)]
    pools = [pool_of(i) for i in range(NUM_STATES)]
    groups = [Group(f"g{i}", 4, 4, pool=pool) for i, pool in enumerate(pools) if pool] or [Group("g0", 4, 4)]
    views = [
        view(name, groups[i % len(groups)].name, offset=shift * i, block=4) for i, name in enumerate(names)
    ]
    manifest = bytes_manifest(*views, region_bytes=1 << 16, groups=tuple(groups))
    made = plan(manifest, manifest, 0)
    started = time.perf_counter()
    if found:
        with pytest.raises(Refused, match=f"… and {found - Refused.SHOWN:,} more") as caught:
            prove(made)
        assert caught.value.codes == ("views-overlap",)
        assert len(caught.value.findings) == Refused.MAX_FINDINGS == found - caught.value.num_more
    else:
        prove(made)
    assert time.perf_counter() - started < 10  # 0.2 to 0.4 s on an idle core


TWO_POOLS = (Group("a", 4, 4), Group("b", 4, 4))
ONE_POOL = (Group("a", 4, 4, pool="p"), Group("b", 4, 4, pool="p"))


# R001-7
def test_groups_of_one_pool_may_share_the_bytes_of_a_block():
    shared = bytes_manifest(view("k"), view("v", "b"), groups=ONE_POOL)
    prove(plan(shared, shared, 0))


def test_groups_of_two_pools_may_not():
    assert codes(bytes_manifest(view("k"), view("v", "b"), groups=TWO_POOLS)) == [{Code.VIEWS_OVERLAP}] * 2


# R001-1
def test_groups_of_one_pool_may_not_share_bytes_of_two_blocks():
    """The second view steps into the first one's blocks with another stride, or starts one block later."""
    for other in (view("v", "b", block=5), view("v", "b", offset=4), view("v", "b", offset=2)):
        assert codes(bytes_manifest(view("k"), other, groups=ONE_POOL)) == [{Code.VIEWS_OVERLAP}] * 2


def test_a_group_of_one_large_block_does_not_hide_behind_its_pool():
    """Its only block covers two pages, the second of which is block 1 of the other group."""
    groups = (Group("a", 4, 4, pool="p"), Group("b", 1, 4, pool="p"))
    large = View.of("v", "b", "r", block_stride=4, axes={"token": AxisMap((Digit(2, 4), Digit(2, 1)))})
    assert codes(bytes_manifest(view("k"), large, groups=groups)) == [{Code.VIEWS_OVERLAP}] * 2


def test_groups_of_one_pool_may_lie_side_by_side_with_unequal_strides():
    """Disjoint bytes are disjoint, whatever the strides: between the other's blocks, or behind them."""
    for other in (view("v", "b", offset=4, block=16), view("v", "b", offset=28, block=12)):
        both = bytes_manifest(view("k", block=8), other, region_bytes=80, groups=ONE_POOL)
        prove(plan(both, apart(both), 0))
        prove(plan(apart(both), both, 0))


def test_groups_of_one_pool_may_share_block_0_with_unequal_strides():
    groups = (Group("a", 4, 4, pool="p"), Group("b", 2, 4, pool="p"))
    both = bytes_manifest(view("k", block=4), view("v", "b", block=16), groups=groups)
    prove(plan(both, both, 0))
    behind = (replace(groups[0], num_blocks=5), groups[1])
    assert codes(bytes_manifest(*both.ranks[0].views, groups=behind)) == [{Code.VIEWS_OVERLAP}] * 2


def test_mutated_views_of_one_pool_are_refused_if_and_only_if_they_clash():
    """Each byte of each block listed, against the proof: no clash is missed, and none is invented."""
    rng = random.Random(8)
    verdicts: Counter[tuple[int, bool]] = Counter()
    for _ in range(1500):
        views = [
            view(name, group, offset=rng.randrange(40), token=rng.choice([1, 2]), block=rng.choice(STRIDES))
            for name, group in (("k", "a"), ("v", "b"))
        ]
        mutant = bytes_manifest(*views, region_bytes=128, groups=ONE_POOL)
        k, v = ([bytes_of_block(each, i) for i in range(4)] for each in views)
        collides = any(len(set().union(*blocks)) < 16 for blocks in (k, v))
        clashes = any(k[i] & v[j] for i, j in permutations(range(4), 2))
        try:
            prove(plan(apart(mutant), mutant, 0))
            verdict = set()
        except Refused as refused:
            verdict = set(refused.codes)
        expected = {"cells-collide": collides, "views-overlap": clashes}
        assert verdict == {code for code, is_so in expected.items() if is_so}, views
        verdicts[len({each.block_stride for each in views}), clashes] += 1
    assert min(verdicts.values()) > 100, verdicts


STRIDES = [5, 7, 8, 8, 12, 16, 24]


def bytes_of_block(view, block_id):
    (_, token), *_ = view.axes
    start = view.offset + block_id * view.block_stride
    return {start + i * token.digits[0].stride for i in range(4)}


@given(
    st.lists(st.tuples(*[st.lists(st.integers(0, 5), min_size=1, max_size=3)] * 2), min_size=1, max_size=8)
)
def test_no_two_boxes_that_overlap_are_taken_for_apart(cells):
    """The proof does not look at every pair; it must look at every pair that overlaps, once."""
    boxes = [
        Box(
            tuple(
                (name, normal(Span(at, at + 1) for at in taken))
                for name, taken in zip("xy", each, strict=True)
            )
        )
        for each in cells
    ]
    looked_at = [frozenset(map(id, pair)) for pair in _pairs_not_apart(boxes, range(2))]
    overlapping = {frozenset((id(a), id(b))) for a, b in combinations(boxes, 2) if a & b}
    assert len(set(looked_at)) == len(looked_at)
    assert overlapping <= set(looked_at)


def test_a_thousand_parts_are_proved_without_half_a_million_pairs():
    boxes = [
        Box((("head", (Span(head, head + 1),)), ("token", (Span(turn, turn + 1),))), 128)
        for head in range(8)
        for turn in range(128)
    ]
    assert list(_pairs_not_apart(boxes, range(2))) == []
    assert len(list(_pairs_not_apart([*boxes, boxes[3]], range(2)))) == 1
