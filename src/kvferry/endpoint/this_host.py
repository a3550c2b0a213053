"""Which host this is, in words that another process can compare."""

from __future__ import annotations

import os
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK_NAMESPACE = "/proc/self/ns/net"


def this_host() -> str:
    """The boot of this machine, and the network namespace of this process.

    Two processes that have both in common share one loopback. Two pods of one machine do not.
    """
    try:
        return f"{BOOT_ID.read_text(encoding='ascii').strip()}/{os.stat(NETWORK_NAMESPACE).st_ino}"
    except OSError:  # no Linux: the name must do
        return socket.gethostname()
