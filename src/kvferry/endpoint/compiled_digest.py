"""Sums for digests by compiled code, where this host has a compiler; else, and until then, by numpy.

A digest has to keep up with memory that is copied at several gigabytes a second, and numpy does not. The code
is compiled once for this processor, in a thread of its own, and kept in the user's private folder. It finds
the same numbers as numpy, or it is not used. Nothing depends on it but the pace.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvferry.core.digest_cells import Bytes, CellBlocks, CellPattern, CellSums, Dimension, sums_by_numpy
from kvferry.core.digest_keys import Words
from kvferry.endpoint.private_files import own_folder, write_private
from kvferry.errors import KVFerryError
from kvferry.log import log_of

log = log_of(__name__)

SETTING = "KVFERRY_DIGEST_COMPILER"
OFF = "off"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
X86_FLAGS = ("-mprefer-vector-width=512",)
"""Where processors have such vectors, compilers leave them out unless they are told: a third of the pace."""
COMPILE_SECONDS = 120.0
FROM_BYTES = 16 << 20
"""A process that takes no digest of so many bytes never compiles."""


class NotCompiled(KVFerryError):
    """Why there is no compiled code here."""


class _Blocks(ctypes.Structure):
    """``struct Blocks`` of ``digest.cpp``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "blocks", "cells", "rows", "keys", "sums")),
        *((name, ctypes.c_uint64) for name in ("num_blocks", "num_cells", "num_rows", "row_words")),
        ("word_bytes", ctypes.c_uint64),
    ]


class CompiledSums:
    """A library that sums up cells."""

    def __init__(self, library: Path) -> None:
        try:
            self._sum_cells = ctypes.CDLL(str(library)).kvferry_sum_cells
        except (OSError, AttributeError) as error:
            raise NotCompiled(f"the compiled code cannot be loaded: {error}") from error
        self._sum_cells.restype = None

    def __call__(self, memory: Mapping[str, Bytes], wanted: Sequence[CellBlocks]) -> list[Words]:
        """``CellSums`` of host memory, by region."""
        return [self._sums(memory[each.region], each) for each in wanted]

    def _sums(self, memory: Bytes, wanted: CellBlocks) -> Words:
        wanted.check_inside(len(memory))
        rows = wanted.pattern.rows
        blocks = wanted.block_ids * wanted.block_stride
        sums = np.empty((len(blocks), len(rows.cells)), np.uint64)
        arrays = (blocks, rows.cells, rows.rows, rows.keys, sums)
        on = _Blocks(
            memory.ctypes.data + wanted.offset,
            *(array.ctypes.data for array in arrays),
            len(blocks),
            len(rows.cells),
            *rows.keys.shape,
            wanted.pattern.word_bytes,
        )
        self._sum_cells(ctypes.byref(on))  # lets go of the interpreter
        return sums


class HostSums:
    """Whoever sums up fastest here: numpy, and compiled code as soon as there is some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: CompiledSums | None = None
        self._thread: threading.Thread | None = None
        self.how = "numpy (nothing was compiled so far)"
        """For people."""

    def of(self, memory: Mapping[str, Bytes], total_bytes: int) -> CellSums:
        """Who sums up this memory; never waits for a compiler."""
        if total_bytes >= FROM_BYTES:
            self.start()
        return partial(self._compiled or sums_by_numpy, memory)

    def start(self) -> threading.Thread:
        """Compile, in a thread, unless that was begun before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compile, name="kvferry-compile", daemon=True)
                self._thread.start()
            return self._thread

    def _compile(self) -> None:
        try:
            compiled = compiled_sums(find_compiler(os.environ))
        except Exception as error:
            self.how = f"numpy ({error})"
        else:
            self._compiled, self.how = compiled, "compiled code"
        log.info("digests of host memory are taken by %s", self.how)


@cache
def host_sums() -> HostSums:
    """Of this process."""
    return HostSums()


def find_compiler(environment: Mapping[str, str]) -> str:
    """The compiler that the environment names, or that is on the path; raises NotCompiled without one."""
    named = environment.get(SETTING, "")
    if named == OFF:
        raise NotCompiled(f"{SETTING} is {OFF}")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise NotCompiled(f"{SETTING} names no program: {named}" if named else "this host has no C++ compiler")


def compiled_sums(compiler: str, folder: Path | None = None) -> CompiledSums:
    """The code for this processor, compiled or found in the folder; raises NotCompiled if it is no good."""
    try:
        folder = folder or own_folder()
        path = folder / f"digest-{_mark(compiler)}.so"
        if not path.exists():
            write_private(folder, path.name, _compile(compiler, folder))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(f"{compiler} failed: {error}") from error
    compiled = CompiledSums(path)
    _check(compiled)
    return compiled


def source() -> str:
    """The code's text."""
    return files(__package__).joinpath("digest.cpp").read_text(encoding="utf-8")


def _compile(compiler: str, folder: Path) -> bytes:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        text, library = Path(place) / "digest.cpp", Path(place) / "digest.so"
        text.write_text(source(), encoding="utf-8")
        command = [compiler, *_flags(), "-o", str(library), str(text)]
        done = subprocess.run(
            command, capture_output=True, timeout=COMPILE_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            complaint = done.stderr.decode(errors="replace").strip().partition("\n")[0]
            raise NotCompiled(f"{compiler} failed: {complaint[:200]}")
        return library.read_bytes()


def _flags() -> tuple[str, ...]:
    return FLAGS + X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else FLAGS


def _mark(compiler: str) -> str:
    """Of the text, the compiler and the processor: code for another one may not run here."""
    stat = os.stat(compiler)
    known = (source(), *_flags(), compiler, stat.st_size, stat.st_mtime_ns, platform.machine(), _processor())
    return hashlib.sha256("\0".join(map(str, known)).encode()).hexdigest()[:32]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _check(compiled: CompiledSums) -> None:
    """Raise NotCompiled unless this code finds what numpy finds, for every width of word and both orders."""
    random = np.random.default_rng(11)
    memory = {"kv": random.integers(0, 256, 1 << 14, np.uint8)}
    for word_bytes in (1, 2, 4):
        for cell_stride, row_stride in ((37 * word_bytes, word_bytes), (word_bytes, 16 * word_bytes)):
            dimensions = Dimension(16, cell_stride, True), Dimension(37, row_stride, False)
            keys = random.integers(0, 1 << 64, 37, np.uint64)
            in_order = dimensions if cell_stride > row_stride else dimensions[::-1]
            digits = (in_order.index(dimensions[0]),)
            pattern = CellPattern(word_bytes, in_order, digits, keys, 0, np.arange(16))
            blocks = [CellBlocks("check", "kv", pattern, 3, 3000, np.array([0, 2, 3]))]
            if (compiled(memory, blocks)[0] != sums_by_numpy(memory, blocks)[0]).any():
                raise NotCompiled("the compiled code finds other sums than numpy")
