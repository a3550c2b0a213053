"""The overlap question, decided without listing bytes, against listing them."""

from dataclasses import replace
from itertools import combinations, product
from math import gcd

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvferry.core import overlap
from kvferry.core.overlap import Blocks, Comb, Tangled, meet, meet_apart, overlaps, overlaps_apart

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


def test_pages_that_fill_their_pool_are_compared_by_the_page():
    """As a cache is laid out: else each block would be compared with each, which is right, and slow."""
    pages = [(i, Comb(32 * i, ((64, 1000),), 32)) for i in range(2)]
    assert overlap._folded(pages) == [(0, Comb(0, (), 32)), (1, Comb(32, (), 32))]


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


def is_fair(pairs, num_items, clash):
    """Each named once, with one that it clashes with; and the rest lies apart."""
    named = [j for _, j in pairs]
    rest = [i for i in range(num_items) if i not in named]
    return (
        len(set(named)) == len(named)
        and all(clash(i, j) and i in rest for i, j in pairs)
        and not any(clash(i, j) for i, j in combinations(rest, 2))
    )


@given(st.lists(st.one_of(pages, combs), min_size=2, max_size=6), st.data())
def test_what_overlaps_is_named_once_and_the_rest_lies_apart(several, data):
    sets = [bytes_of(comb) for comb in several]
    found = list(overlaps(several))
    assert is_fair(found, len(several), lambda i, j: bool(sets[i] & sets[j]))
    owners = data.draw(st.lists(st.sampled_from("ab"), min_size=len(several), max_size=len(several)))
    found = list(overlaps(several, owners))
    assert is_fair(found, len(several), lambda i, j: owners[i] != owners[j] and bool(sets[i] & sets[j]))


blocks = st.builds(
    lambda base, inner, width, stride, num_blocks: Blocks(Comb.of(base, inner, width), stride, num_blocks),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 8, 12, 30])), max_size=2),
    st.integers(1, 3),
    st.sampled_from([PAGE, PAGE, 12, 20, 25, 36, 48, 72]),
    st.integers(1, 5),
)


def share_two_blocks(a, b):
    """By listing every byte of every block."""

    def block(view, i):
        return bytes_of(replace(view.first, base=view.first.base + i * view.stride))

    ids = product(range(a.num_blocks), range(b.num_blocks))
    return any(block(a, i) & block(b, j) for i, j in ids if i != j)


@settings(max_examples=500)
@given(blocks, blocks)
def test_apart_asks_about_two_unequal_blocks_only_whatever_the_strides(a, b):
    assert meet_apart(a, b) == meet_apart(b, a) == share_two_blocks(a, b)


@given(st.lists(blocks, min_size=2, max_size=5), st.data())
def test_views_of_one_pool_are_named_once_and_the_rest_shares_no_two_blocks(views, data):
    owners = data.draw(st.lists(st.sampled_from("ab"), min_size=len(views), max_size=len(views)))
    found = list(overlaps_apart(views, owners))
    assert is_fair(
        found, len(views), lambda i, j: owners[i] != owners[j] and share_two_blocks(views[i], views[j])
    )


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-40, 40), st.integers(1, 6), st.integers(1, 6))
def test_a_distance_occurs_if_and_only_if_two_unequal_blocks_have_it(p, q, shift, num_i, num_j):
    assume(gcd(p, q) == 1)
    pairs = ((i, j) for i in range(num_i) for j in range(num_j) if i != j)
    assert overlap._occurs(p, q, shift, num_i, num_j) == any(j * q - i * p == shift for i, j in pairs)


def test_unequal_strides_are_decided_in_pools_of_any_size(monkeypatch):
    """Every second page of one, every fourth of the other: decided from distances, not block by block."""
    monkeypatch.setattr(overlap, "MAX_WORK", 100)
    a = Blocks(Comb.of(0, [(16, 256)], width=256), 8192, 1 << 40)
    free = Blocks(Comb.of(4096, [(16, 256)], width=256), 16384, 1 << 39)
    late = Blocks(Comb.of(8191, [(16, 256)], width=256), 16384, 1 << 39)
    assert not meet_apart(a, free)
    assert meet_apart(a, late)
    whole = [
        Comb.of(view.base, [(view.num_blocks, view.stride), (16, 256)], width=256) for view in (a, free, late)
    ]
    assert (meet(whole[0], whole[1]), meet(whole[0], whole[2])) == (False, True)


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
    assert list(overlaps([straddling, Comb.of(0, [(3, PAGE)], width=4)])) == [(1, 0)]
    assert list(overlaps([straddling, Comb.of(4, [(3, PAGE)], width=16)])) == []
