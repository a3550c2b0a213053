"""What one rank holds of every page, and how that becomes the axes of its views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.core.box import TOKEN
from kvferry.core.span import Span
from kvferry.core.state import Kind
from kvferry.core.view import AxisMap, Digit
from kvferry.errors import SpecError
from kvferry.layout.order import Leaf
from kvferry.layout.pages import Page, PagePart, held, turn

Axes = tuple[tuple[str, AxisMap], ...]
"""As a view has them."""

Digits = Mapping[str, Sequence[tuple[int, int]]]
"""(count, stride) of the digits of each axis, the most significant first."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """Where a rank stands among those that share a cache: its heads by ``rank``, its tokens by turns."""

    rank: int
    num_ranks: int
    turn: int = 0
    num_turns: int = 1
    """Ranks of context parallelism, which take turns at the tokens."""
    tokens_per_turn: int = 1

    def held(self, part: PagePart, where: str = "") -> dict[str, Span]:
        """The coordinates of a part that this rank holds."""
        what = f"{where}/{part.name}" if where else part.name
        return {
            dim.axis: held(dim.sharding, dim.size, self.rank, self.num_ranks, what=f"{what}: {dim.axis}")
            for dim in part.dims
        }

    def leaf(self, page: Page, part: PagePart, where: str, num_cells: int) -> Leaf:
        """The part as an order sees it, with as much of each axis as is here."""
        sizes = {axis: len(span) for axis, span in self.held(part, where).items()}
        if page.kind is Kind.PAGED:
            sizes[TOKEN] = num_cells
        return Leaf(where, part.name, sizes, part.item.num_bytes)

    def axes(self, page: Page, part: PagePart, digits: Digits, where: str = "") -> Axes:
        """The axes of this rank's view of a part: how its coordinates lie, and which of them are here."""
        maps = {
            axis: AxisMap(tuple(Digit(*pair) for pair in digits.get(axis, ())), span.start)
            for axis, span in self.held(part, where).items()
        }
        if page.kind is Kind.PAGED:
            tokens = [Digit(*pair) for pair in digits[TOKEN]]
            if self.num_turns > 1:
                each = num_cells(page, self.tokens_per_turn, where)
                tokens = with_turns(tokens, each, turn(self.turn, self.num_turns))
            maps[TOKEN] = AxisMap(tuple(tokens))
        return tuple(sorted(maps.items()))


def num_cells(page: Page, num_tokens: int, where: str = "") -> int:
    """How many cells so many tokens make, which must come out even."""
    cells, rest = divmod(num_tokens, page.tokens_per_cell)
    if rest:
        at = f"{where}: " if where else ""
        raise SpecError(f"{at}{num_tokens} tokens do not divide into cells of {page.tokens_per_cell}")
    return cells


def with_turns(digits: Sequence[Digit], each: int, whose: Digit) -> list[Digit]:
    """The digits of a token axis with a turn taken after every ``each`` cells.

    >>> with_turns([Digit(16, 8)], 4, turn(0, 2))
    [Digit(size=4, stride=32, held=None), Digit(size=2, stride=0, held=Span(start=0, stop=1)),
     Digit(size=4, stride=8, held=None)]
    """
    low: list[Digit] = []
    high = list(digits)
    left = each
    while left > 1:
        if not high:
            raise SpecError(f"a turn of {each} cells is longer than a block")
        digit = high.pop()
        if digit.size <= left:
            low.insert(0, digit)
            left, rest = divmod(left, digit.size)
        else:
            rest = digit.size % left
            high.append(Digit(digit.size // left, digit.stride * left))
            low.insert(0, Digit(left, digit.stride))
            left = 1
        if rest:
            raise SpecError(f"a turn of {each} cells does not divide a block")
    return [*high, whose, *low]
