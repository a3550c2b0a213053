"""Readers that are killed (SIGKILL) in the middle of a stream, at any moment; and a source that is.

The real source process, and readers that are processes, too. The quick suite kills a few of them; all of
docs/lab/performance.md's: ``KILLS=60 pytest -m "" -s tests/transport/test_stream_kills.py``.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.endpoint.edges import open_channel
from kvferry.endpoint.gathering import GatherCalls
from kvferry.transport.cards import Card, GatherPoint
from kvferry.transport.pack import ChunkCopier
from kvferry.transport.places import Places
from kvferry.transport.stream_reader import StreamLink, StreamMover
from kvferry.transport.transfers import Transfers
from tests.support.sources import serving

ROOT = Path(__file__).parents[2]
POOL_BYTES = 32 << 20
KILLS = int(os.environ.get("KILLS", "3"))
PATIENCE_S = 60.0


class Reader:
    """Reads a rank over a stream."""

    def __init__(self, card, regions):
        self.pool = np.zeros(POOL_BYTES, np.uint8)
        places = Places("ours", [Region("kv", POOL_BYTES, self.pool.ctypes.data)])
        self.calls = GatherCalls(open_channel("", None), "reader")
        self.transfers = Transfers()
        self.mover = StreamMover(self.transfers, ChunkCopier(places, POOL_BYTES), self.calls)
        self.calls.listen(self.mover)
        point = GatherPoint.from_bytes(Card.from_bytes(card).gather)
        self.link = StreamLink(self.mover, "src", point, Places("src", regions))

    def read(self, run_bytes=64 << 10):
        """The error of reading the whole pool, in runs of this length."""
        at = np.arange(0, POOL_BYTES, run_bytes)
        self.begin(Runs(at, np.flip(at).copy(), np.full(len(at), run_bytes)))
        return self.wait()

    def begin(self, runs):
        self.transfers.begin(1, self.link.prepare(Product.of(runs), None))

    def wait(self):
        deadline = time.monotonic() + PATIENCE_S
        while not (ends := self.transfers.collect()):
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        return ends[0].error

    def close(self):
        self.transfers.close()
        assert self.mover.close(PATIENCE_S)
        self.calls.close()


@pytest.fixture(scope="module")
def served():
    with serving(1, [POOL_BYTES]) as served:
        yield served


def victim(source):
    """A process that reads for ever, and has begun."""
    regions = [(region.name, region.num_bytes, region.address) for region in source.regions]
    told = json.dumps({"card": source.card.hex(), "regions": regions})
    process = subprocess.Popen([sys.executable, "-m", __name__, told], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"reading\n"
    return process


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def is_alive(pid):
    """Whether a child runs: a dead one that nobody waited for counts as dead."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] not in "ZX"


def test_a_source_outlives_readers_that_are_killed_at_any_moment(served):
    source, chance = served.sources[0], random.Random()
    witness = Reader(source.card, source.regions)
    for _ in range(KILLS):
        process = victim(source)
        time.sleep(chance.uniform(0, 0.1))
        end(process)
        assert is_alive(served.pid)
        assert witness.read(random.choice([512, 64 << 10])) == ""
    expected = source.contents[0].reshape(-1, 64 << 10)[::-1]
    assert witness.read() == ""
    assert (witness.pool.reshape(expected.shape) == expected).all()
    witness.close()


def test_a_source_outlives_readers_that_are_killed_while_it_is_stopped(served):
    source = served.sources[0]
    witness = Reader(source.card, source.regions)
    for _ in range(max(2, KILLS // 3)):
        process = victim(source)
        os.kill(served.pid, signal.SIGSTOP)
        time.sleep(0.01)
        end(process)
        os.kill(served.pid, signal.SIGCONT)
        assert is_alive(served.pid)
        assert witness.read() == ""
    witness.close()


def test_a_reader_outlives_a_source_that_is_killed_and_its_read_fails():
    for _ in range(max(1, KILLS // 6)):
        with serving(1, [POOL_BYTES]) as served:
            reader = Reader(served.sources[0].card, served.sources[0].regions)
            assert reader.read() == ""
            os.kill(served.pid, signal.SIGSTOP)
            reader.begin(Runs(np.array([0]), np.array([0]), np.array([POOL_BYTES])))
            os.kill(served.pid, signal.SIGKILL)
            assert "is lost" in reader.wait()
            reader.close()


if __name__ == "__main__":
    known = json.loads(sys.argv[1])
    forever = Reader(bytes.fromhex(known["card"]), [Region(*region) for region in known["regions"]])
    print("reading", flush=True)
    while True:
        forever.read()
