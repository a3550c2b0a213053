"""What one rank holds of an axis, of the layers, of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

from kvferry.core.span import Span
from kvferry.core.view import Digit
from kvferry.errors import SpecError


class Sharding(StrEnum):
    """How an axis is spread over the ranks of tensor parallelism."""

    WHOLE = "whole"
    """Every rank holds all of it (MLA latents, indexer keys)."""
    EVEN = "even"
    """Equal parts; sizes that do not divide are refused (recurrent states)."""
    SPREAD = "spread"
    """Each rank holds whatever its share touches: equal parts where they divide, one coordinate on
    several ranks where there are more ranks than coordinates (KV heads)."""


def held(sharding: Sharding, size: int, rank: int, num_ranks: int, *, what: str = "an axis") -> Span:
    """The coordinates of an axis of ``size`` that rank ``rank`` of ``num_ranks`` holds.

    >>> [str(held(Sharding.SPREAD, 8, r, 4)) for r in range(4)]
    ['[0, 2)', '[2, 4)', '[4, 6)', '[6, 8)']
    >>> [str(held(Sharding.SPREAD, 2, r, 4)) for r in range(4)]
    ['[0, 1)', '[0, 1)', '[1, 2)', '[1, 2)']
    >>> held(Sharding.EVEN, 8, 0, 3)
    Traceback (most recent call last):
    kvferry.errors.SpecError: an axis of 8 does not divide over 3 ranks
    """
    if sharding is Sharding.WHOLE:
        return Span(0, size)
    if sharding is Sharding.EVEN and size % num_ranks:
        raise SpecError(f"{what} of {size} does not divide over {num_ranks} ranks")
    return Span(rank * size // num_ranks, -(-(rank + 1) * size // num_ranks))


def stages(num_layers: int, sizes: Sequence[int] | int) -> list[range]:
    """The layers of each pipeline stage: given sizes, or a number of stages as equal as can be.

    >>> stages(7, 2), stages(7, [2, 5])
    ([range(0, 3), range(3, 7)], [range(0, 2), range(2, 7)])
    """
    if isinstance(sizes, int):
        if not 1 <= sizes <= num_layers:
            raise SpecError(f"{num_layers} layers do not make {sizes} pipeline stages")
        edges = [stage * num_layers // sizes for stage in range(sizes + 1)]
    else:
        if sum(sizes) != num_layers or min(sizes, default=0) < 1:
            raise SpecError(f"pipeline stages {list(sizes)} do not add up to {num_layers} layers")
        edges = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def turn(rank: int, num_ranks: int) -> Digit:
    """The digit of the token axis that says whose turn it is under context parallelism.

    >>> turn(1, 4)
    Digit(size=4, stride=0, held=Span(start=1, stop=2))
    """
    return Digit(num_ranks, 0, None if num_ranks == 1 else Span(rank, rank + 1))
