"""Four ranks that all send and all read, with random aborts.

Who waits for whom is in docs/design.md: nobody holds what another one's progress needs. Here it is tried.
"""

import random
import time
from typing import Any

import numpy as np

from kvferry.cli.processes import AskingTransport, gather_openly
from kvferry.core.runs import Runs
from kvferry.testing.transport_world import contents
from kvferry.transport.base import CANCELLED
from kvferry.transport.region_memory import RegionMemory
from kvferry.transport.settings import Expose, WayChoice

NUM_RANKS, NUM_READS, NUM_CELLS, CELL_BYTES = 4, 40, 256, 512
CHUNK_BYTES = 16 << 10


class Node:
    """One process of an engine with both roles: it serves its cells, and has room for everybody's."""

    def __init__(self, number):
        self.held = contents(number, 0, NUM_CELLS * CELL_BYTES)
        self.room = np.zeros((NUM_READS, NUM_CELLS * CELL_BYTES), np.uint8)
        holder = RegionMemory("cpu")
        holder.add("held", self.held)
        holder.add("room", self.room.reshape(-1))
        self.regions = holder.regions
        self.transport = AskingTransport(way=WayChoice.PACKED, expose=Expose.NOTHING, chunk_bytes=CHUNK_BYTES)
        self.transport.register(holder.regions)
        self.service = gather_openly(self.transport)

    @property
    def is_whole(self):
        """Whether nothing is asked for any more."""
        mover: Any = self.transport._packed and self.transport._packed.mover
        return not any(link.asks for link in mover._links.values())


def shuffled(rng, read):
    """All cells of a rank, in any order, to the room of one read."""
    src = rng.permutation(NUM_CELLS) * CELL_BYTES
    dst = (1 << 48) + read * NUM_CELLS * CELL_BYTES + src
    return Runs(src, dst, np.full(NUM_CELLS, CELL_BYTES))


def test_nobody_waits_for_ever_and_nothing_is_left():
    nodes, chance, rng = [Node(i) for i in range(NUM_RANKS)], random.Random(5), np.random.default_rng(5)
    for node in nodes:
        for i, other in enumerate(nodes):
            if other is not node:
                node.transport.connect(str(i), other.transport.card(), other.regions)
    asked = {}
    for read in range(NUM_READS):
        for i, node in enumerate(nodes):
            peer = chance.choice([j for j in range(NUM_RANKS) if j != i])
            node.transport.read(read, str(peer), shuffled(rng, read))
            asked[i, read] = peer
            if chance.random() < 0.3:
                node.transport.cancel(chance.randrange(read + 1))
    ends: dict[tuple[int, int], str] = {}
    deadline = time.monotonic() + 60
    while len(ends) < len(asked):
        assert time.monotonic() < deadline, f"{len(asked) - len(ends)} reads have not ended"
        for i, node in enumerate(nodes):
            ends |= {(i, end.transfer): end.error for end in node.transport.poll()}
        time.sleep(1e-3)
    assert {*ends.values()} <= {"", CANCELLED}
    assert sum(error == "" for error in ends.values()) > len(ends) / 4
    for (i, read), peer in asked.items():
        if not ends[i, read]:
            assert (nodes[i].room[read] == nodes[peer].held).all()
    while not all(node.is_whole for node in nodes):
        assert time.monotonic() < deadline, "something is still asked for"
        time.sleep(1e-3)
    for node in nodes:
        node.service.close()
        node.transport.close()
