"""Orders: a small language for memory layouts.

A memory layout is an *order* of steps from the outermost to the innermost: loops over an axis (``token``,
``head`` …), tiles (the low digit of an axis), and forks, where layers or parts follow one another. An order
and the local sizes determine every byte offset and stride:

>>> sizes = {"token": 16, "head": 2, "channel": 64}
>>> k, v = (Leaf("layers.0", part, sizes, item_bytes=2) for part in "kv")
>>> for spot in spots(grow(("block", "head", "token", "part", "channel"), (k, v), num_blocks=10)):
...     print(spot.leaf.part, spot.offset, spot.digits)
k 0 {'block': [(10, 8192)], 'head': [(2, 4096)], 'token': [(16, 256)], 'channel': [(64, 2)]}
v 128 {'block': [(10, 8192)], 'head': [(2, 4096)], 'token': [(16, 256)], 'channel': [(64, 2)]}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from kvferry.errors import SpecError

BLOCK, LAYER, PART, TOKEN = "block", "layer", "part", "token"


@dataclass(frozen=True, slots=True)
class Tile:
    """The low digit of an axis: ``size`` neighbouring coordinates. A loop over the axis covers the rest."""

    axis: str
    size: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Parts that follow one another, each with its own order of the remaining steps."""

    branches: tuple[tuple[tuple[str, ...], Order], ...]

    @classmethod
    def of(cls, **branches: Order) -> Fork:
        return cls(tuple(((name,), order) for name, order in branches.items()))


Step = str | Tile | Fork
Order = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One part of one layer's cache on one rank, with its local sizes."""

    layer: str
    part: str
    sizes: Mapping[str, int]
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """``count`` copies of ``inner``, one after another, along an axis."""

    axis: str
    count: int
    inner: Node
    pitch: int
    """Bytes from one copy to the next: those of ``inner``, or more if pages are padded."""


@dataclass(frozen=True, slots=True)
class Row:
    """Different nodes, one after another."""

    children: tuple[Node, ...]


Node = Leaf | Repeat | Row


@dataclass(frozen=True, slots=True)
class Spot:
    """The location of a leaf: its offset, and (count, stride) of the digits of each axis."""

    leaf: Leaf
    offset: int
    digits: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def num_bytes(node: Node) -> int:
    match node:
        case Leaf():
            return node.item_bytes
        case Repeat():
            return node.count * node.pitch
        case Row():
            return sum(num_bytes(child) for child in node.children)


def spots(node: Node, offset: int = 0) -> Iterator[Spot]:
    """Every leaf below a node, with its location."""
    match node:
        case Leaf():
            yield Spot(node, offset)
        case Repeat():
            for spot in spots(node.inner, offset):
                digits = {node.axis: [(node.count, node.pitch)], **spot.digits}
                digits[node.axis] = [(node.count, node.pitch), *spot.digits.get(node.axis, [])]
                yield Spot(spot.leaf, spot.offset, digits)
        case Row():
            for child in node.children:
                yield from spots(child, offset)
                offset += num_bytes(child)


def grow(
    order: Order, leaves: Sequence[Leaf], *, num_blocks: int, page_bytes: Callable[[int], int] = lambda n: n
) -> Node:
    """Build the tree of an order. ``page_bytes`` maps the bytes of a block to the padded number."""
    if not order:
        if len(leaves) != 1:
            raise SpecError(f"the order does not separate {[leaf.part for leaf in leaves]}")
        return leaves[0]
    step, rest = order[0], order[1:]

    def below(order: Order, some: Sequence[Leaf]) -> Node:
        return grow(order, some, num_blocks=num_blocks, page_bytes=page_bytes)

    match step:
        case Fork():
            branches = [
                (inner, [leaf for leaf in leaves if leaf.part in parts]) for parts, inner in step.branches
            ]
            if sum(len(some) for _, some in branches) != len(leaves):
                raise SpecError(f"the order omits some of {[leaf.part for leaf in leaves]}")
            return Row(tuple(below(inner, some) for inner, some in branches if some))
        case "layer" | "part":
            keys = dict.fromkeys(getattr(leaf, step) for leaf in leaves)
            return Row(
                tuple(below(rest, [leaf for leaf in leaves if getattr(leaf, step) == key]) for key in keys)
            )
        case "block":
            inner = below(rest, leaves)
            return Repeat(BLOCK, num_blocks, inner, page_bytes(num_bytes(inner)))
        case Tile(axis, size):
            inner = below(rest, leaves)
            return Repeat(axis, size, inner, num_bytes(inner))
        case axis:
            count = _count(axis, rest, leaves)
            inner = below(rest, leaves)
            return Repeat(axis, count, inner, num_bytes(inner)) if count else inner


def _count(axis: str, rest: Order, leaves: Sequence[Leaf]) -> int:
    """Iterations of a loop over ``axis``, given its inner tiles. 0: no leaf has the axis."""
    counts = set()
    for leaf in leaves:
        tiled = prod(tile.size for tile in _tiles(rest, leaf.part) if tile.axis == axis)
        size = leaf.sizes.get(axis, 0)
        if size % tiled:
            raise SpecError(f"{leaf.part}: {axis} of {size} cannot be split into tiles of {tiled}")
        counts.add(size // tiled)
    if len(counts) > 1:
        raise SpecError(f"a loop over {axis} needs one size for all parts, got {sorted(counts)}")
    return counts.pop()


def _tiles(order: Order, part: str) -> Iterator[Tile]:
    for step in order:
        if isinstance(step, Tile):
            yield step
        elif isinstance(step, Fork):
            for parts, inner in step.branches:
                if part in parts:
                    yield from _tiles(inner, part)


def in_kernel_blocks(order: Order, num_tokens: int) -> Order:
    """The order with each block cut into kernel blocks of ``num_tokens``, one after another."""
    at = 1 + max(i for i, step in enumerate(order) if step in (BLOCK, LAYER))
    return (*order[:at], TOKEN, *_capped(order[at:], num_tokens))


def _capped(order: Order, num_tokens: int) -> Order:
    """The order with every loop over tokens replaced by a tile, for a loop further out."""
    steps: list[Step] = []
    for at, step in enumerate(order):
        if step == TOKEN:
            tiled = prod(s.size for s in order[at:] if isinstance(s, Tile) and s.axis == TOKEN)
            if num_tokens % tiled:
                raise SpecError(f"kernel blocks of {num_tokens} tokens cannot be split into tiles of {tiled}")
            steps.append(Tile(TOKEN, num_tokens // tiled))
        elif isinstance(step, Fork):
            steps.append(Fork(tuple((parts, _capped(inner, num_tokens)) for parts, inner in step.branches)))
        else:
            steps.append(step)
    return tuple(steps)


_LETTERS = {"L": LAYER, "B": BLOCK, "H": "head", "N": "token", "K": "part", "C": "channel"}

NAMED = {
    "HND": "LBHNKC",
    "NHD": "LBNHKC",
    "HND-halves": "LBKHNC",
    "NHD-halves": "LBKNHC",
    "HND-apart": "LKBHNC",
    "NHD-apart": "LKBNHC",
    "cross-layer": "BLHNKC",
    "cross-layer-NHD": "BLNHKC",
}
"""Named layouts: head-major or token-major; K and V packed per token, as halves of a block, or apart."""

PACKED = {
    # CPU attention, vector units: K transposed, V plain (offsets K[c*N + t], V[N*D + t*D + c]).
    "cpu-vec": "LBH[CN|NC]",
    # CPU attention, AMX tiles: pairs of channels (K) or of tokens (V) inside tiles of sixteen.
    "cpu-amx": "LBH[NCn16c2|CNc16n2]",
    # CPU attention, bf16 on Arm's vector units: fours of channels (K) or of tokens (V) inside tiles of eight.
    "cpu-neon-bf16": "LBH[NCn8c4|CNc8n4]",
}
"""Layouts whose K and V differ inside a (block, head): K's order, V's order; n16 is a tile of 16 tokens."""

OPAQUE = "opaque"
"""Whole blocks of an unknown kernel, which are only moved unchanged."""


# A layout orders the letters L (layer), B (block), H (head), N (token), K (K or V) and C (channel),
# outermost first. Any permutation is a layout. If K is omitted, it comes before C: K and V packed per token.
# If K and V have different orders inside a block and head, both are in brackets: in ``LBH[CN|NC]`` K is
# transposed.


@dataclass(frozen=True, slots=True)
class Layout:
    """An order for plain attention; its nesting of blocks and layers applies to all caches."""

    name: str
    order: Order

    @property
    def across_layers(self) -> bool:
        """Whether a block holds all layers of its group."""
        return self.order.index(BLOCK) < self.order.index(LAYER)

    @property
    def outer(self) -> Order:
        return (BLOCK, LAYER) if self.across_layers else (LAYER, BLOCK)


def packed_interior(name: str) -> Order:
    """The order inside a (block, head) of a layout with different orders of K and V."""
    return layout(name).order[-1:]


def layout(name: str) -> Layout:
    """The layout of a name, or of a permutation of LBHNC / LBHNKC.

    >>> layout("NHD").order, layout("BHLNC").across_layers
    (('layer', 'block', 'token', 'head', 'part', 'channel'), True)
    >>> layout("DHN")
    Traceback (most recent call last):
    kvferry.errors.SpecError: unknown layout 'DHN': use one of HND, NHD, ..., or an order of ...
    """
    if packed := _PACKING.fullmatch(PACKED.get(name, name)):
        outer, k, v = packed.groups()
        fork = Fork.of(k=_interior(name, k), v=_interior(name, v))
        return Layout(name, (*(_LETTERS[letter] for letter in outer), fork))
    letters = NAMED.get(name, "LBHNKC" if name == OPAQUE else name)
    if "K" not in letters:
        letters = letters.replace("C", "KC")
    if sorted(letters) != sorted(_LETTERS):
        known = ", ".join([*NAMED, *PACKED, OPAQUE])
        raise SpecError(f"unknown layout {name!r}: use one of {known}, or an order of the letters LBHNKC")
    return Layout(name, tuple(_LETTERS[letter] for letter in letters))


_PACKING = re.compile(r"((?=.*L)(?=.*B)(?=.*H)[LBH]{3})\[([NCnc0-9]+)\|([NCnc0-9]+)\]")
_INTERIOR = re.compile(r"[NC]|[nc][1-9][0-9]{0,5}")


def _interior(name: str, text: str) -> Order:
    """The order inside a (block, head): N and C once each, followed by tiles such as n16 or c2."""
    found = _INTERIOR.findall(text)
    plain = [letter for letter in found if letter in _LETTERS]
    tiles_first = any(
        found.index(t) < found.index(t[0].upper()) for t in found if t[1:] and t[0].upper() in found
    )
    if "".join(found) != text or sorted(plain) != ["C", "N"] or tiles_first:
        raise SpecError(f"layout {name!r}: {text!r} must have N and C once each, each before its tiles")
    return tuple(
        _LETTERS[step] if step in _LETTERS else Tile(_LETTERS[step[0].upper()], int(step[1:]))
        for step in found
    )
