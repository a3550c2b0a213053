"""What must have arrived, said without kvferry's own lists: from block ids alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.cli.bench.grid import NUM_LAYERS, BenchCase

Bytes = NDArray[np.uint8]

CELL_BYTES = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)


def contents(num_bytes: int) -> Bytes:
    """What the source holds: each cell of eight bytes has a number of its own, and none is 0.

    >>> cells = contents(1 << 20).view(np.uint64)
    >>> len(np.unique(cells)) == len(cells), bool(cells.all())
    (True, True)
    """
    return ((np.arange(num_bytes // CELL_BYTES, dtype=np.uint64) + np.uint64(1)) * _ODD).view(np.uint8)


@dataclass(frozen=True, eq=False)
class Stretch:
    """Bytes in a row of the destination, and what they must be after a read. Before it, they are zeros."""

    start: int
    wanted: Bytes


def expected_pages(case: BenchCase, source: Bytes) -> list[Stretch]:
    """After a read of a case's blocks: a stretch for each layer, with the blocks between still zeros."""
    shape = case.shape
    src_ids, dst_ids = case.block_ids()
    pool = source[: shape.total_bytes].reshape(NUM_LAYERS, shape.num_blocks, shape.run_bytes)
    image = np.zeros((NUM_LAYERS, 2 * case.num_blocks, shape.run_bytes), np.uint8)
    image[:, dst_ids] = pool[:, src_ids]
    return [Stretch(layer * shape.layer_bytes, image[layer].ravel()) for layer in range(NUM_LAYERS)]


def expected_whole(case: BenchCase, source: Bytes) -> list[Stretch]:
    """After a read of as many bytes in one run, from the beginning to the beginning."""
    return [Stretch(0, source[: case.total_bytes])]


def first_wrong(stretch: Stretch, found: Bytes) -> str:
    """The first cell that is not what it must be, and how many there are; empty if all are right.

    >>> stretch = Stretch(4096, contents(64))
    >>> found = stretch.wanted.copy()
    >>> first_wrong(stretch, found)
    ''
    >>> found[17] ^= 1
    >>> first_wrong(stretch, found)
    '1 of 8 cells wrong; the first, at byte 4112, is 0xdaa66d2c7ddf753f instead of 0xdaa66d2c7ddf743f'
    """
    wanted, got = (array.view(np.uint64) for array in (stretch.wanted, found))
    wrong = np.flatnonzero(wanted != got)
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (
        f"{len(wrong):,} of {len(wanted):,} cells wrong; the first, at byte"
        f" {stretch.start + CELL_BYTES * first}, is {int(got[first]):#x} instead of {int(wanted[first]):#x}"
    )
