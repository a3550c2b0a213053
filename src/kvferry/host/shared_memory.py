"""Memory that other processes of this user, on this host, can look at by its name.

It is named by where it is found and by what it must be called there: ``/proc/PID/fd/NUMBER NAME``. The name
holds 128 random bits: what is found in its place on another host, or later, has another one. Nothing that is
opened can harm who opens it: the name is compared before, nobody but its owner can write to it, and it cannot
be cut off below a reader's feet.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from mmap import mmap
from weakref import finalize

SEAL_FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE``, which older Pythons do not name. Before Linux 5.1, nothing is shared."""
PLACE = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10} [a-z-]{1,64}[0-9a-f]{32}")


class SharedMemory:
    """Memory of this process, which others can look at, and not change."""

    def __init__(self, prefix: str, num_bytes: int) -> None:
        """Raises OSError where there is no such memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a file")
        name = prefix + secrets.token_hex(16)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = finalize(self, os.close, fd)
        os.ftruncate(fd, num_bytes)
        self.memory = mmap(fd, num_bytes)
        seals = SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.place = f"/proc/{os.getpid()}/fd/{fd} {name}"
        """Where others look."""

    def close(self) -> None:
        """Let go of it; once is enough. Whoever looks at it keeps it until then."""
        self.memory.close()
        self._close()


def open_place(place: str, prefix: str) -> int:
    """A descriptor of somebody's memory, to be read; raises OSError if that is not there, or another one."""
    if not PLACE.fullmatch(place):
        raise OSError("it names no place")
    path, name = place.split(" ")
    if not name.startswith(prefix) or os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is something else")
    # Also what only looks like such memory must not keep us waiting.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{name} (deleted)":  # it was changed meanwhile
        os.close(fd)
        raise OSError(f"{path} is something else")
    return fd
