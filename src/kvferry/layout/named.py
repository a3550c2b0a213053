"""Layouts by name.

A layout orders the letters L (layer), B (block), H (head), N (token), K (K or V) and C (channel), outermost
first; any permutation is a layout. Where K is left out it stands before C: K and V packed per token. Where K
and V are ordered differently inside a block and head, brackets say how: ``LBH[CN|NC]`` has K transposed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvferry.errors import SpecError
from kvferry.layout.order import BLOCK, LAYER, Fork, Order, Tile

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
    "cpu-vec": "LBH[CN|NC]",
    # CPU attention, AMX tiles: pairs of channels (K) or of tokens (V) inside tiles of sixteen.
    "cpu-amx": "LBH[NCn16c2|CNc16n2]",
    # CPU attention, bf16 on Arm's vector units: fours of channels (K) or of tokens (V) inside tiles of eight.
    "cpu-neon-bf16": "LBH[NCn8c4|CNc8n4]",
}
"""Layouts whose K and V differ inside a (block, head): K's order, V's order; n16 is a tile of 16 tokens."""

OPAQUE = "opaque"
"""Whole blocks of an unknown kernel: moved as they are, or not at all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An order for plain attention, and how blocks and layers nest for every other kind of cache."""

    name: str
    order: Order

    @property
    def across_layers(self) -> bool:
        """Whether a block holds all layers of its group."""
        return self.order.index(BLOCK) < self.order.index(LAYER)

    @property
    def outer(self) -> Order:
        """``(layer, block)`` or ``(block, layer)``."""
        return (BLOCK, LAYER) if self.across_layers else (LAYER, BLOCK)


def packed_interior(name: str) -> Order:
    """The order of K and V inside a (block, head), of a layout where they differ.

    >>> packed_interior("cpu-vec")
    (Fork(branches=((('k',), ('channel', 'token')), (('v',), ('token', 'channel')))),)
    """
    return layout(name).order[-1:]


def layout(name: str) -> Layout:
    """The layout of a name, or of a permutation of LBHNC / LBHNKC.

    >>> layout("NHD").order, layout("BHLNC").across_layers
    (('layer', 'block', 'token', 'head', 'part', 'channel'), True)
    >>> layout("DHN")
    Traceback (most recent call last):
    kvferry.errors.SpecError: no layout 'DHN': name one of HND, NHD, ..., or order the letters LBHNKC
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
        raise SpecError(f"no layout {name!r}: name one of {known}, or order the letters LBHNKC")
    return Layout(name, tuple(_LETTERS[letter] for letter in letters))


_PACKING = re.compile(r"((?=.*L)(?=.*B)(?=.*H)[LBH]{3})\[([NCnc0-9]+)\|([NCnc0-9]+)\]")
_INTERIOR = re.compile(r"[NC]|[nc][1-9][0-9]{0,5}")


def _interior(name: str, text: str) -> Order:
    """The order inside a (block, head): N and C once each, tiles as n16 or c2 behind them."""
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
