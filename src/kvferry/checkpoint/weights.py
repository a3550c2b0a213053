"""Weights by their content: the SHA-256 of every file that holds them.

Every byte counts, so a changed tensor cannot hide. File names and folders do not count; the way in which
tensors are split into files does. Digests are kept: only a file that is new, or was written since, is read.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from kvferry.checkpoint.kept_digests import SHA256, FileState, keep, kept_digests, only_reader
from kvferry.errors import SpecError
from kvferry.log import log_of

log = log_of(__name__)

NUM_THREADS = 4
READ_BYTES = 1 << 20
LONG_BYTES = 1_000_000_000
"""From here on reading is worth a line of the log."""
PROGRESS_SECONDS = 10.0


def weights_values(files: Sequence[Path]) -> dict[str, str]:
    """What identifies the weights in these files; raises if one of them cannot be read."""
    if not files:
        raise SpecError("there are no files with weights")
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
            log.info("reading %.1f GB of weights to know the model: digests are kept", total / 1e9)

    def show(self, num_bytes: int) -> None:
        now = time.monotonic()
        if self._is_long and self._next <= now:
            percent = 100 * num_bytes // self._total
            log.info("reading %.1f GB of weights to know the model: %d %%", self._total / 1e9, percent)
            self._next = now + PROGRESS_SECONDS

    def end(self) -> None:
        if self._is_long:
            seconds = time.monotonic() - self._started
            log.info("read %.1f GB of weights in %.1f s", self._total / 1e9, seconds)


def _sha256(path: Path, done: dict[Path, int]) -> tuple[FileState, str]:
    """A file's digest, and the state in which it was read; ``done`` tells how much of it was, so far."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        before = FileState.of(path, os.fstat(file.fileno()))
        while part := file.read(READ_BYTES):
            hasher.update(part)
            done[path] += len(part)
        if FileState.of(path, os.fstat(file.fileno())) != before:
            raise SpecError(f"{path.name} was written while it was read")
    return before, hasher.hexdigest()
