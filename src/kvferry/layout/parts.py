"""What a page is made of: parts, their axes, and their items."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.shard import Sharding

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "uint8": 1}
"""Bytes of an element, by our name of its dtype."""


@dataclass(frozen=True, slots=True)
class Item:
    """The smallest thing that is never cut: an element, or a packed row, or a whole opaque block.

    >>> Item.of("bf16"), Item("uint8", 132, "fp8 row, fp32 scale").num_bytes
    (Item(dtype='bf16', num_bytes=2, encoding='plain'), 132)
    """

    dtype: str
    num_bytes: int
    encoding: str = "plain"
    """What else both sides must share to read it."""

    @classmethod
    def of(cls, dtype: str) -> Item:
        """A plain element of a dtype."""
        return cls(dtype, DTYPE_BYTES[dtype])


@dataclass(frozen=True, slots=True)
class Dim:
    """An axis of a part, its size over all ranks, and how tensor parallelism spreads it."""

    axis: str
    size: int
    sharding: Sharding = Sharding.WHOLE


@dataclass(frozen=True, slots=True)
class PagePart:
    """One state of a layer: K, V, a latent, a scale, one piece of a convolution …"""

    name: str
    dims: tuple[Dim, ...]
    item: Item

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its axes."""
        return tuple(dim.axis for dim in self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of one cell, over all ranks."""
        total = self.item.num_bytes
        for dim in self.dims:
            total *= dim.size
        return total
