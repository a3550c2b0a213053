"""The source of a fleet's secret: a file or the environment, never a command line."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import SpecError
from kvferry.log import log_of
from kvferry.wire.secret import Secret

log = log_of(__name__)

SECRET = "KVFERRY_SECRET"
SECRET_FILE = "KVFERRY_SECRET_FILE"
MAX_SECRET_BYTES = 4096
LOOK_SECONDS = 2.0
"""How often a file is checked for changes."""


class FileSecret(Secret):
    """The secret in a file, reloaded when the file changes.

    If the changed file has no valid secret, the previous one stays in use, and an error is logged.
    """

    __slots__ = ("_lock", "_looked_at", "_path", "_seen")

    def __init__(self, path: str | Path) -> None:
        self._path, self._lock, self._looked_at = path, threading.Lock(), time.monotonic()
        self._seen = _mark(path)
        self.change_to(_read(path))

    def refresh(self) -> None:
        """Reload the file if it has changed; from any thread."""
        if time.monotonic() < self._looked_at + LOOK_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_at = time.monotonic()
            seen, self._seen = self._seen, _mark(self._path)
            if self._seen == seen:
                return
            self.change_to(_read(self._path))
            log.warning("the secret in %s has changed; the new one is in use", self._path)
        except SpecError as error:
            log.error("%s; the previous secret is still in use", error)
        finally:
            self._lock.release()


def secret_from_file(path: str | Path) -> Secret:
    """The secret in a file written by ``kvferry keygen``. Raises SpecError if there is none."""
    return FileSecret(path)


def _mark(path: str | Path) -> tuple[int, int, int] | None:
    """Changes when a file is written or replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read(path: str | Path) -> Secret:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SpecError(f"the secret file {path} cannot be read: {error.strerror or error}") from None
    if mode & stat.S_IROTH:
        log.warning("every user of this host can read the secret in %s; run chmod 600 on it", path)
    if len(data) > MAX_SECRET_BYTES:
        raise SpecError(f"the secret file {path} has more than {MAX_SECRET_BYTES} bytes")
    try:
        return Secret.from_text(data.decode("ascii", "replace"))
    except SpecError as error:
        raise SpecError(f"the secret file {path}: {error}") from None


def secret_from_environment(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret in KVFERRY_SECRET_FILE (a path) or KVFERRY_SECRET; None if neither is set."""
    path, text = environ.get(SECRET_FILE, ""), environ.get(SECRET, "")
    if path and text:
        raise SpecError(f"{SECRET_FILE} and {SECRET} are both set: set one of them")
    if path:
        return secret_from_file(path)
    if not text:
        return None
    try:
        return Secret.from_text(text)
    except SpecError as error:
        raise SpecError(f"{SECRET}: {error}") from None
