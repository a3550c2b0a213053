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

    def __init__(self, hub, ours, *theirs, **options):
        super().__init__()
        self.hub = hub
        self.sources = [self._source(f"prefill-{i}", identity) for i, identity in enumerate(theirs)]
        self.destination = Destination(replace(self.dst, identity=ours), 0, MemoryTransport(hub), **options)

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

    def make(*identities, **options):
        made.append(Fleet(Hub(), *identities, **options))
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


DUMMY = Identity.of({"architecture": "llama", "config.rope_theta": "10000"}, {"weights": "dummy"})


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (Identity.of(ONE), DUMMY, "weights: source has no value (dummy)"),
        (DUMMY, Identity.of(ONE), "weights: destination has no value (dummy)"),
        (DUMMY, DUMMY, "weights: source has no value (dummy), destination has no value (dummy)"),
        (Identity.of(ONE), Identity(), "the rest: source has no value"),
        (Identity(), Identity(), "the rest: source has no value"),
    ],
)
def test_an_unknown_model_is_refused(fleet, ours, theirs, said):
    """RB-9: what may be another model is not read from, and the refusal says what to do."""
    failure = fleet(ours, theirs).fetch(0)
    assert failure.code is FailureCode.REFUSED
    assert f"identity-unknown: {said}" in str(failure)
    assert "set identity to unchecked on both engines" in str(failure)


@pytest.mark.parametrize("ours", [Identity.of(ONE), DUMMY])
def test_an_unknown_model_that_is_accepted_is_a_warning_at_every_meeting(fleet, caplog, ours):
    caplog.set_level(logging.INFO, "kvferry")
    lax = fleet(ours, DUMMY, DUMMY, accept_unknown_identity=True)
    assert lax.fetch(0) is lax.fetch(1) is None
    for number, (level, line) in enumerate(met(caplog)):
        assert level == logging.WARNING
        assert f"met prefill-{number} at " in line
        assert "the models cannot be compared completely" in line
        assert "has no value (dummy)" in line or "both have no value (dummy)" in line
    assert len(met(caplog)) == 2


def test_both_sides_have_to_accept_an_unknown_model(fleet):
    strict = replace(DUMMY, is_required=True)
    failure = fleet(DUMMY, strict, accept_unknown_identity=True).fetch(0)
    assert "identity-unknown: weights" in str(failure)


def test_another_model_is_never_accepted(fleet):
    other = Identity.of({"architecture": "llama", "config.rope_theta": "5"}, {"weights": "dummy"})
    failure = fleet(DUMMY, other, accept_unknown_identity=True).fetch(0)
    assert failure.code is FailureCode.REFUSED
    assert "identity-differs: config.rope_theta: source has 5, destination has 10000" in str(failure)
