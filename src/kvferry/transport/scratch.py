"""Memory for the first read of a remote rank, which sets up connections and device mappings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.runs import Runs, place
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import RegionTable

WARM_REGIONS, WARM_BYTES = 64, 4096
"""What the first read touches: it is about ten times slower than the next."""


class Scratch:
    """Memory that warm-up reads may overwrite, on each device that real reads go to."""

    def __init__(self, cuda: Cuda | None, devices: Iterable[str]) -> None:
        self._cuda = cuda
        self._buffers: list[NDArray[np.uint8]] = []
        self.memory = RegionTable("scratch", [self._region(device) for device in dict.fromkeys(devices)])

    def _region(self, device: str) -> Region:
        num_bytes = WARM_REGIONS * WARM_BYTES
        if self._cuda and device != "cpu":
            return Region("scratch", num_bytes, self._cuda.allocate(num_bytes), device)
        self._buffers.append(np.zeros(num_bytes, np.uint8))
        return Region("scratch", num_bytes, self._buffers[-1].ctypes.data, device)

    def first_bytes(self, regions: Sequence[Region]) -> Runs:
        """The beginning of each region, to each device: whatever kinds of memory a real read will meet."""
        regions = regions[:WARM_REGIONS]
        src = np.array([place(i, 0) for i in range(len(regions))])
        num_bytes = np.array([min(WARM_BYTES, region.num_bytes) for region in regions])
        num_devices = len(self.memory.kinds)
        dst = [place(i, 0) + np.arange(len(regions)) * WARM_BYTES for i in range(num_devices)]
        return Runs(np.tile(src, num_devices), np.concatenate(dst), np.tile(num_bytes, num_devices))

    def free(self) -> None:
        """Give device memory back."""
        for region in self.memory.places.regions:
            if self._cuda and region.device != "cpu":
                self._cuda.free(region.address)
