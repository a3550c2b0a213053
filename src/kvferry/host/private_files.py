"""Files and shared memory that belong to this user alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
from mmap import mmap
from pathlib import Path
from weakref import finalize

from kvferry.errors import SpecError

MAX_FILES = 64
MAX_FILE_BYTES = 64 << 20
MAX_NAME_CHARACTERS = 150


def own_folder() -> Path:
    """This user's private folder below the temporary folder; created if missing."""
    return _made_alone(Path(tempfile.gettempdir()) / f"kvferry-{os.geteuid()}")


def cache_folder() -> Path:
    """This user's private cache folder; created if missing."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise SpecError("this user has no home folder: set XDG_CACHE_HOME") from None
    Path(base).mkdir(mode=0o700, parents=True, exist_ok=True)
    return _made_alone(Path(base) / "kvferry")


def _made_alone(path: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SpecError(f"{path} is not a private folder of this user: remove it, or use another folder")
    return path


def write_private(folder: str | Path, name: str, data: bytes) -> Path:
    """Write a file that only this user can read. An existing file or link is replaced, never followed."""
    if len(data) > MAX_FILE_BYTES:
        raise SpecError(f"{name} is not written: its {len(data)} bytes exceed the limit of {MAX_FILE_BYTES}")
    path = Path(folder) / re.sub(r"[^A-Za-z0-9_.-]", "_", name)[-MAX_NAME_CHARACTERS:].lstrip(".")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(path) and len(os.listdir(path.parent)) >= MAX_FILES:
        raise SpecError(
            f"{path.name} is not written: {path.parent} has {MAX_FILES} files or more: remove some"
        )
    made = path.with_name(f".{secrets.token_hex(8)}")
    opened = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(opened, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # the file must be complete after a crash of the machine
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return path


SEAL_FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE``, which older Pythons lack; needs Linux 5.1."""
PLACE = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10} [a-z-]{1,64}[0-9a-f]{32}")


# Memory that other processes of this user on this host can read.
#
# Its place is ``/proc/PID/fd/NUMBER NAME``. The name has 128 random bits, so another file at the same path
# (on another host, or later) is detected. Readers are safe: the name is compared before opening, only the
# owner can write, and the memory cannot shrink.


class SharedMemory:
    """Memory of this process that others can only read."""

    def __init__(self, prefix: str, num_bytes: int) -> None:
        """Raises OSError if the system does not support it."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system does not support memfd_create")
        name = prefix + secrets.token_hex(16)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = finalize(self, os.close, fd)
        os.ftruncate(fd, num_bytes)
        self.memory = mmap(fd, num_bytes)
        seals = SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        self.place = f"/proc/{os.getpid()}/fd/{fd} {name}"
        """The argument of ``open_place``."""

    def close(self) -> None:
        """Idempotent. Processes that have mapped the memory keep it."""
        self.memory.close()
        self._close()


def open_place(place: str, prefix: str) -> int:
    """A read-only descriptor of shared memory; raises OSError if it does not exist."""
    if not PLACE.fullmatch(place):
        raise OSError("its path is invalid")
    path, name = place.split(" ")
    if not name.startswith(prefix) or os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is a different file")
    # O_NONBLOCK: opening another kind of file must not block.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{name} (deleted)":  # replaced in the meantime
        os.close(fd)
        raise OSError(f"{path} is a different file")
    return fd
