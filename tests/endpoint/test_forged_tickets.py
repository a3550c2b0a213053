"""Forged tickets shut no good load out, and cost bounded memory: 10,000 of 1 KiB a second where a secret
tells them from good ones; without one, each has to be tried, and 1,000 a second are.
"""

import itertools
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kvferry.runtime import FailureCode
from kvferry.wire.secret import Secret, Trust

FLEET = Trust(Secret(b"of this fleet, 128 bit"))
SECONDS = 3


def rss_mib():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


def another_engine(ticket, number):
    """Each names an engine of its own, at a port of this host where nobody is."""
    return msgspec.structs.replace(
        ticket,
        ticket_id=number,
        engine=f"engine-{number}",
        authority=f"tcp://127.0.0.1:{20_000 + number % 10_000}",
        digest=bytes(900),
    )


def one_engine(ticket, number):
    """All name one engine that nobody has met: whoever waits for it waits long."""
    return msgspec.structs.replace(
        ticket, ticket_id=number, generation=1, authority="tcp://127.0.0.1:1", digest=bytes(900)
    )


def of_the_source(ticket, number):
    """All are tickets of the good source, but for a field."""
    return msgspec.structs.replace(ticket, ticket_id=number, digest=bytes(900))


class Flood:
    """A router that passes on whatever a client says; up to so many a second, and at most a second's worth
    that were not answered. A machine that is busy with other work answers fewer.
    """

    def __init__(self, destination, tickets, per_second):
        self._destination, self._tickets, self._is_over = destination, tickets, False
        self._per_second = per_second
        self._thread = threading.Thread(target=self._pour, daemon=True)
        self.num_sent = self.num_answered = 0

    def _pour(self):
        started = time.monotonic()
        while not self._is_over:
            for _ in range(100):
                self._destination.hold(next(self._tickets))
            self.num_sent += 100
            time.sleep(max(0.0, started + self.num_sent / self._per_second - time.monotonic()))
            while self.num_sent - self.num_answered > self._per_second and not self._is_over:
                time.sleep(0.01)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over = True
        self._thread.join()


@pytest.mark.timed
@pytest.mark.parametrize("forge", [another_engine, one_engine, of_the_source])
@pytest.mark.parametrize(
    ("trust", "per_second"), [(FLEET, 10_000), (Trust(), 1_000)], ids=["secret", "one host"]
)
def test_good_loads_go_on_under_a_flood_of_forged_tickets(pair_of, forge, trust, per_second):
    pair = pair_of(trust=trust, engine_trust=trust)
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None
    genuine = pair.offer()
    forged = itertools.cycle([forge(genuine, number) for number in range(1000, 6000)])
    before = rss_mib()
    slowest, num_good, deadline = 0.0, 0, time.monotonic() + SECONDS
    with Flood(pair.destination, forged, per_second) as flood:
        while time.monotonic() < deadline:
            started, handle = time.monotonic(), pair.fetch()
            computed = time.process_time()  # a machine that was stopped for a while shuts nobody out
            reports: dict = {}
            while handle not in reports:
                assert time.process_time() < computed + 9, "the good load is shut out"
                new = pair.destination.poll()
                reports |= {report.handle: report for report in new}
                flood.num_answered += len(new)
                time.sleep(0.001)
            failure = reports[handle].failure
            assert failure is None, failure
            num_good += 1
            slowest = max(slowest, time.monotonic() - started)
    grown = rss_mib() - before
    print(
        f"\n{forge.__name__}: {flood.num_sent / SECONDS:,.0f} forged tickets a second, {num_good} good loads,"
        f" the slowest in {slowest * 1e3:.0f} ms, {grown} MiB more"
    )
    assert grown < 200
    if trust is FLEET:
        codes = {report.failure.code for report in pair.destination.poll()}
        assert codes <= {FailureCode.FORGED}
