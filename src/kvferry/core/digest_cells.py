"""The memory that a digest reads, as a product of the words of a cell and the blocks.

A ``CellPattern`` is made once for all layers of one layout, ``CellBlocks`` for each state of a request. The
sums are computed by numpy here, or by a compiled kernel, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.addresses import held_offsets
from kvferry.core.box import TOKEN, Box
from kvferry.core.span import Spans, count, show
from kvferry.core.state import BYTE, State
from kvferry.core.view import NOT_HELD, AxisMap, Ints, View, is_inside
from kvferry.errors import SpecError

Words = NDArray[np.uint64]

WORD_BYTES = 4
"""Half as long as a key: a change of a word's top bit still affects half of a sum's bits."""

STEP = np.uint64(0x9E3779B97F4A7C15)


def keys_of(seed: int, name: str, coordinates: Ints) -> Words:
    """A pseudo-random odd number for each coordinate of an axis."""
    keys = coordinates.astype(np.uint64)
    keys *= STEP
    keys += _salts(seed, [name])
    return _odd(keys)


def keys_of_names(seed: int, names: Sequence[str]) -> Words:
    """The key of coordinate 0 of each axis.

    >>> names = ["state a", "state b"]
    >>> bool((keys_of_names(7, names) == [keys_of(7, name, np.array([0]))[0] for name in names]).all())
    True
    """
    return _odd(_salts(seed, names))


def _odd(keys: Words) -> Words:
    return stirred(keys) | np.uint64(1)


def _salts(seed: int, names: Sequence[str]) -> Words:
    """A pseudo-random number for each name and seed."""
    salts = np.fromiter(map(_number_of, names), np.uint64, len(names))
    salts += np.uint64(seed * int(STEP) & (1 << 64) - 1)
    return stirred(salts)


def stirred(values: Words) -> Words:
    """The finaliser of SplitMix64, in place: every input bit affects every result bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def shifted_keys(seed: int, name: str, at: Ints) -> Words:
    """The keys of some bytes, shifted by their positions in their words."""
    words, inside = np.divmod(at, WORD_BYTES)
    return keys_of(seed, name, words) << (8 * inside).astype(np.uint64)


@lru_cache(maxsize=1 << 16)
def _number_of(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


Bytes = NDArray[np.uint8]

GATHER_BYTES = 1 << 19
"""Bytes of blocks that numpy reads at once, so that they stay in the CPU cache."""


class Dimension(NamedTuple):
    """One digit of an axis, or several contiguous ones, as a dimension of a block's memory."""

    num_values: int
    stride: int
    is_token: bool


class CellRows(NamedTuple):
    """A pattern as lists: word (c, r, i) of a block is at ``cells[c] + rows[r] + i`` words."""

    cells: Ints
    """Bytes from a block's first item to each cell that this rank holds."""
    rows: Ints
    """Bytes from a cell's first item to each row of it."""
    keys: Words
    """Of each word of each row."""


@dataclass(frozen=True, eq=False)
class CellPattern:
    """The layout of one kind of view's cells, and their keys apart from those of state and cell."""

    word_bytes: int
    dimensions: tuple[Dimension, ...]
    """Those of a cell and of the token axis, the longest stride first."""
    token_digits: tuple[int, ...]
    """The indices of the token axis's dimensions, the most significant first."""
    keys: Words
    """Has the dimensions of a cell, in the same order."""
    offset: int
    """Bytes from the view's own offset to the first item of the box."""
    held: Ints
    """For each cell of a block: its index among those that this rank holds, or ``NOT_HELD``."""

    @classmethod
    def of(cls, state: State, view: View, box: Box, seed: int) -> CellPattern:
        spans, maps = dict(box.axes), dict(view.axes)
        if sorted(spans) != sorted(maps):
            raise SpecError(f"digest: {view.state} has the axes {sorted(maps)}, the box has {sorted(spans)}")
        word = _word(state, view, spans)
        axes = [
            _CellAxis.of(state, name, axis, spans[name], word, seed)
            for name, axis in view.axes
            if name != TOKEN
        ]
        if word.num_words > 1:
            at = np.arange(word.num_words) * word.num_bytes
            axes.append(_CellAxis([(word.num_words, word.num_bytes)], shifted_keys(seed, BYTE, at)))
        keys: Words = np.ones((), np.uint64)
        for axis in axes:
            keys = np.multiply.outer(keys, axis.keys)
        cell_dimensions = [Dimension(*each, False) for axis in axes for each in axis.steps]
        token_dimensions, held_cells = [], np.zeros(1, np.int64)
        if TOKEN in maps:
            cells, digits = held_offsets(maps[TOKEN])[0], maps[TOKEN].digits
            held_cells = np.full(prod(digit.size for digit in digits), NOT_HELD)
            held_cells[cells] = np.arange(len(cells))
            token_dimensions = [Dimension(digit.num_held, digit.stride, True) for digit in digits]
        in_order = _in_order_of_memory(cell_dimensions, token_dimensions, keys)
        return cls(word.num_bytes, *in_order, sum(axis.offset for axis in axes), held_cells)

    @property
    def num_cells(self) -> int:
        return prod(d.num_values for d in self.dimensions if d.is_token)

    @property
    def block_bytes(self) -> int:
        return self.num_cells * self.keys.size * self.word_bytes

    @cached_property
    def rows(self) -> CellRows:
        cells = _distances([self.dimensions[i] for i in self.token_digits])
        in_cell = [d for d in self.dimensions if not d.is_token]
        row_words = 1
        if in_cell and in_cell[-1].stride == self.word_bytes:
            row_words = in_cell.pop().num_values
        return CellRows(cells, _distances(in_cell), self.keys.reshape(-1, row_words))

    @cached_property
    def span_bytes(self) -> int:
        """From the first item of a block to the end of its last row."""
        cells, rows, keys = self.rows
        return int(cells.max()) + int(rows.max()) + int(keys.shape[1]) * self.word_bytes


class CellBlocks(NamedTuple):
    state: str
    region: str
    pattern: CellPattern
    offset: int
    """Bytes from the start of the region to the first item of block 0."""
    block_stride: int
    block_ids: Ints
    """Each once, in order."""

    def check_inside(self, region_bytes: int) -> None:
        """Raise SpecError if a word of these blocks is outside its region: the kernel does not check."""
        start = self.offset + int(self.block_ids[0]) * self.block_stride
        stop = self.offset + int(self.block_ids[-1]) * self.block_stride + self.pattern.span_bytes
        if start < 0 or stop > region_bytes:
            raise SpecError(
                f"digest: {self.state}: bytes [{start}, {stop}) are not all in region {self.region}"
                f" of {region_bytes} bytes"
            )


@dataclass(frozen=True, eq=False)
class CellChunks:
    """The needed cells of some blocks, and their chunks of tokens; shared by layers with equal cells."""

    block_index: Ints
    """The index of each cell's block."""
    places: Ints
    """The index of each cell among those of its block that this rank holds."""
    keys: Words
    chunk_starts: Ints
    """The index of each chunk's first cell."""

    def folded(self, per_block: Words) -> Words:
        """The sum of each chunk, from the sums of all cells of the blocks."""
        per_cell = per_block[self.block_index, self.places]
        per_cell *= self.keys
        return np.asarray(np.add.reduceat(per_cell, self.chunk_starts), np.uint64)


class ChunkedCells(NamedTuple):
    """The needed cells of one state of a request."""

    blocks: CellBlocks
    chunks: CellChunks

    @property
    def distances(self) -> Ints:
        """Bytes from the first item of block 0 to each cell."""
        starts = self.blocks.block_ids * self.blocks.block_stride
        return starts[self.chunks.block_index] + self.blocks.pattern.rows.cells[self.chunks.places]


ChunkSums = Callable[[Sequence[ChunkedCells]], list[Words]]
"""The sum of each chunk, for each state."""


def sums_by_numpy(memory: Mapping[str, Bytes], wanted: Sequence[ChunkedCells]) -> list[Words]:
    """``ChunkSums`` of host memory, by region."""
    return [each.chunks.folded(_sums_of_blocks(memory[each.blocks.region], each.blocks)) for each in wanted]


def _sums_of_blocks(memory: Bytes, wanted: CellBlocks) -> Words:
    """The sum of every cell of each block: blocks × cells."""
    pattern, block_ids = wanted.pattern, wanted.block_ids
    blocks: NDArray[np.unsignedinteger] = np.ndarray(
        (int(block_ids[-1]) + 1, *(d.num_values for d in pattern.dimensions)),
        f"<u{pattern.word_bytes}",
        memory.data,
        wanted.offset,
        (wanted.block_stride, *(d.stride for d in pattern.dimensions)),
    )
    cell_axes = [i + 1 for i, d in enumerate(pattern.dimensions) if not d.is_token]
    token_axes = [i + 1 for i in pattern.token_digits]
    sums = np.empty((len(block_ids), pattern.num_cells), np.uint64)
    step = max(1, GATHER_BYTES // max(1, pattern.block_bytes))
    for start in range(0, len(block_ids), step):
        some = blocks[block_ids[start : start + step]]
        summed = np.einsum(some, list(range(some.ndim)), pattern.keys, cell_axes, [0, *token_axes])
        sums[start : start + step] = summed.reshape(len(some), pattern.num_cells)
    return sums


def _in_order_of_memory(
    cell: Sequence[Dimension], token: Sequence[Dimension], keys: Words
) -> tuple[tuple[Dimension, ...], tuple[int, ...], Words]:
    """Dimensions and keys in memory order; contiguous dimensions of a cell are merged."""
    both = [*cell, *token]
    order = sorted(range(len(both)), key=lambda i: -both[i].stride)
    keys = np.ascontiguousarray(keys.transpose([i for i in order if i < len(cell)]))
    merged: list[Dimension] = []
    digits = dict.fromkeys(range(len(token)), 0)
    for i in order:
        num_values, stride, is_token = both[i]
        if is_token:
            digits[i - len(cell)] = len(merged)
        elif merged and not merged[-1].is_token and merged[-1].stride == num_values * stride:
            num_values *= merged.pop().num_values
        merged.append(Dimension(num_values, stride, is_token))
    shape = [dimension.num_values for dimension in merged if not dimension.is_token]
    return tuple(merged), tuple(digits.values()), keys.reshape(shape)


def _distances(dimensions: Sequence[Dimension]) -> Ints:
    total = np.zeros(1, np.int64)
    for dimension in dimensions:
        total = np.add.outer(total, np.arange(dimension.num_values) * dimension.stride).ravel()
    return total


class _Word(NamedTuple):
    """The unit that is read at once."""

    num_bytes: int
    num_items: int
    """Items per word."""
    num_words: int
    """Words per item."""
    axis: str
    """The axis on which short items share a key; empty if items are long."""


class _CellAxis(NamedTuple):
    """One axis of a box, as dimensions of a block's memory."""

    steps: list[tuple[int, int]]
    """(number of values, bytes from one to the next) of each digit."""
    keys: Words
    """One dimension for each digit."""
    offset: int = 0
    """Byte offset of the first coordinate."""

    @classmethod
    def of(cls, state: State, name: str, axis: AxisMap, spans: Spans, word: _Word, seed: int) -> _CellAxis:
        held, offsets = held_offsets(axis)
        is_in_box = is_inside(spans, held)
        if int(is_in_box.sum()) != count(spans):
            raise SpecError(f"digest: {state.name}: this rank does not hold {name} {show(spans)}")
        if name == word.axis:
            keys = shifted_keys(seed, name, held * state.item_bytes)
        else:
            keys = keys_of(seed, name, held)
        shape, strides = [digit.num_held for digit in axis.digits], [digit.stride for digit in axis.digits]
        offset = 0
        if len(shape) == len(spans) == 1:  # do not read the rest of the axis
            keys, shape = keys[is_in_box], [len(spans[0])]
            offset = int(offsets[is_in_box][0])
        else:
            keys = np.where(is_in_box, keys, np.uint64(0))
        if name == word.axis:
            keys = keys[:: word.num_items]
            shape[-1], strides[-1] = shape[-1] // word.num_items, strides[-1] * word.num_items
        return cls(list(zip(shape, strides, strict=True)), keys.reshape(shape), offset)


def _word(state: State, view: View, spans: Mapping[str, Spans]) -> _Word:
    item_bytes = state.item_bytes
    if item_bytes not in (1, 2) or not state.axes:
        num_bytes = gcd(item_bytes, WORD_BYTES)
        return _Word(num_bytes, 1, item_bytes // num_bytes, "")
    longest = max(state.axes, key=lambda axis: (axis.size, axis.name)).name
    axis, digit = view.axis(longest), view.axis(longest).digits[-1]
    num_items = WORD_BYTES // item_bytes
    edges = [edge for span in spans[longest] for edge in (span.start, span.stop)]
    is_in_order = digit.stride == item_bytes and digit.held is None
    if is_in_order and not any(edge % num_items for edge in (digit.size, axis.start, *edges)):
        return _Word(WORD_BYTES, num_items, 1, longest)
    return _Word(item_bytes, 1, 1, longest)
