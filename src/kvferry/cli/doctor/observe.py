"""Looks at this process and its machine, and at the sockets of an engine with the present settings."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from kvferry.cli.bench.cases import CacheShape, cache_manifest
from kvferry.cli.doctor.probe import CALL_SECONDS, holding, last_line, quiet_environment
from kvferry.cli.doctor.seen import Gpus, HostLimits, ListenerSeen, Observed, SecretSeen
from kvferry.cli.processes import Worker, WorkerDied
from kvferry.core.manifest import Region
from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.endpoint.secret_source import SECRET, SECRET_FILE, secret_from_environment
from kvferry.errors import SpecError, TransportError
from kvferry.host.listening import Listener, listeners
from kvferry.transport.cards import Card, GatherPoint
from kvferry.transport.cuda import device_names
from kvferry.transport.nixl_agent import describe_build
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import UCX_ALL, Expose, UcxSettings, WayChoice
from kvferry.wire.secret import Purpose, Secret, Trust, is_loopback

SETTINGS = (
    UCX_ALL,
    "NIXL_",
    "KVFERRY_",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
CAP_IPC_LOCK = 14
RDMA_DEVICES, RDMA_DOORS = Path("/sys/class/infiniband"), Path("/dev/infiniband")
FINGERPRINT_BYTES = 4
SCHEME, LOOPBACK = "tcp://", "127.0.0.1"
ANY_HOST = ("192.0.2.1", 9)
"""Of the block for documentation: nothing is sent there. The kernel chooses our address by it."""


def gpus() -> Gpus:
    """Devices; counted by the driver itself, so that a missing binding is noticed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Gpus()
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return Gpus()
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return Gpus(cuda)
    try:
        return Gpus(cuda, tuple(device_names()))
    except TransportError as error:
        return Gpus(cuda, tuple(f"device {i}" for i in range(number.value)), error.detail)


def host_limits() -> HostLimits:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lines = (line.partition(":") for line in file_text("/proc/self/status").splitlines())
    status = {key: value.strip() for key, _, value in lines}
    scope = file_text("/proc/sys/kernel/yama/ptrace_scope")
    doors = RDMA_DOORS.glob("uverbs*")
    return HostLimits(
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        may_lock_all=bool(int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1),
        ptrace_scope=int(scope) if scope else None,
        is_filtered=status.get("Seccomp", "0") != "0",
        rdma_devices=tuple(sorted(path.name for path in RDMA_DEVICES.glob("*"))),
        may_open_rdma=any(os.access(path, os.R_OK | os.W_OK) for path in doors),
    )


def file_text(path: str | Path) -> str:
    """A small file of the kernel's; empty if it is not there."""
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that UCX, NIXL, CUDA and kvferry read, without the secret itself."""
    return {
        name: value for name, value in sorted(environ.items()) if name.startswith(SETTINGS) and name != SECRET
    }


def setting_errors(environ: Mapping[str, str]) -> tuple[str, ...]:
    found = []
    for read in (WayChoice.from_environment, Expose.from_environment, _check_together):
        try:
            read(environ)
        except TransportError as error:
            found.append(error.detail)
    return tuple(dict.fromkeys(found))


def _check_together(environ: Mapping[str, str]) -> None:
    """Raise TransportError if the way needs what is not exposed, or UCX's settings are rejected."""
    expose = Expose.from_environment(environ)
    ProcessTransport(way=WayChoice.from_environment(environ), expose=expose).close()
    if expose is Expose.FABRIC:
        UcxSettings.from_environment(environ)


def secret(environ: Mapping[str, str]) -> tuple[SecretSeen, Secret | None]:
    """The secret that the environment names, and what may be shown of it."""
    path = environ.get(SECRET_FILE, "")
    origin = f"the file {path}" if path else SECRET if environ.get(SECRET) else ""
    logging.disable(logging.WARNING)  # findings say the same
    try:
        found = secret_from_environment(environ)
    except SpecError as error:
        return SecretSeen(origin, str(error)), None
    finally:
        logging.disable(logging.NOTSET)
    if found is None:
        return SecretSeen(), None
    is_open = bool(path) and bool(os.stat(path).st_mode & 0o004)
    return SecretSeen(origin, "", is_open, found.key(Purpose.FINGERPRINT)[:FINGERPRINT_BYTES].hex()), found


def own_address() -> str:
    """The address by which other hosts reach this one; loopback if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(ANY_HOST)
        except OSError:
            return LOOPBACK
        return str(asking.getsockname()[0])


# -- the sockets of an engine ----------------------------------------------------------------------


SHAPE = CacheShape(run_bytes=4096, num_blocks=4)
MEANINGS = {
    "authority": "Callers can ask for leases; a lease needs a valid ticket.",
    "rank": "Callers can ask for bytes; they are sent only for a granted lease.",
    "stream": "A caller must name a stream that this rank offered, and only receives bytes.",
    "status": "Callers can read the status; nothing they send is read.",
    "descriptors": "A caller that has the rank's card can open its device memory.",
    "ucx": "Callers can read and write all memory of this process: UCX authenticates nobody.",
    "unknown": "Not opened by kvferry: a library in this process opened it.",
}
"""What callers can do, by what a socket is for: in the order in which they are shown."""
SEALED_MEANINGS = {
    **MEANINGS,
    "authority": "Encrypted. Callers must know the secret; a lease also needs a valid ticket.",
    "rank": "Encrypted. Callers must know the secret; bytes are sent only for a granted lease.",
    "stream": "A caller must name a stream that this rank offered; its frames are encrypted.",
}
"""With a secret."""


class EngineProbe:
    """A source engine of one rank, in a process of its own."""

    def listeners(self, memory: str) -> tuple[ListenerSeen, ...]:
        """Start one whose caches are in this kind of memory, and list its sockets."""
        logging.disable(logging.WARNING)
        secret = secret_from_environment()
        # Started on loopback only, described as an engine is: with a secret it listens at its host's address.
        host, meanings = (own_address(), SEALED_MEANINGS) if secret else (LOOPBACK, MEANINGS)
        sockets = _engine_sockets(memory, Trust(secret))
        found = [_described(purpose, listener, host, meanings) for listener, purpose in sockets.items()]
        return tuple(sorted(found, key=lambda each: (list(MEANINGS).index(each.purpose), each.address)))

    def nixl(self) -> dict[str, object]:
        """The build that an engine with these settings uses, or why it cannot be imported."""
        try:
            return asdict(describe_build())
        except TransportError as error:
            return {"nixl_error": str(error.__cause__ or error.detail)}


def _engine_sockets(memory: str, trust: Trust) -> dict[Listener, str]:
    """Each socket, and its purpose: by when it appears, and by its address."""
    listen = f"{SCHEME}{LOOPBACK}:*"
    with ExitStack() as stack:
        before = listeners()
        held = holding(memory, np.zeros(SHAPE.total_bytes, np.uint8))
        stack.callback(held.free)
        engine = stack.enter_context(closing(SourceEngine("doctor", 1, listen=listen, trust=trust)))
        engine_has, transport = listeners(), _WatchedTransport()
        manifest = cache_manifest("doctor", SHAPE, held.regions[0])
        rank = SourceRank(engine.invitation, manifest, transport, listen=listen, trust=trust)
        stack.enter_context(closing(rank))
        found = {
            **dict.fromkeys(engine_has - before, "authority"),
            **dict.fromkeys(transport.registered - engine_has, "ucx"),
            **dict.fromkeys(listeners() - transport.registered - engine_has, "stream"),
        }
        if gather := Card.from_bytes(transport.card()).gather:
            found[Listener("tcp", GatherPoint.from_bytes(gather).address.removeprefix(SCHEME))] = "rank"
        return found


class _WatchedTransport(ProcessTransport):
    """Notes which sockets there are once its memory is registered."""

    registered: frozenset[Listener] = frozenset()

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.registered = frozenset(listeners())


def _described(purpose: str, listener: Listener, host: str, meanings: Mapping[str, str]) -> ListenerSeen:
    """A socket of an engine that listens at ``host``: who reaches it, and what they can do.

    >>> _described("stream", Listener("tcp", "127.0.0.1:4000"), "10.0.0.7", MEANINGS).reach
    'hosts that can connect to 10.0.0.7'
    """
    kind, address = listener.kind, listener.address
    if kind == "unix":
        is_status = address.endswith(".sock")
        purpose = "descriptors" if address.startswith("@kvferry-") else "status" if is_status else "unknown"
    elif purpose != "ucx":
        address = f"{host}:{address.rpartition(':')[2]}"
    if purpose in ("status", "descriptors"):
        reach = "this user and root, on this host"
    elif kind == "unix" or is_loopback(f"{SCHEME}{address}"):
        reach = "processes of this host"
    else:
        reach = f"hosts that can connect to {address.rpartition(':')[0]}"
    return ListenerSeen(purpose, kind, address, reach, meanings[purpose])


def engine_seen(observed: Observed, memory: str) -> Observed:
    """The same, with the sockets of an engine with these settings, and the NIXL that it uses."""
    with closing(Worker("doctor-engine", EngineProbe, env=quiet_environment())) as worker:
        try:
            observed = replace(observed, listeners=worker.call("listeners", memory, timeout=CALL_SECONDS))
        except Exception as error:  # of that process: why no engine starts
            observed = replace(observed, listeners_error=last_line(error))
        if observed.uses_fabric:
            with suppress(WorkerDied):  # listeners_error says so
                nixl = worker.call("nixl", timeout=CALL_SECONDS)
                observed = replace(observed, software=replace(observed.software, **nixl))
    return observed
