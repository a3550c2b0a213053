"""The host side of ``digest.cu``: writes cells as the kernel's table, and reads the sums.

Every address is checked against the registered memory first: one bad address would destroy the engine's CUDA
context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.digest_cells import CellChunks, CellPattern, ChunkedCells, Words
from kvferry.core.manifest import Region
from kvferry.core.view import Ints
from kvferry.transport.copy_kernel import (
    NUM_ARGUMENTS,
    WARP_SIZE,
    CopyLimits,
    KernelTable,
    TableKernel,
    Work,
)
from kvferry.transport.cuda import Arguments, Cuda

TILE_STEPS, LANE_WORDS = 16, 4
"""Loads of each lane in a tile, words in a load; ``digest.cu`` has the same numbers."""
LOAD_BYTES = 16
TERM = np.dtype(
    [(name, "<u8") for name in ("first", "cells", "weights", "rows", "keys", "sum", "first_tile")]
    + [(name, "<u4") for name in ("num_cells", "row_words", "cell_words", "cell_lanes", "cell_tiles")]
    + [(name, "<u4") for name in ("is_long", "word_bytes", "unit_bytes")]
)
"""``struct Term`` of ``digest.cu``."""
TERM_WORDS = TERM.itemsize // 8


class _Shared(NamedTuple):
    """The terms of all layers with the same arrangement of cells: one for each chunk of tokens."""

    terms: Words
    """As plain words, which numpy joins faster than records. Arrays are given by their offsets in the table,
    ``first_tile`` is the number of tiles."""
    num_terms: int
    bits: int
    """Distances and lengths, combined by "or": the lowest bit is their common alignment."""
    word_bytes: int
    num_tiles: int
    num_bytes: int
    start: int
    """Of the bytes that are read, relative to block 0."""
    stop: int

    def unit_bytes(self, first: int) -> int:
        """The length of one load; devices read aligned words only."""
        bits = self.bits | first
        lowest = bits & -bits
        are_fours = lowest == LOAD_BYTES == self.word_bytes * LANE_WORDS
        return LOAD_BYTES if are_fours else min(lowest, self.word_bytes)


class DigestTable:
    """The kernel's table for some states of a request."""

    def __init__(self, regions: Mapping[str, Region]) -> None:
        self._regions = regions
        self._arrays: list[Words] = []
        self._array_words = 0
        self._patterns: dict[CellPattern, tuple[int, int]] = {}
        self._weights: dict[CellChunks, int] = {}
        self._shared: dict[tuple[CellChunks, CellPattern, int], _Shared] = {}
        self._states: list[_Shared] = []
        self._firsts: list[int] = []
        self.num_sums = 0

    def add(self, wanted: ChunkedCells) -> None:
        """Raises SpecError if a word is not in its region."""
        blocks = wanted.blocks
        region = self._regions[blocks.region]
        key = wanted.chunks, blocks.pattern, blocks.block_stride
        shared = self._shared.get(key)
        if shared is None:
            blocks.check_inside(region.num_bytes)
            shared = self._shared[key] = self._new_shared(wanted)
        elif blocks.offset + shared.start < 0 or blocks.offset + shared.stop > region.num_bytes:
            blocks.check_inside(region.num_bytes)  # raises
        self._states.append(shared)
        self._firsts.append(region.address + blocks.offset)
        self.num_sums += shared.num_terms

    @property
    def num_tiles(self) -> int:
        return sum(shared.num_tiles for shared in self._states)

    @property
    def num_bytes(self) -> int:
        return sum(shared.num_bytes for shared in self._states)

    @property
    def num_words(self) -> int:
        """Words of 64 bits of the table, without the sums behind it."""
        return self.num_sums * TERM_WORDS + self._array_words

    def words_with(self, wanted: ChunkedCells) -> int:
        """At most so many words of table and sums with one more state."""
        blocks, chunks = wanted
        num_sums = self.num_sums + len(chunks.chunk_starts)
        num_words = num_sums * (TERM_WORDS + 1) + self._array_words
        if (chunks, blocks.pattern, blocks.block_stride) in self._shared:
            return num_words
        if blocks.pattern not in self._patterns:
            num_words += len(blocks.pattern.rows.rows) + blocks.pattern.keys.size
        return num_words + 2 * len(chunks.keys)

    def write(self, table: Words, address: int) -> None:
        """Write table and sums of zero, which will be at ``address``."""
        terms = np.concatenate([shared.terms for shared in self._states]).view(TERM)
        counts = [shared.num_terms for shared in self._states]
        units = map(_Shared.unit_bytes, self._states, self._firsts)
        terms["first"] = np.repeat(np.array(self._firsts, np.uint64), counts)
        terms["unit_bytes"] = np.repeat(np.fromiter(units, np.uint32, len(counts)), counts)
        terms["first_tile"] = np.cumsum(terms["first_tile"]) - terms["first_tile"]
        arrays = address + terms.nbytes
        for name in ("cells", "weights", "rows", "keys"):
            terms[name] = arrays + 8 * terms[name]
        terms["sum"] = address + 8 * (self.num_words + np.arange(self.num_sums))
        at = self.num_sums * TERM_WORDS
        table[:at] = terms.view(np.uint64)
        for array in self._arrays:
            table[at : at + array.size] = array
            at += array.size
        table[at : at + self.num_sums] = 0

    def split(self, sums: Words) -> list[Words]:
        counts = [shared.num_terms for shared in self._states]
        return [sums[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]

    def _put(self, values: NDArray[np.generic]) -> int:
        """Returns the offset of an array behind the terms, in words."""
        self._arrays.append(np.ascontiguousarray(values).view(np.uint64).ravel())
        self._array_words += values.size
        return self._array_words - values.size

    def _new_shared(self, wanted: ChunkedCells) -> _Shared:
        pattern, chunks = wanted.blocks.pattern, wanted.chunks
        rows, distances = pattern.rows, wanted.distances
        if pattern not in self._patterns:
            self._patterns[pattern] = self._put(rows.rows), self._put(rows.keys)
        if chunks not in self._weights:
            self._weights[chunks] = self._put(chunks.keys)
        num_cells = np.diff(chunks.chunk_starts, append=len(chunks.keys))
        terms = np.zeros(len(num_cells), TERM)
        terms["cells"] = self._put(distances) + chunks.chunk_starts
        terms["weights"] = self._weights[chunks] + chunks.chunk_starts
        terms["rows"], terms["keys"] = self._patterns[pattern]
        terms["num_cells"], terms["row_words"], terms["cell_words"] = (
            num_cells,
            rows.keys.shape[1],
            rows.keys.size,
        )
        terms["word_bytes"] = pattern.word_bytes
        _set_tiles(terms, num_cells, rows.keys.size)
        bits = LOAD_BYTES | rows.keys.shape[1] * pattern.word_bytes
        for each in (distances, rows.rows):
            bits |= int(np.bitwise_or.reduce(each))
        num_bytes = len(chunks.keys) * rows.keys.size * pattern.word_bytes
        block_ids, stride = wanted.blocks.block_ids, wanted.blocks.block_stride
        return _Shared(
            terms.view(np.uint64),
            len(terms),
            bits,
            pattern.word_bytes,
            int(terms["first_tile"].sum()),
            num_bytes,
            int(block_ids[0]) * stride,
            int(block_ids[-1]) * stride + pattern.span_bytes,
        )


def _set_tiles(terms: NDArray[np.void], num_cells: Ints, cell_words: int) -> None:
    """Cut terms into tiles: one segment of many cells, or many segments of few cells."""
    lanes = min(WARP_SIZE, 1 << (-(-cell_words // LANE_WORDS) - 1).bit_length())
    segments = -(-cell_words // (lanes * LANE_WORDS))
    cell_steps = -(-num_cells // (WARP_SIZE // lanes))
    is_long = cell_steps < min(TILE_STEPS, segments)
    terms["cell_lanes"], terms["is_long"] = lanes, is_long
    terms["cell_tiles"] = np.where(is_long, cell_steps, -(-cell_steps // TILE_STEPS))
    terms["first_tile"] = terms["cell_tiles"] * np.where(is_long, -(-segments // TILE_STEPS), segments)


def tables_of(
    wanted: Sequence[ChunkedCells], regions: Mapping[str, Region], most_bytes: int
) -> Iterator[DigestTable]:
    """Tables of at most so many bytes with their sums; a larger state has one of its own."""
    table = DigestTable(regions)
    for each in wanted:
        if table.num_sums and 8 * table.words_with(each) > most_bytes:
            yield table
            table = DigestTable(regions)
        table.add(each)
    if table.num_sums:
        yield table


LIMITS = CopyLimits(num_blocks=0)
"""The whole device: a digest only reads, and takes a third of the time of 32 blocks, so that the total
slowdown of other work is smaller (``docs/lab/performance.md``)."""
SCRATCH_BYTES = 16 << 20
"""The first size of one table and its sums; longer digests take several turns."""


class DigestKernel:
    """The compiled kernel on one device; one digest at a time."""

    def __init__(self, cuda: Cuda, limits: CopyLimits) -> None:
        self._cuda, self._kernel = cuda, TableKernel(cuda, limits, "digest", "sum_cells")
        self._arguments = Arguments(NUM_ARGUMENTS)
        with cuda.current():
            self._stream = cuda.make_stream()
        self._lock = threading.Lock()
        self._scratch: KernelTable | None = None
        """Made by the first digest."""

    def sums(self, regions: Mapping[str, Region], wanted: Sequence[ChunkedCells]) -> list[Words]:
        tables = tables_of(wanted, regions, SCRATCH_BYTES)
        with self._lock:
            return [sums for table in tables for sums in self._turn(table)]

    def _turn(self, table: DigestTable) -> list[Words]:
        cuda, start = self._cuda, table.num_words
        stop = start + table.num_sums
        if self._scratch is None:
            self._scratch = KernelTable(cuda, SCRATCH_BYTES)
        scratch = self._scratch.room(stop)
        table.write(scratch.words[:stop], scratch.address)
        work = Work(table.num_sums, table.num_tiles, table.num_bytes)
        with cuda.current():
            try:
                cuda.upload_later(scratch.address, scratch.pinned, 8 * stop, self._stream)
                self._kernel.launch(work, scratch.address, self._stream, self._arguments)
                place, num_bytes = 8 * start, 8 * table.num_sums
                cuda.download_later(scratch.pinned + place, scratch.address + place, num_bytes, self._stream)
            finally:  # also after an error
                cuda.wait_stream(self._stream)
        return table.split(scratch.words[start:stop].copy())


@cache
def digest_kernel(device_index: int) -> DigestKernel:
    """Kept for the life of the process; raises TransportError without such a device."""
    return DigestKernel(Cuda(device_index), LIMITS)
