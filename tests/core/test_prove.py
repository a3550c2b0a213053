"""Each law of a plan has a plan that breaks it, and the proof says which and where."""

from dataclasses import replace

import pytest

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


def codes(manifest):
    sound = replace(
        manifest,
        ranks=(
            Rank(
                0,
                tuple(Region(s.name, 64) for s in manifest.states),
                tuple(
                    View.of(s.name, v.group, s.name, block_stride=4, axes={"token": AxisMap((Digit(4, 1),))})
                    for s, v in zip(manifest.states, manifest.ranks[0].views, strict=True)
                ),
            ),
        ),
    )
    return [{f.code for f in findings(plan(*pair, 0))} for pair in ((manifest, sound), (sound, manifest))]


# R001-2
def test_a_view_past_its_region_is_refused_on_either_side():
    assert codes(bytes_manifest(view("k"), region_bytes=15)) == [{Code.OUT_OF_BOUNDS}] * 2


def test_two_cells_on_one_byte_are_refused_on_either_side():
    assert codes(bytes_manifest(view("k", token=0))) == [{Code.CELLS_COLLIDE}] * 2
    assert codes(bytes_manifest(view("k", block=3))) == [{Code.CELLS_COLLIDE}] * 2


def test_two_states_on_one_byte_are_refused_on_either_side():
    assert (
        codes(bytes_manifest(view("k", block=8), view("v", offset=3, block=8))) == [{Code.VIEWS_OVERLAP}] * 2
    )


def test_two_states_side_by_side_or_interleaved_are_sound():
    apart = bytes_manifest(view("k", block=8), view("v", offset=4, block=8))
    woven = bytes_manifest(view("k", token=2, block=8), view("v", offset=1, token=2, block=8))
    prove(plan(apart, woven, 0))


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
    """The second view steps through the tensor with another stride, or starts one block later."""
    for other in (view("v", "b", block=5), view("v", "b", offset=4), view("v", "b", offset=2)):
        assert codes(bytes_manifest(view("k"), other, groups=ONE_POOL)) == [{Code.VIEWS_OVERLAP}] * 2


def test_a_group_of_one_large_block_does_not_hide_behind_its_pool():
    """Its only block covers two pages, the second of which is block 1 of the other group."""
    groups = (Group("a", 4, 4, pool="p"), Group("b", 1, 4, pool="p"))
    large = View.of("v", "b", "r", block_stride=4, axes={"token": AxisMap((Digit(2, 4), Digit(2, 1)))})
    assert codes(bytes_manifest(view("k"), large, groups=groups)) == [{Code.VIEWS_OVERLAP}] * 2
