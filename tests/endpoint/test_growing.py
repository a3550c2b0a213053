"""A request that is read while it is computed: over real channels, with cells that appear step by step."""

from functools import partial

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvferry import SpecError
from kvferry.core.request import BlockTable
from kvferry.core.sample import sample_request
from kvferry.core.span import Span, count
from kvferry.endpoint import Claimant, SourceEngine, SourceRank
from kvferry.endpoint.metrics import EngineMetrics
from kvferry.models import Topology, describe
from kvferry.pattern import fill_rank
from kvferry.runtime import FailureCode
from kvferry.testing.small import small
from kvferry.transport import Hub, MemoryTransport
from kvferry.wire.secret import Trust
from tests.endpoint.conftest import Engines, Pair, with_memory
from tests.endpoint.test_confirmed import until

NUM_TOKENS, STEP = 1000, 200


class LongPrompt(Engines):
    """A prompt of some hundred tokens, of which nothing is computed yet."""

    def __init__(self) -> None:
        src = describe(small("gqa"), Topology(block=8, blocks=200), "prefill")
        dst = describe(small("gqa"), Topology(block=12, blocks=200), "decode")
        self.src, self.src_memory = with_memory(src)
        self.dst, self.dst_memory = with_memory(dst)
        self.request = sample_request(src, dst, NUM_TOKENS)


class Growing(Pair, LongPrompt):
    def __init__(self, metrics: EngineMetrics) -> None:
        super().__init__(metrics=metrics)
        self.claimant = Claimant("decode", trust=Trust())

    def compute(self, start, stop):
        tokens = {group.name: (Span(start, stop),) for group in self.src.groups}
        fill_rank(self.src_memory, self.src, 0, self.request.src, tokens)

    def tables(self, num_tokens):
        """Of all groups, as long as is needed for so many tokens."""
        sizes = {group.name: group.tokens_per_block for group in self.src.groups}
        return {
            name: BlockTable.of(table.block_ids[: -(-num_tokens // sizes[name])])
            for name, table in self.request.src.items()
        }

    def found(self, name):
        """The ticket of a prefill that has begun."""
        number = self.claimant.find(self.engine.address, name)
        end = self.ended()
        assert end.number == number
        return end

    def ended(self):
        """The end of the one question."""
        ends = []

        def has_ended():
            ends.extend(self.claimant.poll())
            return ends

        until(has_ended)
        (end,) = ends
        return end

    def close(self):
        self.claimant.close()
        super().close()


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def pair(registry):
    pair = Growing(EngineMetrics(registry))
    yield pair
    pair.close()


def open_and_fetch(pair, name="a name"):
    until(lambda: pair.engine.is_whole)
    growing = pair.engine.open(
        "request", pair.tables(STEP), NUM_TOKENS, transfer=name, digest=b"of the prompt"
    )
    ticket = pair.found(name).ticket
    assert (ticket.digest, ticket.num_tokens, ticket.num_complete) == (b"of the prompt", NUM_TOKENS, 0)
    return growing, pair.fetch(ticket)


def is_read(pair, num_tokens):
    """Whether everything up to a token has arrived, of what is read in parts of 256."""
    job = next(iter(pair.destination._reader.fetches), None)
    return job is not None and count(job.done) >= num_tokens // 256 * 256


def test_what_is_computed_is_read_at_once_and_reported_once(pair, registry):
    growing, handle = open_and_fetch(pair)
    for stop in range(STEP, NUM_TOKENS, STEP):
        pair.compute(stop - STEP, stop)
        growing.grow(pair.tables(stop), stop)
        until(partial(is_read, pair, stop))
        assert pair.destination.poll() == []
    pair.compute(NUM_TOKENS - STEP, NUM_TOKENS)
    ticket = growing.close(pair.tables(NUM_TOKENS), held_from=0)
    assert not ticket.is_growing
    record = pair.reports()[handle].record
    assert record.outcome == "read"
    assert pair.check()[1] == 0
    assert record.early_bytes == record.num_bytes * 768 // NUM_TOKENS
    until(lambda: [released.reason for released in pair.engine.poll()] == ["read"])
    assert registry.get_sample_value("kvferry_loaded_early_bytes_total") == record.early_bytes


def test_stages_that_come_faster_than_reads_are_merged(pair):
    growing, handle = open_and_fetch(pair)
    pair.compute(0, NUM_TOKENS)
    for stop in range(STEP, NUM_TOKENS, STEP):
        growing.grow(pair.tables(stop), stop)
    growing.close(pair.tables(NUM_TOKENS))
    assert pair.reports()[handle].failure is None
    assert pair.check()[1] == 0


@pytest.mark.parametrize("num_steps", range(5))
def test_what_is_revoked_never_counts(pair, num_steps):
    growing, handle = open_and_fetch(pair)
    for stop in range(STEP, STEP * (num_steps + 1), STEP):
        pair.compute(stop - STEP, stop)
        growing.grow(pair.tables(stop), stop)
        until(partial(is_read, pair, stop))
    growing.revoke()
    assert pair.reports()[handle].failure.code is FailureCode.ENDED
    until(lambda: [released.reason for released in pair.engine.poll()] == ["withdrawn"])
    again = pair.engine.open("request again", pair.tables(STEP), NUM_TOKENS, transfer="a name")
    pair.compute(0, NUM_TOKENS)
    again.close(pair.tables(NUM_TOKENS))
    handle = pair.fetch(pair.found("a name").ticket)
    assert pair.reports()[handle].failure is None
    assert pair.check()[1] == 0


def test_an_ordinary_offer_is_found_by_its_name_and_a_refusal_as_well(pair):
    until(lambda: pair.engine.is_whole)
    number = pair.claimant.find(pair.engine.address, "later")
    pair.compute(0, NUM_TOKENS)
    ticket = pair.engine.offer("request", pair.request.src, NUM_TOKENS, transfer="later")
    end = pair.ended()
    assert (end.number, end.ticket) == (number, ticket)
    pair.engine.refuse("never", "it was aborted")
    assert (pair.found("never").ticket, pair.found("never").detail) == (None, "it was aborted")


def test_a_closed_offer_and_the_blocks_of_an_open_one_do_not_change(pair):
    growing, handle = open_and_fetch(pair)
    pair.compute(0, NUM_TOKENS)
    growing.grow(pair.tables(STEP), STEP)
    other = {name: BlockTable.of(table.block_ids + 1) for name, table in pair.tables(NUM_TOKENS).items()}
    shifted = {name: BlockTable.of(table.block_ids, 8) for name, table in pair.tables(NUM_TOKENS).items()}
    for change in (
        lambda: growing.grow(other, 2 * STEP),
        lambda: growing.grow({}, 2 * STEP),
        lambda: growing.close(other),
        lambda: growing.close(shifted),
        lambda: growing.close({name: BlockTable.of([]) for name in other}),
    ):
        with pytest.raises(SpecError, match="a growing table keeps the blocks that it has"):
            change()
    with pytest.raises(SpecError, match="num_complete must be an integer from 0 to 1000"):
        growing.grow(pair.tables(NUM_TOKENS), NUM_TOKENS + 1)
    growing.close(pair.tables(NUM_TOKENS))
    for change in (
        lambda: growing.grow(pair.tables(NUM_TOKENS), NUM_TOKENS + 1),
        lambda: growing.close(pair.tables(NUM_TOKENS)),
    ):
        with pytest.raises(SpecError, match="the offer of request 'request' is closed"):
            change()
    assert pair.reports()[handle].failure is None
    assert pair.check()[1] == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_tokens": -5}, "num_tokens must be an integer from 0"),
        ({"num_tokens": 100.0}, "num_tokens must be an integer from 0"),
        ({"num_tokens": np.int64(100)}, r"num_tokens must be an integer from 0 .*int64\(100\)"),
        ({"digest": "of the prompt"}, "digest of a request is bytes, got 'of the prompt'"),
        ({"held_from": None}, "held_from must be an integer"),
    ],
)
def test_what_readers_would_reject_is_not_offered(pair, wrong, message):
    """The name is not taken by it."""
    arguments = {"tables": pair.tables(NUM_TOKENS), "num_tokens": NUM_TOKENS}
    with pytest.raises(SpecError, match=message):
        pair.engine.offer("request", **{**arguments, **wrong})
    pair.engine.offer("request", **arguments)


def test_a_claim_of_what_is_no_ticket_is_refused(pair):
    with pytest.raises(SpecError, match="expected a Ticket, got str"):
        pair.claimant.claim("a ticket", 100)
    with pytest.raises(SpecError, match="num_tokens must be an integer"):
        pair.claimant.claim(pair.engine.offer_soft("request", 100, b""), np.int64(100))


def test_arguments_of_sources(pair):
    with pytest.raises(SpecError, match="num_ranks must be a number of ranks, got 0"):
        SourceEngine("prefill", 0)
    manifest = describe(small("gqa"), Topology(tp=2), "prefill")
    with pytest.raises(SpecError, match="a manifest of its own rank only, got 2 ranks"):
        SourceRank(pair.engine.invitation, manifest, MemoryTransport(Hub()))
    with pytest.raises(SpecError, match="expected a Secret"):
        Trust(bytes(32))  # type: ignore[arg-type]
