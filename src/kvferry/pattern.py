"""Test patterns for caches of real size.

The bytes of an item are a hash of its state's name, its cell and its coordinates, and so equal in both
engines. They are written through the source's views and checked through the destination's; no code is shared
with ``lower`` and ``select``. Two items of one byte are equal with a probability of 1/256; the ``oracle`` is
exact, and slow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.core.digest_cells import STEP, Bytes, Words, stirred
from kvferry.core.manifest import Manifest
from kvferry.core.request import HOLE, BlockTable
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing, Kind, State, Tail
from kvferry.core.view import NOT_HELD, Ints, View

STALE = 0xA5
"""The initial value of memory."""
KEPT = "kept"
"""Salt of the pattern of tokens that are already at the destination."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """The first wrong item of a view."""

    state: str
    cell: int
    coordinates: tuple[tuple[str, int], ...]
    wanted: str
    found: str

    def __str__(self) -> str:
        at = " ".join(f"{name} {coordinate}" for name, coordinate in self.coordinates)
        return f"{self.state} cell {self.cell} {at}".rstrip() + f": {self.found} instead of {self.wanted}"


@dataclass(frozen=True, slots=True)
class Checked:
    num_cells: int
    num_wrong: int
    first: Wrong | None = None


@dataclass(frozen=True)
class Site:
    """The items of one view in some cells: their coordinates by axis, and byte offsets."""

    state: State
    axes: tuple[tuple[str, Ints], ...]
    """The cells as axis ``cell``; then every other axis by name, with its held coordinates."""
    offsets: Ints
    """Byte offset of each item in its region; one dimension per axis."""

    def patterns(self, name: str, salt: str = "") -> Bytes:
        """The bytes of each item, as the last dimension, for a state that both engines know as ``name``."""
        digest = hashlib.blake2b(f"{salt}\0{name}".encode(), digest_size=8).digest()
        hashes: Words = np.array(int.from_bytes(digest, "little"), np.uint64)
        for _, coordinates in self.axes:
            hashes = stirred(hashes[..., None] + coordinates.astype(np.uint64) * STEP)
        item_bytes = self.state.item_bytes
        if item_bytes > 8:
            words = np.arange(-(-item_bytes // 8), dtype=np.uint64)
            hashes = stirred(hashes[..., None] + words * STEP)
            return hashes.view(np.uint8)[..., :item_bytes]
        return hashes[..., None].view(np.uint8)[..., :item_bytes]


def cells_of(state: State, tokens: Iterable[Span]) -> Ints:
    """The cells of a state for these tokens; a recurrent state has one.

    >>> cells_of(State("k", (), 2, "bf16", tokens_per_cell=4), [Span(0, 10)]).tolist()
    [0, 1]
    """
    if state.kind is Kind.RECURRENT:
        return np.zeros(1 if any(len(span) for span in tokens) else 0, np.int64)
    size = state.tokens_per_cell
    up = size - 1 if state.tail is Tail.PARTIAL else 0
    ranges = [np.arange(span.start // size, (span.stop + up) // size) for span in tokens if len(span)]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *ranges]))


def site(manifest: Manifest, view: View, table: BlockTable, cells: Ints) -> Site:
    """The items of a view in these cells, without cells that this rank does not hold."""
    state, group = manifest.state_by_name[view.state], manifest.group_by_name[view.group]
    per_block = group.tokens_per_block // state.tokens_per_cell
    index, inside = np.divmod(cells - table.first_token // state.tokens_per_cell, per_block)
    if group.addressing is Addressing.RING:
        index = np.zeros_like(index)
    has_block = (index >= 0) & (index < len(table.block_ids))
    cells, index, inside = cells[has_block], index[has_block], inside[has_block]
    ids = table.block_ids[index]
    axes = dict(view.axes)
    token = axes.pop("token", None)
    in_block = token.offsets()[inside] if token else np.zeros_like(inside)
    is_held = (ids != HOLE) & (in_block != NOT_HELD)
    offsets = view.offset + ids[is_held] * view.block_stride + in_block[is_held]
    held = [("cell", cells[is_held])]
    for name, axis in sorted(axes.items()):
        coordinates = np.flatnonzero(axis.offsets() != NOT_HELD)
        offsets = np.add.outer(offsets, axis.offsets()[coordinates])
        held.append((name, coordinates + axis.start))
    return Site(state, tuple(held), offsets)


def _sites(
    manifest: Manifest, rank: int, tables: Mapping[str, BlockTable], tokens: Mapping[str, Spans]
) -> Iterator[tuple[View, Site]]:
    """Every view of a rank with its items of these tokens."""
    for view in manifest.rank(rank).views:
        if view.group in tables and view.group in tokens:
            cells = cells_of(manifest.state_by_name[view.state], tokens[view.group])
            yield view, site(manifest, view, tables[view.group], cells)


def _check(memory: Bytes, where: Site, name: str, salt: str) -> Checked:
    """Compare every item of a site with its pattern."""
    items, at = _items(memory, where)
    patterns = where.patterns(name, salt)
    wrong = items[at] != _as_items(patterns, items)
    if wrong.ndim > where.offsets.ndim:
        wrong = wrong.any(axis=-1)
    num_wrong = int(wrong.sum())
    if not num_wrong:
        return Checked(where.offsets.size, 0)
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    start, num_bytes = int(where.offsets[index]), min(where.state.item_bytes, 8)
    (_, cell), *coordinates = [
        (axis, int(some[i])) for (axis, some), i in zip(where.axes, index, strict=True)
    ]
    wanted, found = patterns[index][:num_bytes], memory[start : start + num_bytes]
    first = Wrong(where.state.name, cell, tuple(coordinates), wanted.tobytes().hex(), found.tobytes().hex())
    return Checked(where.offsets.size, num_wrong, first)


def _items(memory: Bytes, where: Site) -> tuple[NDArray[np.unsignedinteger], Ints]:
    """The memory as whole items and their indices, or as bytes if items are unaligned or of odd size."""
    width = where.state.item_bytes
    if width in (2, 4, 8) and not len(memory) % width and not (where.offsets % width).any():
        return memory.view(f"u{width}"), where.offsets // width
    return memory, np.add.outer(where.offsets, np.arange(width))


def _as_items(patterns: Bytes, items: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    if items.dtype.itemsize == 1:
        return patterns
    return np.ascontiguousarray(patterns).view(items.dtype)[..., 0]


def fill_rank(
    memory: Mapping[str, Bytes],
    manifest: Manifest,
    rank: int,
    tables: Mapping[str, BlockTable],
    tokens: Mapping[str, Spans],
    salt: str = "",
) -> None:
    """Write the pattern of these tokens (by group) into one rank's memory, through all of its views."""
    for view, where in _sites(manifest, rank, tables, tokens):
        items, at = _items(memory[view.region], where)
        items[at] = _as_items(where.patterns(view.state, salt), items)


def check_rank(
    memory: Mapping[str, Bytes],
    manifest: Manifest,
    rank: int,
    tables: Mapping[str, BlockTable],
    tokens: Mapping[str, Spans],
    names: Mapping[str, str],
    salt: str = "",
) -> Checked:
    """Compare one rank's memory with the pattern of these tokens, state by state.

    ``names`` gives, for the states to look at, the name under which the pattern was written.
    """
    num_cells = num_wrong = 0
    first: Wrong | None = None
    for view, where in _sites(manifest, rank, tables, tokens):
        if view.state in names:
            one = _check(memory[view.region], where, names[view.state], salt)
            num_cells += one.num_cells
            num_wrong += one.num_wrong
            first = first or one.first
    return Checked(num_cells, num_wrong, first)
