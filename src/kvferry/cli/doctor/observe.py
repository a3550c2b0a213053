"""The environment of this process: packages, limits, settings, the secret."""

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
    """Installed packages, and the NIXL of engines with these settings."""

    versions: Mapping[str, str]
    """Of installed packages, by name in the package index."""
    nixl_error: str = ""
    """Why NIXL cannot be imported; empty if it can, or is not used."""
    wheel: str = ""
    """The package that NIXL runs from, such as ``nixl_cu12``; NIXL chooses it by the installed CUDA."""
    ucx_version: str = ""
    plugins: tuple[str, ...] = ()
    """NIXL's."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    memory_bytes: int
    memlock_bytes: int | None = None
    """None: no limit."""
    may_lock_all: bool = False
    """Whether the limit does not apply (CAP_IPC_LOCK)."""
    rdma_devices: tuple[str, ...] = ()
    may_open_rdma: bool = True


@dataclass(frozen=True, slots=True)
class SecretSeen:
    """The public facts about the secret."""

    origin: str = ""
    """The file or the variable; empty if no secret is set."""
    error: str = ""
    is_open: bool = False
    """Whether every user of this host can read the file."""
    fingerprint: str = ""
    """Equal for equal secrets, without revealing them."""


def host_limits() -> HostLimits:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    lines = (line.partition(":") for line in file_text("/proc/self/status").splitlines())
    status = {key: value.strip() for key, _, value in lines}
    doors = RDMA_DOORS.glob("uverbs*")
    return HostLimits(
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        may_lock_all=bool(int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1),
        rdma_devices=tuple(sorted(path.name for path in RDMA_DEVICES.glob("*"))),
        may_open_rdma=any(os.access(path, os.R_OK | os.W_OK) for path in doors),
    )


def file_text(path: str | Path) -> str:
    """Empty if the file does not exist."""
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
    """Raise TransportError for settings that contradict each other."""
    expose = Expose.from_environment(environ)
    ProcessTransport(way=WayChoice.from_environment(environ), expose=expose).close()
    if expose is Expose.FABRIC:
        UcxSettings.from_environment(environ)


def secret(environ: Mapping[str, str]) -> tuple[SecretSeen, Secret | None]:
    """The environment's secret, and the public facts about it."""
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
