"""Engines as processes that tests stop, kill and restart, over streams: there a read of a stopped process
stays in flight until the process goes on, or dies. Over CMA it is over when the post returns.
"""

import time
from contextlib import ExitStack, contextmanager

import pytest

from kvferry.cli.processes import FABRICS
from kvferry.models import Topology, describe, model_from_config
from kvferry.runtime import Timing
from tests.support.fleet import (
    DestinationAccount,
    DestinationFleet,
    SourceAccount,
    SourceFleet,
    until,
)

TCP = FABRICS["tcp"]
TIMING = Timing(lease=2.5, meet=4, read=6, retry=0.2)
"""Short, for tests that wait for an end; long enough for a machine that is busy with something else."""
MODEL = model_from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
    },
    "faults",
)
"""16 KiB per token."""


class Harbour:
    """Starts engines, and ends them all."""

    lease = TIMING.lease

    def __init__(self) -> None:
        self._open = ExitStack()

    def source(self, engine, tp, *, listen="tcp://127.0.0.1:*", secret=b"", timing=TIMING, env=TCP):
        """A source engine with 64 MiB of cache over all ranks."""
        manifest = describe(MODEL, Topology.parse(f"tp={tp},block=16,blocks=256"), engine)
        fleet = SourceFleet(manifest, timing=timing, listen=listen, secret=secret, env=env)
        self._open.callback(fleet.close)
        fleet.wait_whole()
        return SourceAccount(fleet)

    def destination(self, engine, tp, *, secret=b"", timing=TIMING, env=TCP):
        """A destination engine with as much, and other blocks."""
        manifest = describe(MODEL, Topology.parse(f"tp={tp},block=32,blocks=128"), engine)
        fleet = DestinationFleet(manifest, timing=timing, secret=secret, env=env)
        self._open.callback(fleet.close)
        fleet.wait_ready()
        return DestinationAccount(fleet)

    def close(self) -> None:
        self._open.close()

    # -- what tests say often

    _numbers = iter(range(1_000_000))

    def name(self):
        """A request id that nobody used."""
        return f"req-{next(self._numbers)}"

    def offer(self, source, num_tokens=64, *, is_filled=False):
        """A ticket; without a pattern in its blocks, unless asked for."""
        return source.offer(self.name(), num_tokens, is_filled=is_filled)

    def serves(self, source, destination, num_tokens=64):
        """A request goes all the way, every cell is right, and both sides agree on it."""
        ticket = self.offer(source, num_tokens, is_filled=True)
        load = destination.fetch(ticket)
        assert set(destination.wait(load)) == {""}
        assert destination.num_wrong(load) == 0
        assert source.reason(ticket.request_id) == "read"

    def in_flight(self, destination, num_reads):
        """Wait until so many reads are posted and have not ended."""
        until(lambda: destination.num_in_flight() == num_reads, f"{num_reads} reads are in flight")

    def silent(self, destination, load, seconds=0.3):
        """For so long, nothing is said about a load, and its blocks stay where they are."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            destination.poll()
            assert not load.reports
            assert destination.pool.num_missing
            time.sleep(0.01)

    def unchanged(self, destination, seconds=0.3):
        """For so long, nothing is written into the destination's memory."""
        before = destination.fingerprints()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert destination.fingerprints() == before

    @contextmanager
    def level(self, *accounts, extra_fds=0):
        """Around a fault: whoever lives on ends up with no more threads and files than before it.

        Counted once the two sides have met. Nothing is allowed for, so that one leak per fault is seen;
        ``extra_fds`` is for what a test can name.
        """
        workers = [worker for account in accounts for worker in account.fleet.workers()]
        before = {worker: worker.call("health") for worker in workers}
        yield
        for account in accounts:
            until(account.is_quiet, f"{account.fleet.manifest.engine} is quiet")
        for worker in (worker for worker in workers if worker.is_running):
            was = before[worker]

            def is_level(worker=worker, was=was):
                now = worker.call("health")
                return now.num_threads <= was.num_threads and now.num_fds <= was.num_fds + extra_fds

            until(is_level, f"{worker.name} is back at {was}, now {worker.call('health')}", seconds=5)


@pytest.fixture(scope="session")
def _shore():
    harbour = Harbour()
    yield harbour
    harbour.close()


@pytest.fixture
def harbour():
    """For engines of the test's own."""
    harbour = Harbour()
    yield harbour
    harbour.close()


@pytest.fixture(scope="session")
def _source(_shore):
    return _shore.source("prefill", tp=2)


@pytest.fixture(scope="session")
def _one(_shore):
    return _shore.destination("decode", tp=1)


@pytest.fixture(scope="session")
def _two(_shore):
    return _shore.destination("decode-2", tp=2)


def _lent(account):
    """An engine that tests share: given back running and quiet."""
    yield account
    for worker in account.fleet.workers():
        assert worker.is_alive
        worker.resume()
    until(account.is_quiet, f"{account.fleet.manifest.engine} is quiet")
    assert not any("unexpected" in status["refused"] for status in _statuses(account))


def _statuses(account):
    return account.statuses() if isinstance(account, DestinationAccount) else [account.status()]


@pytest.fixture
def source(_source):
    """A source engine of two ranks. Stop it if you like; do not kill it."""
    yield from _lent(_source)


@pytest.fixture
def one(_one):
    """A destination engine of one rank, which reads from every source rank."""
    yield from _lent(_one)


@pytest.fixture
def two(_two):
    """A destination engine of two ranks."""
    yield from _lent(_two)
