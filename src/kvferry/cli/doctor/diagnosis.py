"""What a doctor says: a closed list of conditions, each found at a level, with a reason and a cure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
