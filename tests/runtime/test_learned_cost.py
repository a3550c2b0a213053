"""What loads teach about the cost of moving."""

import numpy as np
import pytest

from kvferry import SpecError
from kvferry.core.cost import Cost, Traffic
from kvferry.core.link_profile import HOST_CMA, TCP_STREAM
from kvferry.core.way import Way
from kvferry.runtime.learned_cost import LEAST, MOST, NUM_HELD_UP, LearnedCost
from kvferry.runtime.load_costs import LoadCosts
from kvferry.runtime.values import Peer

GUESS = Cost(3e-4, 2e-6, 6e9)
TRUTHS = {
    "as guessed": GUESS,
    "a slower host": Cost(8e-4, 6e-6, 3e9),
    "a fast network": Cost(5e-5, 1e-6, 4.5e10),
    "a slow network": Cost(1e-3, 2e-5, 1e9),
}
PEER, OTHER = Peer("prefill", 7, "src"), Peer("prefill", 8, "src")
LOAD = {Way.DIRECT: Traffic(1, 1000, 10**7)}


def loads(count, seed=0):
    """Loads of many sizes, over four decades."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        num_runs = int(10 ** rng.uniform(0, 4))
        yield Traffic(1, num_runs, num_runs * int(10 ** rng.uniform(2.5, 5)))


@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS.keys())
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_twenty_loads_teach_the_cost(truth, noise):
    """Within 30 %, whatever the first guess was."""
    learned, rng = LearnedCost(GUESS), np.random.default_rng(1)
    for traffic in loads(20):
        learned.learn(traffic, truth.of(traffic).seconds * float(np.exp(noise * rng.standard_normal())))
    off = [learned.predict(traffic).seconds / truth.of(traffic).seconds - 1 for traffic in loads(100, seed=2)]
    assert np.percentile(np.abs(off), 95) < 0.3


def test_one_load_corrects_what_it_is_made_of_and_leaves_the_rest():
    learned = LearnedCost(GUESS)
    learned.learn(Traffic(1, 1, 6 * 10**9), 3.0)
    assert learned.cost.bytes_per_second == pytest.approx(2e9, rel=0.2)
    assert learned.cost.seconds_per_run == pytest.approx(GUESS.seconds_per_run, rel=0.01)
    assert learned.num_loads == 1
    assert learned.usual_error == pytest.approx(2.0, rel=0.01)


def test_a_guess_that_is_wrong_by_far_is_outgrown():
    """A network of 1 Gb/s that was taken for this host."""
    learned, truth = LearnedCost(GUESS), Cost(1e-2, 1e-4, 1.1e8)
    for traffic in loads(100):
        learned.learn(traffic, truth.of(traffic).seconds)
    off = [learned.predict(traffic).seconds / truth.of(traffic).seconds - 1 for traffic in loads(100, seed=2)]
    assert np.percentile(np.abs(off), 95) < 0.3


def test_one_small_load_sets_right_what_stalled_loads_said_of_small_ones():
    """Large loads say little of what starting one costs, and noise in them may be taken for it."""
    learned, small = LearnedCost(GUESS), Traffic(1, 16, 16 * 2304)
    sizes = (11_520, 1184, 18_592, 912, 33_888, 5200, 2000)  # a real run, on a busy machine
    for num_runs, times in zip(sizes, (7.5, 2.5, 1.1, 0.6, 0.9, 0.9, 0.9), strict=True):
        traffic = Traffic(1, num_runs, num_runs * 4096)
        learned.learn(traffic, times * GUESS.of(traffic).seconds)
    learned.learn(small, GUESS.of(small).seconds)
    assert learned.predict(small).seconds == pytest.approx(GUESS.of(small).seconds, rel=0.3)


def test_a_link_that_changes_is_learned_anew():
    learned = LearnedCost(GUESS, memory=10)
    slower = Cost(GUESS.seconds_per_read, GUESS.seconds_per_run, GUESS.bytes_per_second / 5)
    for cost in (GUESS, slower):
        for traffic in loads(60):
            learned.learn(traffic, cost.of(traffic).seconds)
    assert learned.cost.bytes_per_second == pytest.approx(slower.bytes_per_second, rel=0.1)


def test_a_load_that_was_held_up_hardly_counts():
    learned = LearnedCost(GUESS)
    for traffic in loads(20):
        learned.learn(traffic, GUESS.of(traffic).seconds)
    before = learned.predict(Traffic(1, 1000, 10**7)).seconds
    learned.learn(Traffic(1, 1000, 10**7), 60.0)
    assert learned.predict(Traffic(1, 1000, 10**7)).seconds == pytest.approx(before, rel=0.05)


def test_a_load_that_was_not_alone_counts_only_if_it_was_quicker():
    learned, traffic = LearnedCost(GUESS), Traffic(1, 1000, 10**7)
    expected = GUESS.of(traffic).seconds
    learned.learn(traffic, 2 * expected, is_alone=False)
    assert (learned.cost, learned.num_loads) == (GUESS, 0)
    learned.learn(traffic, expected / 2, is_alone=False)
    assert learned.predict(traffic).seconds == pytest.approx(expected / 2, rel=0.02)


def test_of_many_loads_that_were_not_alone_the_quickest_counts():
    """Else a link that is slow, and never quiet, would never be known as slow."""
    learned, traffic = LearnedCost(GUESS), Traffic(1, 1000, 10**7)
    expected = GUESS.of(traffic).seconds
    slower = [3.0, 9.0, 50.0, 4.0, 7.0] * (NUM_HELD_UP // 5)
    for times in slower[:-1]:
        learned.learn(traffic, times * expected, is_alone=False)
    assert (learned.cost, learned.num_loads) == (GUESS, 0)
    learned.learn(traffic, slower[-1] * expected, is_alone=False)
    assert learned.num_loads == 1
    assert learned.predict(traffic).seconds == pytest.approx(3 * expected, rel=0.2)


def test_what_moved_nothing_teaches_nothing():
    learned = LearnedCost(GUESS)
    learned.learn(Traffic(0, 0, 0), 1.0)
    learned.learn(Traffic(1, 1, 1), 0.0)
    assert (learned.cost, learned.num_loads) == (GUESS, 0)


def test_no_measurement_makes_a_cost_absurd():
    learned = LearnedCost(GUESS)
    for seconds in (1e-12, 1e12) * 20:
        learned.learn(Traffic(1, 100, 10**6), seconds)
        cost = learned.cost
        assert LEAST * GUESS.seconds_per_run <= cost.seconds_per_run <= MOST * GUESS.seconds_per_run
        assert GUESS.bytes_per_second / MOST <= cost.bytes_per_second <= GUESS.bytes_per_second / LEAST


def test_it_learns_from_more_than_one_load():
    with pytest.raises(SpecError, match="more than one load must count"):
        LearnedCost(GUESS, memory=1)


# -- by peer


def known_costs(*ways):
    costs = LoadCosts(is_on_device=False)
    costs.met(PEER, ways or (Way.DIRECT,))
    return costs


def test_a_new_peer_costs_what_is_usual_for_its_way():
    assert known_costs().predict(PEER, LOAD) == HOST_CMA.cost.of(LOAD[Way.DIRECT]).seconds
    costs = known_costs(Way.PACKED)
    assert costs.predict(PEER, {Way.PACKED: Traffic(1, 1, 1)}) == TCP_STREAM.cost.of(Traffic(1, 1, 1)).seconds


def test_a_peer_is_learned_for_itself_and_forgotten_whole():
    costs = known_costs()
    costs.met(OTHER, [Way.DIRECT])
    usual = costs.predict(PEER, LOAD)
    costs.begin(1, PEER, LOAD, is_waiting=False)
    costs.end(1, 3 * usual)
    assert 2 * usual < costs.predict(PEER, LOAD) <= 3 * usual  # one load is believed in part
    assert costs.predict(OTHER, LOAD) == usual
    assert costs.status()["prefill#7"]["direct"]["num_loads"] == 1
    costs.forget(PEER)
    assert list(costs.status()) == ["prefill#8"]
    costs.met(PEER, [Way.DIRECT])
    assert costs.predict(PEER, LOAD) == usual


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_loads_side_by_side_do_not_teach_that_the_link_is_slow(order):
    costs = known_costs()
    usual = costs.predict(PEER, LOAD)
    costs.begin(1, PEER, LOAD, is_waiting=False)
    costs.begin(2, PEER, LOAD, is_waiting=False)
    for handle in order:
        costs.end(handle, 5 * usual)
    assert costs.predict(PEER, LOAD) == usual


def test_a_load_that_waits_for_the_device_does_not_teach_that_the_link_is_slow():
    costs = known_costs()
    usual = costs.predict(PEER, LOAD)
    costs.begin(1, PEER, LOAD, is_waiting=True)
    costs.end(1, 5 * usual)
    assert costs.predict(PEER, LOAD) == usual
    costs.begin(2, PEER, LOAD, is_waiting=True)
    costs.end(2, usual / 2)
    assert costs.predict(PEER, LOAD) == pytest.approx(usual / 2, rel=0.02)


def test_failed_forgotten_and_unknown_loads_teach_nothing():
    costs = known_costs()
    usual = costs.predict(PEER, LOAD)
    costs.begin(1, PEER, LOAD, is_waiting=False)
    costs.end(1, None)
    costs.end(1, 9.0)
    costs.begin(2, OTHER, LOAD, is_waiting=False)
    costs.end(2, 9.0)
    assert costs.predict(PEER, LOAD) == usual


def test_two_ways_of_one_load_work_side_by_side_and_are_not_told_apart():
    costs = known_costs(Way.DIRECT, Way.PACKED)
    both = {Way.DIRECT: Traffic(1, 1, 10**6), Way.PACKED: Traffic(1, 1, 10**6)}
    assert costs.predict(PEER, both) == TCP_STREAM.cost.of(Traffic(1, 1, 10**6)).seconds
    costs.begin(1, PEER, both, is_waiting=False)
    costs.end(1, 9.0)
    assert [way["num_loads"] for way in costs.status()["prefill#7"].values()] == [0, 0]


def test_a_peer_that_is_forgotten_while_a_load_is_prepared_harms_nobody():
    costs = known_costs()
    costs.forget(PEER)
    assert costs.predict(PEER, LOAD) == 0.0
    costs.met(PEER, [Way.PACKED])
    assert costs.predict(PEER, LOAD) == 0.0


def test_a_load_of_nothing_is_told_to_take_no_time():
    costs = known_costs()
    assert costs.predict(PEER, {}) == 0.0
    costs.begin(1, PEER, {}, is_waiting=False)
    costs.end(1, 0.001)
