"""Settings of a transport: transfer mode, exposure to readers, and UCX.

UCX takes settings from the environment (``UCX_…``), which have priority over those that NIXL passes to an
agent. So this file reads both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from kvferry.errors import TransportError

WAY_SETTING, EXPOSE_SETTING = "KVFERRY_WAY", "KVFERRY_EXPOSE"

C = TypeVar("C", bound=Enum)


class WayChoice(Enum):
    AUTO = "auto"
    """Mapped where possible, else direct, else packed."""
    MAPPED = "mapped"
    DIRECT = "direct"
    PACKED = "packed"
    """These three allow no other mode."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> WayChoice:
        """Raises TransportError if the setting is not one of these words."""
        return chosen(WAY_SETTING, environ, cls.AUTO)

    def allows(self, way: WayChoice) -> bool:
        """
        >>> WayChoice.AUTO.allows(WayChoice.MAPPED), WayChoice.DIRECT.allows(WayChoice.MAPPED)
        (True, False)
        """
        return self in (WayChoice.AUTO, way)


class Expose(Enum):
    """The part of a rank's memory that readers can reach without its help."""

    NOTHING = "nothing"
    """The rank sends every byte itself, after checking the ticket."""
    HOST = "host"
    """Device memory, to processes of the same user on the same host. The rank sends the rest itself."""
    FABRIC = "fabric"
    """All memory, registered with NIXL, to any process that has the card and reaches the fabric."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Expose:
        """Raises TransportError if the setting is not one of these words.

        >>> Expose.from_environment({}), Expose.from_environment({"KVFERRY_EXPOSE": "nothing"})
        (<Expose.HOST: 'host'>, <Expose.NOTHING: 'nothing'>)
        """
        return chosen(EXPOSE_SETTING, environ, cls.HOST)


def chosen(setting: str, environ: Mapping[str, str], default: C) -> C:
    """The value of a setting; raises TransportError if it is unknown.

    >>> chosen("KVFERRY_EXPOSE", {"KVFERRY_EXPOSE": "all"}, Expose.HOST)
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-setting: KVFERRY_EXPOSE='all': must be one of nothing, host, fabric
    """
    choices = type(default)
    value = environ.get(setting, default.value)
    try:
        return choices(value)
    except ValueError:
        words = ", ".join(choice.value for choice in choices)
        raise TransportError("bad-setting", f"{setting}={value!r}: must be one of {words}") from None


UCX_EMULATES = "UCX_PROTO_EMULATION_ENABLE"
UCX_TRANSPORTS = "UCX_TLS"
UCX_GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
UCX_DEVICES = "UCX_NET_DEVICES"
LOOPBACK_DEVICE = "lo"
UCX_ALL = "UCX_"
NO_TCP = "^tcp"
"""The default of ``UCX_TLS``. RDMA protects memory by keys; UCX's TCP has none, and serves any address of the
process to every client of its port."""

FEW_AGENTS, MOST_AGENTS = 4, 8
"""Agents that share a long read: one per core up to the first number, then one for two cores."""

CUDA_ENVIRONMENT = {UCX_GET_ZCOPY: "y"}
"""Set before an agent is made for CUDA memory. Without it, reads of device memory on one host go through TCP:
0.5 GB/s instead of 1,300."""


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """Of the agents of one transport.

    >>> UcxSettings.from_environment({"UCX_TLS": "sm,tcp,self"}).engine_config
    'PROTO_EMULATION_ENABLE=n,NET_DEVICES=lo'
    >>> UcxSettings.from_environment({"UCX_TLS": "all", "UCX_NET_DEVICES": "eth0"})
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-setting: UCX_TLS='all' with UCX_NET_DEVICES='eth0' opens TCP ports ...
    """

    engine_config: str = ""
    """For NIXL's UCX engine; the environment has priority."""
    num_agents: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> UcxSettings:
        """Raises TransportError if UCX would listen for other hosts, or emulate reads."""
        settings = {UCX_EMULATES: "n"}
        # A reader that dies during an emulated read ends its source's process (UCX 1.23).
        if (emulates := environ.get(UCX_EMULATES, "n")).lower() not in ("n", "no", "0", "off"):
            detail = f"{UCX_EMULATES}={emulates!r}: emulated reads are not supported: unset it"
            raise TransportError("bad-setting", detail)
        transports = environ.get(UCX_TRANSPORTS)
        if transports is None:
            settings[UCX_TRANSPORTS] = NO_TCP
        elif allows_tcp(transports):
            settings[UCX_DEVICES] = LOOPBACK_DEVICE
            if (devices := environ.get(UCX_DEVICES, LOOPBACK_DEVICE)) != LOOPBACK_DEVICE:
                raise TransportError(
                    "bad-setting",
                    f"{UCX_TRANSPORTS}={transports!r} with {UCX_DEVICES}={devices!r} opens TCP ports through"
                    " which every client can read and write this process's memory: leave tcp out, or unset"
                    f" {UCX_DEVICES}",
                )
        config = ",".join(f"{name.removeprefix(UCX_ALL)}={value}" for name, value in settings.items())
        return cls(config, default_agents(len(os.sched_getaffinity(0))))


def allows_tcp(transports: str) -> bool:
    """Whether UCX may use TCP, given ``UCX_TLS``; True where that is unclear.

    >>> [allows_tcp(text) for text in ("sm,tcp", "all", "^tcp", "^ib", "ib,self")]
    [True, True, False, True, False]
    >>> [allows_tcp(text) for text in ("", "rc,tcp:aux", "rc,t*", "^tcp:aux")]
    [True, True, True, True]
    """
    names = set(transports.removeprefix("^").replace(" ", "").split(","))
    if transports.startswith("^"):
        return "tcp" not in names
    return any(name in ("", "all") or "tcp" in name or set(name) & set("*?[") for name in names)


def default_agents(num_cores: int) -> int:
    """
    >>> [default_agents(num_cores) for num_cores in (1, 2, 4, 8, 12, 16, 128)]
    [1, 2, 4, 4, 6, 8, 8]
    """
    return min(MOST_AGENTS, max(min(FEW_AGENTS, num_cores), num_cores // 2))
