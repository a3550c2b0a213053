"""Sums for digests by compiled code, where this host has a compiler; else, and until then, by numpy.

A digest has to keep up with memory that is copied at several gigabytes a second, and numpy does not. The
compiled code finds the same numbers as numpy, or it is not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import numpy as np

from kvferry.core.digest_cells import Bytes, CellBlocks, CellPattern, CellSums, Dimension, sums_by_numpy
from kvferry.core.digest_keys import Words
from kvferry.host.compiler import LateCode, NotCompiled, compiled


class _Blocks(ctypes.Structure):
    """``struct Blocks`` of ``digest.cpp``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("first", "blocks", "cells", "rows", "keys", "sums")),
        *((name, ctypes.c_uint64) for name in ("num_blocks", "num_cells", "num_rows", "row_words")),
        ("word_bytes", ctypes.c_uint64),
    ]


class CompiledSums:
    """A library that sums up cells."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sum_cells = library.kvferry_sum_cells
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
        self.compiled: LateCode[CompiledSums] = LateCode("digests of host memory are taken", compiled_sums)

    @property
    def how(self) -> str:
        """For people."""
        return self.compiled.how

    def of(self, memory: Mapping[str, Bytes], total_bytes: int) -> CellSums:
        """Who sums up this memory; never waits for a compiler."""
        return partial(self.compiled.for_bytes(total_bytes) or sums_by_numpy, memory)


@cache
def host_sums() -> HostSums:
    """Of this process."""
    return HostSums()


def compiled_sums(compiler: str, folder: Path | None = None) -> CompiledSums:
    """The code for this processor; raises NotCompiled if it is no good."""
    sums = CompiledSums(compiled(compiler, "digest", source(), folder))
    _check(sums)
    return sums


def source() -> str:
    """The code's text."""
    return files(__package__).joinpath("digest.cpp").read_text(encoding="utf-8")


def _check(sums: CompiledSums) -> None:
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
            if (sums(memory, blocks)[0] != sums_by_numpy(memory, blocks)[0]).any():
                raise NotCompiled("the compiled code finds other sums than numpy")
