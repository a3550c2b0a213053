from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Span, SpecError
from kvferry.core.span import count, intersect, normal, show, subtract

some_spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: Span(pair[0], pair[0] + pair[1])),
    max_size=8,
)


def members(spans):
    return {i for span in spans for i in range(span.start, span.stop)}


def is_normal(spans):
    return all(len(s) for s in spans) and all(a.stop < b.start for a, b in pairwise(spans))


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3)])
def test_a_span_runs_forward_from_zero_or_is_refused(start, stop):
    with pytest.raises(SpecError, match=rf"\[{start}, {stop}\)"):
        Span(start, stop)


@given(some_spans)
def test_the_normal_form_is_the_same_set_written_in_one_way(spans):
    assert members(normal(spans)) == members(spans)
    assert is_normal(normal(spans))
    assert normal(reversed(spans)) == normal(spans)


@given(some_spans, some_spans)
def test_intersect_and_subtract_are_those_of_sets(a, b):
    assert members(intersect(a, b)) == members(a) & members(b)
    assert members(subtract(a, b)) == members(a) - members(b)
    assert is_normal(intersect(a, b))
    assert is_normal(subtract(a, b))


@given(some_spans)
def test_count_is_the_number_of_members_of_a_normal_form(spans):
    assert count(normal(spans)) == len(members(spans))


def test_an_empty_set_is_shown_as_nothing():
    assert show(()) == "nothing"


@pytest.mark.parametrize("stop", [1 << 63, 1 << 64, (1 << 62) + 1])
def test_a_span_beyond_every_token_is_refused(stop):
    """Python has no length for it, and sums of it would wrap around."""
    with pytest.raises(SpecError, match="a span ends at"):
        Span(0, stop)
