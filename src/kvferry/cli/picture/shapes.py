"""From bytes and seconds to lengths on a canvas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from kvferry.cli.output import milliseconds
from kvferry.cli.picture.bands import Band, Parts, StateRow

WIDTH = 1000.0
"""Of every strip; the page scales it."""
STRIP_HEIGHT = 120.0
BAR_HEIGHT = 12.0
"""Of the bar of a rank's parts."""
USED = 0.8
"""The part of its column that the rank with the most bytes fills."""
THINNEST = 2.0


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class BandShape:
    band: Band
    path: str


@dataclass(frozen=True, slots=True)
class HeldShape:
    """The bar of one rank: its frame, and the filled parts."""

    rank: int
    frame: Rect
    filled: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """A drawn row: source ranks above, destination ranks below, bands between them."""

    row: StateRow
    src: tuple[HeldShape, ...]
    dst: tuple[HeldShape, ...]
    bands: tuple[BandShape, ...]


def strips(rows: Sequence[StateRow], dst_ranks: Sequence[int]) -> tuple[Strip, ...]:
    """All rows on one scale."""
    columns = [len(rows[0].src.shares), len(dst_ranks)] if rows else [1, 1]
    most = [
        max((size for row in rows for size in _ends(row.bands, side).values()), default=0) for side in (0, 1)
    ]
    fits = [USED * WIDTH / number / size for number, size in zip(columns, most, strict=True) if size]
    return tuple(_strip(row, dst_ranks, min(fits, default=0.0)) for row in rows)


def _ends(bands: Sequence[Band], side: int) -> dict[int, int]:
    """The bytes of each rank of one side."""
    sums: dict[int, int] = defaultdict(int)
    for band in bands:
        sums[(band.src_rank, band.dst_rank)[side]] += band.num_bytes
    return sums


def _strip(row: StateRow, dst_ranks: Sequence[int], scale: float) -> Strip:
    asked = {rank: parts for rank, parts in row.dst.shares.items() if rank in set(dst_ranks)}
    tops, bottoms = _ports(row.bands, 0, [*row.src.shares], scale), _ports(row.bands, 1, [*asked], scale)
    bands = (
        BandShape(band, _path(top, bottom))
        for band, top, bottom in zip(row.bands, tops, bottoms, strict=True)
    )
    return Strip(row, tuple(_bars(row.src.shares)), tuple(_bars(asked)), tuple(bands))


def _ports(bands: Sequence[Band], side: int, ranks: Sequence[int], scale: float) -> list[Rect]:
    """The end of each band, side by side in the middle of its rank's column."""
    column = WIDTH / len(ranks)
    width = [max(THINNEST, band.num_bytes * scale) for band in bands]
    at: dict[int, float] = {}
    for i, rank in enumerate(ranks):
        mine = sum(
            w for w, band in zip(width, bands, strict=True) if (band.src_rank, band.dst_rank)[side] == rank
        )
        at[rank] = column * (i + 0.5) - mine / 2
    ports: list[Rect] = [Rect(0, 0)] * len(bands)
    # In the order of the other side's ranks, so that neighbours do not cross.
    for i in sorted(range(len(bands)), key=lambda i: (bands[i].src_rank, bands[i].dst_rank)):
        rank = (bands[i].src_rank, bands[i].dst_rank)[side]
        ports[i] = Rect(at[rank], width[i])
        at[rank] += width[i]
    return ports


def _path(top: Rect, bottom: Rect) -> str:
    """A band from the lower edge of the upper bar to the upper edge of the lower one."""
    first, last = BAR_HEIGHT + 2, STRIP_HEIGHT - BAR_HEIGHT - 2
    middle = (first + last) / 2
    left, right = (top.x, bottom.x), (bottom.x + bottom.width, top.x + top.width)
    down = f"M{number(left[0])} {first:g}C{number(left[0])} {middle:g} {number(left[1])} {middle:g}"
    up = f"L{number(right[0])} {last:g}C{number(right[0])} {middle:g} {number(right[1])} {middle:g}"
    return f"{down} {number(left[1])} {last:g}{up} {number(right[1])} {first:g}Z"


def _bars(shares: Mapping[int, Parts]) -> Iterator[HeldShape]:
    column = WIDTH / len(shares)
    gap = column * 0.08
    for i, (rank, parts) in enumerate(shares.items()):
        frame = Rect(i * column + gap, column - 2 * gap)
        filled = tuple(
            Rect(frame.x + start * frame.width, (stop - start) * frame.width) for start, stop in parts
        )
        yield HeldShape(rank, frame, filled)


def number(value: float) -> str:
    """A length with one decimal.

    >>> number(12.0), number(12.345)
    ('12', '12.3')
    """
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class LogScale:
    """Times on a logarithmic axis.

    >>> scale = LogScale.of([0.002, 0.3])
    >>> scale.ticks, round(scale.at(0.01), 2)
    ((0.001, 0.01, 0.1, 1.0), 33.33)
    """

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> LogScale:
        known = [value for value in values if value > 0] or [1.0]
        low, high = floor(log10(min(known))), ceil(log10(max(known)))
        return cls(low, max(high, low + 1))

    def at(self, value: float) -> float:
        """In percent of the axis."""
        return 100 * (log10(max(value, 10**self.low)) - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> tuple[float, ...]:
        return tuple(float(f"1e{power}") for power in range(int(self.low), int(self.high) + 1))


def tick_words(seconds: float) -> str:
    """A power of ten.

    >>> tick_words(1e-5), tick_words(0.001), tick_words(10.0)
    ('10 µs', '1 ms', '10 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size * 0.999:
            return f"{seconds / size:.0f} {unit}"
    return milliseconds(1e3 * seconds)
