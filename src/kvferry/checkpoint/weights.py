"""Weights by their content: names, shapes and dtypes of all tensors, and bytes from well-chosen places.

Only safetensors files: their headers say where each tensor lies, so a checkpoint of any size takes a few
thousand small reads. Which bytes are read depends on the tensors alone: folders, file names and the way in
which tensors are spread over files do not matter. The reads go by offsets, which the safetensors library does
not tell; the format is a length, a JSON object and bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import nsmallest
from itertools import pairwise
from pathlib import Path
from zlib import crc32

from kvferry.checkpoint.config import short_digest
from kvferry.errors import SpecError

MAX_READS = 2048
"""Small reads of one checkpoint: cold, on one disk, a fraction of a second."""
MAX_READS_PER_TENSOR = 8
READ_BYTES = 1024
NUM_THREADS = 16
"""Reads at a time: of files on a network, each waits for its answer."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
NUMBERS = re.compile(r"\d+")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
LAST_MATRIX = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int

    @property
    def form(self) -> str:
        """What it is, wherever it is."""
        return f"{self.dtype} {list(self.shape)}"


def weights_values(files: Sequence[Path]) -> dict[str, str]:
    """What identifies the weights in these safetensors files; raises ``SpecError`` if they make no sense."""
    tensors = stored_tensors(files)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(path.open("rb")).fileno() for path in files}
        tensors, embeddings = _without_copy(tensors, handles)
        content = _content_digest(tensors, handles)
    forms = json.dumps([(tensor.name, tensor.form) for tensor in tensors])
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    return {
        "weights.tensors": f"{len(tensors)} tensors, {num_bytes} bytes, digest {short_digest(forms)}",
        "weights.content": f"digest {content}",
        **({"weights.embeddings": embeddings} if embeddings else {}),
    }


# -- what there is -------------------------------------------------------------------------------------


def stored_tensors(files: Sequence[Path]) -> list[StoredTensor]:
    """All tensors of some files, by name."""
    if not files:
        raise SpecError("there are no safetensors files")
    found = sorted((tensor for path in files for tensor in _tensors_of(path)), key=lambda each: each.name)
    for one, other in pairwise(found):
        if one.name == other.name:
            raise SpecError(f"tensor {one.name} is in {one.path.name} and in {other.path.name}")
    return found


def _tensors_of(path: Path) -> list[StoredTensor]:
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, num_bytes - 8):
            raise SpecError(f"{path.name} is no safetensors file: a header of {length} bytes")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = [_tensor(name, entry, path, 8 + length) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SpecError(f"{path.name} is no safetensors file: {error!r}") from None
    for tensor in tensors:
        if not 0 <= tensor.offset <= tensor.offset + tensor.num_bytes <= num_bytes:
            raise SpecError(f"{path.name} is cut off: {tensor.name} lies past its end")
    return tensors


def _tensor(name: str, entry: Mapping[str, object], path: Path, data_offset: int) -> StoredTensor:
    start, stop = map(int, entry["data_offsets"])  # type: ignore[call-overload]
    shape = tuple(map(int, entry["shape"]))  # type: ignore[call-overload]
    return StoredTensor(name, str(entry["dtype"]), shape, path, data_offset + start, stop - start)


# -- what is in it -------------------------------------------------------------------------------------


def _content_digest(tensors: Sequence[StoredTensor], handles: Mapping[Path, int]) -> str:
    """A digest over bytes of all tensors, or of a fair choice of them."""
    chosen = _chosen(tensors)
    num_reads = max(1, min(MAX_READS_PER_TENSOR, MAX_READS // max(1, len(chosen))))
    hasher = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        samples = pool.map(lambda each: _sample(each, handles, num_reads), chosen)
        for tensor, sample in zip(chosen, samples, strict=True):
            hasher.update(f"{tensor.name}\0{tensor.form}\0".encode())
            hasher.update(sample)
    return hasher.hexdigest()


def _chosen(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """All tensors, or as many as may be read: equally many of each kind.

    Thousands of experts are one kind, by their names without numbers: they do not crowd out attention.
    """
    if len(tensors) <= MAX_READS:
        return list(tensors)
    kinds: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        kinds.setdefault(NUMBERS.sub("#", tensor.name), []).append(tensor)
    chosen: list[StoredTensor] = []
    for num_done, kind in enumerate(sorted(kinds.values(), key=len)):
        share = (MAX_READS - len(chosen)) // (len(kinds) - num_done)
        chosen += nsmallest(share, kind, key=lambda each: crc32(each.name.encode()))
    return sorted(chosen, key=lambda each: each.name)


def _sample(
    tensor: StoredTensor, handles: Mapping[Path, int], num_reads: int, seed: str | None = None
) -> bytes:
    """Bytes of one tensor: all of a small one, else some from each of ``num_reads`` equal parts."""
    handle = handles[tensor.path]
    if tensor.num_bytes <= num_reads * READ_BYTES:
        return _read(handle, tensor, 0, tensor.num_bytes)
    part = tensor.num_bytes // num_reads
    key = f"{tensor.name if seed is None else seed} {tensor.form}"
    starts = (
        turn * part + int(short_digest(f"{turn} {key}"), 16) % (part - READ_BYTES + 1)
        for turn in range(num_reads)
    )
    return b"".join(_read(handle, tensor, start, READ_BYTES) for start in starts)


def _read(handle: int, tensor: StoredTensor, start: int, num_bytes: int) -> bytes:
    data = os.pread(handle, num_bytes, tensor.offset + start)
    if len(data) != num_bytes:
        raise SpecError(f"{tensor.path.name} is cut off: {tensor.name} lies past its end")
    return data


# -- tied embeddings -----------------------------------------------------------------------------------


def _without_copy(
    tensors: Sequence[StoredTensor], handles: Mapping[Path, int]
) -> tuple[list[StoredTensor], str]:
    """The tensors without a last matrix that only repeats the embeddings, and whether the two are one.

    Some tools write tied embeddings twice: the weights are the same.
    """
    embeddings = [tensor for tensor in tensors if tensor.name.endswith(EMBEDDINGS)]
    last = [tensor for tensor in tensors if tensor.name.endswith(LAST_MATRIX)]
    if len(embeddings) != 1 or len(last) > 1:
        return list(tensors), ""
    if not last:
        return list(tensors), "tied"
    (one,), (other,) = embeddings, last
    samples = [_sample(each, handles, MAX_READS_PER_TENSOR, seed="") for each in (one, other)]
    if one.form != other.form or samples[0] != samples[1]:
        return list(tensors), "separate"
    return [tensor for tensor in tensors if tensor is not other], "tied"
