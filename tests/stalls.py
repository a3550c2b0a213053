"""When this machine stood still: a process beside the tests looks at the clock ten times a second.

Hosts of virtual machines stop them for seconds at times, and give that time to nobody. A test in which a
process must answer within ten seconds cannot tell a program that failed from a machine that stood still. Such
a test is run again once the machine runs, and says so; a test that fails on a machine that runs has failed.
"""

import os
import subprocess
import sys
import time

SHORTEST = 0.5
"""Seconds. A process that wants to run waits for less, however busy a machine is."""
STALL_SECONDS = 1.5
"""A machine that stood still for so long during a test, at once or in parts, may have failed it."""
CALM_SECONDS = 15.0
"""A machine that has not stood still for so long runs."""
PATIENCE = 600.0
"""For how long machines are waited for, in all."""
LOOK = f"""
import os, select, sys, time
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    looked = time.monotonic()
    is_asked = select.select([0], [], [], 0.1)[0]
    late = time.monotonic() - looked - 0.1
    if late > {SHORTEST}:
        print(looked + 0.1 + late, late, flush=True)
    if is_asked:
        if not os.read(0, 1):
            break
        print(flush=True)
"""


class StallWatch:
    """Knows when the machine stood still."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", LOOK, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stalls: list[tuple[float, ...]] = []
        self._patience = PATIENCE
        self._listen()  # it looks from now on

    def _listen(self) -> None:
        """Until it says that this is all."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline().strip():
            self._stalls.append(tuple(map(float, line.split())))

    def lost_since(self, moment: float) -> float:
        """For how many seconds it stood still, in all, since a moment of the monotonic clock."""
        assert self.process.stdin is not None
        self.process.stdin.write("?")
        self.process.stdin.flush()
        self._listen()
        return sum(seconds for ended, seconds in self._stalls if ended > moment)

    def wait_for_calm(self) -> float:
        """Until the machine runs, or patience is at its end; how many seconds that took."""
        began = time.monotonic()
        while time.monotonic() < began + self._patience:
            looked = time.monotonic()
            time.sleep(min(CALM_SECONDS, began + self._patience - looked))
            if not self.lost_since(looked):
                break
        took = time.monotonic() - began
        self._patience -= took
        return took

    def close(self) -> None:
        """Look no more."""
        self.process.kill()
        self.process.communicate()
