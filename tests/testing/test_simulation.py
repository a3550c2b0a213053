"""The simulation of the whole runtime: it finds nothing as it is, and every bug that is planted."""

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.support.simulation import EVERY_TROUBLE, Law, Trouble, run, smaller
from tests.support.simulation.__main__ import main
from tests.support.simulation.world import SimulatedWorld
from tests.testing.planted_bugs import BUGS

NUM_SEEDS = int(os.environ.get("KVFERRY_SIMULATED_RUNS", "25"))
"""`make simulate` runs many more."""
MAX_SEEDS = 200
"""After so many seeds a planted bug counts as not found."""


def test_every_law_holds_whatever_goes_wrong():
    num_good, num_failed, num_early, seen = 0, 0, 0, Counter[Trouble]()
    for seed in range(NUM_SEEDS):
        found = run(seed, num_requests=25)
        assert found.is_good, found.story()
        num_good += found.num_good
        num_failed += found.num_failed
        num_early += found.num_early
        seen.update(found.troubles)
    assert num_good > 10 * NUM_SEEDS, "a world in which nothing succeeds shows nothing"
    assert num_failed > 2 * NUM_SEEDS, "nor does one in which nothing fails"
    assert num_early > NUM_SEEDS, "nor one in which nobody reads while others compute"
    assert set(seen) == EVERY_TROUBLE


def test_without_troubles_everything_is_loaded():
    for seed in range(3):
        found = run(seed, num_requests=15, troubles=())
        assert (found.is_good, found.num_failed) == (True, 0), found.story()
        assert found.num_good >= 10  # a source may have had no room for some
        assert found.num_cells > 0


def test_a_clock_that_stood_still_wakes_its_processes():
    """One that was stopped before, and went on while its clock stood still, waited for ever."""
    world = SimulatedWorld(0, num_requests=0, troubles=frozenset())
    source = world.sources[0]
    world.timeline.run_until(2.0)
    request = source.prefill(num_tokens=8)
    assert request is not None
    source.authority.stop()
    source.host.clock.run_at(0.0)
    source.authority.resume()
    world.timeline.run_until(3.0)
    world._resume(source.host)
    world.timeline.run_until(20.0)
    assert request.releases == ["expired"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug, monkeypatch, record_property):
    with monkeypatch.context() as patch:
        bug.plant(patch)
        for seed in range(MAX_SEEDS):
            found = run(seed, 50, bug.troubles)
            if bug.laws & {violation.law for violation in found.violations}:
                break
        else:
            pytest.fail(f"{bug.name} was not found in {MAX_SEEDS} seeds")
    record_property("seeds", seed + 1)
    print(f"{bug.name:28} {seed + 1:4} seeds   {found.violations[0]}")
    assert run(seed, 50, bug.troubles).is_good, "found without the bug"


def digest(seed: int, hash_seed: str) -> str:
    script = f"from tests.support.simulation import run; print(run({seed}, 15).trace.digest())"
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    return done.stdout


def test_the_same_seed_is_the_same_run():
    """Also in another process, where sets have another order."""
    assert digest(4, "1") == digest(4, "2") != digest(5, "1")


@pytest.fixture
def bug(monkeypatch):
    next(bug for bug in BUGS if bug.name == "wrong request in a release").plant(monkeypatch)


@pytest.mark.usefixtures("bug")
def test_a_failing_run_tells_what_led_to_it_and_how_to_see_it_again(capsys):
    broken = (found for found in (run(seed, 40) for seed in range(20)) if not found.is_good)
    pairs = ((found, smaller(found)) for found in broken)
    # A few need all their requests.
    found, small = next(pair for pair in pairs if pair[1].num_requests < pair[0].num_requests)
    assert found.violations[0].law in {violation.law for violation in small.violations}
    assert small.troubles <= found.troubles
    story = small.story()
    assert "releases request-" in story or "releases prefill-" in story
    assert story.splitlines()[-1] == small.command()
    arguments = small.command().split("simulation ")[1].split()
    assert main(arguments) == 1
    assert str(small.violations[0]) in capsys.readouterr().out


@pytest.mark.usefixtures("bug")
def test_many_runs_name_the_seeds_that_broke_a_law(capsys):
    assert main(["--runs", "3", "--requests", "40", "--processes", "1"]) == 1
    assert "seeds that broke a law: " in capsys.readouterr().out


def test_many_runs_say_what_they_saw(capsys):
    assert main(["--runs", "2", "--requests", "5", "--processes", "2", "--first", "7"]) == 0
    assert "2 runs of 5 requests" in capsys.readouterr().out


def test_every_law_has_a_bug_that_breaks_it():
    """A check that was never seen to fire is not a check."""
    narrow = [bug.laws for bug in BUGS if bug.laws != frozenset(Law)]
    assert frozenset[Law]().union(*narrow) == set(Law)
