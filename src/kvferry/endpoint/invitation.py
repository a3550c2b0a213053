"""Addresses of an engine, and the identity of a host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.errors import SpecError
from kvferry.wire.secret import Trust


@dataclass(frozen=True, slots=True)
class Invitation:
    """Address and credential for a rank to join its engine, passed on by the engine, for example by a pipe.

    >>> Invitation("tcp://127.0.0.1:5555", b"a secret")
    Invitation(address='tcp://127.0.0.1:5555')
    """

    address: str
    credential: bytes = field(repr=False)


EVERY_HOST = ("0.0.0.0", "*", "[::]")


def check_listen(listen: str, advertise: str, trust: Trust) -> None:
    """Raise SpecError unless listening there is allowed, and readers can connect to it."""
    if not advertise and any(f"//{host}:" in listen for host in EVERY_HOST):
        raise SpecError(f"listen={listen} is not an address that readers can connect to: set advertise=HOST")
    trust.check_listen(listen)


def advertised(address: str, host: str) -> str:
    """The address with another host.

    >>> advertised("tcp://0.0.0.0:5555", "10.0.0.7"), advertised("tcp://127.0.0.1:5555", "")
    ('tcp://10.0.0.7:5555', 'tcp://127.0.0.1:5555')
    """
    return f"tcp://{host}:{address.rpartition(':')[2]}" if host else address


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = "/proc/self/ns/net"


def this_host() -> str:
    """The boot ID and network namespace: processes that share both share a loopback; two pods do not."""
    try:
        return f"{BOOT_ID.read_text(encoding='ascii').strip()}/{os.stat(NETWORK_NAMESPACE).st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
