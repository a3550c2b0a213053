"""Digests of files, kept in this user's cache folder. Without one they are taken at every start."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import SpecError
from kvferry.host.private_files import cache_folder, write_private
from kvferry.log import log_of

log = log_of(__name__)

NAME = "weights.json"
MAX_KEPT = 8192
"""Files; the ones that were kept first are dropped."""
SETTLED_NS = 2_000_000_000
"""A file that was written so recently may be written again under the same times."""
SHA256 = re.compile(r"[0-9a-f]{64}")


class FileState(NamedTuple):
    """What changes whenever a file is written, or replaced by another one."""

    path: str
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result | None = None) -> FileState:
        """That of a file, or of the open file that is there."""
        found = found or path.stat()
        return cls(os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    @property
    def is_settled(self) -> bool:
        return time.time_ns() - max(self.mtime_ns, self.ctime_ns) > SETTLED_NS


def kept_digests() -> dict[FileState, str]:
    """All that is kept."""
    try:
        opened = os.open(cache_folder() / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(opened, encoding="utf-8") as file:
            return dict(map(_entry, json.load(file)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _warn("kept digests of weights cannot be used, and are taken again", str(error))
        return {}


def _entry(entry: list[object]) -> tuple[FileState, str]:
    *state, digest = entry
    if not (isinstance(digest, str) and SHA256.fullmatch(digest)):
        raise SpecError(f"{NAME} has no digest in {entry!r:.200}")
    return FileState(*state), digest  # type: ignore[arg-type]


def keep(state: FileState, digest: str) -> None:
    """Keep the digest of a file. What two processes keep at once, one of them takes again another time."""
    if not state.is_settled:
        return
    kept = {each: text for each, text in kept_digests().items() if each.path != state.path}
    entries = [[*each, text] for each, text in {**kept, state: digest}.items()]
    try:
        write_private(cache_folder(), NAME, json.dumps(entries[-MAX_KEPT:]).encode())
    except (OSError, ValueError) as error:
        _warn("digests of weights are not kept: the next start reads the weights again", str(error))


@cache
def _warn(what: str, why: str) -> None:
    """Once: a checkpoint has hundreds of files."""
    log.warning("%s: %s", what, why)


@contextmanager
def only_reader() -> Iterator[None]:
    """Let one process of this user read at a time, where that can be arranged."""
    with ExitStack() as stack:
        with suppress(OSError, ValueError):
            lock = os.open(cache_folder() / "weights.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, lock)
            _wait_for(lock)
        yield


def _wait_for(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("another process of this user reads weights: waiting for its digests")
        fcntl.flock(lock, fcntl.LOCK_EX)
