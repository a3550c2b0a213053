"""The values of an examination, which ``kvferry doctor --json`` prints as they are, and its findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from kvferry.core.choices import Way
from kvferry.transport.settings import EXPOSE_SETTING, Expose

HOST = "host"
"""The memory that is not a device's."""


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
class Gpus:
    """Devices according to the driver, and whether kvferry can use them."""

    driver_cuda: str = ""
    """The newest CUDA that the driver serves ('13.0'); empty if there is no driver."""
    names: tuple[str, ...] = ()
    why_not: str = ""
    """Why kvferry cannot use them; empty if it can, or if there are none."""


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


@dataclass(frozen=True, slots=True)
class TimedRead:
    """Reads of one size, and how long each of them took."""

    num_runs: int
    run_bytes: int
    seconds: tuple[float, ...]

    @property
    def total_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True)
class ReadsSeen:
    """Reads of one kind of memory, from one process to another."""

    memory: str
    """``host``, or ``cuda:0``."""
    way: Way | None = None
    """None: no read was possible."""
    reason: str = ""
    """Why no better way is open, in the transport's words."""
    carrier: str = ""
    """``copy kernel``, ``stream``, or UCX's lane: ``cma/memory``, ``rc_mlx5/mlx5_0:1``, ``cuda_ipc/cuda``."""
    times: tuple[TimedRead, ...] = ()
    copy_bytes_per_second: float = 0.0
    """A plain copy within the reader's process."""
    cma_error: str = ""
    """Why the system does not let the reader read the source's memory without UCX; empty if it does."""
    error: str = ""
    wrong: str = ""
    """The first cell that differs from the source's."""

    @property
    def bytes_per_second(self) -> float:
        """Of the longest run; 0 if nothing was read."""
        longest = max(self.times, key=lambda one: one.run_bytes, default=None)
        return longest.total_bytes / min(longest.seconds) if longest else 0.0

    @property
    def most_runs(self) -> TimedRead | None:
        """The read of the most runs, whose time is spent on runs."""
        return max(self.times, key=lambda one: one.num_runs, default=None)

    @property
    def seconds_per_run(self) -> float:
        """Of the read of the most runs; 0 if nothing was read."""
        most = self.most_runs
        return min(most.seconds) / most.num_runs if most else 0.0


@dataclass(frozen=True, slots=True)
class ListenerSeen:
    """A socket that an engine with the present settings listens on."""

    purpose: str
    kind: str
    """``tcp`` or ``unix``."""
    address: str
    reach: str
    """Who can connect."""
    meaning: str
    """What they can do."""


@dataclass(frozen=True, slots=True)
class ProfileSeen:
    """A saved profile, compared with the present measurement."""

    path: str
    error: str = ""
    """Why it cannot be used at all."""
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where a process is, in words that another process can compare."""

    name: str
    boot: str
    """The boot of the machine: equal in all containers of it."""
    pid_namespace: str
    user: int
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A call to a ``kvferry doctor --listen``."""

    address: str
    ours: HostPlace
    tcp_error: str = ""
    """Why the port could not be reached at all."""
    is_connected: bool = False
    """Whether the listener speaks our protocol, with our secret or, like us, without one."""
    answer_error: str = ""
    theirs: HostPlace | None = None

    @property
    def is_one_machine(self) -> bool:
        return self.theirs is not None and self.theirs.boot == self.ours.boot

    @property
    def shares_pids(self) -> bool:
        """Whether one process can name the other."""
        theirs = self.theirs
        return theirs is not None and self.is_one_machine and theirs.pid_namespace == self.ours.pid_namespace


@dataclass(frozen=True, slots=True)
class Observed:
    software: Software
    gpus: Gpus
    limits: HostLimits
    secret: SecretSeen
    machine: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the environment: those that UCX, NIXL, CUDA and kvferry read, without the secret."""
    setting_errors: tuple[str, ...] = ()
    """Why kvferry rejects some of them."""
    reads: tuple[ReadsSeen, ...] = ()
    listeners: tuple[ListenerSeen, ...] = ()
    """Sockets of an engine with these settings."""
    listeners_error: str = ""
    """Why no such engine could be started; empty if one was."""
    profile: ProfileSeen | None = None
    peer: PeerSeen | None = None

    @property
    def uses_fabric(self) -> bool:
        """Whether engines with these settings use NIXL at all."""
        return self.settings.get(EXPOSE_SETTING) == Expose.FABRIC.value

    @property
    def is_one_machine(self) -> bool:
        """Whether both processes of the reads are on this machine."""
        return self.peer is None or self.peer.is_one_machine


class Level(StrEnum):
    """How bad it is, the worst first."""

    PROBLEM = "problem"
    """Something does not work until it is changed."""
    WARNING = "warning"
    """It works, but slower, or less safely, than this machine could."""
    NOTE = "note"
    """It matters to some deployments only."""


class Condition(StrEnum):
    """Everything that can be found; docs/doctor.md explains each. The names are stable."""

    NO_NIXL = "no-nixl"
    WRONG_WHEEL = "wrong-wheel"
    NIXL_VERSION = "nixl-version"
    NO_UCX = "no-ucx"
    VLLM_VERSION = "vllm-version"
    BAD_SETTING = "bad-setting"
    READ_FAILED = "read-failed"
    WRONG_BYTES = "wrong-bytes"
    NO_CMA = "no-cma"
    TCP_FALLBACK = "tcp-fallback"
    NO_RDMA_ACCESS = "no-rdma-access"
    LOW_MEMLOCK = "low-memlock"
    SLOW_READS = "slow-reads"
    NO_CUDA_BINDINGS = "no-cuda-bindings"
    NO_IPC = "no-ipc"
    GET_ZCOPY_OFF = "get-zcopy-off"
    NO_CUDA_COPY = "no-cuda-copy"
    VIRTUAL_MEMORY = "virtual-memory"
    NO_SECRET = "no-secret"
    BAD_SECRET = "bad-secret"
    OPEN_SECRET_FILE = "open-secret-file"
    STALE_PROFILE = "stale-profile"
    UNREACHABLE = "unreachable"
    WRONG_SECRET = "wrong-secret"
    NO_DOCTOR = "no-doctor"
    OTHER_VERSIONS = "other-versions"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    level: Level
    name: Condition
    what: str
    """What was seen."""
    why: str
    """Why it matters."""
    cure: str
    """What to do about it."""
