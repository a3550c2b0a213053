"""The checker: what it finds by itself, and what it leaves in peace.

That it finds no fault in what is right is shown wherever something is selected: by the sweep, the corpus and
``make law``.
"""

from dataclasses import replace

import numpy as np
import pytest

from kvferry import Group, Product, RequestError, Slack, Span, SpecError, lower, plan, prove, select
from kvferry.core.addresses import MAX_INDEX, BlockPlaces
from kvferry.core.check import Checker
from kvferry.core.prove import Proof
from kvferry.core.request import HOLE, BlockTable, Request
from kvferry.core.state import Addressing
from kvferry.errors import Refused
from tests.core.byte_mutants import MUTANTS, make_cases, outcome

A_FEW = MUTANTS[::6]


@pytest.fixture(scope="module")
def cases():
    return make_cases()


@pytest.mark.parametrize("mutant", A_FEW, ids=lambda mutant: mutant.name[:60])
def test_a_mutant_moves_no_wrong_byte(cases, mutant):
    result = outcome(mutant, cases)
    assert result.missed == 0
    assert result.wrong + result.crashed > 0, "this mutant changes nothing: choose another one"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name[:60])
def test_every_mutant_moves_no_wrong_byte(cases, mutant):
    test_a_mutant_moves_no_wrong_byte(cases, mutant)


def test_a_plan_of_nothing_is_not_proved(engine):
    """What is needed is what the rank holds, not what the plan says."""
    good = plan(engine(), engine(), 0)
    with pytest.raises(Refused, match="gap: k: the plan leaves it out"):
        prove(replace(good, states=(), pieces=()))


def test_a_proof_cannot_be_made_by_hand(engine):
    good = plan(engine(), engine(), 0)
    with pytest.raises(SpecError, match=r"only prove\(plan\)"):
        Proof(good, ("k",))
    with pytest.raises((TypeError, ValueError, SpecError)):
        replace(prove(good), plan=replace(good, pieces=()))


def test_the_checker_misses_a_lane(engine):
    with pytest.raises(Refused, match="gap: lane full -> full"):
        Checker(engine(), engine(), 0).check_lanes([])


def request(need: Span, kept: tuple[Span, ...] = ()) -> Request:
    tables = {"full": BlockTable.of([1])}
    return Request(tables, {"full": BlockTable.of([2])}, {"full": (need,)}, {"full": kept})


@pytest.mark.parametrize("slack", list(Slack))
def test_a_ring_does_not_overwrite_a_kept_token(engine, slack):
    """Token 5 sits where token 1 would go."""
    ring = engine(group=Group("full", 4, 4, Addressing.RING))
    route = lower(prove(plan(engine(group=Group("full", 4, 8)), ring, 0)))
    with pytest.raises(RequestError, match="kept"):
        select(route, request(Span(0, 2), (Span(5, 6),)), slack=slack)


def test_a_term_that_writes_kept_cells_is_found(engine):
    """As if ``select`` had forgotten what is kept."""
    route = lower(prove(plan(engine(), engine(), 0)))
    whole = select(route, request(Span(0, 4)))
    terms = {rank: product.terms for rank, product in whole.products.items()}
    with pytest.raises(
        RequestError, match=r"not-proved: group full: cells \[0, 2\) are kept, and are written"
    ):
        route.checker.check_selection(request(Span(2, 4), (Span(0, 2),)), terms, (), Slack.CLEAR)


def test_a_block_of_another_request_is_found(engine):
    route = lower(prove(plan(engine(), engine(), 0)))
    selected = select(route, request(Span(0, 4)))
    terms = {rank: product.terms for rank, product in selected.products.items()}
    others = replace(request(Span(0, 4)), dst={"full": BlockTable.of([3])})
    with pytest.raises(RequestError, match="a block is not in the table of the request"):
        route.checker.check_selection(others, terms, (), Slack.CLEAR)


def test_stale_cells_are_found(engine):
    route = lower(prove(plan(engine(), engine(order="head token channel"), 0)))
    selected = select(route, request(Span(0, 2)))
    terms = {rank: product.terms for rank, product in selected.products.items()}
    assert selected.blank.terms
    with pytest.raises(RequestError, match=r"cells \[2, 3\) of its blocks are neither written nor kept"):
        route.checker.check_selection(request(Span(0, 2)), terms, (), Slack.CLEAR)


def test_a_list_that_lost_a_run_is_found(engine, monkeypatch):
    route = lower(prove(plan(engine(), engine(order="head token channel"), 0)))
    product = select(route, request(Span(0, 4))).products[0]
    monkeypatch.setattr("kvferry.core.product.merged", lambda lists: next(iter(lists)).part(0, 3))
    with pytest.raises(RequestError, match="the list of runs differs from the selection"):
        _ = Product(product.terms).runs


def test_cells_of_blocks_that_a_request_does_not_own_are_not_located():
    places = BlockPlaces(Group("full", 9, 4), {"full": BlockTable.of([5, 3])}, 1, "src")
    places.check([(0, 8)])
    assert [each.tolist() for each in places.locate(np.array([1, 6]))] == [[5, 3], [1, 2]]
    with pytest.raises(RequestError, match="src-table-short"):
        places.check([(0, 9)])


@pytest.mark.parametrize("highest", [5, MAX_INDEX])
def test_only_blocks_of_the_table_have_cells(highest):
    """With a short and with a long range of block ids; a hole is no block."""
    places = BlockPlaces(Group("full", highest + 1, 4), {"full": BlockTable.of([highest, HOLE, 3])}, 1, "dst")
    assert places.cells_at(np.array([3, highest]), 1, [(0, 12)]).tolist() == [9, 1]
    for wrong in (HOLE, -7, 0, 4, highest + 1, 1 << 40):
        with pytest.raises(RequestError, match="a block is not in the table of the request"):
            places.cells_at(np.array([3, wrong]), 1, [(0, 12)])
