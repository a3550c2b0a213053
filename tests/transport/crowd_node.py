"""One process of the crowd of test_packed_crowd.py: it gathers for the others, and reads from them.

It is told by lines of JSON on its input whom to read and when to end, and answers by lines of JSON.
"""

import json
import random
import sys
import threading
import time
from collections import Counter
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from kvferry.cli.processes import AskingTransport, gather_openly
from kvferry.core.manifest import Region
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.testing.transport_world import contents
from kvferry.transport.base import CANCELLED
from kvferry.transport.region_memory import RegionMemory
from kvferry.transport.settings import Expose, WayChoice

NUM_CELLS, CELL_BYTES, NUM_ROOMS = 256, 512, 8
HELD_BYTES = NUM_CELLS * CELL_BYTES
CHUNK_BYTES = 16 << 10
PATIENCE_S = 120.0


class Node:
    """Serves its cells to everybody, and has room for a few reads of its own."""

    def __init__(self, number: int) -> None:
        self.room = np.zeros((NUM_ROOMS, HELD_BYTES), np.uint8)
        holder = RegionMemory("cpu")
        holder.add("held", contents(number, 0, HELD_BYTES))
        holder.add("room", self.room.reshape(-1))
        self.transport = AskingTransport(way=WayChoice.PACKED, expose=Expose.NOTHING, chunk_bytes=CHUNK_BYTES)
        self.transport.register(holder.regions)
        self.holder = holder  # or its memory would be gone
        self.service = gather_openly(self.transport)
        regions = [(region.name, region.num_bytes, region.address) for region in holder.regions]
        say({"card": self.transport.card().hex(), "regions": regions})
        self.chance, self.rng = random.Random(), np.random.default_rng()
        self.peers: dict[str, int] = {}
        """The number of each peer that is connected, by its name."""
        self.reading: dict[int, int] = {}
        """Whose cells each room gets."""
        self.counts: Counter[str] = Counter()
        self.errors: set[str] = set()

    def meet(self, name: str, number: int, card: str, regions: list[Any]) -> None:
        try:
            self.transport.connect(name, bytes.fromhex(card), [Region(*region) for region in regions])
            self.peers[name] = number
        except TransportError:
            self.counts["not met"] += 1  # it was killed before

    def forget(self, name: str) -> None:
        self.peers.pop(name, None)
        self.transport.forget(name)

    def step(self) -> None:
        """One more read, if there is room, or an abort; and a look at what has ended."""
        free = [room for room in range(NUM_ROOMS) if room not in self.reading]
        if free and self.peers:
            room, (name, number) = free[0], self.chance.choice([*self.peers.items()])
            cells = self.rng.permutation(NUM_CELLS) * CELL_BYTES
            to = (1 << 48) + room * HELD_BYTES + cells
            self.room[room] = 0
            try:
                self.transport.read(room, name, Runs(cells, to, np.full(NUM_CELLS, CELL_BYTES)))
                self.reading[room] = number
            except TransportError:
                self.counts["refused"] += 1
        if self.reading and self.chance.random() < 0.03:
            self.transport.cancel(self.chance.choice([*self.reading]))
        self.collect()

    def collect(self) -> None:
        for end in self.transport.poll():
            number = self.reading.pop(end.transfer)
            if end.error:
                self.counts["cancelled" if end.error == CANCELLED else "failed"] += 1
                self.errors.add(end.error)
            else:
                is_right = (self.room[end.transfer] == contents(number, 0, HELD_BYTES)).all()
                self.counts["right" if is_right else "wrong"] += 1

    @property
    def is_whole(self) -> bool:
        mover: Any = self.transport._packed and self.transport._packed.mover
        return not any(link.asks for link in mover._links.values())

    def end(self) -> None:
        """Wait until all has ended; what was taken away from nobody is back then."""
        deadline = time.monotonic() + PATIENCE_S
        while (self.reading or not self.is_whole) and time.monotonic() < deadline:
            self.collect()
            time.sleep(1e-3)
        counts = self.counts | {"under way": len(self.reading)}
        say({"counts": counts, "is_whole": self.is_whole, "errors": sorted(self.errors)[:5]})


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def main(number: int) -> None:
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()
    node = Node(number)

    def hear() -> None:
        for line in sys.stdin:
            told.put(json.loads(line))

    threading.Thread(target=hear, daemon=True).start()
    is_reading = True
    while True:
        try:
            word = told.get_nowait() if is_reading else told.get()
        except Empty:
            node.step()
            time.sleep(1e-3)
            continue
        match word.pop("what"):
            case "meet":
                node.meet(**word)
            case "forget":
                node.forget(**word)
            case "end":
                is_reading = False
                node.end()
            case "close":
                node.service.close()
                node.transport.close()
                return
            case other:
                raise ValueError(other)


if __name__ == "__main__":
    main(int(sys.argv[1]))
