"""When this machine stood still: a process beside the tests looks at the clock ten times a second.

Hosts of virtual machines stop them for seconds at times, and give that time to nobody. A test in which a
process must answer within ten seconds cannot tell a program that failed from a machine that stood still. Such
a test is run again, and says so; a test that fails on a machine that runs has failed.
"""

import contextlib
import os
import subprocess
import sys
import time

STALL_SECONDS = 1.5
"""A process that wants to run waits for less, however busy a machine is."""
LOOK = f"""
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    looked = time.monotonic()
    time.sleep(0.1)
    late = time.monotonic() - looked - 0.1
    if late > {STALL_SECONDS}:
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
        os.set_blocking(self._pipe.fileno(), False)
        self._text = b""

    def longest_since(self, moment: float) -> float:
        """For how many seconds it did at most, since a moment of the monotonic clock; 0 if it did not."""
        time.sleep(0.2)  # the watch, too, has to wake up
        with contextlib.suppress(BlockingIOError):
            self._text += self._pipe.read() or b""
        stalls = [tuple(map(float, line.split())) for line in self._text.splitlines()]
        return max((seconds for ended, seconds in stalls if ended > moment), default=0.0)

    def close(self) -> None:
        """Look no more."""
        self.process.kill()
        self.process.wait()
        self._pipe.close()
