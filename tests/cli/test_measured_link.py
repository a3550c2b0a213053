"""Links of one's own machine, from what the doctor has written."""

import json

import pytest

from kvferry.cli.link_profile import Cost, Origin, Traffic, measured_links
from kvferry.core.choices import Way
from kvferry.errors import SpecError

TRUTH = {("host-cma", "direct"): Cost(1e-3, 5e-6, 2e9), ("cuda:0", "mapped"): Cost(2e-4, 1e-9, 1e12)}
PLAN = ("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3")


def report(sizes=((256, 64), (256, 16384), (65536, 64), (65536, 1024))):
    """What a machine with these very costs would have measured."""
    times = [
        {
            "medium": medium,
            "way": way,
            "num_runs": num_runs,
            "total_bytes": num_runs * run_bytes,
            "median_s": cost.of(Traffic(1, num_runs, num_runs * run_bytes)).seconds,
        }
        for (medium, way), cost in TRUTH.items()
        for run_bytes, num_runs in sizes
    ]
    return {"machine": {"processor": "abacus", "num_cores": 3}, "times": times}


@pytest.fixture
def written(tmp_path):
    def write(document):
        path = tmp_path / "mine.json"
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


def test_a_machine_is_told_by_what_was_measured_on_it(written):
    profiles = measured_links(written(report()))
    assert [(each.name, each.way) for each in profiles] == [
        ("mine/host-cma", Way.DIRECT),
        ("mine/cuda:0", Way.MAPPED),
    ]
    for profile, truth in zip(profiles, TRUTH.values(), strict=True):
        for traffic in (Traffic(1, 100, 10**5), Traffic(1, 10**4, 10**7), Traffic(1, 10, 10**8)):
            assert profile.cost.of(traffic).seconds == pytest.approx(truth.of(traffic).seconds, rel=0.1)
        assert profile.origin is Origin.MEASURED
        assert profile.source.startswith("abacus, 3 cores: predicts 4 of 4 sizes within 30 %, median error ")


def test_plan_takes_such_a_file_for_a_link(cli, written):
    path = written(report())
    links = cli(*PLAN, "--link", path, "--link", "400Gb", "--json").answer["links"]
    assert [link["link"] for link in links] == ["mine/host-cma", "mine/cuda:0", "400Gb"]
    assert links[0]["seconds"] > links[1]["seconds"] > 0


BROKEN = {
    "no JSON": "{",
    "a list": [],
    "no times": {"machine": {"processor": "", "num_cores": 1}},
    "no machine": {"times": []},
    "a time that is none": report() | {"times": [report()["times"][0] | {"median_s": 0.0}]},
    "an unknown way": report() | {"times": [report()["times"][0] | {"way": "pigeon"}]},
    "text for times": report() | {"times": "many"},
}


@pytest.mark.parametrize("document", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_such_file_is_refused(written, document):
    with pytest.raises(SpecError, match=r"mine.json: not a result of `kvferry doctor --save`"):
        measured_links(written(document))


def test_too_few_sizes_are_refused(written, cli):
    path = written(report(sizes=((256, 64), (65536, 64))))
    ran = cli(*PLAN, "--link", path)
    assert (ran.code, ran.out) == (2, "")
    assert "no transfer mode was measured with at least 3 sizes" in ran.err


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"away.json: No such file"):
        measured_links(tmp_path / "away.json")
