from hypothesis import given
from hypothesis import strategies as st

from kvferry import Span
from kvferry.core.box import EVERY, Box
from kvferry.core.span import normal


@st.composite
def boxes(draw):
    period = draw(st.sampled_from([1, 2, 3, 4, 6]))
    residues = normal(Span(i, i + 1) for i in draw(st.sets(st.integers(0, period - 1))))
    heads = normal(Span(i, i + 1) for i in draw(st.sets(st.integers(0, 5))))
    return Box((("head", heads), ("token", residues)), period)


def members(box, num_tokens=24):
    axes = dict(box.axes)
    return {
        (head, token)
        for span in axes["head"]
        for head in range(span.start, span.stop)
        for token in range(num_tokens)
        if any(token % box.period in residue for residue in axes["token"])
    }


@given(boxes(), boxes())
def test_the_intersection_of_boxes_is_that_of_their_cells_whatever_their_periods(a, b):
    assert members(a & b) == members(a) & members(b)
    assert bool(a & b) == bool(members(a) & members(b))


@given(boxes(), st.integers(1, 4))
def test_a_box_over_a_longer_period_is_the_same_box(box, times):
    longer = box.over(box.period * times)
    assert members(longer) == members(box)
    assert longer.num_cells() == times * box.num_cells()


def test_a_box_of_no_axes_is_one_cell_and_true():
    assert Box(()).num_cells() == 1
    assert Box(())


def test_a_box_shows_its_turns_but_not_a_token_axis_that_it_holds_whole():
    turns = Box((("head", (Span(0, 2),)), ("token", (Span(1, 2),))), period=4)
    assert str(turns) == "head [0, 2) × token [1, 2) of 4"
    assert str(Box((("token", EVERY),), period=2)) == "token [0, 1) of 2"
    assert str(Box((("token", EVERY),))) == "everything"


def test_every_cell_is_one_part_of_any_period():
    assert Box((("token", EVERY),)).over(1 << 20).axes == (("token", (Span(0, 1 << 20),)),)
