"""The overlap question, decided without listing bytes, against listing them."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core import overlap
from kvferry.core.overlap import Comb, Tangled, meet, meet_apart, overlaps

STRIDES = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 30]
steps = st.tuples(st.integers(1, 4), st.sampled_from(STRIDES))
combs = st.builds(Comb.of, st.integers(0, 40), st.lists(steps, max_size=3), width=st.integers(1, 4))
PAGE = 24


def cells(comb):
    for multiples in product(*(range(count) for _, count in comb.steps)):
        yield comb.base + sum(k * stride for k, (stride, _) in zip(multiples, comb.steps, strict=True))


def bytes_of(comb):
    return {start + i for start in cells(comb) for i in range(comb.width)}


@given(combs)
def test_a_comb_folds_if_and_only_if_two_cells_share_a_byte(comb):
    assert comb.folds() == (len(bytes_of(comb)) < comb.width * len(list(cells(comb))))


@given(combs)
def test_a_comb_stops_after_its_last_byte(comb):
    assert comb.stop == max(bytes_of(comb)) + 1


@given(combs, combs)
def test_combs_meet_if_and_only_if_they_share_a_byte(a, b):
    assert meet(a, b) == meet(b, a) == bool(bytes_of(a) & bytes_of(b))


pages = st.builds(
    lambda base, inner, count, width: Comb.of(base, [*inner, (count, PAGE)], width),
    st.integers(0, 2 * PAGE),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 8, 12])), max_size=2),
    st.integers(2, 4),
    st.integers(1, 3),
)


@given(st.lists(st.one_of(pages, combs), min_size=2, max_size=5))
def test_overlaps_lists_exactly_the_pairs_that_share_a_byte(several):
    found = list(overlaps(several))
    shared = [
        (i, j) for i, j in combinations(range(len(several)), 2) if bytes_of(several[i]) & bytes_of(several[j])
    ]
    assert sorted(found) == shared


blocks = st.tuples(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 8, 12, 30])), max_size=2),
    st.integers(2, 4),
    st.integers(1, 3),
)


@given(blocks, blocks)
def test_apart_asks_about_two_unequal_blocks_only(a, b):
    def one(block, i=0):
        base, inner, _, width = block
        return Comb.of(base + i * PAGE, inner, width)

    shared = any(
        bytes_of(one(a, i)) & bytes_of(one(b, j)) for i in range(a[2]) for j in range(b[2]) if i != j
    )
    assert meet_apart(one(a), one(b), PAGE, a[2], b[2]) == shared


def test_the_size_of_the_pool_costs_nothing(monkeypatch):
    monkeypatch.setattr(overlap, "MAX_WORK", 100)
    k = Comb.of(0, [(1 << 40, 4096), (16, 128)], width=64)
    v = Comb.of(64, [(1 << 40, 4096), (16, 128)], width=64)
    assert not meet(k, v)
    assert not k.folds()


def test_what_is_too_tangled_is_said_to_be_so_not_guessed(monkeypatch):
    monkeypatch.setattr(overlap, "MAX_WORK", 10)
    primes = [(50, 1009), (50, 1013), (50, 1019), (50, 1021)]
    with pytest.raises(Tangled):
        Comb.of(0, primes, width=1).folds()


def test_a_page_that_reaches_into_the_next_one_is_not_laid_over_it():
    straddling = Comb.of(20, [(3, PAGE)], width=8)
    assert list(overlaps([straddling, Comb.of(0, [(3, PAGE)], width=4)])) == [(0, 1)]
    assert list(overlaps([straddling, Comb.of(4, [(3, PAGE)], width=16)])) == []
