"""Endpoints without threads: a clock, a channel, workers and steps of the test's own."""

import random
from collections import deque
from collections.abc import Callable

from kvferry.channel import Received
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.endpoint.edges import ChannelThread, Edges, WorkerThreads
from kvferry.runtime import Timing
from kvferry.transport.memory import Hub, MemoryTransport
from kvferry.wire.ticket import to_text


class SimulatedChannel(ChannelThread):
    """One of a world's channels: what is sent arrives when the world wants it to."""

    def __init__(self, world, address):
        self.world, self.address = world, address
        self.refused: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.receive: Callable[[Received], None] = lambda received: None

    def start(self, name, receive, is_behind):
        self.receive = receive

    def send(self, to, data):
        self.world.packets.append((self.address, to, data))

    def hang_up(self, address):
        pass

    def close(self):
        pass


class SimulatedWorkers(WorkerThreads):
    def __init__(self, world):
        self.world = world

    def submit(self, key, job):
        self.world.jobs.append(job)

    def close(self, seconds):
        return True


class World:
    """Everything that happens, one thing after the other."""

    def __init__(self):
        self.now = 0.0
        self.owners: list = []
        self.jobs: deque = deque()
        self.packets: deque = deque()
        self.channels: dict[str, SimulatedChannel] = {}
        self.edges = Edges(
            clock=lambda: self.now,
            random_bytes=random.Random(7).randbytes,
            open_channel=self.open_channel,
            make_workers=lambda name: SimulatedWorkers(self),
            start_owner=self.owners.append,
        )

    def open_channel(self, listen, secret):
        address = f"tcp://127.0.0.1:{len(self.channels)}"
        return self.channels.setdefault(address, SimulatedChannel(self, address))

    def run(self, seconds):
        """Let so much time pass; nothing takes any."""
        until = self.now + seconds
        while self.now < until:
            while self.packets or self.jobs or self.step() <= self.now:
                if self.packets:
                    src, to, data = self.packets.popleft()
                    self.channels[to].receive(Received(src, data))
                elif self.jobs:
                    self.jobs.popleft()()
            self.now = min(until, self.step())

    def step(self):
        """One step of every owner; when the next wants another one."""
        nexts = []
        for owner in self.owners:
            events, _ = owner.take(0)
            nexts.append(owner.step(events, self.now))
        return self.now if self.packets or self.jobs else max(min(nexts), self.now)


def test_a_request_is_moved_without_a_thread_or_a_clock(engines):
    """Whatever an endpoint stands on can be put in its place; each run is the same as the last."""
    world, hub = World(), Hub()
    src, dst, request = engines.src, engines.dst, engines.request
    timing = Timing(lease=8, meet=4, read=20, retry=0.5)
    engine = SourceEngine("prefill", 1, timing=timing, edges=world.edges)
    rank = SourceRank(engine.invitation, src, MemoryTransport(hub), timing=timing, edges=world.edges)
    destination = Destination(dst, 0, MemoryTransport(hub), timing=timing, edges=world.edges)
    handle = destination.fetch(engine.offer("request-1", request.src, 20), request.dst, request.need)
    assert (destination.poll(), engine.is_whole) == ([], False)
    world.run(1.0)
    (report,) = destination.poll()
    assert (report.handle, report.failure) == (handle, None)
    num_cells, num_wrong = engines.check()
    assert (num_cells > 0, num_wrong) == (True, 0)
    assert [released.reason for released in (*engine.poll(), *rank.poll())] == ["read", "read"]

    held = destination.hold(engine.offer("request-2", request.src, 20))
    world.run(100.0)  # many leases long
    assert destination.status()["fetches"] == {"holding": 1}
    world.channels[engine.address] = SimulatedChannel(world, engine.address)  # it hears nothing any more
    destination.abort(held)
    world.run(20.0)
    (report,) = destination.poll()
    assert report.record.outcome == "aborted"
    assert destination.status()["settling"] == 0
    assert [released.reason for released in engine.poll()] == ["expired"]
    for endpoint in (destination, rank, engine):
        endpoint.close()


def test_chance_is_an_argument(engines):
    """Keys, generations and readers' names are the same wherever the same bytes are drawn."""
    tickets, readers = set(), set()
    for _ in range(2):
        world = World()
        engine = SourceEngine("prefill", 1, edges=world.edges)
        destination = Destination(engines.dst, 0, MemoryTransport(Hub()), edges=world.edges)
        tickets.add(to_text(engine.offer("request-1", engines.request.src, 20)))
        readers.add(destination.status()["reader"])
        destination.close()
        engine.close()
    assert (len(tickets), len(readers)) == (1, 1)
