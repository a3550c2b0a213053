"""Memory for regions, on the host or on a CUDA device, without an engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.transport.cuda import Cuda

Bytes = NDArray[np.uint8]


class RegionMemory:
    """Memory of one device; regions are added one by one.

    >>> memory = RegionMemory("cpu")
    >>> memory.add("kv", np.arange(8, dtype=np.uint8))
    >>> memory.clear(2, 3)
    >>> memory.read(0, 6).tolist(), memory.regions[0].num_bytes
    ([0, 1, 0, 0, 0, 5], 8)
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.cuda = None if device == "cpu" else Cuda(int(device.partition(":")[2] or 0))
        self.regions: tuple[Region, ...] = ()
        self._host: list[Bytes] = []

    def add(self, name: str, data: Bytes) -> None:
        """Add a region that holds ``data``; on the host, the array itself."""
        address = self.cuda.allocate(data.nbytes) if self.cuda else data.ctypes.data
        self.regions += (Region(name, data.nbytes, address, self.device),)
        if self.cuda:
            self.cuda.upload(address, data.tobytes())
        else:
            self._host.append(data)

    def read(self, start: int, num_bytes: int, region_index: int = 0) -> Bytes:
        """Bytes of a region: the memory itself on the host, a copy from a device."""
        if not self.cuda:
            return self._host[region_index][start : start + num_bytes]
        data = self.cuda.download(self.regions[region_index].address + start, num_bytes)
        return np.frombuffer(bytearray(data), np.uint8)

    def arrays(self) -> list[Bytes]:
        return [self.read(0, region.num_bytes, index) for index, region in enumerate(self.regions)]

    def store(self, arrays: list[Bytes]) -> None:
        """Write back what ``arrays`` returned; host arrays are the memory already."""
        if self.cuda:
            for region, array in zip(self.regions, arrays, strict=True):
                self.cuda.upload(region.address, array.tobytes())

    def clear(self, start: int, num_bytes: int, region_index: int = 0) -> None:
        if self.cuda:
            self.cuda.clear([(self.regions[region_index].address + start, num_bytes)])
        else:
            self._host[region_index][start : start + num_bytes] = 0

    def load(self) -> list[Bytes]:
        return [array.copy() for array in self.arrays()]

    def free(self) -> None:
        if self.cuda:
            for region in self.regions:
                self.cuda.free(region.address)
            self.cuda.close()
