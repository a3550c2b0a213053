"""Weights by their content: the SHA-256 of every file that holds them.

Every byte counts, so a changed tensor cannot hide. File names and folders do not count; the way in which
tensors are split into files does. Digests are kept: only a file that is new, or was written since, is read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvferry.checkpoint.config import config_values, short_digest
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
    try:
        opened = os.open(cache_folder() / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(opened, encoding="utf-8") as file:
            return dict(map(_entry, json.load(file)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        _warn("the cached weight hashes cannot be read and are computed again", str(error))
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
        _warn("weight hashes cannot be cached: the next start reads the weights again", str(error))


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
        log.info("another process of this user is hashing weights: waiting for its result")
        fcntl.flock(lock, fcntl.LOCK_EX)


NUM_THREADS = 4
READ_BYTES = 1 << 20
LONG_BYTES = 1_000_000_000
"""From here on reading is worth a line of the log."""
PROGRESS_SECONDS = 10.0


def weights_values(files: Sequence[Path]) -> dict[str, str]:
    """What identifies the weights in these files; raises if one of them cannot be read."""
    if not files:
        raise SpecError("no weight files were found")
    digests = _known(files)
    if len(digests) < len(set(files)):
        with only_reader():  # the ranks of an engine start together: one reads, the others wait for it
            digests = file_digests(files)
    num_bytes = sum(path.stat().st_size for path in files)
    content = hashlib.sha256("\n".join(sorted(digests[path] for path in files)).encode()).hexdigest()
    return {
        "weights.files": f"{len(files)} file{'s' * (len(files) != 1)}, {num_bytes:,} bytes",
        "weights.content": f"sha256 {content}",
    }


def file_digests(files: Sequence[Path]) -> dict[Path, str]:
    """The SHA-256 of each file: known by its name in the Hugging Face cache, kept, or taken now."""
    known = _known(files)
    missing = [path for path in dict.fromkeys(files) if path not in known]
    return known | _read(missing) if missing else known


def _known(files: Sequence[Path]) -> dict[Path, str]:
    kept = kept_digests()
    found = {path: _blob_name(path) or kept.get(FileState.of(path), "") for path in files}
    return {path: digest for path, digest in found.items() if digest}


def _blob_name(path: Path) -> str:
    """The digest that the Hugging Face cache has as the name of a large file; small ones have a Git hash."""
    blob = path.resolve(strict=True)
    is_in_cache = blob.parent.name == "blobs" and (blob.parent.parent / "snapshots").is_dir()
    return blob.name if is_in_cache and SHA256.fullmatch(blob.name) else ""


def _read(files: Sequence[Path]) -> dict[Path, str]:
    """Take digests, and keep each as soon as it is there."""
    total = sum(path.stat().st_size for path in files)
    done = dict.fromkeys(files, 0)
    digests: dict[Path, str] = {}
    progress = _Progress(total)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        futures = {pool.submit(_sha256, path, done): path for path in files}
        pending = set(futures)
        while pending:
            ended, pending = wait(pending, PROGRESS_SECONDS, FIRST_COMPLETED)
            for future in ended:
                state, digests[futures[future]] = future.result()
                keep(state, digests[futures[future]])
            progress.show(sum(done.values()))
    progress.end()
    return digests


class _Progress:
    """Lines of the log about a long read."""

    def __init__(self, total: int) -> None:
        self._total, self._started = total, time.monotonic()
        self._next = self._started + PROGRESS_SECONDS
        self._is_long = total >= LONG_BYTES
        if self._is_long:
            log.info("hashing %.1f GB of weights to identify the model; the hashes are cached", total / 1e9)

    def show(self, num_bytes: int) -> None:
        now = time.monotonic()
        if self._is_long and self._next <= now:
            percent = 100 * num_bytes // self._total
            log.info("hashing %.1f GB of weights to identify the model: %d %%", self._total / 1e9, percent)
            self._next = now + PROGRESS_SECONDS

    def end(self) -> None:
        if self._is_long:
            seconds = time.monotonic() - self._started
            log.info("hashed %.1f GB of weights in %.1f s", self._total / 1e9, seconds)


def _sha256(path: Path, done: dict[Path, int]) -> tuple[FileState, str]:
    """A file's digest, and the state in which it was read; ``done`` tells how much of it was, so far."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        before = FileState.of(path, os.fstat(file.fileno()))
        while part := file.read(READ_BYTES):
            hasher.update(part)
            done[path] += len(part)
        if FileState.of(path, os.fstat(file.fileno())) != before:
            raise SpecError(f"{path.name} changed while it was hashed")
    return before, hasher.hexdigest()


ADAPTER_NAMES = frozenset(
    {
        "base_model_name_or_path",
        "revision",
        "peft_version",
        "task_type",
        "inference_mode",
        "init_lora_weights",
    }
)
"""What an adapter's configuration says about names and its training."""

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Of these, engines load the first that is there."""


def adapter_digest(folder: Path) -> str:
    """What identifies the adapter in a folder, wherever it is and whatever it is called.

    Raises ``SpecError`` if it is not made of a configuration and one file of weights.
    """
    config_file = folder / "adapter_config.json"
    try:
        config = json.loads(config_file.read_bytes())
        found = [path for path in map(folder.joinpath, WEIGHTS) if path.exists()][:1]
        weights = file_digests(found).values()
    except (OSError, ValueError) as error:  # a SpecError is a ValueError
        raise SpecError(f"the adapter in {folder} cannot be read: {error}") from None
    if not found:
        raise SpecError(f"the adapter in {folder} has none of {', '.join(WEIGHTS)}")
    if not isinstance(config, dict):
        raise SpecError(f"{config_file}: a JSON object is expected")
    return short_digest(json.dumps([config_values(config, without=ADAPTER_NAMES), *weights], sort_keys=True))
