"""Runs gathered and scattered by compiled code, where there is a compiler; else numpy does it (``pack``)."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvferry.core.view import Ints
from kvferry.host.compiler import LateCode, NotCompiled, compiled
from kvferry.transport.lengths import sum_of


class _Side(ctypes.Structure):
    """``struct Side`` of ``copy_runs.cpp``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "lengths", "steps")),
        *((name, ctypes.c_uint64) for name in ("num_rows", "num_steps")),
        ("chunk", ctypes.c_void_p),
        ("num_parts", ctypes.c_uint64),
        *((name, ctypes.c_void_p) for name in ("firsts", "offsets")),
    ]


MAX_THREADS, PROCESSORS_PER_THREAD = 4, 4
"""That copy one chunk together, if there are so many processors for each: both sides copy, and the engines
compute beside."""
PARALLEL_BYTES = 1 << 20
"""From so many on: to wake a thread up takes as long as copying a few hundred kilobytes."""
PARTS_PER_THREAD = 4
"""Threads wake up one after the other: who comes first takes more."""


class CompiledCopies:
    """A library that copies runs. It checks nothing: whoever calls has."""

    def __init__(
        self, library: ctypes.CDLL, num_threads: int = 1, parallel_bytes: int = PARALLEL_BYTES
    ) -> None:
        """``num_threads``: that copy together, the caller's among them, from so many bytes on."""
        self._gather, self._scatter = library.kvferry_gather, library.kvferry_scatter
        for function in (self._gather, self._scatter, library.kvferry_help):
            function.restype = None
        library.kvferry_help(num_threads - 1)
        self._num_parts = PARTS_PER_THREAD * num_threads if num_threads > 1 else 1
        self._parallel_bytes = parallel_bytes

    def gather(self, rows: Ints, lengths: Ints, steps: Ints, chunk: int) -> None:
        """Copy runs to ``chunk``, an address. Each of the rows, addresses, is there once for each step."""
        self._call(self._gather, (rows, lengths, steps), chunk)

    def scatter(self, rows: Ints, lengths: Ints, steps: Ints, chunk: int) -> None:
        """Copy the bytes from ``chunk`` to the runs."""
        self._call(self._scatter, (rows, lengths, steps), chunk)

    def _call(self, function: ctypes._NamedFuncPointer, columns: tuple[Ints, Ints, Ints], chunk: int) -> None:
        """Lets go of the interpreter, and returns when all is copied."""
        rows, lengths, steps = (np.ascontiguousarray(column, np.int64) for column in columns)
        if not len(rows) or not len(steps):
            return
        is_long = sum_of(columns[1]) * len(steps) >= self._parallel_bytes
        firsts, offsets = _parts(lengths, len(steps), self._num_parts if is_long else 1)
        addresses = [column.ctypes.data for column in (rows, lengths, steps, firsts, offsets)]
        side = _Side(*addresses[:3], len(rows), len(steps), chunk, len(offsets), *addresses[3:])
        function(ctypes.byref(side))


def _parts(lengths: Ints, num_steps: int, number: int) -> tuple[Ints, Ints]:
    """Where so many parts begin, by the number of their first run, and in the chunk; and the last one's end.

    >>> [column.tolist() for column in _parts(np.array([10, 1]), num_steps=3, number=2)]
    [[0, 3, 6], [0, 30]]
    """
    firsts = np.arange(number + 1) * (len(lengths) * num_steps) // number
    if number == 1:
        return firsts, np.zeros(1, np.int64)
    rows, steps = np.divmod(firsts[:-1], num_steps)
    starts = np.cumsum(lengths) - lengths
    return firsts, starts[rows] * num_steps + lengths[rows] * steps


@cache
def host_copies() -> LateCode[CompiledCopies]:
    """Of this process."""
    return LateCode("short runs of host memory are gathered", compiled_copies)


def compiled_copies(compiler: str, folder: Path | None = None) -> CompiledCopies:
    """The code for this processor; raises NotCompiled if it is no good."""
    num_threads = min(MAX_THREADS, max(1, len(os.sched_getaffinity(0)) // PROCESSORS_PER_THREAD))
    copies = CompiledCopies(compiled(compiler, "copy", source(), folder), num_threads)
    _check(copies)
    return copies


def source() -> str:
    """The code's text."""
    return files(__package__).joinpath("copy_runs.cpp").read_text(encoding="utf-8")


def _check(copies: CompiledCopies) -> None:
    """Raise NotCompiled unless this code copies what it is told to copy, and nothing else."""
    random = np.random.default_rng(3)
    memory, chunk = random.integers(0, 256, 1 << 16, np.uint8), np.zeros(1 << 15, np.uint8)
    starts, lengths = np.array([0, 1000, 64, 3000]), np.array([7, 0, 512, 5000])
    steps = np.array([16384, 0, 40000])
    runs = [
        slice(at + step, at + step + length)
        for at, length in zip(starts, lengths, strict=True)
        for step in steps
    ]
    wanted = np.concatenate([memory[run] for run in runs])
    rows = starts + memory.ctypes.data
    copies.gather(rows, lengths, steps, chunk.ctypes.data)
    is_gathered = (chunk[: len(wanted)] == wanted).all() and not chunk[len(wanted) :].any()
    before, chunk[:] = memory.copy(), ~chunk
    copies.scatter(rows, lengths, steps, chunk.ctypes.data)
    for run in runs:
        before[run] = ~before[run]
    if not is_gathered or (memory != before).any():
        raise NotCompiled("the compiled code copies other bytes than it is told to")
