"""What a cache is made of: states, their axes, and the groups that share a block table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TypeVar

from kvferry.core.box import TOKEN
from kvferry.errors import SpecError

BYTE = "byte"
"""The name by which a digest tells the words of a long item apart."""

MAX_AXIS = 1 << 20
"""The longest axis, and the largest block, in cells: a guard against nonsense, not a limit of the method."""
MAX_BYTES = 1 << 47
"""The largest region, offset or stride: 128 TiB."""


class Kind(StrEnum):
    """Whether a state grows with the request.

    >>> Kind("paged") is Kind.PAGED
    True
    """

    PAGED = "paged"
    """One cell per token (or per few tokens)."""
    RECURRENT = "recurrent"
    """One value per request, whatever its length."""


class Tail(StrEnum):
    """Handling of tokens that do not fill the last cell of several tokens.

    >>> block = State("layers.0/block", (), 4096, "opaque", tokens_per_cell=16, tail=Tail.PARTIAL)
    >>> block.tail, block.cell_bytes
    (<Tail.PARTIAL: 'partial'>, 4096)
    """

    COMPLETE = "complete"
    """A cell exists once all of its tokens are computed (compressed caches)."""
    PARTIAL = "partial"
    """A cell exists from its first token on (an opaque block is such a cell)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis of a state and how many coordinates it has over all ranks.

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
    """One logical array of one layer; both engines must agree on it.

    >>> k = State("layers.0/k", (Axis("head", 8), Axis("channel", 128)), item_bytes=2, dtype="bf16")
    >>> k.cell_bytes
    2048
    """

    name: str
    axes: tuple[Axis, ...]
    """The axes besides the token axis, in no particular order."""
    item_bytes: int
    """Bytes of one item: the smallest thing that is never cut. An opaque cell is one item."""
    dtype: str
    """What an item is (``bf16``, ``fp8_e4m3``, ``opaque`` …): equal on both sides, or refused."""
    kind: Kind = Kind.PAGED
    tokens_per_cell: int = 1
    tail: Tail = Tail.COMPLETE
    encoding: str = "plain"
    """How items are to be read beyond their dtype (scales inside, an unknown kernel's order …)."""
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
            raise SpecError(f"{where}: two axes of one name in {names}")
        if self.kind is Kind.RECURRENT and self.tokens_per_cell != 1:
            raise SpecError(f"{where}: a recurrent state has no tokens_per_cell")

    @property
    def cell_bytes(self) -> int:
        return self.item_bytes * prod(axis.size for axis in self.axes)


class Addressing(StrEnum):
    """How a group maps a token to a cell.

    >>> Group("window", num_blocks=8, tokens_per_block=128, addressing=Addressing.RING).addressing
    <Addressing.RING: 'ring'>
    """

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
    """Groups of one pool draw from one set of block ids: an id belongs to one of them at a time."""
    window: int = 0
    """How many tokens of history its states are read for; 0: all of them."""
    sinks: int = 0
    """How many first tokens are read besides the window."""

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
    """A choice, also if it is given by its name alone; raises if it is none."""
    try:
        return choices(value)
    except ValueError:
        raise SpecError(f"{what} must be one of {', '.join(choices)}, got {value!r}") from None


def check_range(what: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise SpecError(f"{what} must be an integer from {low} to {high}, got {value!r}")
