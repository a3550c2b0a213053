"""The digest kernel's other half: blocks of cells become the table that ``digest.cu`` reads.

Before the kernel sees an address, it is checked against the memory that is really there: one bad address
would destroy the engine's whole CUDA context.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from kvferry.core.digest_cells import CellBlocks, CellPattern
from kvferry.core.digest_keys import Words
from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.transport.copy_kernel import NUM_ARGUMENTS, THREADS_PER_BLOCK, CopyLimits, compiled_kernel
from kvferry.transport.cuda import Arguments, Cuda

TILE_WORDS = 1024
"""What a warp sums up at a time; ``digest.cu`` has the same number."""
TERM = np.dtype(
    [(name, "<u8") for name in ("first", "blocks", "cells", "rows", "keys", "sums", "first_tile")]
    + [(name, "<u4") for name in ("tiles_per_cell", "num_cells", "row_words", "cell_words")]
    + [("word_bytes", "<u4"), ("unit_bytes", "<u4")]
)
"""``struct Term`` of ``digest.cu``."""
TERM_WORDS = TERM.itemsize // 8
SCRATCH_BYTES = 16 << 20
"""Of a table and its sums, on the device and pinned: digests of more states take several turns."""


class DigestTable(NamedTuple):
    """Some states in the form of the kernel, for being put at an address; the sums come behind."""

    words: Words
    sum_shapes: list[tuple[int, int]]
    num_terms: int
    num_tiles: int
    num_bytes: int

    @property
    def num_sums(self) -> int:
        return sum(blocks * cells for blocks, cells in self.sum_shapes)

    def split(self, sums: Words) -> list[Words]:
        """The sums of each state."""
        ends = np.cumsum([blocks * cells for blocks, cells in self.sum_shapes])
        parts = np.split(sums, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self.sum_shapes, strict=True)]


def words_needed(wanted: CellBlocks) -> int:
    """Words of 64 bits that one state takes of a table and its sums, at most: patterns may be shared."""
    rows, num_blocks = wanted.pattern.rows, len(wanted.block_ids)
    arrays = len(rows.cells) + len(rows.rows) + rows.keys.size
    return TERM_WORDS + arrays + num_blocks * (1 + len(rows.cells))


def table_of(wanted: Sequence[CellBlocks], regions: Mapping[str, Region], address: int) -> DigestTable:
    """What the kernel reads at ``address``; raises SpecError if a word is not in its region."""
    arrays: list[Words] = []
    at = len(wanted) * TERM_WORDS

    def put(values: np.ndarray) -> int:
        nonlocal at
        arrays.append(np.ascontiguousarray(values).view(np.uint64).ravel())
        at += arrays[-1].size
        return address + 8 * (at - arrays[-1].size)

    patterns: dict[CellPattern, tuple[int, int, int]] = {}
    heads: list[tuple[int, ...]] = []
    num_tiles = num_bytes = 0
    for each in wanted:
        region, rows = regions[each.region], each.pattern.rows
        each.check_inside(region.num_bytes)
        if each.pattern not in patterns:
            patterns[each.pattern] = put(rows.cells), put(rows.rows), put(rows.keys)
        tiles_per_cell = -(-rows.keys.size // TILE_WORDS)
        num_cells, row_words = len(rows.cells), rows.keys.shape[1]
        blocks = put(each.block_ids * each.block_stride)
        word = each.pattern.word_bytes, _unit_bytes(each, region)
        lengths = tiles_per_cell, num_cells, row_words, rows.keys.size, *word
        heads.append((region.address + each.offset, blocks, *patterns[each.pattern], 0, num_tiles, *lengths))
        num_tiles += len(each.block_ids) * num_cells * tiles_per_cell
        num_bytes += len(each.block_ids) * each.pattern.block_bytes
    shapes = [(len(each.block_ids), len(each.pattern.rows.cells)) for each in wanted]
    sizes = np.array([num_blocks * num_cells for num_blocks, num_cells in shapes], np.int64)
    terms = np.array(heads, TERM)
    terms["sums"] = address + 8 * (at + np.cumsum(sizes) - sizes)
    words = np.concatenate([terms.view(np.uint64), *arrays])
    return DigestTable(words, shapes, len(wanted), num_tiles, num_bytes)


def _unit_bytes(wanted: CellBlocks, region: Region) -> int:
    """What a device can read at once: it reads two or four bytes at multiples of that only."""
    rows = wanted.pattern.rows
    bits = wanted.pattern.word_bytes | region.address + wanted.offset
    for distances in (wanted.block_ids * wanted.block_stride, rows.cells, rows.rows):
        bits |= int(np.bitwise_or.reduce(distances))
    return bits & -bits


def turns(wanted: Sequence[CellBlocks]) -> Iterator[list[CellBlocks]]:
    """The states that fit into the scratch together; one that does not fit is a turn of its own."""
    some: list[CellBlocks] = []
    num_words = 0
    for each in wanted:
        needed = words_needed(each)
        if some and 8 * (num_words + needed) > SCRATCH_BYTES:
            yield some
            some, num_words = [], 0
        some.append(each)
        num_words += needed
    if some:
        yield some


class DigestKernel:
    """The compiled kernel on one device, with its stream and scratch; one digest at a time."""

    def __init__(self, cuda: Cuda, limits: CopyLimits) -> None:
        self._cuda, self._limits = cuda, limits
        self._kernel = cuda.load(compiled_kernel("digest", source(), cuda.architecture), "sum_cells")
        self._arguments = Arguments(NUM_ARGUMENTS)
        with cuda.current():
            self._stream = cuda.make_stream()
        self._lock = threading.Lock()
        self._num_bytes, self._device, self._pinned = 0, 0, 0

    def sums(self, regions: Mapping[str, Region], wanted: Sequence[CellBlocks]) -> list[Words]:
        """The sums of each state's cells; waits for the device."""
        with self._lock:
            return [sums for some in turns(wanted) for sums in self._turn(regions, some)]

    def _turn(self, regions: Mapping[str, Region], wanted: Sequence[CellBlocks]) -> list[Words]:
        cuda = self._cuda
        self._grow(8 * sum(words_needed(each) for each in wanted))
        table = table_of(wanted, regions, self._device)
        pinned = cuda.pinned_array(self._pinned, self._num_bytes).view(np.uint64)
        start, stop = table.words.size, table.words.size + table.num_sums
        pinned[:start], pinned[start:stop] = table.words, 0
        launches = self._limits.launches(table.num_tiles, table.num_bytes, cuda.num_multiprocessors)
        with cuda.current():
            try:
                cuda.upload_later(self._device, self._pinned, 8 * stop, self._stream)
                for first, end, num_blocks in launches:
                    self._arguments.set(self._device, table.num_terms, first, end)
                    cuda.launch(self._kernel, num_blocks, THREADS_PER_BLOCK, self._stream, self._arguments)
                place = 8 * start
                cuda.download_later(
                    self._pinned + place, self._device + place, 8 * table.num_sums, self._stream
                )
            finally:  # also what was begun before an error ends here
                cuda.wait_stream(self._stream)
        return table.split(pinned[start:stop].copy())

    def _grow(self, num_bytes: int) -> None:
        """Take scratch once; only a state that needs more than it makes it grow."""
        if num_bytes <= self._num_bytes:
            return
        num_bytes = max(num_bytes, SCRATCH_BYTES)
        device, pinned = self._device, self._pinned
        self._num_bytes = self._device = self._pinned = 0
        if device:
            self._cuda.free(device)
            self._cuda.free_pinned(pinned)
        device = self._cuda.allocate(num_bytes)
        try:
            self._pinned = self._cuda.allocate_pinned(num_bytes)
        except TransportError:
            self._cuda.free(device)
            raise
        self._num_bytes, self._device = num_bytes, device


@cache
def digest_kernel(device_index: int) -> DigestKernel:
    """Of a device, for the life of the process; raises TransportError where there is no such device."""
    return DigestKernel(Cuda(device_index), CopyLimits())


def source() -> str:
    """The kernel's text."""
    return files(__package__).joinpath("digest.cu").read_text(encoding="utf-8")
