"""What was seen of a machine, all that the checks know, and what a doctor says of it: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from kvferry.core.choices import Way
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


class Level(StrEnum):
    """How bad it is, the worst first."""

    PROBLEM = "problem"
    """Something will not work until it is cured."""
    WARNING = "warning"
    """It works, but slower, or less safely, than this machine could."""
    NOTE = "note"
    """Good to know; it matters to some deployments only."""


class Condition(StrEnum):
    """Everything that can be found. The names are stable: tools may match on them."""

    NO_NIXL = "no-nixl"
    """NIXL cannot be imported."""
    WRONG_WHEEL = "wrong-wheel"
    """NIXL's wheel is for another CUDA than torch's or the driver's."""
    NIXL_VERSION = "nixl-version"
    """A version of NIXL that kvferry was not written for, or two that were mixed."""
    NO_UCX = "no-ucx"
    """NIXL is there, but its UCX plugin is not."""
    VLLM_VERSION = "vllm-version"
    """A vLLM that kvferry's connector refuses."""
    BAD_SETTING = "bad-setting"
    """An environment variable whose value kvferry refuses."""
    READ_FAILED = "read-failed"
    """A read between the two processes failed."""
    WRONG_BYTES = "wrong-bytes"
    """A read ended well, and the bytes were not those of the source."""
    NO_CMA = "no-cma"
    """Two processes of this host cannot read each other's memory."""
    TCP_FALLBACK = "tcp-fallback"
    """There is an RDMA card, and bytes go over TCP."""
    NO_RDMA_ACCESS = "no-rdma-access"
    """There is an RDMA card, and this process may not open it."""
    LOW_MEMLOCK = "low-memlock"
    """This process may lock less memory than an RDMA card asks for."""
    SLOW_READS = "slow-reads"
    """Reads are direct, and far slower than a plain copy."""
    NO_CUDA_BINDINGS = "no-cuda-bindings"
    """There is a GPU, and kvferry cannot use it."""
    NO_IPC = "no-ipc"
    """Device memory of another process cannot be opened here, so that the copy kernel cannot be used."""
    GET_ZCOPY_OFF = "get-zcopy-off"
    """UCX was told not to read device memory by itself."""
    NO_CUDA_COPY = "no-cuda-copy"
    """There is a GPU, and UCX was told to do without it, so that NIXL makes no agent."""
    VIRTUAL_MEMORY = "virtual-memory"
    """torch was told to put device memory together from pieces, which few can open in another process."""
    NO_SECRET = "no-secret"
    """No secret is set: engines of other hosts are not talked to."""
    BAD_SECRET = "bad-secret"
    """A secret is named that cannot be read, or is none."""
    OPEN_SECRET_FILE = "open-secret-file"
    """Every user of this host can read the secret."""
    STALE_PROFILE = "stale-profile"
    """A saved profile does not tell what reads take here and now."""
    UNREACHABLE = "unreachable"
    """Nobody answers at the address of the peer."""
    WRONG_SECRET = "wrong-secret"
    """The peer answers, and does not know our secret."""
    NO_DOCTOR = "no-doctor"
    """The peer is there, and no `kvferry doctor --listen` of our version."""
    OTHER_VERSIONS = "other-versions"
    """The two hosts have different versions of what takes part."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that was found.

    >>> print(Diagnosis(Condition.NO_SECRET, Level.NOTE, "No secret is set.", "One host only.", "Make one."))
    note: no-secret: No secret is set. One host only. Make one.
    """

    condition: Condition
    level: Level
    what: str
    """What was seen."""
    why: str
    """Why it matters."""
    cure: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.level}: {self.condition}: {self.what} {self.why} {self.cure}"

    def as_object(self) -> dict[str, str]:
        """Plain data."""
        return {
            "name": self.condition.value,
            "level": self.level.value,
            "what": self.what,
            "why": self.why,
            "cure": self.cure,
        }
