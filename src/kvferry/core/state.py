"""States, their axes, and the groups that share a block table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TypeVar

from kvferry.core.box import TOKEN
from kvferry.errors import SpecError

BYTE = "byte"
"""The axis name that a digest uses for the words of a long item."""

MAX_AXIS = 1 << 20
"""The longest axis, and the largest block, in cells: a sanity check, not a limit of the method."""
MAX_BYTES = 1 << 47
"""The largest region, offset or stride: 128 TiB."""


class Kind(StrEnum):
    """Whether a state grows with the request."""

    PAGED = "paged"
    """One cell per token (or per few tokens)."""
    RECURRENT = "recurrent"
    """One value per request, whatever its length."""


class Tail(StrEnum):
    """Handling of tokens that do not fill the last cell of several tokens."""

    COMPLETE = "complete"
    """The cell exists once all of its tokens are computed (compressed caches)."""
    PARTIAL = "partial"
    """The cell exists from its first token on (opaque blocks)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis of a state, and its size over all ranks.

    >>> Axis("head", 0)
    Traceback (most recent call last):
    kvferry.errors.SpecError: axis head: size must be an integer from 1 to 1048576, got 0
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        if not self.name or self.name in (TOKEN, BYTE):
            raise SpecError(f"an axis needs a name other than {TOKEN!r} and {BYTE!r}, got {self.name!r}")
        check_range(f"axis {self.name}: size", self.size, 1, MAX_AXIS)


@dataclass(frozen=True, slots=True)
class State:
    """One logical array of one layer; equal on both engines.

    >>> k = State("layers.0/k", (Axis("head", 8), Axis("channel", 128)), item_bytes=2, dtype="bf16")
    >>> k.cell_bytes
    2048
    """

    name: str
    axes: tuple[Axis, ...]
    """The axes besides the token axis, in any order."""
    item_bytes: int
    """Bytes of one item: the smallest unit that is never split. An opaque cell is one item."""
    dtype: str
    """``bf16``, ``fp8_e4m3``, ``opaque`` …: must be equal on both sides."""
    kind: Kind = Kind.PAGED
    tokens_per_cell: int = 1
    tail: Tail = Tail.COMPLETE
    encoding: str = "plain"
    """The format of an item beyond its dtype (scales inside, an unknown kernel's order …)."""
    aliases: tuple[str, ...] = ()
    """Further names of this state: layers that share a cache."""

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a state needs a name")
        where = f"state {self.name}"
        object.__setattr__(self, "kind", one_of(f"{where}: kind", Kind, self.kind))
        object.__setattr__(self, "tail", one_of(f"{where}: tail", Tail, self.tail))
        check_range(f"{where}: item_bytes", self.item_bytes, 1, MAX_BYTES)
        check_range(f"{where}: tokens_per_cell", self.tokens_per_cell, 1, MAX_AXIS)
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise SpecError(f"{where}: axis names must differ, got {names}")
        if self.kind is Kind.RECURRENT and self.tokens_per_cell != 1:
            raise SpecError(f"{where}: a recurrent state has no tokens_per_cell")

    @property
    def cell_bytes(self) -> int:
        return self.item_bytes * prod(axis.size for axis in self.axes)


class Addressing(StrEnum):
    """The mapping of a group's tokens to cells."""

    TABLE = "table"
    """A block table: block ids in the order of the tokens."""
    SLOT = "slot"
    """One slot per request: recurrent states."""
    RING = "ring"
    """One block per request, overwritten cyclically: token t is at (t - first token) modulo its size."""


@dataclass(frozen=True, slots=True)
class Group:
    """The states of one engine that share one block table. Never matched across engines.

    >>> Group("full", num_blocks=1000, tokens_per_block=16).pool
    'full'
    """

    name: str
    num_blocks: int
    tokens_per_block: int = 1
    addressing: Addressing = Addressing.TABLE
    pool: str = ""
    """Groups of one pool share a set of block ids; each id belongs to one group at a time."""
    window: int = 0
    """Number of most recent tokens that attention reads; 0: all."""
    sinks: int = 0
    """Number of first tokens that attention reads besides the window."""

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a group needs a name")
        where = f"group {self.name}"
        object.__setattr__(self, "addressing", one_of(f"{where}: addressing", Addressing, self.addressing))
        check_range(f"{where}: num_blocks", self.num_blocks, 1, 1 << 40)
        check_range(f"{where}: tokens_per_block", self.tokens_per_block, 1, MAX_AXIS)
        check_range(f"{where}: window", self.window, 0, 1 << 40)
        check_range(f"{where}: sinks", self.sinks, 0, 1 << 40)
        if self.addressing is Addressing.SLOT and self.tokens_per_block != 1:
            raise SpecError(f"{where}: a slot holds one value, not {self.tokens_per_block} tokens")
        if not self.pool:
            object.__setattr__(self, "pool", self.name)


E = TypeVar("E", bound=StrEnum)


def one_of(what: str, choices: type[E], value: str) -> E:
    """The member of this name; raises SpecError if there is none."""
    try:
        return choices(value)
    except ValueError:
        raise SpecError(f"{what} must be one of {', '.join(choices)}, got {value!r}") from None


def check_range(what: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise SpecError(f"{what} must be an integer from {low} to {high}, got {value!r}")
