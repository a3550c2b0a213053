"""Reads as posts: nothing is lost, doubled or moved."""

import numpy as np
import pytest

from kvferry import Region
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport.nixl_agent import slice_pairs
from kvferry.transport.places import MemoryKind, RegionTable

SRC = RegionTable("src", [Region("kv", 1 << 20, 1 << 30), Region("gpu", 1 << 20, 2 << 30, "cuda:3")])
DST = RegionTable("dst", [Region("kv", 1 << 20, 3 << 30)])
LENGTHS = np.array([1, 4096, 5000, 262144, 7, 100_000])


def runs():
    """From both regions in turn."""
    starts = np.cumsum(LENGTHS) - LENGTHS
    regions = np.arange(len(LENGTHS)) % 2
    return Runs(np.array([place(int(i), 0) for i in regions]) + starts, starts, LENGTHS)


def test_all_of_a_kind_is_posted_of_a_kind_at_once():
    posts = [*slice_pairs(runs(), SRC, DST)]
    assert [(pair.src_kind, pair.dst_kind, len(pair.src)) for pair in posts] == [
        ("DRAM", "DRAM", 3),
        ("VRAM", "DRAM", 3),
    ]
    assert int(sum(pair.src[:, 1].sum() for pair in posts)) == LENGTHS.sum()


def test_memory_of_an_unknown_kind_is_refused():
    with pytest.raises(TransportError, match="bad-device"):
        MemoryKind.of(Region("kv", 64, 64, "npu:0"))
