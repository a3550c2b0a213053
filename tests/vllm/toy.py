"""A toy model: what it remembers of a request, and which token follows from that.

Every cell of a cache is a number made of the layer, the head, the channel, the position and *all* tokens up
to there. The next token is made of every cell that a real model would read at that position. So a cache that
is wrong anywhere gives a wrong token, as with a real model, but in microseconds; and what is right can be
said without any cache at all (``answer``).

Before a step writes, it reads what is there already. If that is not what it should be, the difference goes
into all it writes: an error is never painted over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

VOCABULARY = 256
Words = npt.NDArray[np.uint64]
Totals = dict[tuple[str, int], int]
"""(layer, head) -> what reading all of its cells came to. A state has no heads: it is head 0."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_VALUE_BITS = 24
"""Values are whole numbers that a float of 32 bits holds exactly."""


@dataclass(frozen=True)
class Attention:
    """The cells of an attention layer on one rank: two parts (K and V) of ``width`` channels per head."""

    name: str
    heads: tuple[int, ...]
    """Which of the model's heads are here."""
    width: int
    window: int = 0
    """A token reads this many tokens, itself included; 0: all."""
    chunk: int = 0
    """A token reads those of its own chunk of so many; 0: there are no chunks."""

    def start(self, position: int) -> int:
        """The first token that is read at a position."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position + 1 - self.window) if self.window else 0

    def keys(self) -> Words:
        """One number per (head, part and channel)."""
        return np.stack([_keys(f"{self.name}/{head}", 2 * self.width) for head in self.heads])


@dataclass(frozen=True)
class Recurrent:
    """The cells of a state: one value, made of all tokens so far."""

    name: str
    width: int

    def keys(self) -> Words:
        """One number per cell."""
        return _keys(self.name, self.width)[None]


Layer = Attention | Recurrent


class Memory(Protocol):
    """Where a rank keeps the cells of one request."""

    def read(self, layer: Layer, start: int, stop: int) -> npt.NDArray[np.uint32]:
        """The bits of [head, token, channel]; of a state, those after token ``stop - 1``, as one token."""

    def write(self, layer: Layer, start: int, bits: npt.NDArray[np.uint32]) -> None:
        """Put them there, from token ``start`` on."""

    def stops(self, layer: Recurrent, start: int, stop: int) -> Iterable[int]:
        """After how many tokens the state is kept, of those that a step computes."""


@dataclass
class Text:
    """A request's tokens, and a fingerprint of all tokens up to each."""

    tokens: list[int]
    prints: list[int] = field(default_factory=list)
    sums: dict[Layer, Words] = field(default_factory=dict)
    """Of each attention layer: [head, token], what all right cells before a token come to."""

    def fingerprints(self, start: int, stop: int) -> Words:
        for token in self.tokens[len(self.prints) : stop]:
            before = self.prints[-1] if self.prints else 1
            self.prints.append(_scramble(before * 31 + token + 1))
        return np.array(self.prints[start:stop], np.uint64)


def forward(layers: Iterable[Layer], text: Text, memory: Memory, start: int, stop: int) -> Totals:
    """Compute tokens [start, stop) of a request; what reading at the last of them came to."""
    totals: Totals = {}
    for layer in layers:
        stain = _stain(layer, text, memory, start)
        if isinstance(layer, Attention):
            memory.write(layer, start, _cells(layer, text, start, stop) ^ stain)
        else:
            for end in memory.stops(layer, start, stop):
                memory.write(layer, end - 1, _cells(layer, text, start, end) ^ stain)
        found = memory.read(layer, _first_read(layer, stop - 1), stop)
        for head, total in zip(_heads(layer), _totals(layer, found, stop), strict=True):
            totals[layer.name, head] = int(total)
    return totals


def sample(totals: Iterable[Totals]) -> int:
    """The next token, from what all ranks read. Ranks that hold the same head must agree on it."""
    seen = sorted({(*key, total) for of_rank in totals for key, total in of_rank.items()})
    return hashlib.blake2b(repr(seen).encode(), digest_size=1).digest()[0] % VOCABULARY


def answer(layers: Sequence[Layer], prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What follows a prompt, if every cell that is read is right."""
    text = Text(list(prompt))
    for _ in range(num_tokens):
        stop = len(text.tokens)
        totals: Totals = {}
        for layer in layers:
            right = _right(layer, text, _first_read(layer, stop - 1), stop)
            for head, total in zip(_heads(layer), right, strict=True):
                totals[layer.name, head] = int(total)
        text.tokens.append(sample([totals]))
    return text.tokens[len(prompt) :]


def whole(layers: Iterable[Layer]) -> list[Layer]:
    """The layers of an engine, from those of its ranks: each with all of its heads."""
    heads: dict[str, set[int]] = {}
    of_name: dict[str, Layer] = {}
    for layer in layers:
        heads.setdefault(layer.name, set()).update(_heads(layer))
        of_name[layer.name] = layer
    return [
        replace(layer, heads=tuple(sorted(heads[name]))) if isinstance(layer, Attention) else layer
        for name, layer in of_name.items()
    ]


def _stain(layer: Layer, text: Text, memory: Memory, start: int) -> npt.NDArray[np.uint32]:
    """What is wrong with the cells that token ``start`` builds on, per head; 0 if nothing is."""
    if start == 0:
        return np.zeros((len(_heads(layer)), 1, 1), np.uint32)
    first = layer.start(start) if isinstance(layer, Attention) else start - 1
    wrong = _totals(layer, memory.read(layer, first, start), start) - _right(layer, text, first, start)
    return (wrong >> np.uint64(64 - _VALUE_BITS)).astype(np.uint32)[:, None, None]


def _cells(layer: Layer, text: Text, start: int, stop: int) -> npt.NDArray[np.uint32]:
    """The right bits of [head, token, channel]. A state keeps only what came after its last token."""
    first = start if isinstance(layer, Attention) else stop - 1
    prints = text.fingerprints(first, stop)
    mixed = (prints[None, :, None] ^ layer.keys()[:, None, :]) * _ODD
    values = (mixed >> np.uint64(64 - _VALUE_BITS)).astype(np.float32)
    return values.view(np.uint32)


def _totals(layer: Layer, bits: npt.NDArray[np.uint32], stop: int) -> Words:
    """One number per head, in which every cell has a weight of its own by position and channel."""
    return _by_token(bits, stop).sum(axis=1, dtype=np.uint64)


def _by_token(bits: npt.NDArray[np.uint32], stop: int) -> Words:
    num_tokens, width = bits.shape[1:]
    positions = np.arange(stop - num_tokens, stop, dtype=np.uint64)[:, None]
    channels = np.arange(width, dtype=np.uint64)[None]
    weights = ((positions * np.uint64(1_000_003) + channels + np.uint64(1)) * _ODD) | np.uint64(1)
    return (bits.astype(np.uint64) * weights[None]).sum(axis=2, dtype=np.uint64)


def _right(layer: Layer, text: Text, start: int, stop: int) -> Words:
    """What ``_totals`` of the right cells of [start, stop) comes to; each token's cells are made once."""
    if isinstance(layer, Recurrent):
        return _totals(layer, _cells(layer, text, start, stop), stop)
    sums = text.sums.get(layer, np.zeros((len(layer.heads), 1), np.uint64))
    num_known = sums.shape[1] - 1
    if num_known < stop:
        more = np.cumsum(_by_token(_cells(layer, text, num_known, stop), stop), axis=1, dtype=np.uint64)
        sums = text.sums[layer] = np.concatenate([sums, sums[:, -1:] + more], axis=1)
    return sums[:, stop] - sums[:, start]


def _first_read(layer: Layer, position: int) -> int:
    return layer.start(position) if isinstance(layer, Attention) else position


def _heads(layer: Layer) -> tuple[int, ...]:
    return layer.heads if isinstance(layer, Attention) else (0,)


@cache
def _keys(name: str, num_cells: int) -> Words:
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 1 << 63, num_cells, dtype=np.uint64)


def _scramble(value: int) -> int:
    value &= _MASK
    value ^= value >> 31
    value = value * 0xBF58476D1CE4E5B9 & _MASK
    return value ^ value >> 29
