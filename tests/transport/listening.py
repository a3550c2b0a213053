"""Which sockets processes listen at, as the kernel has them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_LISTENS = "0A"
_ACCEPTS = 0x10000
"""A flag of unix sockets in the kernel's table: ``listen`` was called."""


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """A socket that others can reach. A UDP socket counts as soon as it has a port."""

    kind: str
    """tcp, udp or unix."""
    address: str
    """Of the host; for a unix socket its path, or ``@`` and its name."""
    port: int = 0


def listening() -> set[tuple[str, int]]:
    """(address, port) of every listening TCP socket of this process."""
    return {(each.address, each.port) for each in listeners_of([os.getpid()]) if each.kind == "tcp"}


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """All sockets that these processes listen at; one that has ended has none."""
    found: set[Listener] = set()
    for pid in pids:
        try:
            found |= set(_listeners_of(pid))
        except OSError:
            continue
    return found


def family_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    pids = [pid]
    for each in pids:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                pids += map(int, path.read_text(encoding="ascii").split())
            except OSError:
                continue  # it has ended
    return pids


def _listeners_of(pid: int) -> Iterator[Listener]:
    inodes = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            name = os.readlink(entry.path)
        except OSError:
            continue  # closed meanwhile
        if name.startswith("socket:["):
            inodes.add(name[8:-1])
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _table(pid, kind):
            fields = line.split()
            address, port = fields[1].split(":")
            is_open = fields[3] == _LISTENS if kind.startswith("tcp") else int(port, 16) > 0
            if is_open and fields[9] in inodes:
                yield Listener(kind[:3], _address(address), int(port, 16))
    for line in _table(pid, "unix"):
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
            yield Listener("unix", fields[7] if len(fields) > 7 else "")


def _table(pid: int, kind: str) -> list[str]:
    path = Path(f"/proc/{pid}/net/{kind}")
    return path.read_text(encoding="utf-8", errors="replace").splitlines()[1:] if path.exists() else []


def _address(text: str) -> str:
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    data = b"".join(words)
    if len(data) == 4:
        return str(IPv4Address(data))
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)
