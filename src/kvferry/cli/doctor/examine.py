"""One examination: everything is looked at, then measured, and becomes one value."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.cli.doctor import observe
from kvferry.cli.doctor.calling import Say, call, listen, read_peer, whole_address
from kvferry.cli.doctor.profile import compared_profile
from kvferry.cli.doctor.seen import HOST, ListenerSeen, Observed, PeerSeen, ReadsSeen, SecretSeen, Software
from kvferry.cli.doctor.sockets import engine_listeners
from kvferry.cli.doctor.two_processes import failed_read, last_line, read_from, serving_memory
from kvferry.cli.machine import describe_machine, package_versions
from kvferry.errors import SpecError
from kvferry.transport.nixl_agent import NixlBuild
from kvferry.transport.settings import EXPOSE_SETTING, Expose
from kvferry.wire.secret import Secret

FIRST_DEVICE = "cuda:0"


def asked_memories(asked: Sequence[str]) -> list[str]:
    """The kinds of memory to read; raises SpecError if one is not there."""
    gpus = observe.gpus()
    devices = [f"cuda:{i}" for i in range(gpus.num_devices)] if not gpus.why_not else []
    for name in asked:
        if name != HOST and name not in devices:
            there = ", ".join([HOST, *devices])
            raise SpecError(
                f"--memory {name}: there is {there}{f' ({gpus.why_not})' if gpus.why_not else ''}"
            )
    return list(dict.fromkeys(asked)) or [HOST, *devices[:1]]


def serve(address: str, memories: Sequence[str], say: Say) -> None:
    """Be read by another doctor, until interrupted."""
    whole = whole_address("--listen", address)
    seen, secret = _secret()
    say(f"the secret has the fingerprint {seen.fingerprint}" if seen.fingerprint else "no secret is set")
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process of a container would ignore the latter
        signal.signal(number, signal.default_int_handler)
    try:
        listen(whole, secret, memories, say)
    except KeyboardInterrupt:
        say("no longer listening")


def _secret() -> tuple[SecretSeen, Secret | None]:
    seen, secret = observe.secret(os.environ)
    if seen.error:
        raise SpecError(seen.error)
    return seen, secret


@dataclass(frozen=True)
class _Measured:
    """What was found by reading."""

    reads: tuple[ReadsSeen, ...] = ()
    build: NixlBuild | None = None
    peer: PeerSeen | None = None

    @classmethod
    def of(
        cls, done: Sequence[tuple[ReadsSeen, NixlBuild | None]], peer: PeerSeen | None = None
    ) -> _Measured:
        builds = [build for _, build in done if build]
        return cls(tuple(reads for reads, _ in done), builds[0] if builds else None, peer)


def examine(memories: Sequence[str], peer: str, profile: Path | None, progress: Say) -> Observed:
    """Look at this machine, and read from another process of it, or from a peer."""
    address = whole_address("--peer", peer) if peer else ""
    settings = observe.settings(os.environ)
    software = Software(package_versions())
    seen, secret = observe.secret(os.environ)
    errors = observe.setting_errors(os.environ)
    measured = _Measured()
    listeners: tuple[ListenerSeen, ...] = ()
    listeners_error = ""
    if not (errors or seen.error):
        listeners, listeners_error = _listeners(memories, progress)
        measured = _read_peer(address, secret, memories, progress) if peer else _read_here(memories, progress)
    if build := measured.build:
        software = replace(software, wheel=build.wheel, ucx_version=build.ucx_version, plugins=build.plugins)
    gpus = observe.gpus()
    if settings.get(EXPOSE_SETTING) == Expose.FABRIC.value:
        software = replace(software, nixl_error=observe.nixl_error())
    observed = Observed(
        software=software,
        gpus=gpus,
        limits=observe.host_limits(),
        secret=seen,
        settings=settings,
        setting_errors=errors,
        reads=measured.reads,
        listeners=listeners,
        listeners_error=listeners_error,
        peer=measured.peer,
    )
    if profile is None:
        return observed
    machine = describe_machine(", ".join(gpus.names))
    compared = compared_profile(profile, measured.reads, machine, software.versions)
    return replace(observed, profile=compared)


def _listeners(memories: Sequence[str], progress: Say) -> tuple[tuple[ListenerSeen, ...], str]:
    """The sockets of an engine that is started for it; or why it did not start."""
    progress("starting an engine, to list its sockets")
    try:
        return engine_listeners(memories[-1]), ""
    except Exception as error:  # of the process that was started: whatever it was, it is what was seen
        return (), last_line(error)


def _read_here(memories: Sequence[str], progress: Say) -> _Measured:
    """From another process of this machine."""
    done = []
    for memory in memories:
        progress(f"reading {memory} memory of another process")
        try:
            with serving_memory(memory) as served:
                done.append(read_from(memory, served.card, served.pid))
        except Exception as error:  # of the process that serves: whatever it was, it is what was seen
            done.append((failed_read(memory, error), None))
    return _Measured.of(done)


def _read_peer(address: str, secret: Secret | None, memories: Sequence[str], progress: Say) -> _Measured:
    """From a doctor that listens."""
    progress(f"calling {address}")
    peer, offered = call(address, secret)
    progress("reading its memory")
    return _Measured.of(read_peer(peer, offered, memories), peer)
