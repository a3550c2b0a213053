"""Reads as posts: nothing is lost, doubled or moved, at full pace and at the careful one."""

import numpy as np
import pytest

from kvferry import Region
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport.descriptors import FULL_PACE, MemoryKind, Pace, RegionTable, slice_pairs

SRC = RegionTable("src", [Region("kv", 1 << 20, 1 << 30), Region("gpu", 1 << 20, 2 << 30, "cuda:3")])
DST = RegionTable("dst", [Region("kv", 1 << 20, 3 << 30)])
LENGTHS = np.array([1, 4096, 5000, 262144, 7, 100_000])


def runs():
    """From both regions in turn."""
    starts = np.cumsum(LENGTHS) - LENGTHS
    regions = np.arange(len(LENGTHS)) % 2
    return Runs(np.array([place(int(i), 0) for i in regions]) + starts, starts, LENGTHS)


def moved(posts):
    """Which byte (kind, device, address) goes to which address, in the order of the latter."""
    cells = [
        (int(dst[0]) + i, pair.src_kind, int(src[2]), int(src[0]) + i)
        for pair in posts
        for src, dst in zip(pair.src, pair.dst, strict=True)
        for i in range(int(src[1]))
    ]
    return sorted(cells)


@pytest.mark.parametrize("max_run_bytes", [7168, 261120])
def test_a_careful_read_has_one_short_run_per_post_and_moves_the_same(max_run_bytes):
    pace = Pace.careful(max_run_bytes)
    posts = [*slice_pairs(runs(), SRC, DST, pace)]
    assert pace.num_posted == 1
    assert {len(pair.src) for pair in posts} == {1}
    assert max(int(pair.src[0, 1]) for pair in posts) <= max_run_bytes
    assert all((pair.src[:, 1] == pair.dst[:, 1]).all() for pair in posts)
    assert moved(posts) == moved(slice_pairs(runs(), SRC, DST, FULL_PACE))


def test_full_pace_posts_all_of_a_kind_at_once():
    posts = [*slice_pairs(runs(), SRC, DST)]
    assert [(pair.src_kind, pair.dst_kind, len(pair.src)) for pair in posts] == [
        ("DRAM", "DRAM", 3),
        ("VRAM", "DRAM", 3),
    ]
    assert int(sum(pair.src[:, 1].sum() for pair in posts)) == LENGTHS.sum()


def test_memory_of_an_unknown_kind_is_refused():
    with pytest.raises(TransportError, match="bad-device"):
        MemoryKind.of(Region("kv", 64, 64, "npu:0"))
