"""Which TCP addresses this process listens at, as the kernel has them."""

from __future__ import annotations

import os
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

_LISTENS = "0A"


def listening() -> set[tuple[str, int]]:
    """(address, port) of every listening TCP socket of this process."""
    sockets = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(entry.path))
        except OSError:
            continue  # closed meanwhile
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    data = b"".join(words)
    if len(data) == 4:
        return str(IPv4Address(data))
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)
