"""Eight processes that all send and all read, with random aborts and kills, for SECONDS (20)."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

NUM_NODES = int(os.environ.get("NODES", "8"))
SECONDS = float(os.environ.get("SECONDS", "20"))


class Child:
    def __init__(self, number):
        self.number = number
        self.told: dict[str, Any] = {}
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("crowd_node.py"), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.name = f"{number}-{self.process.pid}"

    def hear(self):
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # UCX has things to say, too
                return json.loads(line)
        raise AssertionError(f"{self.name} is gone")

    def say(self, what, **more):
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"what": what} | more) + "\n")
            self.process.stdin.flush()

    def meet(self, other):
        self.say("meet", name=other.name, number=other.number, **other.told)

    def kill(self):
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@pytest.mark.slow
def test_no_deadlock_no_wrong_cell_and_nothing_is_left_at_the_end():
    chance, numbers = random.Random(), iter(range(1_000_000))
    nodes = [Child(next(numbers)) for _ in range(NUM_NODES)]
    num_killed = 0
    try:
        for node in nodes:
            node.told = node.hear()
        for node in nodes:
            for other in nodes:
                if other is not node:
                    node.meet(other)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            time.sleep(chance.uniform(1, 4))
            victim = nodes.pop(chance.randrange(NUM_NODES))
            victim.kill()
            num_killed += 1
            new = Child(next(numbers))
            new.told = new.hear()
            for node in nodes:
                node.say("forget", name=victim.name)
                node.meet(new)
                new.meet(node)
            nodes.append(new)
        for node in nodes:
            node.say("end")
        ends = [node.hear() for node in nodes]
        for node in nodes:
            node.say("close")
        assert [node.process.wait(60) for node in nodes] == [0] * NUM_NODES
    finally:
        for node in nodes:
            node.kill()
    counts = [end["counts"] for end in ends]
    print(f"{num_killed} killed;", {name: sum(c.get(name, 0) for c in counts) for name in counts[0]}, ends[0])
    assert all(end["is_whole"] for end in ends), ends
    assert not any(c.get("wrong") or c["under way"] for c in counts), ends
    assert sum(c.get("right", 0) for c in counts) > NUM_NODES
