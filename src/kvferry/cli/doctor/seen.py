"""What was seen of a machine, as values: all that the checks know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from kvferry.core.way import Way
from kvferry.transport.settings import EXPOSE_SETTING, Expose

HOST = "host"
"""The memory that is not a device's."""


@dataclass(frozen=True, slots=True)
class Software:
    """What is installed, as far as it takes part."""

    versions: Mapping[str, str]
    """Of packages, by their names in an index; those that are not installed are left out."""
    nixl_error: str = ""
    """Why NIXL cannot be imported; empty if it can."""
    wheel: str = ""
    """The package that NIXL runs from, such as ``nixl_cu12``: it chooses by the CUDA that it finds."""
    ucx_version: str = ""
    plugins: tuple[str, ...] = ()
    """NIXL's."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Devices, by the driver itself, and whether kvferry can use them."""

    driver_cuda: str = ""
    """The newest CUDA that the driver serves ('13.0'); empty if there is no driver."""
    names: tuple[str, ...] = ()
    why_not: str = ""
    """Why kvferry cannot use them; empty if it can, or if there are none."""

    @property
    def num_devices(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What the system lets this process do."""

    memory_bytes: int
    memlock_bytes: int | None = None
    """How much memory may be locked; None: as much as there is."""
    may_lock_all: bool = False
    """Whether this process is above that limit (CAP_IPC_LOCK)."""
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
    """Whether everybody on this host can read the file."""
    fingerprint: str = ""
    """A few digits that are equal for equal secrets, and tell nothing of them."""


@dataclass(frozen=True, slots=True)
class TimedRead:
    """One size of read, and how long each turn took."""

    num_runs: int
    run_bytes: int
    seconds: tuple[float, ...]

    @property
    def total_bytes(self) -> int:
        return self.num_runs * self.run_bytes

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def best_seconds(self) -> float:
        """Of the turn that others disturbed least."""
        return min(self.seconds)


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
    """What UCX reads by: ``cma/memory``, ``tcp/eth0``, ``rc_mlx5/mlx5_0:1``, ``cuda_ipc/cuda`` …"""
    times: tuple[TimedRead, ...] = ()
    copy_bytes_per_second: float = 0.0
    """A plain copy within the reader's process."""
    cma_error: str = ""
    """What the system said when it was asked for a byte of the source, without UCX; empty if it gave it."""
    error: str = ""
    wrong: str = ""
    """The first cell that was not the source's."""

    @property
    def bytes_per_second(self) -> float:
        """Of the longest run; 0 if nothing was read."""
        longest = max(self.times, key=lambda one: one.run_bytes, default=None)
        return longest.total_bytes / longest.best_seconds if longest else 0.0

    @property
    def most_runs(self) -> TimedRead | None:
        """The read of the most runs: what it takes is spent on runs."""
        return max(self.times, key=lambda one: one.num_runs, default=None)

    @property
    def seconds_per_run(self) -> float:
        """Of the read of the most runs; 0 if nothing was read."""
        most = self.most_runs
        return most.best_seconds / most.num_runs if most else 0.0


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
    """A profile that was saved before, against what was measured now."""

    path: str
    error: str = ""
    """Why it cannot be used at all."""
    differences: tuple[str, ...] = ()
    """What is not as it was."""


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
    """A call to a `kvferry doctor --listen`."""

    address: str
    ours: HostPlace
    tcp_error: str = ""
    """Why the port could not be reached at all."""
    is_connected: bool = False
    """Whether somebody there speaks our language, with our secret or, like us, without one."""
    answer_error: str = ""
    """What was wrong with the answer."""
    theirs: HostPlace | None = None
    answer_seconds: float = 0.0

    @property
    def is_one_machine(self) -> bool:
        return self.theirs is not None and self.theirs.boot == self.ours.boot

    @property
    def shares_pids(self) -> bool:
        """Whether one process can name the other."""
        return (
            self.is_one_machine
            and self.theirs is not None
            and (self.theirs.pid_namespace == self.ours.pid_namespace)
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that was seen in one run."""

    software: Software
    gpus: Gpus
    limits: HostLimits
    secret: SecretSeen
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the environment: those that UCX, NIXL, CUDA and kvferry read, but for the secret."""
    setting_errors: tuple[str, ...] = ()
    """Why kvferry refuses some of them."""
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
