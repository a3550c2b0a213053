"""What belongs to this user alone: files, folders, and a server for processes of the same user.

Callers of the server are checked by peer credentials.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from time import sleep
from weakref import finalize

from kvferry.errors import SpecError
from kvferry.host.threads import SocketLoop
from kvferry.log import is_worth_a_line, log_of

log = log_of(__name__)

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


ROOT = 0
PEER = struct.Struct("3i")
"""Process, user and group."""
PAUSE_SECONDS = 0.1
"""After an error of ``accept``, such as too many open files."""


class UserServer:
    """Answers one caller after another in its own thread; only this user and root may connect.

    ``seconds`` is the time limit per caller. No error of a caller ends the thread; a PermissionError from
    ``answer`` is logged.
    """

    def __init__(
        self, listening: socket.socket, answer: Callable[[socket.socket], None], *, name: str, seconds: float
    ) -> None:
        self._socket, self._answer, self._name, self._seconds = listening, answer, name, seconds
        self._num_refused = 0
        listening.setblocking(False)
        self._loop = SocketLoop(name, lambda _: float("inf"))
        self._loop.watch(listening, self._serve)
        self._loop.start()

    def _serve(self) -> None:
        try:
            caller, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller has disconnected
        except OSError as error:
            self._warn(str(error))
            sleep(PAUSE_SECONDS)
            return
        try:
            with caller:
                caller.settimeout(self._seconds)
                self._check_user(caller)
                self._answer(caller)
        except PermissionError as error:
            self._warn(str(error))
        except OSError as error:
            log.debug("%s: failed to answer a request: %s", self._name, error)

    @staticmethod
    def _check_user(caller: socket.socket) -> None:
        """Raises PermissionError for other users. The credentials come from the kernel."""
        _, user, _ = PEER.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        if user not in (ROOT, os.geteuid()):
            raise PermissionError(f"the caller runs as user {user}, this process as user {os.geteuid()}")

    def _warn(self, why: str) -> None:
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):
            log.warning("%s: rejected a request (%d so far): %s", self._name, self._num_refused, why)

    def close(self) -> None:
        self._loop.put(self._loop.stop)
        self._loop.join(self._seconds)
        self._socket.close()
