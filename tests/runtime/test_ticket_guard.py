"""A source rank that gathers: it takes what its authority granted, until the lease ends, and nothing else."""

import msgspec
import numpy as np
import pytest

from kvferry import BlockTable
from kvferry.core.owned import BlockBytes
from kvferry.models import Topology, describe
from kvferry.runtime.ticket_guard import Admitted, EndedTickets, GatherRefusal, Refusal, TicketGuard
from kvferry.testing.small import small
from kvferry.wire.ticket import Ticket, make_proofs, permits_for, tables_to_wire

KEY = bytes(range(32))
SRC = describe(small("gqa"), Topology(block=8, blocks=20), "prefill")


@pytest.fixture
def guard():
    guard = TicketGuard(KEY, BlockBytes(SRC, SRC.ranks[0]))
    guard.begin(7)
    return guard


def ticket(ticket_id=1, blocks=(3, 4), generation=7):
    tables = tables_to_wire({"full": BlockTable.of(list(blocks))})
    return Ticket("prefill", generation, ticket_id, f"r{ticket_id}", "tcp://x", 16, tables, 30_000)


def permit(ticket, key=KEY):
    return permits_for(ticket, make_proofs(ticket, {0: key}), [0])[0]


def of_block(block_id, extra_bytes=0):
    """The first cell of a block of the first view, as a reader asks for it."""
    view = SRC.ranks[0].views[0]
    (_, _), cells = next(iter(BlockBytes(SRC, SRC.ranks[0]).of_block_0.items()))
    whole = cells.stops[:1] - cells.starts[:1] + extra_bytes
    return [(cells.starts[:1], whole, np.array([block_id * view.block_stride]))]


def test_what_was_granted_is_gathered(guard):
    admitted = guard.admit(permit(ticket()))
    assert isinstance(admitted, Admitted)
    assert guard.check(admitted, of_block(3) + of_block(4)) is None
    assert guard.admit(permit(ticket())) is admitted
    assert guard.refused == {}


def test_another_tickets_bytes_and_bytes_beyond_a_block_are_refused_and_counted(guard):
    admitted = guard.admit(permit(ticket()))
    for terms, why in ((of_block(5), "another request"), (of_block(3, extra_bytes=1), "leaves its block")):
        refusal = guard.check(admitted, of_block(3) + terms)
        assert refusal.code is GatherRefusal.NOT_ITS_BYTES
        assert why in refusal.detail
    assert guard.refused == {"not-its-bytes": 2}


def test_a_ticket_that_has_ended_is_refused_also_one_that_was_admitted(guard):
    admitted = guard.admit(permit(ticket()))
    guard.end(1)
    assert guard.check(admitted, of_block(3)).code is GatherRefusal.ENDED
    assert guard.admit(permit(ticket())).code is GatherRefusal.ENDED
    assert isinstance(guard.admit(permit(ticket(2))), Admitted)


def test_an_earlier_start_of_the_engine_is_refused_and_a_later_one_numbers_anew(guard):
    guard.end(1)
    guard.begin(8)
    assert guard.admit(permit(ticket(2, generation=7))).code is GatherRefusal.ENDED
    assert isinstance(guard.admit(permit(ticket(1, generation=8))), Admitted)


def test_what_the_authority_did_not_grant_is_refused(guard):
    good = ticket()
    forged = msgspec.structs.replace(good, tables=ticket(blocks=(3, 5)).tables)
    mixed = permits_for(forged, make_proofs(good, {0: KEY}), [0])[0]
    for bad in (b"", b"junk", permit(good)[:-1], permit(good, b"another rank's key"), mixed):
        refusal = guard.admit(bad)
        assert isinstance(refusal, Refusal)
        assert refusal.code is GatherRefusal.NOT_GRANTED
    assert guard.refused == {"not-granted": 5}


def test_few_permits_are_remembered(guard):
    guard.MAX_ADMITTED = 2
    first = guard.admit(permit(ticket(1)))
    guard.admit(permit(ticket(2)))
    guard.admit(permit(ticket(3)))
    assert guard.admit(permit(ticket(1))) is not first


def test_a_number_that_never_ends_does_not_keep_all_later_ones_for_ever():
    ended = EndedTickets()
    ended.MAX_KEPT = 10
    for number in range(2, 40):
        ended.add(number)
    assert ended.num_kept <= 10
    assert all(number in ended for number in range(1, 40))


def test_tickets_end_one_by_one_and_only_gaps_are_kept():
    ended = EndedTickets()
    for number in (1, 2, 5):
        ended.add(number)
    assert [number in ended for number in (1, 2, 3, 5, 6)] == [True, True, False, True, False]
    assert ended.num_kept == 1
