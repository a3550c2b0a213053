"""What UCX is told, and what the environment tells it: read once per transport, as a value.

UCX takes settings from the environment of the process (``UCX_…``); NIXL adds those that an agent is made
with, and lets the environment win. So both are looked at here, together, and nowhere else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import TransportError
from kvferry.transport.descriptors import FULL_PACE, Pace
from kvferry.transport.emulation import (
    SEGMENT_BYTES,
    SETTING,
    UCX_SEGMENT_BYTES,
    AgentMode,
    EmulatedReads,
    fragment_bytes,
)
from kvferry.transport.ring_window import SETTING as SHARED_SETTING
from kvferry.transport.ring_window import SharedRings
from kvferry.transport.setting import chosen

UCX_EMULATES = "UCX_PROTO_EMULATION_ENABLE"
UCX_SENT, UCX_RECEIVED = "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"
UCX_TRANSPORTS = "UCX_TLS"
UCX_GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
UCX_DEVICES = "UCX_NET_DEVICES"
LOOPBACK_DEVICE = "lo"
UCX_ALL = "UCX_"
"""What the names of all its settings begin with."""

AGENTS_SETTING = "KVFERRY_READ_AGENTS"
FEW_AGENTS, MOST_AGENTS = 4, 8
"""Up to so many all cores are used, from then on half of them (``docs/performance.md``)."""

CUDA_ENVIRONMENT = {UCX_GET_ZCOPY: "y"}
"""What the environment must have before an agent is made that reads or serves CUDA memory.

Without it, reads of device memory on one host go through TCP: 0.5 GB/s instead of 1,300.
"""

GPU_DRIVER = Path("/dev/nvidiactl")
"""A file of NVIDIA's driver. The driver itself is not called: a process that has must not fork any more."""


def fabrics(*, has_gpu: bool) -> dict[str, dict[str, str]]:
    """What the environment of processes says that are to read each other's host memory by CMA, or over TCP.

    UCX sends its own messages over TCP in both. Where a GPU is, NIXL makes no agent without ``cuda_copy``;
    where none is, UCX warns of it. TCP is for what is done between two hosts: no memory is shared there.

    >>> fabrics(has_gpu=True)["tcp"]
    {'UCX_TLS': 'tcp,self,cuda_copy', 'KVFERRY_SHARED_RINGS': 'off'}
    """
    more = ",cuda_copy" if has_gpu else ""
    apart = {SHARED_SETTING: SharedRings.OFF.value}
    return {
        "cma": {UCX_TRANSPORTS: f"sm,tcp,self{more}"},
        "tcp": {UCX_TRANSPORTS: f"tcp,self{more}", **apart},
    }


FABRICS = fabrics(has_gpu=GPU_DRIVER.exists())
"""Those of this machine."""

QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
"""For a process whose report says what went wrong: loud libraries would drown it."""

UNITS = {unit: 1 << (10 * i) for i, unit in enumerate(("", "k", "m", "g"))}


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """How the agents of one transport use UCX.

    >>> UcxSettings.from_environment({"UCX_TCP_TX_SEG_SIZE": "8k", "KVFERRY_READ_AGENTS": "2"})
    UcxSettings(emulated_reads=<...careful'>, sent_bytes=8192, received_bytes=262144, num_agents=2, ...)
    """

    emulated_reads: EmulatedReads = EmulatedReads.CAREFUL
    sent_bytes: int = SEGMENT_BYTES
    """The longest TCP segment that our agents send."""
    received_bytes: int = SEGMENT_BYTES
    """The longest TCP segment that our agents have room for."""
    num_agents: int = 1
    """How many agents share a long read."""
    is_one_host: bool = False
    """Whether only this host is served. UCX authenticates nobody, and listens on every network device that it
    may use: with this, on loopback only."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> UcxSettings:
        """The settings of agents that are made in this environment; raises TransportError if they clash."""
        sent, received = _bytes_in(environ, UCX_SENT), _bytes_in(environ, UCX_RECEIVED)
        # UCX wants no more to be sent than there is room for.
        sent = sent or min(SEGMENT_BYTES, received or SEGMENT_BYTES)
        received = received or max(SEGMENT_BYTES, sent)
        return cls(_emulated_reads(environ), sent, received, _num_agents(environ))

    @property
    def first_mode(self) -> AgentMode:
        """How a remote rank is tried first."""
        return AgentMode.FAST if self.emulated_reads is EmulatedReads.FAST else AgentMode.DIRECT

    def engine_config(self, mode: AgentMode) -> str:
        """For NIXL's UCX engine; what the environment has, too, stays as it is there.

        >>> UcxSettings().engine_config(AgentMode.DIRECT)
        'TCP_TX_SEG_SIZE=262144,TCP_RX_SEG_SIZE=262144,PROTO_EMULATION_ENABLE=n'
        """
        settings = {UCX_SENT: str(self.sent_bytes), UCX_RECEIVED: str(self.received_bytes)}
        if self.is_one_host:
            settings[UCX_DEVICES] = LOOPBACK_DEVICE
        if mode is AgentMode.DIRECT:
            settings[UCX_EMULATES] = "n"
        if mode is AgentMode.CAREFUL:
            # Where InfiniBand cannot read memory, it could still carry messages, but in other fragments.
            settings[UCX_TRANSPORTS] = "^ib"
        return ",".join(f"{name.removeprefix('UCX_')}={value}" for name, value in settings.items())

    def pace(self, mode: AgentMode, src_segment_bytes: int) -> Pace:
        """How to read from an agent that sends such segments; 0 if nobody told it which."""
        sent = src_segment_bytes or UCX_SEGMENT_BYTES
        if mode is AgentMode.CAREFUL:
            return Pace.careful(fragment_bytes(min(self.received_bytes, sent)))
        if mode is AgentMode.FAST and self.received_bytes < sent:
            # UCX does not negotiate: the first long segment breaks the connection, and ends the source.
            raise TransportError(
                "segments",
                f"it sends segments of {sent} bytes, {UCX_RECEIVED} has room for {self.received_bytes}",
            )
        return FULL_PACE


def choices_told_in(folder: str) -> dict[str, str]:
    """What the environment of a process says that is to write down, in a folder, what UCX reads by."""
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/ucx.%p.log"}


def prepare_for_cuda(environ: MutableMapping[str, str]) -> None:
    """Tell UCX, in this environment, what it needs for CUDA memory; what is set there stays."""
    for name, value in CUDA_ENVIRONMENT.items():
        environ.setdefault(name, value)


def _emulated_reads(environ: Mapping[str, str]) -> EmulatedReads:
    """The setting, checked beside UCX's own, which NIXL lets win over what an agent is made with."""
    wanted, ucx = chosen(SETTING, environ, EmulatedReads.CAREFUL), environ.get(UCX_EMULATES, "")
    if ucx.lower() in ("n", "no", "0", "off"):
        return EmulatedReads.REFUSE
    if ucx and wanted is not EmulatedReads.FAST:
        raise TransportError(
            "bad-setting",
            f"{UCX_EMULATES}={ucx!r} has UCX emulate reads unasked, and {SETTING} is {wanted.value!r}: unset"
            f" the first, or set the second to {EmulatedReads.FAST.value!r}",
        )
    return wanted


def default_agents(num_cores: int) -> int:
    """How many agents share a long read.

    >>> [default_agents(num_cores) for num_cores in (1, 2, 4, 8, 12, 16, 128)]
    [1, 2, 4, 4, 6, 8, 8]
    """
    return min(MOST_AGENTS, max(min(FEW_AGENTS, num_cores), num_cores // 2))


def _num_agents(environ: Mapping[str, str]) -> int:
    """The setting; by default as many as there are cores for them, but not more than help."""
    if AGENTS_SETTING not in environ:
        return default_agents(len(os.sched_getaffinity(0)))
    value = environ[AGENTS_SETTING]
    if not re.fullmatch(r"[1-9]|[1-5]\d|6[0-4]", value):
        raise TransportError("bad-setting", f"{AGENTS_SETTING}={value!r}: a number of agents, from 1 to 64")
    return int(value)


def _bytes_in(environ: Mapping[str, str], name: str) -> int | None:
    """A number of bytes, the way UCX reads it ('8k', '1M', '65536', '64KB')."""
    if name not in environ:
        return None
    found = re.fullmatch(r"([1-9]\d*)([kmg]?)b?", environ[name].lower())
    if not found:
        raise TransportError("bad-setting", f"{name}={environ[name]!r}: not a number of bytes")
    return int(found[1]) * UNITS[found[2]]
