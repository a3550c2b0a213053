"""A digest of a request's transferred cells, independent of layout, block size and tiling.

Each side computes it from its own memory through its own views: the source rank over the cells that it
served, the destination rank over the cells it received from there. Cells are located by the checker's
arithmetic (``core.addresses``), so that a bug in the transfer code does not hide itself.

The digest is a sum modulo 2^64 over items: each item's bytes times a key that depends on its *logical*
position (state, cell, coordinates), not its address. The sum of some cells is therefore independent of their
order, their holders and the pieces; bytes between needed cells do not count.

A key is a product of odd numbers, one per axis. Odd numbers preserve every single-bit change; a product makes
the sums of a block one contraction of its memory with the keys of a cell. Items of one or two bytes that are
neighbours on the state's longest axis share a key, shifted to their position in a word of four bytes: memory
in that order is read by words, any other by items, with the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from kvferry.core.addresses import BlockPlaces, needed_cells
from kvferry.core.box import TOKEN, Box
from kvferry.core.digest_cells import (
    Bytes,
    CellBlocks,
    CellChunks,
    CellPattern,
    ChunkedCells,
    ChunkSums,
    Words,
    keys_of,
    keys_of_names,
    sums_by_numpy,
)
from kvferry.core.manifest import Manifest, Rank
from kvferry.core.plan import Plan
from kvferry.core.request import BlockTable, Request
from kvferry.core.span import Span, Spans, count
from kvferry.core.state import State
from kvferry.core.view import NOT_HELD, Ints, View, is_inside
from kvferry.errors import SpecError

CHUNK_TOKENS = 1024
"""Tokens per sum of a part: the resolution at which differences are located."""


@dataclass(frozen=True, slots=True)
class DigestPart:
    """The cells of one state that one source rank sent for one request; both sides digest exactly these."""

    state: str
    """The destination's name of the state."""
    src_state: str
    """The source's name of it, from which keys are derived."""
    box: Box
    cells: Spans
    """Needed cells; the box may exclude some on the token axis."""

    def __str__(self) -> str:
        cells = " ".join(str(span) for span in self.cells)
        return f"{self.state} cells {cells} {self.box}"


def digest_parts(plan: Plan, request: Request) -> dict[int, tuple[DigestPart, ...]]:
    """The parts of one request, by the source rank that sends them."""
    views = plan.dst.rank(plan.dst_rank).by_state
    parts: dict[int, list[DigestPart]] = {}
    for piece in plan.pieces:
        state = plan.dst.state_by_name[piece.state]
        cells = needed_cells(request.need, views[piece.state].group, state)
        need = tuple(Span(*each) for each in cells)
        part = DigestPart(piece.state, plan.src_name(piece.state), piece.box, need)
        if need and (piece.box.period == 1 or len(cells_of(part))):
            parts.setdefault(piece.src_rank, []).append(part)
    return {src_rank: tuple(each) for src_rank, each in sorted(parts.items())}


@dataclass(frozen=True, slots=True)
class DigestDifference:
    """A part with different bytes on both sides, and the range of tokens with the difference."""

    state: str
    tokens: Span

    def __str__(self) -> str:
        return f"{self.state}, tokens {self.tokens}"


class _Located(NamedTuple):
    """The locations of the cells of a part; shared by many layers."""

    block_ids: Ints
    """Each once, in order."""
    block_index: Ints
    """Of each cell, among these."""
    inside: Ints
    """The position of each cell in its block."""
    keys: Words
    chunk_starts: Ints


class _Alike(NamedTuple):
    """The properties of a part, apart from its first byte; shared by many layers."""

    pattern: CellPattern
    block_ids: Ints
    chunks: CellChunks


@dataclass(frozen=True, eq=False)
class DigestSide:
    """One rank's memory of one request."""

    manifest: Manifest
    rank: Rank
    tables: Mapping[str, BlockTable]
    memory: Mapping[str, Bytes]
    """The bytes of each region; empty if ``chunk_sums`` accesses them itself."""
    side: str
    """``src`` or ``dst``: for messages."""
    chunk_sums: ChunkSums | None = None
    """The implementation; None: numpy."""
    _patterns: dict[tuple[object, ...], CellPattern] = field(default_factory=dict, repr=False)
    _known: dict[tuple[object, ...], _Located] = field(default_factory=dict, repr=False)
    _chunks: dict[tuple[int, CellPattern], CellChunks] = field(default_factory=dict, repr=False)
    """By the identity of a value of ``_known``, and the pattern."""
    _alike: dict[tuple[object, ...], tuple[_Alike | None, DigestPart]] = field(
        default_factory=dict, repr=False
    )
    """Keyed by the identities of axes, box and cells; the part keeps these objects alive."""

    def sums(self, parts: Sequence[DigestPart], *, seed: int = 0) -> list[Words]:
        """The sums of each part, one for each chunk of its tokens.

        Raises ``SpecError`` for cells that this rank does not hold, ``RequestError`` for cells outside the
        request's blocks.
        """
        asked = [self._asked(part, seed) for part in parts]
        some = [each for each in asked if each]
        sums_of = self.chunk_sums or partial(sums_by_numpy, self.memory)
        found = iter(sums_of(some))
        keys = keys_of_names(seed, [f"state {part.src_state}" for part in parts])
        none = np.zeros(0, np.uint64)
        return [key * next(found) if each else none for each, key in zip(asked, keys, strict=True)]

    def _asked(self, part: DigestPart, seed: int) -> ChunkedCells | None:
        name = part.src_state if self.side == "src" else part.state
        view, state = self.rank.by_state.get(name), self.manifest.state_by_name.get(name)
        if view is None or state is None:
            raise SpecError(f"digest: rank {self.rank.rank} does not hold state {name!r:.80}")
        place = id(view.axes), id(part.box), id(part.cells)
        key = (*place, view.group, self.manifest.shapes[state.name], state.item_bytes, seed)
        if key not in self._alike:
            self._alike[key] = self._alike_of(part, state, view, seed), part
        alike = self._alike[key][0]
        if alike is None:
            return None
        pattern, block_ids, chunks = alike
        offset = view.offset + pattern.offset
        return ChunkedCells(
            CellBlocks(name, view.region, pattern, offset, view.block_stride, block_ids), chunks
        )

    def _alike_of(self, part: DigestPart, state: State, view: View, seed: int) -> _Alike | None:
        located = self._located(part, state, view, seed)
        if located is None:
            return None
        pattern = self._pattern(state, view, part.box, seed)
        if (id(located), pattern) not in self._chunks:
            places = pattern.held[located.inside]
            if (places == NOT_HELD).any():
                raise SpecError(f"digest: {view.state}: this rank does not hold all of these cells")
            chunks = CellChunks(located.block_index, places, located.keys, located.chunk_starts)
            self._chunks[id(located), pattern] = chunks
        return _Alike(pattern, located.block_ids, self._chunks[id(located), pattern])

    def _located(self, part: DigestPart, state: State, view: View, seed: int) -> _Located | None:
        key = (view.group, state.tokens_per_cell, part.cells, dict(part.box.axes).get(TOKEN), part.box.period)
        if found := self._known.get((*key, seed)):
            return found
        group = self.manifest.group_by_name[view.group]
        places = BlockPlaces(group, self.tables, state.tokens_per_cell, self.side)
        places.check([(span.start, span.stop) for span in part.cells])
        cells = cells_of(part)
        if not len(cells):
            return None
        ids, inside = places.locate(cells)
        block_ids, block_index = np.unique(ids, return_inverse=True)
        keys = keys_of(seed, TOKEN, cells)
        located = _Located(block_ids, block_index, inside, keys, _chunk_starts(cells, state))
        self._known[*key, seed] = located
        return located

    def _pattern(self, state: State, view: View, box: Box, seed: int) -> CellPattern:
        key = (view.axes, box, state.axes, state.item_bytes, seed)
        if key not in self._patterns:
            self._patterns[key] = CellPattern.of(state, view, box, seed)
        return self._patterns[key]


@dataclass(frozen=True, eq=False)
class TakenDigest:
    """The destination's digest of its own memory, by source rank."""

    manifest: Manifest
    by_rank: Mapping[int, tuple[Sequence[DigestPart], Sequence[Words]]]

    def difference(self, src_rank: int, sums: bytes) -> DigestDifference | None:
        """The first difference between a source rank's sums and ours, if any."""
        parts, ours = self.by_rank[src_rank]
        theirs = np.frombuffer(sums[: len(sums) // 8 * 8], "<u8")
        ends = np.cumsum([len(one) for one in ours])
        split = [theirs[end - len(one) : end] for one, end in zip(ours, ends, strict=True)]
        return next(differences(self.manifest, parts, ours, split), None)


def sums_to_bytes(sums: Sequence[Words]) -> bytes:
    return b"".join(one.astype("<u8").tobytes() for one in sums)


def most_bytes(manifest: Manifest, part: DigestPart) -> int:
    """An upper bound on the bytes of a part, cheap to compute."""
    axes, num_cells = dict(part.box.axes), count(part.cells)
    residues = axes.pop(TOKEN, None)
    if residues is not None and part.box.period > 1:
        num_whole = sum((len(span) // part.box.period + 1) for span in part.cells)
        num_cells = min(num_cells, num_whole * count(residues))
    return num_cells * prod(map(count, axes.values())) * manifest.state_by_name[part.state].item_bytes


def cells_of(part: DigestPart) -> Ints:
    ranges = [np.arange(span.start, span.stop) for span in part.cells]
    cells = np.concatenate(ranges) if ranges else np.zeros(0, np.int64)
    residues = dict(part.box.axes).get(TOKEN)
    if residues is None or part.box.period == 1:
        return cells
    return cells[is_inside(residues, cells % part.box.period)]


def differences(
    manifest: Manifest, parts: Sequence[DigestPart], ours: Sequence[Words], theirs: Sequence[Words]
) -> Iterator[DigestDifference]:
    """The differences between the sums of two sides; ``manifest`` is the destination's."""
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
    """The index of each chunk's first cell. Chunks are counted from token 0, independent of blocks."""
    chunks = cells // max(1, CHUNK_TOKENS // state.tokens_per_cell)
    return np.flatnonzero(np.concatenate(([True], chunks[1:] != chunks[:-1])))
