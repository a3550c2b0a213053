"""Layouts by name.

A layout orders the letters L (layer), B (block), H (head), N (token), K (K or V) and C (channel), outermost
first; any permutation is a layout. Where K is left out it stands before C: K and V packed per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import SpecError
from kvferry.models.order import BLOCK, LAYER, Fork, Order, Step, Tile

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
"""Friendly names. Head-major or token-major; K and V packed per token, as halves of a block, or apart."""

PACKED = {
    # CPU attention, vector units: K transposed, V plain (offsets K[c*N + t], V[N*D + t*D + c]).
    "cpu-vec": Fork.of(k=("channel", "token"), v=("token", "channel")),
    # CPU attention, AMX tiles: pairs of channels (K) or of tokens (V) inside tiles of sixteen.
    "cpu-amx": Fork.of(
        k=("token", "channel", Tile("token", 16), Tile("channel", 2)),
        v=("channel", "token", Tile("channel", 16), Tile("token", 2)),
    ),
}
"""Layouts whose K and V differ inside a (block, head)."""

OPAQUE = "opaque"
"""Whole blocks of an unknown kernel: moved as they are, or not at all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An order for plain attention, and how blocks and layers nest for every other kind of cache."""

    name: str
    order: Order
    outer: Order
    """``(layer, block)`` or ``(block, layer)``."""

    @property
    def across_layers(self) -> bool:
        """Whether a block holds all layers of its group."""
        return self.outer[0] == BLOCK


def layout(name: str) -> Layout:
    """The layout of a name, or of a permutation of LBHNC / LBHNKC.

    >>> layout("NHD").order, layout("BHLNC").across_layers
    (('layer', 'block', 'token', 'head', 'part', 'channel'), True)
    >>> layout("DHN")
    Traceback (most recent call last):
    kvferry.errors.SpecError: no layout 'DHN': name one of HND, NHD, ..., or order the letters LBHNKC
    """
    if name in PACKED:
        return Layout(name, (LAYER, BLOCK, "head", PACKED[name]), (LAYER, BLOCK))
    letters = NAMED.get(name, "LBHNKC" if name == OPAQUE else name)
    if "K" not in letters:
        letters = letters.replace("C", "KC")
    if sorted(letters) != sorted(_LETTERS):
        known = ", ".join([*NAMED, *PACKED, OPAQUE])
        raise SpecError(f"no layout {name!r}: name one of {known}, or order the letters LBHNKC")
    steps: tuple[Step, ...] = tuple(_LETTERS[letter] for letter in letters)
    outer = (LAYER, BLOCK) if letters.index("L") < letters.index("B") else (BLOCK, LAYER)
    return Layout(name, steps, outer)
