"""Identifies weights by the SHA-256 of their files.

File names and folders do not matter; the split of tensors into files does. Digests are cached: only new and
changed files are read.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvferry.checkpoint.config import config_values, short_digest
from kvferry.errors import SpecError
from kvferry.host.this_user import cache_folder, write_private
from kvferry.log import log_of

log = log_of(__name__)

NAME = "weights.json"
MAX_KEPT = 8192
"""Cached digests; the oldest are dropped."""
SETTLED_NS = 2_000_000_000
"""A file with a younger timestamp may change again without a new timestamp."""
SHA256 = re.compile(r"[0-9a-f]{64}")


class FileState(NamedTuple):
    """Changes whenever a file is written or replaced."""

    path: str
    num_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, found: os.stat_result | None = None) -> FileState:
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
    """Cache the digest of a file. Of two concurrent writers one may be lost."""
    if not state.is_settled:
        return
    kept = {each: text for each, text in kept_digests().items() if each.path != state.path}
    entries = [[*each, text] for each, text in {**kept, state: digest}.items()]
    try:
        write_private(cache_folder(), NAME, json.dumps(entries[-MAX_KEPT:]).encode())
    except (OSError, ValueError) as error:
        _warn("weight hashes cannot be cached: the next start hashes the weights again", str(error))


@cache
def _warn(what: str, why: str) -> None:
    """Warn once: a checkpoint has hundreds of files."""
    log.warning("%s: %s", what, why)


@contextmanager
def only_reader() -> Iterator[None]:
    """Lets one process of this user read at a time, if the cache folder is usable."""
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
"""Progress is logged from this size on."""
PROGRESS_SECONDS = 10.0


def weights_values(files: Sequence[Path]) -> dict[str, str]:
    """The identity of the weights in these files; raises if one of them cannot be read."""
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
    """The SHA-256 of each file: from its name in the Hugging Face cache, cached, or computed."""
    known = _known(files)
    missing = [path for path in dict.fromkeys(files) if path not in known]
    return known | _read(missing) if missing else known


def _known(files: Sequence[Path]) -> dict[Path, str]:
    kept = kept_digests()
    found = {path: _blob_name(path) or kept.get(FileState.of(path), "") for path in files}
    return {path: digest for path, digest in found.items() if digest}


def _blob_name(path: Path) -> str:
    """The SHA-256 that is a large file's name in the Hugging Face cache; small ones have a Git hash."""
    blob = path.resolve(strict=True)
    is_in_cache = blob.parent.name == "blobs" and (blob.parent.parent / "snapshots").is_dir()
    return blob.name if is_in_cache and SHA256.fullmatch(blob.name) else ""


def _read(files: Sequence[Path]) -> dict[Path, str]:
    """Compute digests, and cache each as it completes."""
    total = sum(path.stat().st_size for path in files)
    report = log.info if total >= LONG_BYTES else log.debug
    report("hashing %.1f GB of weights to identify the model; the hashes are cached", total / 1e9)
    started = shown = time.monotonic()
    done, digests = 0, dict[Path, str]()
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for path, (state, digest) in zip(files, pool.map(_sha256, files), strict=True):
            keep(state, digest)
            digests[path] = digest
            done += state.num_bytes
            if time.monotonic() - shown >= PROGRESS_SECONDS:
                shown = time.monotonic()
                percent = 100 * done // max(1, total)
                report("hashing %.1f GB of weights to identify the model: %d %%", total / 1e9, percent)
    report("hashed %.1f GB of weights in %.1f s", total / 1e9, time.monotonic() - started)
    return digests


def _sha256(path: Path) -> tuple[FileState, str]:
    """A file's state and digest."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        before = FileState.of(path, os.fstat(file.fileno()))
        while part := file.read(READ_BYTES):
            hasher.update(part)
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
"""Keys of an adapter's configuration that do not affect the computation."""

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Engines load the first of these that exists."""


def adapter_digest(folder: Path) -> str:
    """The identity of the adapter in a folder, independent of its path and name.

    Raises ``SpecError`` if the configuration or the weights are missing.
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
        raise SpecError(f"{config_file}: expected a JSON object")
    return short_digest(json.dumps([config_values(config, without=ADAPTER_NAMES), *weights], sort_keys=True))
