"""A process that holds one object and answers calls, and that can be stopped for a while."""

from __future__ import annotations

import os
import signal

from kvferry.cli import processes
from kvferry.cli.processes import WorkerDied, call_all

__all__ = ["Worker", "WorkerDied", "call_all"]


class Worker(processes.Worker):
    """A worker that tests stop and resume."""

    _is_stopped = False

    @property
    def is_running(self) -> bool:
        """Whether the process can answer: neither dead nor stopped."""
        return self.is_alive and not self._is_stopped

    def stop(self) -> None:
        """SIGSTOP: the process stays, and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        self._is_stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self._is_stopped = False

    def close(self) -> None:
        if self._is_stopped and self.is_alive:
            self.resume()
        super().close()
