"""The sockets that a process listens on, as the kernel lists them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_LISTENS = "0A"
_ACCEPTS = 1 << 16
"""A flag of Unix sockets."""


@dataclass(frozen=True, slots=True, order=True)
class Listener:
    """One listening socket, or a UDP socket with a port."""

    kind: str
    """``tcp``, ``udp`` or ``unix``."""
    address: str
    """``HOST:PORT``, a path, or ``@NAME`` for an abstract socket."""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


def listeners(pid: int | str = "self") -> set[Listener]:
    """Every listening socket of a process. Raises OSError if it has ended.

    >>> import socket
    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...     Listener("tcp", f"127.0.0.1:{server.getsockname()[1]}") in listeners()
    True
    >>> with socket.socket(socket.AF_UNIX) as server:
    ...     server.bind("\\0a-name-of-no-file")
    ...     server.listen()
    ...     Listener("unix", "@a-name-of-no-file") in listeners()
    True
    """
    inodes = set(_inodes(pid))
    return {listener for inode, listener in (*_internet(pid), *_unix(pid)) if inode in inodes}


def _inodes(pid: int | str) -> Iterator[str]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield target.removeprefix("socket:[").removesuffix("]")


def _internet(pid: int | str) -> Iterator[tuple[str, Listener]]:
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _rows(pid, table):
            address, port = fields[1].split(":")
            if fields[3] == _LISTENS if table.startswith("tcp") else int(port, 16):
                yield fields[9], Listener(table[:3], f"{_host(address)}:{int(port, 16)}")


def _unix(pid: int | str) -> Iterator[tuple[str, Listener]]:
    for fields in _rows(pid, "unix"):
        if int(fields[3], 16) & _ACCEPTS:
            yield fields[6], Listener("unix", fields[7] if len(fields) > 7 else "")


def _rows(pid: int | str, table: str) -> Iterator[list[str]]:
    path = Path(f"/proc/{pid}/net/{table}")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
            yield line.split(maxsplit=7) if table == "unix" else line.split()


def _host(text: str) -> str:
    """The usual notation of an address.

    >>> _host("0100007F"), _host("00000000000000000000000001000000")
    ('127.0.0.1', '[::1]')
    >>> _host("0000000000000000FFFF00000100007F")
    '127.0.0.1'
    """
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if len(data) == 4:
        return str(IPv4Address(data))
    address = IPv6Address(data)
    return str(address.ipv4_mapped) if address.ipv4_mapped else f"[{address}]"
