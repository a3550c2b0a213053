"""The numbers that a digest multiplies items with: what an item *is* decides them, never where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvferry.core.view import Ints

Words = NDArray[np.uint64]

WORD_BYTES = 4
"""Half as long as a key: a changed bit at the top of a word still changes half of a sum's bits."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_STIRS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = (1 << 64) - 1


def keys_of(seed: int, name: str, coordinates: Ints) -> Words:
    """An odd number for each coordinate of an axis; numbers of neighbours have nothing in common."""
    keys = coordinates.astype(np.uint64)
    keys *= _STEP
    keys += _salt(seed, name)
    return _mixed(keys)


def keys_of_names(seed: int, names: Sequence[str]) -> Words:
    """The key of coordinate 0 of each of some axes.

    >>> names = ["state a", "state b"]
    >>> bool((keys_of_names(7, names) == [keys_of(7, name, np.array([0]))[0] for name in names]).all())
    True
    """
    salts = np.fromiter(map(_number_of, names), np.uint64, len(names))
    salts += np.uint64(seed * int(_STEP) & _MASK)
    return _mixed(_stirred(salts))


def _mixed(keys: Words) -> Words:
    return _stirred(keys) | np.uint64(1)


def _stirred(keys: Words) -> Words:
    for shift, factor in _STIRS:
        keys ^= keys >> np.uint64(shift)
        keys *= np.uint64(factor)
    keys ^= keys >> np.uint64(31)
    return keys


def shifted_keys(seed: int, name: str, at: Ints) -> Words:
    """Keys of the bytes that begin words, and of those inside words: shifted to where they stand."""
    words, inside = np.divmod(at, WORD_BYTES)
    return keys_of(seed, name, words) << (8 * inside).astype(np.uint64)


def _salt(seed: int, name: str) -> np.uint64:
    """The number of a name, stirred with the seed: other names and other seeds have nothing in common."""
    salt = (_number_of(name) + seed * int(_STEP)) & _MASK
    for shift, factor in _STIRS:
        salt = ((salt ^ salt >> shift) * factor) & _MASK
    return np.uint64(salt ^ salt >> 31)


@lru_cache(maxsize=1 << 16)
def _number_of(name: str) -> int:
    """Hashed once for all loads."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
