"""Every way of starting kvferry listens at the sockets that are documented, and at no others.

``DOCUMENTED`` is the table of docs/security.md as data. Each command runs in a process of its own; all its
children are looked at while it runs. vLLM's case is tests/vllm/test_expose.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.host.listening import Listener
from kvferry.transport.exports import DescriptorServer
from tests.hostile.world import ROOT, Process, environment
from tests.transport.listening import family_of, listeners_of

HOST = "127.0.0.2"
"""This machine, as others would call it: an address that an engine was told to listen at."""
LOOK_SECONDS = 0.02
PATIENCE_SECONDS = 90.0
STAY = """
import socket, time, zmq

def stay(listen):
    def listen_and_stay(*args, **kwargs):
        try:
            return listen(*args, **kwargs)
        finally:
            time.sleep(0.5)
    return listen_and_stay

socket.socket.listen = stay(socket.socket.listen)
zmq.Socket.bind = stay(zmq.Socket.bind)
"""
"""Python runs this before each command: what is open for a moment only is open long enough to be seen."""


@dataclass(frozen=True, slots=True)
class Documented:
    """Sockets of one kind that one way of starting opens."""

    purpose: str
    kind: str
    where: str
    """An address; ``HOST``: the one that it was told to listen at. Of a unix socket: how its name begins."""
    number: int = 1
    protection: str = ""


LOOPBACK = "127.0.0.1"
AUTHORITY = "CURVE with a secret; without one, loopback only"
RANK = "as the authority's; each ask carries a permit"
STREAMS = "a 128-bit id that is told over the control channel; AES-128-GCM with a secret"
STATUS = "folder 0700, socket 0600; same user or root"


def source(host: str = LOOPBACK, num_ranks: int = 1, name: str = "prefill") -> tuple[Documented, ...]:
    """A source engine, whose ranks may be other processes."""
    return (
        Documented("lease authority", "tcp", host, 1, AUTHORITY),
        Documented("asks of a rank", "tcp", host, num_ranks, RANK),
        Documented("streams of a rank", "tcp", host, num_ranks, STREAMS),
        Documented("status of the engine", "unix", f"status/source-{name}-", 1, STATUS),
    )


def destination(name: str = "decode", num_ranks: int = 1) -> tuple[Documented, ...]:
    return (Documented("status of the rank", "unix", f"status/destination-{name}-", num_ranks, STATUS),)


DOCUMENTED: dict[str, tuple[Documented, ...]] = {
    "library: SourceEngine and SourceRank": source(),
    "library, with a secret": source("HOST"),
    "library: Destination": destination(),
    "kvferry demo": (*source(num_ranks=4, name="src"), *destination("dst", 2)),
    "kvferry doctor": (*source(name="doctor"), *source()[1:3]),
    "kvferry doctor --listen": (
        Documented("calls of doctors", "tcp", "HOST", 1, AUTHORITY),
        *source("HOST")[1:3],
    ),
    "kvferry proxy": (Documented("HTTP", "tcp", "HOST", 1, "none: clients, as those of vLLM's own port"),),
    "kvferry bench": source()[1:3],  # without NIXL; with it, also UCX's own sockets on loopback
    "device memory (KVFERRY_EXPOSE=host)": (
        Documented("descriptors of device memory", "unix", "@kvferry-", 1, "same user or root, and a token"),
    ),
}
"""By way of starting. All other commands open none."""


def seen(listeners: set[Listener]) -> Counter[tuple[str, str]]:
    """By kind and address, or the telling part of a name."""
    return Counter((each.kind, _place(each)) for each in listeners)


def _place(listener: Listener) -> str:
    if listener.kind != "unix":
        return listener.host
    if listener.address.startswith("@"):
        return listener.address[: len("@kvferry-")]
    bound = Path(listener.address)
    path = bound.with_name(bound.name.removeprefix("."))  # renamed once it listens
    assert path.parent.stat().st_mode & 0o077 == 0, f"others can enter {path.parent}"
    assert not path.exists() or path.stat().st_mode & 0o077 == 0, f"others can connect to {path}"
    name = path.name.removesuffix(".sock").rsplit("-", 2)[0]  # without its process and what makes it unique
    return f"{path.parent.name}/{name.rstrip('0123456789').rstrip('-')}-"


def documented(way: str, host: str) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for each in DOCUMENTED[way]:
        found[each.kind, each.where.replace("HOST", host)] += each.number
    return found


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    return str(path)


def listeners_while_it_runs(
    command: list[str], env: dict[str, str], is_enough: Callable[[set[Listener]], bool]
) -> set[Listener]:
    """All that a command and its children ever listened at; it is ended once that is enough."""
    found: set[Listener] = set()
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                found |= listeners_of(family_of(process.pid))
                if is_enough(found):
                    time.sleep(5 * LOOK_SECONDS)  # what comes late comes now
                    found |= listeners_of(family_of(process.pid))
                    break
                time.sleep(LOOK_SECONDS)
        finally:
            family = family_of(process.pid)
            for _ in range(20):
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(1)
                    break
                except subprocess.TimeoutExpired:
                    continue  # it may not have listened to signals yet
            else:
                for pid in family:
                    os.kill(pid, signal.SIGKILL)
    return found


COMMANDS = {
    "kvferry demo": "demo --tokens 300 --requests 2 --layers 2 --src tp=4 --dst tp=2 --model gpt-oss-20b",
    "kvferry doctor": "doctor --memory host",
    "kvferry doctor --listen": f"doctor --memory host --listen {HOST}:0",
    "kvferry proxy": f"proxy --listen {HOST}:0 --prefill http://{HOST}:1 --decode http://{HOST}:2",
    "kvferry bench": "bench --quick --memory host",
}
SERVES = ("kvferry doctor --listen", "kvferry proxy")
"""These run until they are told to stop; the others until they are done."""


@pytest.mark.parametrize("has_secret", [False, True], ids=["no secret", "secret"])
@pytest.mark.parametrize("way", COMMANDS)
def test_a_command(way: str, secret_file: str, tmp_path: Path, *, has_secret: bool) -> None:
    """A secret opens nothing more: it is the address that a command was told which does."""
    wanted = documented(way, HOST)
    env = environment(secret_file if has_secret else "")
    (tmp_path / "nixl.py").write_text("raise ImportError")
    (tmp_path / "sitecustomize.py").write_text(STAY)
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env.get("PYTHONPATH", "")])
    found = listeners_while_it_runs(
        [sys.executable, "-m", "kvferry", *COMMANDS[way].split()],
        env,
        lambda found: way in SERVES and seen(found).total() >= wanted.total(),
    )
    assert seen(found) == wanted


@contextmanager
def running(script: str, env: dict[str, str], *argv: str) -> Iterator[Process]:
    process = Process([sys.executable, str(ROOT / "tests" / "hostile" / script), *argv], env)
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("has_secret", [False, True], ids=["no secret", "secret"])
def test_the_library(secret_file: str, *, has_secret: bool) -> None:
    env, host = environment(secret_file if has_secret else ""), HOST if has_secret else LOOPBACK
    way = "library, with a secret" if has_secret else "library: SourceEngine and SourceRank"
    with running("source_process.py", env, host) as engine, running("reader_process.py", env) as reader:
        assert seen(listeners_of([engine.pid])) == documented(way, host)
        for _ in range(2):
            answer = reader.ask(engine.ask("offer"))
            assert '"error": ""' in answer, answer
        assert seen(listeners_of([engine.pid])) == documented(way, host), "a reader changes nothing"
        assert seen(listeners_of([reader.pid])) == documented("library: Destination", host)


def test_descriptors_of_device_memory() -> None:
    before = listeners_of([os.getpid()])
    server = DescriptorServer([])
    try:
        found = listeners_of([os.getpid()]) - before
    finally:
        server.close()
    assert seen(found) == documented("device memory (KVFERRY_EXPOSE=host)", LOOPBACK)
