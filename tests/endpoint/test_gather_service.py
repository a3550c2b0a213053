"""What a rank that gathers hears of its engine's starts and releases, in whatever order; and junk."""

import time
from typing import ClassVar

import pytest

from kvferry.channel import Received
from kvferry.core.owned import BlockBytes
from kvferry.endpoint.edges import ControlChannel
from kvferry.endpoint.gather_service import GatherService
from kvferry.errors import SpecError
from kvferry.runtime.ticket_guard import Admitted, GatherRefusal, Refusal, TicketGuard
from kvferry.transport.places import Places
from kvferry.transport.staging_ring import StagingRing, StagingSize
from kvferry.wire.gather import Gather, encode_rank_message
from tests.runtime.test_ticket_guard import KEY, SRC, permit, ticket


class SilentChannel(ControlChannel):
    """Nobody calls, and nobody listens."""

    address = "tcp://127.0.0.1:1"
    refused: ClassVar = {}
    dropped: ClassVar = {}

    def start(self, name, receive, is_behind):
        pass

    def send(self, to, data):
        pass

    def hang_up(self, address):
        pass

    def close(self):
        pass


@pytest.fixture
def guard():
    return TicketGuard(KEY, BlockBytes(SRC, SRC.ranks[0]))


@pytest.fixture
def service(guard):
    ring = StagingRing(StagingSize(4, 4096))
    service = GatherService(Places("ours", ()), ring, guard, SilentChannel(), time.monotonic)
    yield service
    service.close()
    ring.close()


def test_a_release_that_is_heard_before_the_start_it_is_of_is_not_forgotten(service, guard):
    """The rank's owner hears of both in one batch of messages, and says so in this order."""
    released = []
    service.revoke(7, 1, lambda: released.append(1))
    service.begin(7)
    service.close()
    assert released == [1]
    refusal = guard.admit(permit(ticket(1)))
    assert isinstance(refusal, Refusal)
    assert refusal.code is GatherRefusal.ENDED
    assert isinstance(guard.admit(permit(ticket(2))), Admitted)


@pytest.mark.parametrize(
    "columns", [(b"123", bytes(8), bytes(8)), (b"", b"", b""), (bytes(24), bytes(16), bytes(8))]
)
def test_an_ask_that_makes_no_sense_is_refused_where_junk_is_counted(service, columns):
    """It once got a line of the log each time."""
    with pytest.raises(SpecError, match="gather: "):
        service._receive(Received("@00", encode_rank_message(Gather(1, b"", (columns,)))))
