"""Blocks to scale: the cells of each view in one block of a tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np

from kvferry.cli.output import by_numbers, kind_of, together
from kvferry.core.box import TOKEN
from kvferry.core.manifest import Manifest, Rank
from kvferry.core.span import Span
from kvferry.core.state import Addressing, Group
from kvferry.core.view import View
from kvferry.errors import counted

MAX_CELLS = 96
"""Cells of a view that are drawn one by one; more are drawn together."""
MAX_CELLS_OF_ENGINE = 900
"""Of all views of an engine together, so that a page stays small."""

SMALL = 12
"""Views of less than this fraction of a block are also drawn enlarged."""


@dataclass(frozen=True, slots=True)
class DrawnCells:
    """Cells that are drawn as one, from the first byte to the last."""

    offset: int
    """From the start of the block."""
    num_bytes: int
    words: str
    is_whole: bool
    """Whether no other cells lie between them."""


@dataclass(frozen=True, slots=True)
class Track:
    """One view, or the equal views of several layers."""

    label: str
    stride_words: str
    """The stride of each axis."""
    cells: tuple[DrawnCells, ...]

    @property
    def extent_bytes(self) -> int:
        return max(c.offset + c.num_bytes for c in self.cells) - min(c.offset for c in self.cells)


@dataclass(frozen=True, slots=True)
class Lens:
    """A small part of a block, enlarged."""

    first_byte: int
    num_bytes: int
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The views of one group in a tensor, or of several equal groups."""

    groups: tuple[str, ...]
    holds: str
    """The content of one block."""
    first_byte: int
    """Of the first block in the tensor."""
    block_bytes: int
    used_bytes: int
    tracks: tuple[Track, ...]
    lens: Lens | None

    @property
    def used_percent(self) -> float:
        return 100 * self.used_bytes / self.block_bytes


@dataclass(frozen=True, slots=True)
class BlockPicture:
    """A block of one kind of tensor, with the views of all of its groups."""

    tensors: str
    """Their names, joined."""
    num_tensors: int
    num_bytes: int
    """Drawn bytes: the longest stride of its parts."""
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True, slots=True)
class EngineBlocks:
    """The blocks of one rank of an engine."""

    engine: str
    """Its role: source, destination, A or B."""
    rank: int
    sentence: str
    """The number of ranks with this layout."""
    pictures: tuple[BlockPicture, ...]
    num_more: int
    """Other tensors, with combinations of the same views."""


def engine_blocks(engine: str, manifest: Manifest) -> EngineBlocks:
    """Blocks of the first rank: enough tensors to show every kind of view once."""
    rank = manifest.ranks[0]
    looks = [_look(each) for each in manifest.ranks]
    alike = looks.count(looks[0])
    sentence = (
        "all ranks have this layout"
        if alike == len(looks)
        else f"{alike} of {len(looks)} ranks have this layout"
    )
    views: dict[str, list[View]] = defaultdict(list)
    for view in rank.views:
        views[view.region].append(view)
    kinds: dict[object, list[str]] = defaultdict(list)
    for region, mine in views.items():
        kinds[frozenset((_view_look(view), view.group) for view in mine)].append(region)
    shown, seen = [], set[object]()
    for regions in kinds.values():
        some = {_view_look(view) for view in views[regions[0]]}
        if not some <= seen:
            seen |= some
            shown.append(regions)
    num_tracks = sum(len({kind_of(view.state) for view in views[regions[0]]}) for regions in shown)
    limit = max(8, min(MAX_CELLS, MAX_CELLS_OF_ENGINE // num_tracks)) if num_tracks else MAX_CELLS
    drawn = tuple(_picture(manifest, regions, views, limit) for regions in shown)
    return EngineBlocks(engine, rank.rank, sentence, drawn, len(views) - sum(map(len, shown)))


def _look(rank: Rank) -> object:
    """Equal for ranks of one layout, whatever heads they hold."""
    return tuple((view.region, view.group, _view_look(view)) for view in rank.views)


def _view_look(view: View) -> object:
    """Equal for views of one kind, at one place of the block."""
    digits = tuple((name, tuple((d.num_held, d.stride) for d in axis.digits)) for name, axis in view.axes)
    return (kind_of(view.state), view.offset % view.block_stride, view.block_stride, digits)


def _pool(view: View) -> tuple[str, int, int]:
    """Equal for views of one series of blocks: a tensor may hold all blocks of K before those of V."""
    return (view.group, view.block_stride, view.offset // view.block_stride)


def _picture(
    manifest: Manifest, regions: Sequence[str], views: Mapping[str, Sequence[View]], limit: int
) -> BlockPicture:
    pools: dict[tuple[str, int, int], list[View]] = defaultdict(list)
    for view in views[regions[0]]:
        pools[_pool(view)].append(view)
    alike: dict[object, list[tuple[str, int, int]]] = defaultdict(list)
    for pool, mine in pools.items():
        group = manifest.group_by_name[pool[0]]
        look = frozenset(map(_view_look, mine))
        alike[look, group.tokens_per_block, group.addressing, group.window].append(pool)
    everywhere = [view for region in regions for view in views[region]]
    parts = tuple(
        _part(manifest, some, pools[some[0]], [view for view in everywhere if _pool(view) in some], limit)
        for some in alike.values()
    )
    longest = max(part.block_bytes for part in parts)
    return BlockPicture(together(regions), len(regions), longest, parts)


def _part(
    manifest: Manifest,
    pools: Sequence[tuple[str, int, int]],
    views: Sequence[View],
    alike: Sequence[View],
    limit: int,
) -> BlockPart:
    """The views of one pool; ``alike``: those of equal pools and tensors, named with them."""
    groups = tuple(dict.fromkeys(name for name, _, _ in pools))
    _, stride, index = pools[0]
    kinds: dict[str, list[View]] = defaultdict(list)
    for view in views:
        kinds[kind_of(view.state)].append(view)
    cells = sum(_held_bytes(manifest, view) for view in views)
    states: dict[str, list[str]] = defaultdict(list)
    for view in alike:
        states[kind_of(view.state)].append(view.state)
    tracks = tuple(
        Track(
            together(sorted(states[kind], key=by_numbers)),
            _strides(some[0]),
            tuple(_cells(manifest, some, limit)),
        )
        for kind, some in kinds.items()
    )
    holds = _holds(manifest.group_by_name[groups[0]])
    return BlockPart(groups, holds, index * stride, stride, cells, tracks, _lens(tracks, stride))


def _lens(tracks: Sequence[Track], block_bytes: int) -> Lens | None:
    """The views that are too small on the scale of the block."""
    small = [track for track in tracks if SMALL * track.extent_bytes < block_bytes]
    if not small:
        return None
    first = min(cell.offset for track in small for cell in track.cells)
    end = max(cell.offset + cell.num_bytes for track in small for cell in track.cells)
    return Lens(first, end - first, tuple(small)) if SMALL * (end - first) < block_bytes else None


def _holds(group: Group) -> str:
    if group.addressing is Addressing.SLOT:
        return "the state of one request"
    window = f"; the last {group.window:,} of a request are kept" if group.window else ""
    return f"{counted(group.tokens_per_block, 'token')}{window}"


def _held_bytes(manifest: Manifest, view: View) -> int:
    return manifest.state_by_name[view.state].item_bytes * prod(count for count, _ in view.steps())


def _cells(manifest: Manifest, views: Sequence[View], limit: int) -> Iterator[DrawnCells]:
    each = max(1, limit // len(views))
    for view in views[:limit]:
        state = manifest.state_by_name[view.state]
        name = f"{view.state}: " if len(views) > 1 else ""
        for cell in drawn_cells(
            view, state.item_bytes, state.tokens_per_cell, each, view.offset % view.block_stride
        ):
            yield replace(cell, words=f"{name}{cell.words}")


def _strides(view: View) -> str:
    steps = [(digit.stride, name) for name, axis in view.axes for digit in axis.digits if digit.num_held > 1]
    return ", ".join(f"{name} {stride:,} B" for stride, name in sorted(steps, reverse=True))


# -- the cells of a view -----------------------------------------------------------------------------


def drawn_cells(
    view: View, item_bytes: int, tokens_per_cell: int, limit: int, offset: int
) -> Iterator[DrawnCells]:
    """The cells of one block, the outermost steps one by one, up to the limit.

    >>> import numpy as np
    >>> pool = np.zeros((9, 2, 4, 2, 8), np.int16)  # block, head, token, K or V, channel
    >>> v = pool[:, :, :, 1]
    >>> view = View.of_strides("v", "g", "r", "block head token channel", v.shape, v.strides, offset=16)
    >>> [(c.offset, c.num_bytes, c.words) for c in drawn_cells(view, 2, 1, 8, 16)][:2]
    [(16, 16, 'head 0, token 0'), (48, 16, 'head 0, token 1')]
    >>> [(c.offset, c.num_bytes, c.words, c.is_whole) for c in drawn_cells(view, 2, 1, 2, 16)]
    [(16, 112, 'head 0, tokens 0 to 3', False), (144, 112, 'head 1, tokens 0 to 3', False)]
    """
    steps = [(name, digit) for name, axis in view.axes for digit in axis.digits if digit.num_held > 1]
    steps.sort(key=lambda step: -step[1].stride)
    # Innermost steps without gaps are not drawn one by one.
    num_shown, extent = len(steps), item_bytes
    while num_shown and steps[num_shown - 1][1].stride == extent:
        name, digit = steps[num_shown - 1]
        if name in (TOKEN, "head"):
            break
        num_shown, extent = num_shown - 1, extent * digit.num_held
    # The first step beyond the limit is cut into equal parts; the steps inside it are drawn whole.
    parts, number = list[list[Span]](), 1
    for _, digit in steps[:num_shown]:
        parts.append(_cut(digit.num_held, limit // number))
        number *= digit.num_held
        if number > limit:
            break
    named = {name for name, _ in steps[: len(parts)]}
    parts += [[Span(0, digit.num_held)] for _, digit in steps[len(parts) :]]
    for spans in product(*parts):
        chosen = {(name, digit.stride): span for (name, digit), span in zip(steps, spans, strict=True)}
        at = offset + sum(stride * span.start for (_, stride), span in chosen.items())
        size = item_bytes + sum(stride * (len(span) - 1) for (_, stride), span in chosen.items())
        is_whole = size == item_bytes * prod(map(len, spans))
        yield DrawnCells(at, size, _words(view, named, chosen, tokens_per_cell), is_whole)


def _cut(length: int, number: int) -> list[Span]:
    each = -(-length // max(1, number))
    return [Span(at, min(at + each, length)) for at in range(0, length, each)]


def _words(view: View, named: set[str], chosen: Mapping[tuple[str, int], Span], tokens_per_cell: int) -> str:
    """The tokens, heads and parts of other axes that these cells have."""
    parts = []
    for name, axis in sorted(view.axes, key=lambda each: (each[0] != "head", each[0] != TOKEN, each[0])):
        if name not in (TOKEN, "head") and name not in named:
            continue
        values, weight = np.array([axis.start]), axis.size
        for digit in axis.digits:
            weight //= digit.size
            first = digit.held.start if digit.held else 0
            span = chosen[name, digit.stride] if digit.num_held > 1 else Span(0, 1)
            values = np.add.outer(values, weight * (first + np.arange(span.start, span.stop))).ravel()
        scale = tokens_per_cell if name == TOKEN else 1
        low, high = int(values.min()) * scale, int(values.max() + 1) * scale - 1
        in_turns = " in turns" if len(values) * scale <= high - low else ""
        parts.append(f"{name} {low}" if low == high else f"{name}s {low} to {high}{in_turns}")
    return ", ".join(parts) or "all of it"
