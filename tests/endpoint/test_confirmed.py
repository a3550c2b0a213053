"""A load counts if the source confirms it after the last byte; and nobody else can end its lease.

Two of these reported 2,880 wrong cells as good, while settlements were believed by their names and reads by
the reader's clock.
"""

import time

from kvferry.channel import Channel
from kvferry.endpoint.edges import Edges
from kvferry.runtime import Timing
from kvferry.wire.messages import TOKEN_BYTES, Outcome, Settle, encode
from tests.support.faults import Faults, FaultyHub


def until(is_so, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (so := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return so


def reuse(pair):
    """The source engine writes another request into its memory."""
    for memory in pair.src_memory.values():
        memory[:] = 0xEE


def stalled(pair, faults):
    """A load whose read is posted, and does not go on."""
    good = pair.fetch()
    assert pair.reports()[good].failure is None
    assert pair.check()[1] == 0
    for memory in pair.dst_memory.values():
        memory[:] = 0
    until(pair.engine.poll)
    faults.stall()
    ticket = pair.offer()
    handle = pair.fetch(ticket)
    until(lambda: pair.destination.status()["in_flight"])
    return ticket, handle


def test_a_forged_settlement_frees_no_block_that_is_being_read(pair_of):
    """The forger knows the names, and tries every number that the attempt may have."""
    faults = Faults()
    pair = pair_of(hub=FaultyHub(faults), reader="decode")
    ticket, handle = stalled(pair, faults)
    forger = Channel()
    try:
        for attempt in range(100):
            named = ticket.generation, ticket.ticket_id, "decode", 0, attempt
            forger.send(pair.engine.address, encode(Settle(*named, bytes(TOKEN_BYTES), Outcome.READ)))
        answers: list = []
        while len(answers) < 100:
            answers += until(lambda: forger.wait(0.01))
    finally:
        forger.close()
    assert pair.engine.poll() == []
    faults.resume()
    assert pair.reports()[handle].failure is None
    assert pair.check()[1] == 0
    (released,) = until(pair.engine.poll)
    assert released.reason == "read"


class StoppableClock:
    """As of a virtual machine that is paused: it does not notice."""

    def __init__(self):
        self.stopped_at = None

    def __call__(self):
        return time.monotonic() if self.stopped_at is None else self.stopped_at


def test_a_late_read_does_not_count_though_the_readers_clock_has_stopped(pair_of):
    faults, clock = Faults(), StoppableClock()
    pair = pair_of(hub=FaultyHub(faults), edges=Edges(clock=clock), source_timing=Timing(lease=0.5))
    _, handle = stalled(pair, faults)
    clock.stopped_at = time.monotonic()
    (released,) = until(pair.engine.poll)
    assert released.reason == "expired"
    reuse(pair)
    faults.resume()
    failure = pair.reports()[handle].failure
    assert failure is not None
    assert failure.code == "lease-ended"
    num_cells, num_wrong = pair.check()
    assert (num_cells > 0, num_wrong) == (True, num_cells), "the bytes did come, and were the wrong ones"


def test_a_record_says_how_long_the_confirmation_took(pair_of):
    pair = pair_of()
    handle = pair.fetch()
    record = pair.reports()[handle].record
    assert 0 < record.confirm_seconds < record.total_seconds
