"""A digest of what a request moved, which every layout, block size and tiling leaves the same.

Both sides take it of their own memory, through their own views: the source rank of the cells that it served,
the destination rank of the cells that came from there. It is a sum modulo 2^64 over items, each item's bytes
times a key that its *logical* position decides (state, cell, coordinates), never its address. So the sum of
some cells does not depend on their order, on who holds them, or on how they are cut into pieces; bytes
between needed cells do not count.

A key is a product of odd numbers, one per axis, as an address is a sum of one offset per axis. Odd, so that
no single changed bit is ever lost; a product, so that the sums of a block are one contraction of its memory
with the keys of a cell. Items of one or two bytes that are neighbours on the state's longest axis share a
key, shifted to where they stand in a word of four bytes: memory that has them in that order is read by
words, any other by items, to the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.box import TOKEN, Box
from kvferry.core.manifest import Manifest, Rank
from kvferry.core.plan import Plan
from kvferry.core.request import BlockTable, Request
from kvferry.core.select import needed_cells
from kvferry.core.span import Span, Spans, count, show
from kvferry.core.state import State
from kvferry.core.view import NOT_HELD, AxisMap, Ints, View
from kvferry.core.walk import Walk
from kvferry.errors import SpecError

Words = NDArray[np.uint64]
Bytes = NDArray[np.uint8]

CHUNK_TOKENS = 1024
"""Every so many tokens of a part have a sum of their own: so near is a difference told."""
WORD_BYTES = 4
"""Half as long as a key: a changed bit at the top of a word still changes half of a sum's bits."""
GATHER_BYTES = 1 << 19
"""Of the blocks that are looked at together: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class DigestPart:
    """What one source rank sent of one state, for one request: both sides digest exactly this.

    >>> from kvferry.core.sample import sample_request
    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> from kvferry import plan
    >>> parts = digest_parts(plan(src, dst, 1), sample_request(src, dst, 100))
    >>> sorted(parts), print(parts[3][-1])
    layers.47.attn/v cells [0, 100) channel [0, 256) × head [1, 2)
    ([2, 3], None)
    """

    state: str
    """The destination's name of the state."""
    src_state: str
    """The source's name of it. Keys are made of this one."""
    box: Box
    cells: Spans
    """Needed cells; those that the box leaves out on the token axis do not count."""

    def __str__(self) -> str:
        cells = " ".join(str(span) for span in self.cells)
        return f"{self.state} cells {cells} {self.box}"


def digest_parts(plan: Plan, request: Request) -> dict[int, tuple[DigestPart, ...]]:
    """The parts of one request, by the source rank that sends them."""
    views = plan.dst.rank(plan.dst_rank).by_state
    parts: dict[int, list[DigestPart]] = {}
    for piece in plan.pieces:
        state = plan.dst.state_by_name[piece.state]
        need, _ = needed_cells(state, views[piece.state].group, request)
        part = DigestPart(piece.state, plan.src_name(piece.state), piece.box, need)
        if need and (piece.box.period == 1 or len(cells_of(part))):
            parts.setdefault(piece.src_rank, []).append(part)
    return {src_rank: tuple(each) for src_rank, each in sorted(parts.items())}


@dataclass(frozen=True, slots=True)
class DigestDifference:
    """A part whose bytes are not the same on both sides, and the tokens among which they differ."""

    state: str
    tokens: Span

    def __str__(self) -> str:
        return f"{self.state}, tokens {self.tokens}"


@dataclass(frozen=True, eq=False)
class DigestSide:
    """One rank's memory of one request."""

    manifest: Manifest
    rank: Rank
    tables: Mapping[str, BlockTable]
    memory: Mapping[str, Bytes]
    """The bytes of each region."""
    side: str
    """``src`` or ``dst``: for messages."""
    _readers: dict[tuple[object, ...], tuple[_CellReader, Box]] = field(default_factory=dict, repr=False)
    """Each with its box, which lives as long: it is known by where it is."""

    def sums(self, parts: Sequence[DigestPart], *, seed: int = 0) -> list[Words]:
        """The sums of each part, one for each chunk of its tokens.

        Raises ``SpecError`` for what this rank does not hold, ``RequestError`` for what is not the request's.
        """
        return [self._sums(part, seed) for part in parts]

    def _sums(self, part: DigestPart, seed: int) -> Words:
        name = part.src_state if self.side == "src" else part.state
        view, state = self.rank.by_state.get(name), self.manifest.state_by_name.get(name)
        if view is None or state is None:
            raise SpecError(f"digest: rank {self.rank.rank} does not hold state {name!r:.80}")
        walk = Walk(self.manifest.group_by_name[view.group], self.tables, state.tokens_per_cell, self.side)
        if part.cells:
            walk.check(part.cells, 1)
        cells = cells_of(part)
        if not len(cells):
            return np.zeros(0, np.uint64)
        reader = self._reader(state, view, part.box, seed)
        per_cell = reader.per_cell(self.memory[view.region], view, *walk.locate(cells))
        per_cell *= _keys(seed, TOKEN, cells)
        per_cell *= _keys(seed, f"state {part.src_state}", np.zeros(1, np.int64))
        return np.add.reduceat(per_cell, _chunk_starts(cells, state))

    def _reader(self, state: State, view: View, box: Box, seed: int) -> _CellReader:
        """Layers share their axes and boxes: what is the same object is looked at once."""
        key = (id(view.axes), id(box), state.axes, state.item_bytes, seed)
        if key not in self._readers:
            self._readers[key] = _CellReader.of(state, view, box, seed), box
        return self._readers[key][0]


@dataclass(frozen=True, eq=False)
class TakenDigest:
    """What the destination rank found in its own memory, for each source rank that it read from."""

    manifest: Manifest
    """The destination's."""
    by_rank: Mapping[int, tuple[Sequence[DigestPart], Sequence[Words]]]

    def difference(self, src_rank: int, sums: bytes) -> DigestDifference | None:
        """The first place where a source rank's sums are others than ours; None if all are equal."""
        parts, ours = self.by_rank[src_rank]
        theirs = np.frombuffer(sums[: len(sums) // 8 * 8], "<u8")
        ends = np.cumsum([len(one) for one in ours])
        split = [theirs[end - len(one) : end] for one, end in zip(ours, ends, strict=True)]
        return next(differences(self.manifest, parts, ours, split), None)


def sums_to_bytes(sums: Sequence[Words]) -> bytes:
    """The sums of all parts, one after another, as they travel."""
    return b"".join(one.astype("<u8").tobytes() for one in sums)


def num_bytes(manifest: Manifest, part: DigestPart) -> int:
    """Of all cells of a part; ``manifest`` is the destination's."""
    num_items = len(cells_of(part)) * prod(count(spans) for name, spans in part.box.axes if name != TOKEN)
    return num_items * manifest.state_by_name[part.state].item_bytes


def cells_of(part: DigestPart) -> Ints:
    """The cells of a part, one by one, in order."""
    ranges = [np.arange(span.start, span.stop) for span in part.cells]
    cells = np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
    residues = dict(part.box.axes).get(TOKEN)
    if residues is None or part.box.period == 1:
        return cells
    return cells[_inside(residues, cells % part.box.period)]


def differences(
    manifest: Manifest, parts: Sequence[DigestPart], ours: Sequence[Words], theirs: Sequence[Words]
) -> Iterator[DigestDifference]:
    """Where the sums of two sides differ; ``manifest`` is the destination's."""
    for part, mine, other in zip(parts, ours, theirs, strict=True):
        state = manifest.state_by_name[part.state]
        size = state.tokens_per_cell
        cells = cells_of(part)
        starts = _chunk_starts(cells, state)
        if len(mine) != len(other):
            yield DigestDifference(part.state, Span(int(cells[0]) * size, (int(cells[-1]) + 1) * size))
            continue
        for at in np.flatnonzero(mine != other):
            stop = starts[at + 1] if at + 1 < len(starts) else len(cells)
            yield DigestDifference(
                part.state, Span(int(cells[starts[at]]) * size, (int(cells[stop - 1]) + 1) * size)
            )


def _chunk_starts(cells: Ints, state: State) -> Ints:
    """Where each chunk begins among the cells. Chunks are counted from token 0: blocks have no say."""
    chunks = cells // max(1, CHUNK_TOKENS // state.tokens_per_cell)
    return np.flatnonzero(np.concatenate(([True], chunks[1:] != chunks[:-1])))


class _Dimension(NamedTuple):
    """One digit of an axis, as a dimension of the memory of a block."""

    num_values: int
    stride: int
    is_token: bool


class _Word(NamedTuple):
    """What is read at once."""

    num_bytes: int
    num_items: int
    """Neighbouring items that one word holds."""
    num_words: int
    """Words that one item has."""
    axis: str
    """The axis on which short items share a key; empty if items are long."""


class _CellAxis(NamedTuple):
    """One axis of a box, as dimensions of a block's memory."""

    steps: list[tuple[int, int]]
    """(number of values, bytes from one to the next) of each digit."""
    keys: Words
    """One dimension for each digit."""
    offset: int = 0
    """Bytes to the first coordinate that is read."""

    @classmethod
    def of(cls, state: State, name: str, axis: AxisMap, spans: Spans, word: _Word, seed: int) -> _CellAxis:
        offsets = axis.offsets()
        held = np.flatnonzero(offsets != NOT_HELD)
        is_in_box = _inside(spans, held + axis.start)
        if int(is_in_box.sum()) != count(spans):
            raise SpecError(f"digest: {state.name}: this rank does not hold {name} {show(spans)}")
        if name == word.axis:
            keys = _shifted_keys(seed, name, (held + axis.start) * state.item_bytes)
        else:
            keys = _keys(seed, name, held + axis.start)
        shape, strides = [digit.num_held for digit in axis.digits], [digit.stride for digit in axis.digits]
        offset = 0
        if len(shape) == len(spans) == 1:  # the rest of the axis is not even read
            keys, shape = keys[is_in_box], [len(spans[0])]
            offset = int(offsets[held[is_in_box][0]])
        else:
            keys = np.where(is_in_box, keys, np.uint64(0))
        if name == word.axis:
            keys = keys[:: word.num_items]
            shape[-1], strides[-1] = shape[-1] // word.num_items, strides[-1] * word.num_items
        return cls(list(zip(shape, strides, strict=True)), keys.reshape(shape), offset)


@dataclass(frozen=True, eq=False)
class _CellReader:
    """How the cells of one kind of view are read and summed up, but for the keys of state and cell."""

    dtype: str
    dimensions: tuple[_Dimension, ...]
    """In the order of the axes and their digits; those of a cell first, then those of the token axis."""
    keys: Words
    """One dimension for each that is not the token axis's."""
    offset: int
    """Bytes from the view's own offset to the first item of the box."""
    held: Ints
    """For each cell of a block: where it stands among those that this rank holds, or ``NOT_HELD``."""

    @classmethod
    def of(cls, state: State, view: View, box: Box, seed: int) -> _CellReader:
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
            axes.append(_CellAxis([(word.num_words, word.num_bytes)], _shifted_keys(seed, "byte", at)))
        keys: Words = np.ones((), np.uint64)
        for axis in axes:
            keys = np.multiply.outer(keys, axis.keys)
        dimensions = [_Dimension(*each, False) for axis in axes for each in axis.steps]
        held_cells = np.zeros(1, np.int64)
        if TOKEN in maps:
            is_held = maps[TOKEN].offsets() != NOT_HELD
            held_cells = np.where(is_held, np.cumsum(is_held) - 1, NOT_HELD)
            dimensions += [_Dimension(digit.num_held, digit.stride, True) for digit in maps[TOKEN].digits]
        offset = sum(axis.offset for axis in axes)
        return cls(f"<u{word.num_bytes}", tuple(dimensions), keys, offset, held_cells)

    def per_cell(self, memory: Bytes, view: View, ids: Ints, inside: Ints) -> Words:
        """The sum of each cell, of a block and a place in it."""
        places = self.held[inside]
        if (places == NOT_HELD).any():
            raise SpecError(f"digest: {view.state}: this rank does not hold all of these cells")
        block_ids, at = np.unique(ids, return_inverse=True)
        per_block = self._per_block(memory, view, block_ids)
        return per_block[at, places]

    def _per_block(self, memory: Bytes, view: View, block_ids: Ints) -> Words:
        """The sums of all cells of these blocks, also those that nobody asked for."""
        order = sorted(range(len(self.dimensions)), key=lambda i: -self.dimensions[i].stride)
        dimensions = [self.dimensions[i] for i in order]
        blocks: NDArray[np.unsignedinteger] = np.ndarray(
            (int(block_ids[-1]) + 1, *(d.num_values for d in dimensions)),
            self.dtype,
            memory.data,
            view.offset + self.offset,
            (view.block_stride, *(d.stride for d in dimensions)),
        )
        cell_axes = [i + 1 for i, d in enumerate(self.dimensions) if not d.is_token]
        token_axes = [i + 1 for i, d in enumerate(self.dimensions) if d.is_token]
        num_cells = prod(d.num_values for d in self.dimensions if d.is_token)
        sums = np.empty((len(block_ids), num_cells), np.uint64)
        block_bytes = prod(blocks.shape[1:]) * blocks.itemsize
        step = max(1, GATHER_BYTES // max(1, block_bytes))
        for start in range(0, len(block_ids), step):
            some = blocks[block_ids[start : start + step]]
            summed = np.einsum(some, [0, *(i + 1 for i in order)], self.keys, cell_axes, [0, *token_axes])
            sums[start : start + step] = summed.reshape(len(some), num_cells)
        return sums


def _word(state: State, view: View, spans: Mapping[str, Spans]) -> _Word:
    item_bytes = state.item_bytes
    if item_bytes not in (1, 2) or not state.axes:
        num_bytes = gcd(item_bytes, WORD_BYTES)
        return _Word(num_bytes, 1, item_bytes // num_bytes, "")
    longest = max(state.axes, key=lambda axis: (axis.size, axis.name)).name
    axis, digit = view.axis(longest), view.axis(longest).digits[-1]
    num_items = WORD_BYTES // item_bytes
    edges = [edge for span in spans[longest] for edge in (span.start, span.stop)]
    is_in_order = digit.stride == item_bytes and digit.num_held == digit.size
    if is_in_order and not any(edge % num_items for edge in (digit.size, axis.start, *edges)):
        return _Word(WORD_BYTES, num_items, 1, longest)
    return _Word(item_bytes, 1, 1, longest)


def _shifted_keys(seed: int, name: str, at: Ints) -> Words:
    """Keys of the bytes that begin words, and of those inside words: shifted to where they stand."""
    words, inside = np.divmod(at, WORD_BYTES)
    return _keys(seed, name, words) << (8 * inside).astype(np.uint64)


def _inside(spans: Spans, values: Ints) -> NDArray[np.bool_]:
    """Which of the values lie in sorted spans."""
    starts, stops = np.array([(s.start, s.stop) for s in spans], np.int64).reshape(-1, 2).T
    at = np.searchsorted(starts, values, side="right") - 1
    return np.asarray((at >= 0) & (values < stops[at]) if len(starts) else np.zeros(len(values), bool))


_STEP = np.uint64(0x9E3779B97F4A7C15)


@lru_cache(maxsize=4096)
def _salt(seed: int, name: str) -> np.uint64:
    return np.uint64(int.from_bytes(blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little"))


def _keys(seed: int, name: str, coordinates: Ints) -> Words:
    """An odd number for each coordinate of an axis; numbers of neighbours have nothing in common."""
    keys = coordinates.astype(np.uint64)
    keys *= _STEP
    keys += _salt(seed, name)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return keys | np.uint64(1)
