"""Files that are written on behalf of peers: where nobody else can see or bend them, and not without end."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from kvferry.errors import SpecError

MAX_FILES = 64
MAX_FILE_BYTES = 64 << 20
MAX_NAME_CHARACTERS = 150


def own_folder() -> Path:
    """This user's folder for such files, which nobody else may look into; made if it is not there."""
    return _made_alone(Path(tempfile.gettempdir()) / f"kvferry-{os.geteuid()}")


def cache_folder() -> Path:
    """This user's folder for what can be made again; made if it is not there."""
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
        raise SpecError(f"{path} is not a folder of this user's alone: remove it, or name another folder")
    return path


def write_private(folder: str | Path, name: str, data: bytes) -> Path:
    """Write a file that only this user can read. What is there under its name is replaced, never followed."""
    if len(data) > MAX_FILE_BYTES:
        raise SpecError(f"{name} would have {len(data)} bytes, more than {MAX_FILE_BYTES}: it is not written")
    path = Path(folder) / re.sub(r"[^A-Za-z0-9_.-]", "_", name)[-MAX_NAME_CHARACTERS:].lstrip(".")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.path.lexists(path) and len(os.listdir(path.parent)) >= MAX_FILES:
        raise SpecError(
            f"{path.parent} has {MAX_FILES} files or more: remove some; {path.name} is not written"
        )
    made = path.with_name(f".{secrets.token_hex(8)}")
    opened = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(opened, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a machine that stops must not leave half a library for the next start
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    return path
