import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Span, SpecError
from kvferry.core.span import normal
from kvferry.layout.pages import Sharding, held, stages, turn

sizes = st.integers(1, 64)


@given(sizes, st.integers(1, 16))
def test_spread_covers_the_axis_and_leaves_no_rank_empty(size, num_ranks):
    parts = [held(Sharding.SPREAD, size, rank, num_ranks) for rank in range(num_ranks)]
    assert all(len(part) for part in parts)
    assert normal(parts) == (Span(0, size),)


@given(sizes, st.integers(1, 16))
# R002-5
def test_even_gives_equal_parts_or_refuses(size, num_ranks):
    if size % num_ranks:
        with pytest.raises(SpecError, match=f"an axis of {size} cannot be split over {num_ranks} ranks"):
            held(Sharding.EVEN, size, 0, num_ranks)
    else:
        parts = [held(Sharding.EVEN, size, rank, num_ranks) for rank in range(num_ranks)]
        assert {len(part) for part in parts} == {size // num_ranks}
        assert normal(parts) == (Span(0, size),)


def test_more_ranks_than_heads_replicate_each_head_equally():
    assert [held(Sharding.SPREAD, 2, rank, 6).start for rank in range(6)] == [0, 0, 0, 1, 1, 1]


def test_whole_is_the_whole_axis_on_every_rank():
    assert {held(Sharding.WHOLE, 7, rank, 3) for rank in range(3)} == {Span(0, 7)}


@given(st.integers(1, 100), st.integers(1, 12))
def test_stages_are_consecutive_and_as_equal_as_can_be(num_layers, num_stages):
    if num_stages > num_layers:
        with pytest.raises(SpecError, match=f"{num_layers} layers"):
            stages(num_layers, num_stages)
        return
    parts = stages(num_layers, num_stages)
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("given_sizes", [[2, 2], [5, 0], [], [7, -2]])
def test_stage_sizes_that_do_not_add_up_are_refused(given_sizes):
    with pytest.raises(SpecError, match="do not add up to 5"):
        stages(5, given_sizes)


def test_turns_share_no_token_and_miss_none():
    assert [turn(rank, 4).held for rank in range(4)] == [Span(rank, rank + 1) for rank in range(4)]
    assert turn(0, 1).held is None
