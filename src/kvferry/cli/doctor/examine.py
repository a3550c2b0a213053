"""One examination: all observations and measurements, on this host or with the doctor of another host."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.cli.doctor import observe
from kvferry.cli.doctor.observe import HostLimits, SecretSeen, Software
from kvferry.cli.doctor.peer import PeerSeen, call, whole_address
from kvferry.cli.doctor.sockets import EngineProbe, ListenerSeen
from kvferry.cli.machine import Gpus, describe_machine, gpus, package_versions
from kvferry.cli.processes import Worker, WorkerDied, quiet_environment
from kvferry.cli.reads import CALL_SECONDS, ReadsSeen, last_line, read_from, read_here, sizes_of
from kvferry.transport.settings import EXPOSE_SETTING, Expose


@dataclass(frozen=True, slots=True)
class Observed:
    software: Software
    gpus: Gpus
    limits: HostLimits
    secret: SecretSeen
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of UCX, NIXL, CUDA and kvferry, without the secret."""
    setting_errors: tuple[str, ...] = ()
    reads: tuple[ReadsSeen, ...] = ()
    listeners: tuple[ListenerSeen, ...] = ()
    """Of an engine with these settings."""
    listeners_error: str = ""
    """Why no such engine starts; empty if it does."""
    peer: PeerSeen | None = None

    @property
    def uses_fabric(self) -> bool:
        """Whether engines with these settings use NIXL."""
        return self.settings.get(EXPOSE_SETTING) == Expose.FABRIC.value

    @property
    def is_one_machine(self) -> bool:
        return self.peer is None or self.peer.is_one_machine


def examine(memories: Sequence[str], peer: str, progress: Callable[[str], None]) -> Observed:
    """Examine this machine, and read from another process of it, or from a peer."""
    address = whole_address("--peer", peer) if peer else ""
    secret_seen, secret = observe.secret(os.environ)
    observed = Observed(
        Software(package_versions()),
        gpus(),
        observe.host_limits(),
        secret_seen,
        describe_machine(),
        observe.settings(os.environ),
        observe.setting_errors(os.environ),
    )
    if observed.setting_errors or secret_seen.error:
        return observed
    progress("starting an engine, to list its sockets")
    observed = _with_engine(observed, memories[-1])
    if not peer:
        progress(f"reading {' and '.join(memories)} memory of another process")
        return replace(observed, reads=tuple(read_here(memory, sizes_of(memory)) for memory in memories))
    progress(f"calling {address}")
    called, offered = call(address, secret)
    progress("reading its memory")
    shared = (one for one in offered if one.memory in memories)
    reads = tuple(read_from(one, sizes_of(one.memory), shares_pids=called.shares_pids) for one in shared)
    return replace(observed, peer=called, reads=reads)


def _with_engine(observed: Observed, memory: str) -> Observed:
    """Add the sockets of an engine with these settings, and its NIXL."""
    with closing(Worker("doctor-engine", EngineProbe, env=quiet_environment())) as worker:
        try:
            observed = replace(observed, listeners=worker.call("listeners", memory, timeout=CALL_SECONDS))
        except Exception as error:  # of that process
            observed = replace(observed, listeners_error=last_line(error))
        if observed.uses_fabric:
            with suppress(WorkerDied):  # listeners_error says so
                nixl = worker.call("nixl", timeout=CALL_SECONDS)
                observed = replace(observed, software=replace(observed.software, **nixl))
    return observed
