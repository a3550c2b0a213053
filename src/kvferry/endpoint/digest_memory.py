"""A rank's memory, as digests see it: each region is summed up where it lies, by host or device."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from kvferry.core.digest_cells import Bytes, ChunkedCells, ChunkSums, sums_by_numpy
from kvferry.core.digest_keys import Words
from kvferry.core.manifest import Rank, Region
from kvferry.errors import SpecError, TransportError
from kvferry.transport.digest_kernel import DigestKernel, digest_kernel

HOST = "cpu"


class DigestMemory:
    """Raises SpecError for memory that cannot be digested in this process."""

    def __init__(self, rank: Rank) -> None:
        for region in rank.regions:
            if not region.address:
                raise SpecError(f"region {region.name} has no address, so that it cannot be digested")
        self._regions = {region.name: region for region in rank.regions}
        self.host: Mapping[str, Bytes] = {
            region.name: _bytes_at(region.address, region.num_bytes)
            for region in rank.regions
            if region.device == HOST
        }
        on_devices = {region.device: region for region in rank.regions if region.device != HOST}
        self._kernels = {device: _kernel_of(region) for device, region in on_devices.items()}

    @property
    def is_of_host(self) -> bool:
        """Whether all of it is the host's: then several threads may share a digest."""
        return not self._kernels

    def chunk_sums(self) -> ChunkSums:
        """Who sums up a digest of it."""
        host = partial(sums_by_numpy, self.host)
        return host if self.is_of_host else partial(self._each_by_its_own, host)

    def _each_by_its_own(self, host: ChunkSums, wanted: Sequence[ChunkedCells]) -> list[Words]:
        if not self.host and len(self._kernels) == 1:
            (kernel,) = self._kernels.values()
            return kernel.sums(self._regions, wanted)
        devices = [self._regions[each.blocks.region].device for each in wanted]
        found: dict[int, Words] = {}
        for device in sorted({*devices}):
            at = [i for i, other in enumerate(devices) if other == device]
            some = [wanted[i] for i in at]
            sums = host(some) if device == HOST else self._kernels[device].sums(self._regions, some)
            found.update(zip(at, sums, strict=True))
        return [found[i] for i in range(len(wanted))]


def _kernel_of(region: Region) -> DigestKernel:
    index = re.fullmatch(r"cuda:(\d+)", region.device)
    if index is None:
        raise SpecError(f"memory on {region.device} (region {region.name}) cannot be digested")
    try:
        return digest_kernel(int(index[1]))
    except TransportError as error:
        raise SpecError(f"region {region.name} on {region.device} cannot be digested: {error}") from error


def _bytes_at(address: int, num_bytes: int) -> Bytes:
    return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), np.uint8)
