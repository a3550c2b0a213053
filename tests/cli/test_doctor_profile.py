"""Profiles that a doctor saves: `kvferry plan` takes them, and one that is no longer true is noticed."""

import json
from dataclasses import replace

import pytest

from kvferry.cli.doctor.probe import SIZES
from kvferry.cli.doctor.report import compared_profile, profile_document
from kvferry.cli.doctor.seen import Gpus, HostLimits, Observed, ReadsSeen, SecretSeen, Software, TimedRead
from kvferry.cli.link_profile import Cost, Traffic, measured_links
from kvferry.core.choices import Way

MACHINE = {"processor": "abacus", "num_cores": 3, "device": ""}
VERSIONS = {"kvferry": "0.1", "nixl": "1.5.1", "torch": "2.13"}
COSTS = {
    Way.DIRECT: Cost(5e-4, 3e-6, 4e9),
    Way.PACKED: Cost(1e-3, 4e-7, 2e9),
    Way.MAPPED: Cost(1e-4, 1e-9, 9e11),
}


def reads(way, memory="host", factor=1.0):
    """What a machine with these very costs would have measured."""
    times = tuple(
        TimedRead(size.num_runs, size.run_bytes, (factor * COSTS[way].of(traffic).seconds,))
        for size in SIZES
        for traffic in [Traffic(1, size.num_runs, size.num_runs * size.run_bytes)]
    )
    return ReadsSeen(memory, way, "", "somehow", times, 9e9)


def observed(*some, machine=MACHINE, versions=VERSIONS):
    return Observed(Software(versions), Gpus(), HostLimits(1 << 30), SecretSeen(), machine, reads=some)


@pytest.fixture
def saved(tmp_path):
    def save(*some):
        path = tmp_path / "here.json"
        path.write_text(json.dumps(profile_document(observed(*some))))
        return path

    return save


@pytest.mark.parametrize(
    ("way", "memory"), [(Way.DIRECT, "host"), (Way.PACKED, "host"), (Way.MAPPED, "cuda:0")]
)
def test_plan_is_told_what_was_measured(saved, way, memory):
    (link,) = measured_links(saved(reads(way, memory)))
    assert (link.name, link.way) == (f"here/{memory}", way)
    for traffic in (Traffic(1, 100, 10**5), Traffic(1, 10**4, 10**7), Traffic(1, 10, 10**8)):
        assert link.cost.of(traffic).seconds == pytest.approx(COSTS[way].of(traffic).seconds, rel=0.15)


def test_plan_takes_the_file(cli, saved):
    path = saved(reads(Way.DIRECT))
    argv = ("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3", "--link", path, "--json")
    assert [link["link"] for link in cli(*argv).answer["links"]] == ["here/host"]


def compared(path, *some, **changes):
    return compared_profile(path, observed(*some, **changes))


def test_a_profile_of_this_machine_is_true(saved):
    path = saved(reads(Way.DIRECT), reads(Way.MAPPED, "cuda:0"))
    busy = reads(Way.DIRECT, factor=2)
    assert compared(path, busy, reads(Way.MAPPED, "cuda:0")).differences == ()
    assert compared(path, versions={**VERSIONS, "torch": "2.14"}).differences == ()


STALE = {
    "another processor": (
        {"machine": {**MACHINE, "processor": "quipu"}},
        "processor was abacus, and is quipu",
    ),
    "another GPU": ({"machine": {**MACHINE, "device": "H200"}}, "device was none, and is H200"),
    "another NIXL": ({"versions": {**VERSIONS, "nixl": "1.6.0"}}, "nixl was 1.5.1, and is 1.6.0"),
    "slower": (
        {"some": [reads(Way.DIRECT, factor=5)]},
        "reads of host memory take 5 times as long as it says",
    ),
    "another way": ({"some": [reads(Way.PACKED)]}, "host memory was read direct, and is read packed"),
    "a new memory": ({"some": [reads(Way.MAPPED, "cuda:0")]}, "it has no times of cuda:0 memory"),
}


@pytest.mark.parametrize(("changes", "words"), STALE.values(), ids=STALE.keys())
def test_a_profile_that_is_no_longer_true_says_in_what(saved, changes, words):
    path, changes = saved(reads(Way.DIRECT)), {"some": [reads(Way.DIRECT)], **changes}
    some = changes.pop("some")
    assert compared(path, *some, **changes).differences == (words,)


def test_what_is_no_profile_is_said(tmp_path):
    assert "No such file" in compared(tmp_path / "away.json").error
    (tmp_path / "junk.json").write_text("{")
    assert "not a result of" in compared(tmp_path / "junk.json").error


def test_reads_that_failed_are_not_saved():
    failed = [ReadsSeen("host", error="it is dead"), replace(reads(Way.DIRECT), wrong="1 of 8 cells")]
    assert profile_document(observed(*failed)) == {}
