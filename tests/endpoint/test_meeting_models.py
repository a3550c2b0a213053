"""RB-9: two engines meet, and say whether they run the same model, in one line of the log."""

import logging
import time
from dataclasses import replace

import pytest

from kvferry import Identity
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.runtime import FailureCode
from kvferry.transport.memory import Hub, MemoryTransport
from tests.endpoint.conftest import Engines

ONE = {"architecture": "llama", "config.rope_theta": "10000", "weights.content": "1f2e"}


class Fleet(Engines):
    """Source engines of equal geometry, each of its own model, and a destination."""

    def __init__(self, hub, ours, *theirs):
        super().__init__()
        self.hub = hub
        self.sources = [self._source(f"prefill-{i}", identity) for i, identity in enumerate(theirs)]
        self.destination = Destination(replace(self.dst, identity=ours), 0, MemoryTransport(hub))

    def _source(self, name, identity):
        engine = SourceEngine(name, 1)
        manifest = replace(self.src, engine=name, identity=identity)
        return engine, SourceRank(engine.invitation, manifest, MemoryTransport(self.hub))

    def fetch(self, index):
        ticket = self.sources[index][0].offer("request", self.request.src, 20)
        self.destination.fetch(ticket, self.request.dst, self.request.need)
        while not (reports := self.destination.poll()):
            time.sleep(0.001)
        return reports[0].failure

    def close(self):
        self.destination.close()
        for engine, rank in self.sources:
            rank.close()
            engine.close()


@pytest.fixture
def fleet():
    made = []

    def make(*identities):
        made.append(Fleet(Hub(), *identities))
        return made[-1]

    yield make
    for each in made:
        each.close()


def met(caplog):
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.getMessage().startswith("kvferry: met ")]


def test_a_plan_that_engines_share_is_not_a_model_that_they_share(fleet, caplog):
    """RB-9, RA-2: after the first engine a second one of equal geometry is met, of another model."""
    caplog.set_level(logging.INFO, "kvferry")
    ours = Identity.of(ONE)
    two = fleet(ours, ours, Identity.of({**ONE, "weights.content": "3d4c"}), ours)
    assert two.fetch(0) is None
    failure = two.fetch(1)
    assert failure.code is FailureCode.REFUSED
    assert "identity-differs: weights.content: source has 3d4c, destination has 1f2e" in str(failure)
    assert two.fetch(2) is None
    lines = met(caplog)
    assert [level for level, _ in lines] == [logging.INFO] * 2
    assert all("the same model (3 parts of the identity equal)" in line for _, line in lines)
    assert all("memory" in line for _, line in lines), "the way is told, too"


def test_an_unknown_model_is_a_warning_in_the_line_of_the_meeting(fleet, caplog):
    caplog.set_level(logging.INFO, "kvferry")
    dummy = Identity.of({"architecture": "llama", "config.rope_theta": "10000"}, {"weights": "dummy"})
    lax = fleet(Identity.of(ONE), dummy)
    assert lax.fetch(0) is None
    ((level, line),) = met(caplog)
    assert level == logging.WARNING
    assert "cannot tell whether the models are the same" in line
    assert "weights: source has no value (dummy)" in line
    strict = fleet(replace(Identity.of(ONE), is_required=True), dummy)
    failure = strict.fetch(0)
    assert failure.code is FailureCode.REFUSED
    assert "identity-unknown: weights: source has no value (dummy)" in str(failure)
