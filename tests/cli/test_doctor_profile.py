"""Profiles that a doctor saves: `kvferry plan` takes them."""

import json
from dataclasses import replace

import pytest

from kvferry.cli.doctor.examine import Observed
from kvferry.cli.doctor.observe import HostLimits, SecretSeen, Software
from kvferry.cli.doctor.report import busy_words, profile_document
from kvferry.cli.link_profile import Cost, Traffic, measured_links
from kvferry.cli.machine import Gpus
from kvferry.cli.reads import SIZES, ReadsSeen, TimedRead
from kvferry.core.choices import Way

MACHINE = {"processor": "abacus", "num_cores": 3, "device": ""}
VERSIONS = {"kvferry": "0.1", "nixl": "1.5.1", "torch": "2.13"}
COSTS = {
    Way.DIRECT: Cost(5e-4, 3e-6, 4e9),
    Way.PACKED: Cost(1e-3, 4e-7, 2e9),
    Way.MAPPED: Cost(1e-4, 1e-9, 9e11),
}


def reads(way, memory="host"):
    """What a machine with these very costs would have measured."""
    times = tuple(
        TimedRead(size.num_runs, size.total_bytes // size.num_runs, (COSTS[way].of(traffic).seconds,))
        for size in SIZES
        for traffic in [Traffic(1, size.num_runs, size.total_bytes)]
    )
    return ReadsSeen(memory, way, "", times, 9e9)


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


def test_reads_that_failed_are_not_saved():
    failed = [ReadsSeen("host", error="it is dead"), replace(reads(Way.DIRECT), wrong="1 of 8 cells")]
    assert profile_document(observed(*failed)) == {}


def test_a_machine_that_was_busy_is_named():
    def said(load):
        return busy_words(observed(machine={**MACHINE, "load": load}))

    assert (said(0.2), said(2.5)) == ("", "the load average was 2.5 on 3 cores")
