"""Runs gathered and scattered by compiled code, where there is a compiler; else numpy does it (``pack``)."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvferry.core.view import Ints
from kvferry.host.compiler import LateCode, NotCompiled, compiled


class _Side(ctypes.Structure):
    """``struct Side`` of ``copy_runs.cpp``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "lengths", "steps")),
        *((name, ctypes.c_uint64) for name in ("num_rows", "num_steps")),
    ]


class CompiledCopies:
    """A library that copies runs. It checks nothing: whoever calls has."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._gather, self._scatter = library.kvferry_gather, library.kvferry_scatter
        for function in (self._gather, self._scatter):
            function.restype = None

    def gather(self, rows: Ints, lengths: Ints, steps: Ints, chunk: int) -> None:
        """Copy runs to ``chunk``, an address. Each of the rows, addresses, is there once for each step."""
        self._call(self._gather, (rows, lengths, steps), chunk)

    def scatter(self, rows: Ints, lengths: Ints, steps: Ints, chunk: int) -> None:
        """Copy the bytes from ``chunk`` to the runs."""
        self._call(self._scatter, (rows, lengths, steps), chunk)

    @staticmethod
    def _call(function: ctypes._NamedFuncPointer, columns: tuple[Ints, Ints, Ints], chunk: int) -> None:
        rows, lengths, steps = (np.ascontiguousarray(column, np.int64) for column in columns)
        addresses = (column.ctypes.data for column in (rows, lengths, steps))
        side = _Side(*addresses, len(rows), len(steps))
        function(ctypes.byref(side), ctypes.c_void_p(chunk))  # lets go of the interpreter


@cache
def host_copies() -> LateCode[CompiledCopies]:
    """Of this process."""
    return LateCode("short runs of host memory are gathered", compiled_copies)


def compiled_copies(compiler: str, folder: Path | None = None) -> CompiledCopies:
    """The code for this processor; raises NotCompiled if it is no good."""
    copies = CompiledCopies(compiled(compiler, "copy", source(), folder))
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
