"""A piece of memory on the host or on a device, to read from and to read into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.cli.bench.checks import Bytes, Stretch, first_wrong
from kvferry.core.manifest import Region
from kvferry.transport.cuda import Cuda

ALIGNMENT = 4096


@dataclass(frozen=True)
class BenchSetup:
    """What both processes are told."""

    device: str
    num_bytes: int
    folder: str
    """For files that both may need."""


class BenchMemory:
    """One region, which starts with zeros."""

    def __init__(self, device: str, num_bytes: int) -> None:
        self.cuda = None if device == "cpu" else Cuda(int(device.partition(":")[2]))
        room = np.zeros(0 if self.cuda else num_bytes + ALIGNMENT, np.uint8)
        skip = -room.ctypes.data % ALIGNMENT
        self.host = room[skip : skip + num_bytes]
        """The bytes, if they are the host's."""
        address = self.cuda.allocate(num_bytes) if self.cuda else self.host.ctypes.data
        self.region = Region("kv", num_bytes, address, device)
        if self.cuda:
            self.cuda.clear([(address, num_bytes)])

    def write(self, data: Bytes) -> None:
        """Put bytes at the beginning."""
        if self.cuda:
            self.cuda.upload(self.region.address, data.tobytes())
        else:
            self.host[: len(data)] = data

    def wipe(self, stretches: Sequence[Stretch]) -> None:
        """Make these places zeros."""
        if self.cuda:
            self.cuda.clear((self.region.address + one.start, len(one.wanted)) for one in stretches)
            return
        for one in stretches:
            self.host[one.start : one.start + len(one.wanted)] = 0

    def first_wrong(self, stretches: Sequence[Stretch]) -> str:
        """The first cell of these places that is not what it must be; empty if all are right."""
        for one in stretches:
            if wrong := first_wrong(one, self._read(one.start, len(one.wanted))):
                return wrong
        return ""

    def _read(self, start: int, num_bytes: int) -> Bytes:
        if self.cuda:
            return np.frombuffer(self.cuda.download(self.region.address + start, num_bytes), np.uint8)
        return self.host[start : start + num_bytes]

    def close(self) -> None:
        """Give device memory back."""
        if self.cuda:
            self.cuda.free(self.region.address)
            self.cuda.close()
