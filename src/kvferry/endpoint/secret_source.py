"""Where a fleet's secret comes from: a file, or the environment. Never a command line."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import SpecError
from kvferry.log import log_of
from kvferry.wire.secret import Secret

log = log_of(__name__)

SECRET = "KVFERRY_SECRET"
SECRET_FILE = "KVFERRY_SECRET_FILE"
MAX_SECRET_BYTES = 4096


def secret_from_file(path: str | Path) -> Secret:
    """The secret in a file, as ``kvferry keygen`` writes it. Raises SpecError if there is none."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise SpecError(f"the secret file {path} cannot be read: {error.strerror or error}") from None
    if mode & stat.S_IROTH:
        log.warning("everybody on this host can read the secret in %s: chmod 600 it", path)
    if len(data) > MAX_SECRET_BYTES:
        raise SpecError(f"the secret file {path} has more than {MAX_SECRET_BYTES} bytes")
    try:
        return Secret.from_text(data.decode("ascii", "replace"))
    except SpecError as error:
        raise SpecError(f"the secret file {path}: {error}") from None


def secret_from_environment(environ: Mapping[str, str] = os.environ) -> Secret | None:
    """The secret that the environment names (KVFERRY_SECRET_FILE) or has (KVFERRY_SECRET), if it does."""
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
