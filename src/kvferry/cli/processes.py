"""Worker processes that hold one object and answer calls; transports without engines."""

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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.owned import BlockBytes
from kvferry.core.view import Ints
from kvferry.endpoint.edges import open_channel
from kvferry.endpoint.gathering import GatherService, ask_to_gather
from kvferry.endpoint.secret_source import secret_from_environment
from kvferry.errors import KVFerryError
from kvferry.runtime.ticket_guard import Admitted, TicketGuard
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import EXPOSE_SETTING, UCX_TRANSPORTS, WAY_SETTING, Expose, WayChoice

STDOUT = 1
START = 0
"""The number of the first answer: the object exists."""

_spawn = multiprocessing.get_context("spawn")
_numbers = count(START + 1)

GPU_DRIVER = Path("/dev/nvidiactl")
"""A file of NVIDIA's driver. A process that calls the driver itself must not fork any more."""


FABRICS = {
    "cma": {
        EXPOSE_SETTING: Expose.FABRIC.value,
        WAY_SETTING: WayChoice.DIRECT.value,
        UCX_TRANSPORTS: f"sm,tcp,self{',cuda_copy,cuda_ipc' if GPU_DRIVER.exists() else ''}",
    },
    "tcp": {WAY_SETTING: WayChoice.PACKED.value},
}
"""Environments for reads within one host, directly by CMA or over TCP.

For direct reads UCX sends its own messages over TCP, on loopback. NIXL needs ``cuda_copy`` if there is a GPU;
without one UCX warns about it.
"""

QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}


def quiet_environment() -> dict[str, str]:
    """Silences the libraries of a process that reports errors itself."""
    return {name: os.environ.get(name, value) for name, value in QUIET.items()}


class WorkerDied(KVFerryError):
    """The process has ended, or does not answer."""


class Worker:
    """Creates ``factory(*args)`` in a new process, and calls its methods there, one at a time.

    A worker ends with the process that created it.
    """

    def __init__(
        self, name: str, factory: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._pipe, theirs = _spawn.Pipe()
        self._lock = threading.Lock()
        self._process = _spawn.Process(
            target=_serve, args=(theirs, dict(env or {}), factory, args), name=name, daemon=True
        )
        resource_tracker.ensure_running()  # its start would unblock the signal
        # Inherited: the parent process decides when it ends, also while it imports.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._start = START
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until the object exists; raises the error of its creation."""
        if not self._is_ready:
            self._answer(self._start, "start", timeout)
            self._is_ready = True

    def call(self, method: str, *args: Any, timeout: float = 60, **kwargs: Any) -> Any:
        """Run a method there; raises its error, or ``WorkerDied``."""
        self.wait_ready(timeout)
        with self._lock:
            return self._answer(self._ask(method, args, kwargs), method, timeout)

    def _ask(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Send a call; returns the number of its answer."""
        number = next(_numbers)
        try:
            self._pipe.send((number, method, args, kwargs))
        except (BrokenPipeError, OSError) as error:
            raise WorkerDied(f"process {self.name} has ended") from error
        return number

    def _answer(self, number: int, method: str, timeout: float) -> Any:
        """Wait for an answer; late answers to abandoned calls are dropped."""
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

    def close(self) -> None:
        """Close the object if possible, and end the process."""
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
    """Run a method in all workers at once; returns the results, or raises the first error."""
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
    # Libraries with threads of their own may crash in an orderly exit; nothing is left to clean up.
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error with its traceback as text: foreign exception types may not be picklable."""
    return RuntimeError("".join(traceback.format_exception(error)))


def until(condition: Callable[[], object], what: str, seconds: float = 30) -> None:
    """Wait for a condition; raises KVFerryError after the timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise KVFerryError(f"timed out after {seconds:g} s; expected: {what}")
        time.sleep(0.005)


# -- two transports alone, without engines ---------------------------------------------------------


class OpenGuard(TicketGuard):
    """Admits every request."""

    def __init__(self) -> None:
        nothing = BlockBytes(Manifest("open", (), (), ()), Rank(0, (), ()))
        super().__init__(b"", nothing)
        self._everything = Admitted(1, nothing.of_blocks({}))

    def admit(self, permit: bytes) -> Admitted:
        return self._everything

    def check(self, admitted: Admitted, terms: Sequence[tuple[Ints, Ints, Ints]]) -> None:
        return None


def gather_openly(transport: ProcessTransport, listen: str = "tcp://127.0.0.1:*") -> GatherService:
    """Let a registered transport send to all processes with the environment's secret, if any."""
    if transport.packed is None:
        raise KVFerryError("this memory does not support packed reads")
    secret = secret_from_environment()
    channel, is_sealed = open_channel(listen, secret), secret is not None
    service = GatherService(transport.packed.sender, OpenGuard(), channel, is_sealed=is_sealed)
    transport.packed.advertise(service.address)
    return service


class AskingTransport(ProcessTransport):
    """A transport that requests packed reads once it is registered, as a ``Destination`` does."""

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        ask_to_gather(self, lambda: open_channel("", secret_from_environment()))
