"""A process that holds one object and answers calls to its methods."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from kvferry.errors import KVFerryError

STDOUT = 1
START = 0
"""The number of the first answer: that the object is made."""

_spawn = multiprocessing.get_context("spawn")
_numbers = count(START + 1)


class WorkerDied(KVFerryError):
    """The process is gone, or does not answer."""


class Worker:
    """Makes ``factory(*args)`` in a new process; ``call`` runs a method of it there and returns the result.

    A worker dies with the process that made it. Calls are answered one at a time, in order.
    """

    _is_stopped = False

    def __init__(
        self, name: str, factory: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._pipe, theirs = _spawn.Pipe()
        self._lock = threading.Lock()
        self._process = _spawn.Process(
            target=_serve, args=(theirs, dict(env or {}), factory, args), name=name, daemon=True
        )
        self._process.start()
        theirs.close()
        self._start = START
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        """Whether the process exists, stopped or not."""
        return self._process.is_alive()

    @property
    def is_running(self) -> bool:
        """Whether the process can answer: neither dead nor stopped."""
        return self.is_alive and not self._is_stopped

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until the object is made; raises what its making raised."""
        if not self._is_ready:
            self._answer(self._start, "start", timeout)
            self._is_ready = True

    def call(self, method: str, *args: Any, timeout: float = 60, **kwargs: Any) -> Any:
        """Run a method there; raises what it raised, or ``WorkerDied``."""
        self.wait_ready(timeout)
        with self._lock:
            return self._answer(self._ask(method, args, kwargs), method, timeout)

    def _ask(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Send a call; the number of its answer."""
        number = next(_numbers)
        try:
            self._pipe.send((number, method, args, kwargs))
        except (BrokenPipeError, OSError) as error:
            raise WorkerDied(f"{self.name} is gone") from error
        return number

    def _answer(self, number: int, method: str, timeout: float) -> Any:
        """Wait for an answer; late ones, to calls that were given up, are dropped."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise WorkerDied(f"{self.name} did not answer {method} within {timeout:g} s")
                answered, is_good, result = self._pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                raise WorkerDied(f"{self.name} died during {method}") from error
            if answered == number:
                break
        if is_good:
            return result
        raise result

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """SIGSTOP: the process stays, and does nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        self._is_stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self._is_stopped = False

    def close(self) -> None:
        """End the process: its object is closed first, if it can be."""
        if self._is_stopped and self.is_alive:
            self.resume()
        if self._process.is_alive():
            with contextlib.suppress(WorkerDied, Exception):
                self.call("close", timeout=15)
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(5)
            if self._process.is_alive():
                self.kill()
        self._pipe.close()


def call_all(
    workers: Sequence[Worker], method: str, *args: Any, timeout: float = 60, **kwargs: Any
) -> list[Any]:
    """Run a method in all of these at once; the results, or what the first that failed raised."""
    numbers: list[int] = []
    results: list[Any] = []
    errors: list[Exception] = []
    with contextlib.ExitStack() as held:
        for worker in workers:
            worker.wait_ready(timeout)
            held.enter_context(worker._lock)
            numbers.append(worker._ask(method, args, kwargs))
        for worker, number in zip(workers, numbers, strict=True):
            try:
                results.append(worker._answer(number, method, timeout))
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return results


def _serve(pipe: Connection, env: Mapping[str, str], factory: Callable[..., Any], args: Any) -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who made this process decides when it ends
    os.dup2(sys.stderr.fileno(), STDOUT)  # UCX logs to standard output, which is not ours
    os.environ.update(env)
    try:
        served = factory(*args)
        pipe.send((START, True, None))
    except Exception as error:
        pipe.send((START, False, _portable(error)))
        return
    with contextlib.suppress(EOFError, OSError):
        while (asked := pipe.recv()) is not None:
            number, method, arguments, keywords = asked
            try:
                pipe.send((number, True, getattr(served, method)(*arguments, **keywords)))
            except Exception as error:
                pipe.send((number, False, _portable(error)))
    # Libraries with threads of their own may not survive an orderly exit; nothing is left to tidy up.
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error with where it came from; foreign exception types may not survive the way."""
    return RuntimeError("".join(traceback.format_exception(error)))
