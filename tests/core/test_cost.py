"""What moving costs, by the numbers that were measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Product, Runs, SpecError, Term
from kvferry.cli.link_profile import NO_TRAFFIC, Cost, CostTerm, Traffic


def product(num_bytes, at=0, num_pairs=4):
    steps = np.arange(num_pairs) * 4096
    return Product(
        (Term(Runs(np.array([at]), np.array([0]), np.array([num_bytes])), np.stack([steps, steps])),)
    )


def test_traffic_of_products_needs_no_list():
    some = [product(512), product(64), Product(())]
    assert Traffic.of(some) == Traffic(num_reads=2, num_runs=8, num_bytes=4 * 576, num_words=4 * 36)
    assert all("runs" not in vars(each) for each in some)
    assert Traffic.of(some, num_runs=3).num_runs == 3


@pytest.mark.parametrize(("num_bytes", "at", "num_words"), [(1000, 0, 125), (96, 4, 24), (33, 16, 33)])
def test_words_are_as_wide_as_the_addresses_allow(num_bytes, at, num_words):
    assert Traffic.of([product(num_bytes, at)]).num_words == 4 * num_words


def test_merged_neighbours_are_counted_in_words_too():
    runs = Runs(np.array([0]), np.array([0]), np.array([64]))
    steps = np.array([0, 64, 128, 640, 704])
    term = Term(runs, np.stack([steps, steps]), block_bytes=64)
    assert Traffic.of([Product((term,))]) == Traffic(1, 2, 5 * 64, 5 * 4)


def test_traffic_adds_up():
    assert Traffic(1, 2, 64) + Traffic(2, 3, 16) == Traffic(3, 5, 80, 5)
    assert sum([Traffic(1, 2, 64)], NO_TRAFFIC) == Traffic(1, 2, 64)
    assert NO_TRAFFIC.average_run_bytes == 0


@pytest.mark.parametrize("bad", [(-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_less_than_nothing_is_refused(bad):
    with pytest.raises(SpecError, match="must be at least 0"):
        Traffic(*bad)


@pytest.mark.parametrize(
    "bad", [(-1, 0, 1), (0, -1, 1), (0, float("inf"), 1), (0, 0, 0), (0, float("nan"), 1)]
)
def test_a_cost_that_is_none_is_refused(bad):
    with pytest.raises(SpecError, match="costs must be finite"):
        Cost(*bad)


def test_an_estimate_says_what_takes_most_of_the_time():
    cost = Cost(1e-3, 1e-5, 1e9)
    few = cost.of(Traffic(2, 1, 1000))
    assert few.mostly is CostTerm.READS
    many = cost.of(Traffic(1, 32768, 32768 * 512))
    assert (many.mostly, round(many.share, 2)) == (CostTerm.RUNS, 0.95)
    assert many.seconds == pytest.approx(0.3455, rel=1e-3)
    assert cost.of(Traffic(1, 4, 10**9)).mostly is CostTerm.BYTES
    nothing = cost.of(NO_TRAFFIC)
    assert (nothing.seconds, nothing.share) == (0, 0)


def test_narrow_words_cost_more_where_words_are_moved():
    traffic = Traffic(1, 1, 1600, num_words=200)
    assert Cost(0, 0, 1e9).of(traffic).seconds == pytest.approx(1600e-9)
    assert Cost(0, 0, 1e9, is_by_words=True).of(traffic).seconds == pytest.approx(3200e-9)


costs = st.builds(Cost, st.floats(0, 1e-3), st.floats(0, 1e-4), st.floats(1e8, 1e13))
traffics = st.builds(Traffic, st.integers(0, 100), st.integers(0, 10**7), st.integers(0, 10**12))


@given(costs, traffics, traffics)
def test_more_traffic_never_takes_less_time(cost, some, more):
    assert cost.of(some + more).seconds >= cost.of(some).seconds
