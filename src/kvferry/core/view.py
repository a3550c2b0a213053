"""Cell addresses, which are separable:

    region + offset + block id × block stride + (one term per axis)

The term of an axis consists of *digits*: the coordinate in mixed radix, each digit with its own byte stride.
A plain axis has one digit. A tile, a kernel block inside a scheduler block, a transposed or interleaved order
has a few. Under context parallelism a rank holds only some values of a digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvferry.core.box import EVERY, TOKEN, Box
from kvferry.core.span import Span, Spans
from kvferry.core.state import MAX_AXIS, MAX_BYTES, check_range
from kvferry.errors import SpecError

Ints = NDArray[np.int64]

MAX_PARTS = 1 << 12
"""The most separate parts of an axis that a rank may hold."""

BLOCK = "block"
"""The name of an array's block axis."""

NOT_HELD = -1
"""The byte offset of a coordinate that this rank does not hold."""


def is_inside(spans: Spans, values: Ints) -> NDArray[np.bool_]:
    starts, stops = np.array([(s.start, s.stop) for s in spans], np.int64).reshape(-1, 2).T
    at = np.searchsorted(starts, values, side="right") - 1
    return np.asarray((at >= 0) & (values < stops[at]) if len(starts) else np.zeros(len(values), bool))


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of an axis: its number of values, and the bytes between neighbours.

    >>> Digit(16, stride=256), Digit(4, stride=0, held=Span(1, 2)).num_held
    (Digit(size=16, stride=256, held=None), 1)
    """

    size: int
    stride: int
    held: Span | None = None
    """The values that this rank holds, the first of them at offset 0; ``None``: all."""

    def __post_init__(self) -> None:
        check_range("digit: size", self.size, 1, MAX_AXIS)
        check_range("digit: stride", self.stride, 0, MAX_BYTES)
        if self.held is not None and not (len(self.held) and self.held.stop <= self.size):
            raise SpecError(f"digit: holds {self.held} of {self.size} values")

    @property
    def num_held(self) -> int:
        return self.size if self.held is None else len(self.held)


@dataclass(frozen=True, slots=True)
class AxisMap:
    """The coordinates of one axis from ``start`` on, in mixed radix, the most significant digit first.

    Sixteen tokens as four kernel blocks of four, 1,024 bytes apart:

    >>> AxisMap((Digit(4, 1024), Digit(4, 64))).offsets()[:6].tolist()
    [0, 64, 128, 192, 1024, 1088]

    The second of two context-parallel ranks with an interleave of two tokens:

    >>> turns = AxisMap((Digit(2, 128), Digit(2, 0, held=Span(1, 2)), Digit(2, 64)))
    >>> turns.offsets().tolist(), turns.spans()
    ([-1, -1, 0, 64, -1, -1, 128, 192], (Span(start=2, stop=4), Span(start=6, stop=8)))
    """

    digits: tuple[Digit, ...]
    start: int = 0

    def __post_init__(self) -> None:
        check_range("axis map: start", self.start, 0, MAX_AXIS)
        if self.size > MAX_AXIS:
            raise SpecError(f"axis map: {self.size} coordinates, at most {MAX_AXIS} are allowed")
        if self.num_parts > MAX_PARTS:
            raise SpecError(
                f"axis map: holds {self.num_parts} separate parts, at most {MAX_PARTS} are allowed"
            )

    @property
    def size(self) -> int:
        """Number of coordinates, held or not."""
        return prod(digit.size for digit in self.digits)

    @property
    def period(self) -> int:
        """Number of coordinates after which the set of held ones repeats; 1 if all are held."""
        for i, digit in enumerate(self.digits):
            if digit.num_held < digit.size:
                return prod(d.size for d in self.digits[i:])
        return 1

    @property
    def num_parts(self) -> int:
        """An upper bound on the number of separate parts that are held."""
        cut = [i for i, digit in enumerate(self.digits) if digit.num_held < digit.size]
        return prod(digit.num_held for digit in self.digits[: cut[-1]]) if cut else 1

    def offsets(self) -> Ints:
        """Byte offset of each coordinate from ``start`` on, or ``NOT_HELD``."""
        total, held = np.zeros(1, np.int64), np.ones(1, bool)
        for digit in self.digits:
            values = np.arange(digit.size, dtype=np.int64)
            span = digit.held or Span(0, digit.size)
            inside = (values >= span.start) & (values < span.stop)
            total = np.add.outer(total, (values - span.start) * digit.stride).ravel()
            held = np.logical_and.outer(held, inside).ravel()
        offsets = np.where(held, total, NOT_HELD)
        offsets.setflags(write=False)
        return offsets

    def spans(self) -> Spans:
        if self.period == 1:
            return (Span(self.start, self.start + self.size),)
        held = np.flatnonzero(self.offsets() != NOT_HELD) + self.start
        cuts = np.flatnonzero(np.diff(held) != 1) + 1
        return tuple(Span(int(p[0]), int(p[-1]) + 1) for p in np.split(held, cuts))


@dataclass(frozen=True, slots=True)
class View:
    """The addresses of one rank's box of one state.

    >>> view = View.of("layers.0/k", "full", "kv", block_stride=4096, axes={
    ...     "token": AxisMap((Digit(16, 256),)), "head": AxisMap((Digit(2, 128),), start=4),
    ...     "channel": AxisMap((Digit(64, 2),))})
    >>> print(view.box())
    channel [0, 64) × head [4, 6)
    """

    state: str
    group: str
    region: str
    offset: int
    """Bytes from the start of the region to the first held cell of block 0."""
    block_stride: int
    """Bytes from a block (or slot) to the next one."""
    axes: tuple[tuple[str, AxisMap], ...]
    """Axis names and maps, sorted by name; the token axis has the cells of one block."""

    def __post_init__(self) -> None:
        for what, value, low in (("offset", self.offset, 0), ("block_stride", self.block_stride, 1)):
            # Formatting the text for each of a hundred thousand views would be slow.
            if type(value) is not int or not low <= value <= MAX_BYTES:
                check_range(f"view of {self.state}: {what}", value, low, MAX_BYTES)
        names = [name for name, _ in self.axes]
        if names != sorted(set(names)):
            raise SpecError(f"view of {self.state}: axes must be sorted by name, each once, got {names}")

    @classmethod
    def of(
        cls,
        state: str,
        group: str,
        region: str,
        *,
        block_stride: int,
        axes: Mapping[str, AxisMap],
        offset: int = 0,
    ) -> View:
        return cls(state, group, region, offset, block_stride, tuple(sorted(axes.items())))

    @classmethod
    def of_strides(
        cls,
        state: str,
        group: str,
        region: str,
        axes: str,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        offset: int = 0,
        start: Mapping[str, int] | None = None,
    ) -> View:
        """A view of an array by its own shape and strides, in bytes (of a torch tensor: times its item size).

        ``axes`` names the array's axes in order, one of them ``block``; ``start`` has the first coordinate of
        this rank per axis (default 0); ``offset`` is the array's first byte in its region.

        >>> cache = np.zeros((100, 2, 16, 4, 64), np.float16)  # block, K or V, token, head, channel
        >>> k, v = cache[:, 0], cache[:, 1]
        >>> view = View.of_strides("layers.0/v", "full", "kv", "block token head channel", v.shape, v.strides,
        ...     offset=v.ctypes.data - cache.ctypes.data, start={"head": 4})
        >>> print(view.box(), view.offset, view.block_stride)
        channel [0, 64) × head [4, 8) 8192 16384
        """
        names, starts = axes.split(), dict(start or {})
        if not len({*names}) == len(names) == len(shape) == len(strides) or BLOCK not in names:
            raise SpecError(
                f"view of {state}: axes {names} for an array of shape {list(shape)} and strides"
                f" {list(strides)}: name each axis once, one of them {BLOCK!r}"
            )
        if unknown := sorted(starts.keys() - set(names) | starts.keys() & {BLOCK, TOKEN}):
            raise SpecError(
                f"view of {state}: start must name axes of the array besides {BLOCK!r} and {TOKEN!r},"
                f" got {unknown}"
            )
        steps = dict(zip(names, zip(map(int, shape), map(int, strides), strict=True), strict=True))
        _, block_stride = steps.pop(BLOCK)
        maps = {name: AxisMap((Digit(*step),), starts.get(name, 0)) for name, step in steps.items()}
        return cls.of(state, group, region, block_stride=block_stride, axes=maps, offset=offset)

    def axis(self, name: str) -> AxisMap:
        return dict(self.axes)[name]

    def box(self) -> Box:
        """The part of the state that this rank holds. ``Rank.boxes`` has these, equal ones as one object."""
        period = next((axis.period for name, axis in self.axes if name == TOKEN), 1)
        spans = ((name, axis.spans() if name != TOKEN else _residues(axis)) for name, axis in self.axes)
        return Box(tuple(spans), period)

    def steps(self) -> tuple[tuple[int, int], ...]:
        """(count, byte stride) of every held digit inside one block."""
        return tuple((d.num_held, d.stride) for _, axis in self.axes for d in axis.digits)


def _residues(axis: AxisMap) -> Spans:
    """The held cells of a block, modulo the period."""
    if axis.period == 1:
        return EVERY
    lowest = next(i for i, d in enumerate(axis.digits) if d.num_held < d.size)
    return AxisMap(axis.digits[lowest:]).spans()
