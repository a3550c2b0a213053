"""Digests of device memory, on a device: the host's numbers of the same bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvferry.core.digest import digest_parts
from kvferry.core.manifest import Rank
from kvferry.endpoint.load_digest import LoadDigest
from kvferry.transport.cuda import Cuda, has_cuda
from kvferry.transport.memory import placed
from tests.core.planted_faults import PAIRS, Loaded

pytestmark = pytest.mark.skipif(not has_cuda(), reason="no GPU here: the kernel runs on a CPU only")


@pytest.mark.parametrize("pair", PAIRS)
def test_a_device_finds_the_hosts_numbers(pair: tuple[str, str, str, int]) -> None:
    """Of any layout; and another number once a needed bit has changed."""
    loaded = Loaded.of(pair, np.random.default_rng(3))
    cuda, dst = Cuda(0), loaded.planned.dst
    rank = dst.rank(loaded.planned.dst_rank)
    addresses = {name: cuda.allocate(len(values)) for name, values in loaded.memory.items()}
    on_host = replace(rank, regions=placed(rank, loaded.memory))
    on_device = replace(
        rank, regions=tuple(replace(r, device="cuda:0", address=addresses[r.name]) for r in rank.regions)
    )
    parts = [part for some in digest_parts(loaded.planned, loaded.request).values() for part in some]

    def sums_of(where: Rank) -> list[list[int]]:
        ranks = tuple(where if each is rank else each for each in dst.ranks)
        taken = LoadDigest(replace(dst, ranks=ranks), rank.rank, "dst", lambda: True)
        return [sums.tolist() for sums in taken.sums(loaded.request.dst, parts, 7)]

    try:
        for name, values in loaded.memory.items():
            cuda.upload(addresses[name], values.tobytes())
        assert sums_of(on_device) == sums_of(on_host)
        region, where = loaded.sites[parts[0].state]
        loaded.memory[region][where.offsets] ^= 1
        cuda.upload(addresses[region], loaded.memory[region].tobytes())
        assert sums_of(on_device) == sums_of(on_host)
    finally:
        for address in addresses.values():
            cuda.free(address)
        cuda.close()
