import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Axis, AxisMap, Digit, Span, SpecError, View
from kvferry.core.state import MAX_AXIS
from kvferry.core.view import NOT_HELD
from kvferry.testing.oracle import byte_offset


@st.composite
def digits(draw):
    size = draw(st.integers(1, 4))
    held = None
    if draw(st.booleans()):
        start = draw(st.integers(0, size - 1))
        held = Span(start, draw(st.integers(start + 1, size)))
    return Digit(size, draw(st.integers(0, 50)), held)


axis_maps = st.builds(AxisMap, st.lists(digits(), max_size=4).map(tuple), st.integers(0, 9))


@given(axis_maps)
def test_offsets_are_those_of_reading_the_coordinate_digit_by_digit(axis):
    slow = [byte_offset(axis, axis.start + i) for i in range(axis.size)]
    assert axis.offsets().tolist() == [NOT_HELD if at is None else at for at in slow]


@given(axis_maps)
def test_spans_are_the_coordinates_that_have_an_offset(axis):
    held = [axis.start + i for i, at in enumerate(axis.offsets().tolist()) if at != NOT_HELD]
    assert [i for span in axis.spans() for i in range(span.start, span.stop)] == held


@given(axis_maps)
def test_the_held_coordinates_repeat_after_the_period(axis):
    held = (axis.offsets() != NOT_HELD).tolist()
    assert axis.size % axis.period == 0
    assert held == held[: axis.period] * (axis.size // axis.period)


def test_a_view_of_an_array_is_where_the_array_says():
    """Whatever was done to the array: sliced, permuted, K and V as halves of a block."""
    pool = np.arange(5 * 2 * 3 * 4 * 8, dtype=np.int64).reshape(5, 2, 3, 4, 8)
    base = pool.ctypes.data
    for array, axes in (
        (pool[:, 1], "block head token channel"),
        (pool[:, 0].transpose(0, 2, 1, 3), "block token head channel"),
        (pool[2:, 1].transpose(1, 0, 3, 2), "head block channel token"),
    ):
        offset = array.ctypes.data - base
        view = View.of_strides(
            "k", "g", "r", axes, array.shape, array.strides, offset=offset, start={"head": 6}
        )
        for at in np.ndindex(array.shape):
            place = dict(zip(axes.split(), at, strict=True))
            inside = sum(
                byte_offset(axis, axis.start + place[name]) or 0 for name, axis in dict(view.axes).items()
            )
            byte = view.offset + place["block"] * view.block_stride + inside
            assert pool.ravel()[byte // 8] == array[at]
        assert view.axis("head").start == 6


@pytest.mark.parametrize(
    ("axes", "start", "said"),
    [
        ("block token", {}, "name each axis once"),
        ("layer token head", {}, "one of them 'block'"),
        ("block block head", {}, "one of them 'block'"),
        ("block head head", {}, "name each axis once"),
        ("block token head", {"channel": 1}, r"start must name axes of the array .*\['channel'\]"),
        ("block token head", {"token": 1}, r"start must name axes of the array .*\['token'\]"),
    ],
)
def test_axes_that_are_not_the_arrays_are_refused(axes, start, said):
    array = np.zeros((2, 3, 4))
    with pytest.raises(SpecError, match=said):
        View.of_strides("k", "g", "r", axes, array.shape, array.strides, start=start)


def test_offsets_are_shared_and_so_cannot_be_written():
    offsets = AxisMap((Digit(4, 2),)).offsets()
    with pytest.raises(ValueError, match="read-only"):
        offsets[0] = 7


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Digit(0, 1), "digit: size"),
        (lambda: Digit(4, -1), "digit: stride"),
        (lambda: Digit(4, 1, Span(2, 2)), r"holds \[2, 2\) of 4"),
        (lambda: Digit(4, 1, Span(2, 5)), r"holds \[2, 5\) of 4"),
        (lambda: AxisMap((Digit(MAX_AXIS, 1), Digit(2, 1))), "coordinates"),
        (lambda: AxisMap((), start=-1), "start"),
        (lambda: View.of("k", "g", "r", block_stride=0, axes={}), "view of k: block_stride"),
        (lambda: View.of("k", "g", "r", block_stride=1, offset=-1, axes={}), "view of k: offset"),
    ],
)
def test_nonsense_is_a_spec_error_that_names_the_field(make, said):
    with pytest.raises(SpecError, match=said):
        make()


def test_the_box_of_a_view_states_the_turns_of_its_rank_not_of_its_block():
    token = AxisMap((Digit(4, 8), Digit(2, 0, Span(1, 2)), Digit(2, 4)))
    box = View.of("k", "g", "r", block_stride=32, axes={"token": token}).box()
    assert (box.axes, box.period) == ((("token", (Span(2, 4),)),), 4)


def test_axes_are_sorted_by_name_in_whatever_order_they_are_given():
    one = AxisMap((Digit(1, 1),))
    a = View.of("k", "g", "r", block_stride=1, axes={"b": one, "a": one})
    assert a == View.of("k", "g", "r", block_stride=1, axes={"a": one, "b": one})


def test_an_axis_has_none_of_the_names_that_mean_something_else():
    """By ``byte`` a digest tells the words of a long item apart: an axis of that name would undo it."""
    for name in ("", "token", "byte"):
        with pytest.raises(SpecError, match="an axis needs a name other than 'token' and 'byte'"):
            Axis(name, 4)
