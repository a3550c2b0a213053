"""When this machine stood still: a process beside the tests looks at the clock ten times a second.

Hosts of virtual machines stop them for seconds at times, and give that time to nobody. A test in which a
process must answer within ten seconds cannot tell a program that failed from a machine that stood still. Such
a test is run again once the machine runs, and says so; a test that fails on a machine that runs has failed.
"""

import contextlib
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
import os, sys, time
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    looked = time.monotonic()
    time.sleep(0.1)
    late = time.monotonic() - looked - 0.1
    if late > {SHORTEST}:
        print(looked + late, late, flush=True)
"""


class StallWatch:
    """Knows when the machine stood still."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", LOOK, str(os.getpid())],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        self._pipe = self.process.stdout
        self._pipe.readline()  # it looks from now on
        os.set_blocking(self._pipe.fileno(), False)
        self._text = b""
        self._patience = PATIENCE

    def lost_since(self, moment: float) -> float:
        """For how many seconds it stood still, in all, since a moment of the monotonic clock."""
        time.sleep(SHORTEST)  # the watch, too, has to wake up
        with contextlib.suppress(BlockingIOError):
            self._text += self._pipe.read() or b""
        stalls = [tuple(map(float, line.split())) for line in self._text.splitlines()]
        return sum(seconds for ended, seconds in stalls if ended > moment)

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
        self.process.wait()
        self._pipe.close()
