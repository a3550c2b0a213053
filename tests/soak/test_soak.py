"""``make soak MINUTES=10``: real processes over real NIXL, while some are killed, some stopped, some hostile.

Two yards, one over shared memory (CMA) and one over TCP. In each a source engine of two ranks, a destination
that lives throughout, and one that is killed now and then. At any time some loads are under way, some are
aborted, and a stranger forges messages to every authority. In the end: no load that counted had a wrong cell,
every load had its end, every block is back, and whoever lived has not grown.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from kvferry.cli.processes import FABRICS
from kvferry.models import Topology, describe
from kvferry.runtime import Timing
from kvferry.testing.small import small
from tests.support.fleet import (
    DestinationAccount,
    DestinationFleet,
    SourceAccount,
    SourceFleet,
    TrackedLoad,
    until,
)
from tests.support.fleet.actors import Health
from tests.support.fleet.worker import Worker

pytest.importorskip("nixl", exc_type=ImportError)

MINUTES = float(os.environ.get("KVFERRY_SOAK_MINUTES", "1"))
SEED = int(os.environ.get("KVFERRY_SOAK_SEED", "1"))
TIMING = Timing(lease=3, meet=6, read=10, retry=0.2)
ENDS_WITHIN = 45.0
"""Seconds in which every load must have its end: whatever happens to its source."""
NUM_IN_FLIGHT = 6
"""Loads of one destination at a time."""
SIZES = (1, 9, 40, 150)
KILL_EVERY, STOP_EVERY = 20.0, 3.0
"""Seconds, on the average, in each yard."""
HEAP = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1"}
YARDS = FABRICS

_ids = count(1)


@dataclass
class Ledger:
    """What happened in all."""

    happened: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    num_wrong: int = 0
    slowest: float = 0.0
    late: list[str] = field(default_factory=list)


class Berth:
    """A destination, and the loads that it has under way."""

    def __init__(self, name: str, env: dict[str, str]) -> None:
        manifest = describe(small("gqa"), Topology.parse("tp=2,block=12,blocks=300,layout=NHD"), name)
        self.fleet = DestinationFleet(manifest, timing=TIMING, env=env)
        self.fleet.wait_ready()
        self.account = DestinationAccount(self.fleet)
        self.under_way: dict[TrackedLoad, float] = {}

    def kill(self) -> None:
        for worker in self.fleet.workers():
            worker.kill()


class Yard:
    """One source, two destinations, one kind of memory between them."""

    def __init__(self, name: str, env: dict[str, str], ledger: Ledger, pick: random.Random) -> None:
        self.name, self.env, self.ledger, self.pick = name, env, ledger, pick
        self.old, self.young = Berth(f"{name}-old", env), Berth(f"{name}-young", env)
        self.port = 0
        self.source = self._new_source()
        self.stopped: dict[Worker, float] = {}
        """Until when."""

    def _new_source(self) -> SourceAccount:
        """At the address of the one before, if there was one."""
        manifest = describe(small("gqa"), Topology.parse("tp=2,block=8,blocks=1200"), f"{self.name}-prefill")
        listen = f"tcp://127.0.0.1:{self.port or '*'}"
        fleet = SourceFleet(manifest, timing=TIMING, listen=listen, env=self.env)
        fleet.wait_whole()
        self.port = int(fleet.address.rpartition(":")[2])
        return SourceAccount(fleet)

    @property
    def berths(self) -> tuple[Berth, Berth]:
        return self.old, self.young

    def step(self, now: float) -> None:
        """A little of everything."""
        self._resume(now)
        for berth in self.berths:
            self._collect(berth, now)
            if not self.stopped and len(berth.under_way) < NUM_IN_FLIGHT:
                self._load(berth, now)
        if not self._has_stopped_source():
            self.source.poll()

    def _load(self, berth: Berth, now: float) -> None:
        request_id, num_tokens = f"req-{next(_ids)}", self.pick.choice(SIZES)
        self.source.prefill(request_id, num_tokens, wait_seconds=20)
        load = berth.account.fetch(self.source.offer(request_id, num_tokens))
        berth.under_way[load] = now
        self.ledger.happened["loads"] += 1
        if self.pick.random() < 0.1:
            berth.account.abort(load)
            self.ledger.happened["aborts"] += 1

    def _collect(self, berth: Berth, now: float) -> None:
        if any(worker in self.stopped for worker in berth.fleet.workers()):
            return
        for load in berth.account.poll():
            self.ledger.slowest = max(self.ledger.slowest, now - berth.under_way.pop(load))
            self.ledger.codes.update({str(code) or "good" for code in load.codes})
            if set(load.codes) == {""}:
                self.ledger.num_wrong += berth.account.num_wrong(load)
        for load, since in berth.under_way.items():
            if now - since > ENDS_WITHIN and load.request_id not in self.ledger.late:
                self.ledger.late.append(load.request_id)

    # -- what goes wrong

    def stop_one(self, now: float) -> None:
        """A process that gets no processor for a while: shorter or longer than a lease."""
        worker = self.pick.choice([*self.source.fleet.workers(), *self.young.fleet.workers()])
        if worker not in self.stopped:
            worker.stop()
            self.stopped[worker] = now + self.pick.choice((0.05, 0.5, 1.5, 1.5 * TIMING.lease))
            self.ledger.happened["stops"] += 1

    def kill_one(self) -> None:
        """The source, with whatever it offered; or the young destination, with whatever it reads."""
        self._resume(float("inf"))
        if self.pick.random() < 0.5:
            for worker in self.source.fleet.workers():
                worker.kill()
            self.source = self._new_source()
            self.ledger.happened["sources killed"] += 1
        else:
            self.young.kill()
            self.young = Berth(f"{self.name}-young", self.env)
            self.ledger.happened["destinations killed"] += 1

    def _resume(self, now: float) -> None:
        for worker in [worker for worker, until_then in self.stopped.items() if until_then <= now]:
            del self.stopped[worker]
            if worker.is_alive:
                worker.resume()

    def _has_stopped_source(self) -> bool:
        return any(worker in self.stopped for worker in self.source.fleet.workers())

    # -- the end

    def settle(self) -> None:
        """Until nothing is left of all of it."""
        self._resume(float("inf"))

        def is_over() -> bool:
            now = time.monotonic()
            for berth in self.berths:
                self._collect(berth, now)
            return not any(berth.under_way for berth in self.berths)

        until(is_over, f"{self.name}: every load has its end", ENDS_WITHIN)
        for account in (self.old.account, self.young.account, self.source):
            until(account.is_quiet, f"{self.name}: nothing is left: {account.left()}", ENDS_WITHIN)

    def close(self) -> None:
        self._resume(float("inf"))
        for fleet in (self.old.fleet, self.young.fleet, self.source.fleet):
            fleet.close()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def yards(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Yard]]:
    for name, value in HEAP.items():
        monkeypatch.setenv(name, value)
    pick = random.Random(SEED)
    made = [Yard(name, env, ledger, random.Random(pick.random())) for name, env in YARDS.items()]
    yield made
    for yard in made:
        yard.close()


def health_of_the_old(yards: list[Yard]) -> dict[str, Health]:
    return {worker.name: worker.call("health") for yard in yards for worker in yard.old.fleet.workers()}


def attacker(yards: list[Yard]) -> subprocess.Popen[str]:
    addresses = [yard.source.fleet.address for yard in yards]
    command = [sys.executable, str(Path(__file__).with_name("attacker.py")), str(SEED), *addresses]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_soak(yards: list[Yard], ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    started, pick = time.monotonic(), random.Random(SEED)
    end = started + 60 * MINUTES
    measured: dict[str, Health] = {}
    next_fault = {(yard.name, kind): started + 2 for yard in yards for kind in ("kill", "stop")}
    with attacker(yards) as hostile:
        while (now := time.monotonic()) < end:
            for yard in yards:
                yard.step(now)
                for kind, every in (("kill", KILL_EVERY), ("stop", STOP_EVERY)):
                    if now > next_fault[yard.name, kind]:
                        next_fault[yard.name, kind] = now + pick.uniform(0.5, 1.5) * every
                        yard.kill_one() if kind == "kill" else yard.stop_one(now)
            if not measured and now > started + 0.3 * (end - started):
                measured = health_of_the_old(yards)
            time.sleep(0.002)
        said, _ = hostile.communicate("stop\n", timeout=30)
    for yard in yards:
        yard.settle()
    after = health_of_the_old(yards)
    growth = {name: after[name].rss_bytes / was.rss_bytes for name, was in measured.items()}
    with capsys.disabled():
        print(f"\n{MINUTES:g} minutes, seed {SEED}: {dict(ledger.happened)}, {int(said)} hostile messages")
        print(f"ends: {dict(ledger.codes)}; the slowest took {ledger.slowest:.1f} s")
        print(f"wrong cells: {ledger.num_wrong}")
        print(f"memory of those who lived: x {max(growth.values()):.3f} at most")
    assert ledger.num_wrong == 0
    assert not ledger.late, f"no end within {ENDS_WITHIN:g} s: {ledger.late}"
    assert ledger.codes["good"] > ledger.happened["loads"] / 4
    assert max(growth.values()) < 1.10
    for name, was in measured.items():
        assert after[name].num_threads <= was.num_threads + 2
        assert after[name].num_fds <= was.num_fds + 4
