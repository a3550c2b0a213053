"""Starts the two processes of a probe, and ends them."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from kvferry.cli.doctor.probe import ProbeReader, ProbeSource
from kvferry.cli.doctor.seen import ReadsSeen
from kvferry.cli.processes import RankCard, Worker
from kvferry.transport.nixl_agent import NixlBuild
from kvferry.transport.ucx import QUIET, choices_told_in

CALL_SECONDS = 180.0


@dataclass(frozen=True)
class ServedMemory:
    """Memory that a process of ours serves."""

    memory: str
    card: RankCard
    pid: int


def quiet_environment() -> dict[str, str]:
    """The environment as it is, but for libraries that would be loud beside our report."""
    return {name: os.environ.get(name, value) for name, value in QUIET.items()}


@contextmanager
def serving_memory(memory: str, host: str = "127.0.0.1") -> Iterator[ServedMemory]:
    """A process that serves one kind of memory at a host, until the end of the block."""
    listen, env = f"tcp://{host}:*", quiet_environment()
    with closing(Worker("doctor-src", ProbeSource, memory, listen, env=env)) as worker:
        yield ServedMemory(memory, worker.call("card", timeout=CALL_SECONDS), worker.pid)


def read_from(memory: str, source: RankCard, src_pid: int) -> tuple[ReadsSeen, NixlBuild | None]:
    """Read it in a process of its own, by which NIXL; whatever goes wrong there is what was seen.

    ``src_pid`` is 0 if the source's process cannot be named here.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-doctor-") as folder:
        env = {**quiet_environment(), **choices_told_in(folder)}
        with closing(Worker("doctor-dst", ProbeReader, memory, env=env)) as worker:
            try:
                seen = worker.call("read", source, src_pid, folder, timeout=CALL_SECONDS)
                return seen, worker.call("build", timeout=CALL_SECONDS)
            except Exception as error:
                return failed_read(memory, error), None


def failed_read(memory: str, error: Exception) -> ReadsSeen:
    """A probe that did not even come to reading, in the last line of what it said."""
    return ReadsSeen(memory, error=last_line(error))


def last_line(error: Exception) -> str:
    """Of what a process said; the class of its error means nothing to users."""
    line = (str(error).strip() or type(error).__name__).splitlines()[-1]
    return re.sub(r"^kvferry\.errors\.\w+: ", "", line)
