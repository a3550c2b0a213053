"""What this process may do on its machine: packages, limits, settings, the secret."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.endpoint.secret_source import SECRET, SECRET_FILE, secret_from_environment
from kvferry.errors import SpecError, TransportError
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import UCX_ALL, Expose, UcxSettings, WayChoice
from kvferry.wire.secret import Purpose, Secret

SETTINGS = (
    UCX_ALL,
    "NIXL_",
    "KVFERRY_",
    "CUDA_VISIBLE_DEVICES",
)
CAP_IPC_LOCK = 14
RDMA_DEVICES, RDMA_DOORS = Path("/sys/class/infiniband"), Path("/dev/infiniband")
FINGERPRINT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Software:
    """Installed packages, and the NIXL that engines with these settings use."""

    versions: Mapping[str, str]
    """By name in the package index; packages that are not installed are left out."""
    nixl_error: str = ""
    """Why NIXL cannot be imported; empty if it can, or if it is not used."""
    wheel: str = ""
    """The package that NIXL runs from, such as ``nixl_cu12``: it chooses by the CUDA that it finds."""
    ucx_version: str = ""
    plugins: tuple[str, ...] = ()
    """NIXL's."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What the system lets this process do."""

    memory_bytes: int
    memlock_bytes: int | None = None
    """How much memory may be locked; None: no limit."""
    may_lock_all: bool = False
    """Whether that limit does not apply to this process (CAP_IPC_LOCK)."""
    ptrace_scope: int | None = None
    """Yama's; None if the kernel has no Yama."""
    is_filtered: bool = False
    """Whether a seccomp filter looks at this process's system calls."""
    rdma_devices: tuple[str, ...] = ()
    may_open_rdma: bool = True


@dataclass(frozen=True, slots=True)
class SecretSeen:
    """The secret that the environment names, but not the secret."""

    origin: str = ""
    """The file, or the variable; empty if none is named."""
    error: str = ""
    is_open: bool = False
    """Whether every user of this host can read the file."""
    fingerprint: str = ""
    """A few digits that are equal for equal secrets, and reveal nothing of them."""


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
