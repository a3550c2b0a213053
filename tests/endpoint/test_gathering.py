"""Engines whose ranks gather for readers: loads are right, and what is not the reader's is refused."""

import threading
import time
from itertools import count

import numpy as np
import pytest

from kvferry.core.owned import BlockBytes
from kvferry.core.product import Term
from kvferry.core.runs import Runs
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.endpoint.edges import open_channel
from kvferry.endpoint.gathering import GatherCalls
from kvferry.transport.cards import Card, GatherPoint
from kvferry.transport.pack import ChunkCopier
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import Expose, WayChoice
from kvferry.wire.secret import Secret, Trust
from kvferry.wire.ticket import make_proofs, permits_for

SECRETS = {"open": None, "secret": Secret(bytes(range(16)))}


def transport(expose=Expose.HOST):
    return ProcessTransport(way=WayChoice.PACKED, expose=expose, chunk_bytes=4096)


class Gathering:
    """A source engine whose rank gathers, and a destination."""

    def __init__(self, engines, secret=None, expose=Expose.HOST):
        self.src, self.dst, self.request = engines.src, engines.dst, engines.request
        self.dst_memory, self.check = engines.dst_memory, engines.check
        trust = Trust(secret)
        self.engine = SourceEngine("prefill", 1, trust=trust)
        self.src_transport = transport(expose)
        self.rank = SourceRank(self.engine.invitation, self.src, self.src_transport, trust=trust)
        self.destination = Destination(self.dst, 0, transport(expose), trust=trust)
        self._names = count(1)

    def offer(self):
        return self.engine.offer(f"request-{next(self._names)}", self.request.src, 20)

    def load(self):
        self.destination.fetch(self.offer(), self.request.dst, self.request.need)
        return soon(self.destination.poll)[0]

    def close(self):
        self.destination.close()
        self.rank.close()
        self.engine.close()


def soon(look):
    deadline = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(2e-3)
    return found


@pytest.fixture(params=[Expose.HOST, Expose.NOTHING], ids=lambda expose: expose.value)
def expose(request):
    """What both sides open to the fabric."""
    return request.param


@pytest.fixture(params=SECRETS)
def gathering(request, engines, expose):
    gathering = Gathering(engines, SECRETS[request.param], expose)
    yield gathering
    gathering.close()


def test_loads_that_ranks_gather_are_right(gathering):
    for _ in range(3):
        for memory in gathering.dst_memory.values():
            memory[:] = 0xEE
        report = gathering.load()
        assert report.failure is None, report.failure
        assert report.record.way == "packed"
        num_cells, num_wrong = gathering.check()
        assert num_cells > 0
        assert num_wrong == 0
    assert gathering.rank.status()["gathered"] >= 3
    assert soon(gathering.rank.poll)[0].reason == "read"
    assert gathering.rank.status()["refused"] == {}


class Stranger:
    """Asks a rank by itself, whatever it likes."""

    def __init__(self, engines, secret=None):
        self.calls = GatherCalls(open_channel("", secret), "stranger")
        point = GatherPoint.from_bytes(Card.from_bytes(engines.src_transport.card()).gather)
        self.to, self.regions = point.address, engines.src.ranks[0].regions
        self.answers = []
        self.calls.listen(self)  # type: ignore[arg-type]  # it hears what a mover hears

    def not_gathered(self, sender, nonce, error):
        self.answers.append((nonce, error))

    def stream_offered(self, sender, nonce, offer):
        self.answers.append((nonce, offer))

    def lost(self, sender):
        pass

    def ask(self, permit, term):
        """What it says of bytes for a stream that is not there: others are refused for that alone."""
        nonce = len(self.answers) + 1
        self.calls.ask(self.to, nonce, permit, [term], bytes(16))
        return soon(lambda: len(self.answers) == nonce and self.answers[-1][1])

    def open_stream(self, permit):
        nonce = len(self.answers) + 1
        self.calls.open_stream(self.to, nonce, permit, self.regions)
        return soon(lambda: len(self.answers) == nonce and self.answers[-1][1])


@pytest.fixture
def hostile(engines, expose):
    gathering = Gathering(engines, expose=expose)
    stranger = Stranger(gathering)
    yield gathering, stranger
    stranger.calls.close()
    gathering.close()


def cell_of(engines, block_id, extra_bytes=0):
    rank = engines.src.ranks[0]
    (_, stride), cells = next(iter(BlockBytes(engines.src, rank).of_block_0.items()))
    length = cells.stops[:1] - cells.starts[:1] + extra_bytes
    return Term(Runs(cells.starts[:1], cells.starts[:1], length), np.array([[block_id * stride], [0]]))


def key_of(rank):
    """What only its own authority knows."""
    return rank._member._member._join.rank_key


def test_a_rank_refuses_what_is_not_the_tickets_and_counts_it(hostile):
    engines, stranger = hostile
    soon(lambda: engines.rank.is_joined)
    ticket = engines.offer()
    rank_key = key_of(engines.rank)
    permit = permits_for(ticket, make_proofs(ticket, {0: rank_key}), [0])[0]
    (group,) = {view.group for view in engines.src.ranks[0].views}
    mine = engines.request.src[group].block_ids.tolist()
    other = next(block for block in range(9) if block not in mine)

    assert "the stream is unknown or closed" in stranger.ask(permit, cell_of(engines, mine[0]))
    assert "another request" in stranger.ask(permit, cell_of(engines, other))
    assert "leaves its block" in stranger.ask(permit, cell_of(engines, mine[0], extra_bytes=1))
    assert "did not grant" in stranger.ask(permit[:-1] + bytes([permit[-1] ^ 1]), cell_of(engines, mine[0]))
    assert "not-granted" in stranger.ask(b"", cell_of(engines, mine[0]))
    assert "not-granted" in stranger.open_stream(b""), "a stream is for those who may have something"
    assert stranger.open_stream(permit).stream_id

    engines.engine.withdraw(ticket.request_id)
    assert soon(engines.rank.poll)[0].reason == "withdrawn"
    assert "ended" in stranger.ask(permit, cell_of(engines, mine[0]))
    assert engines.rank.status()["refused"] == {"not-its-bytes": 2, "not-granted": 3, "ended": 1}
    assert engines.rank.status()["gathered"] == 1
    assert engines.load().failure is None


def test_more_than_a_chunk_and_senseless_asks_are_refused_and_the_rank_goes_on(hostile):
    engines, stranger = hostile
    soon(lambda: engines.rank.is_joined)
    ticket = engines.offer()
    permit = permits_for(ticket, make_proofs(ticket, {0: key_of(engines.rank)}), [0])[0]
    (group,) = {view.group for view in engines.src.ranks[0].views}
    term = cell_of(engines, engines.request.src[group].block_ids.tolist()[0])
    much = Term(
        Runs(*(np.repeat(c, 4096) for c in (term.pattern.src, term.pattern.dst, term.pattern.num_bytes))),
        term.steps,
    )
    assert "too-much" in stranger.ask(permit, much)
    stranger.calls._channel.send(stranger.to, b"junk")
    stranger.calls._channel.send(stranger.to, bytes(9 << 20))
    assert "the stream is unknown or closed" in stranger.ask(permit, term)


def test_the_engine_hears_of_no_release_while_its_rank_gathers(engines, monkeypatch):
    """Law 6: neither by the rank's ``poll`` nor by the authority's."""
    gathers, may_end = threading.Event(), threading.Event()

    gather = ChunkCopier.gather

    def slow_gather(*args):
        gathers.set()
        assert may_end.wait(60)
        return gather(*args)

    monkeypatch.setattr(ChunkCopier, "gather", slow_gather)
    gathering = Gathering(engines)
    ticket = gathering.offer()
    handle = gathering.destination.fetch(ticket, gathering.request.dst, gathering.request.need)
    assert gathers.wait(60)
    gathering.destination.abort(handle)
    soon(lambda: gathering.engine.status()["unheard"])  # its lease has ended, and the rank is told
    assert gathering.engine.poll() == gathering.rank.poll() == []
    assert gathering.engine.num_leases == 1
    may_end.set()
    assert [released.request_id for released in soon(gathering.engine.poll)] == [ticket.request_id]
    assert [released.request_id for released in soon(gathering.rank.poll)] == [ticket.request_id]
    gathering.close()
