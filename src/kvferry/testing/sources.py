"""Ranks to read from, in a process of their own: what the laws of a transport and its benchmark need.

    python -m kvferry.testing.sources cpu 3 1048576 64

serves three ranks, each with two regions of so many bytes, until its input ends. It prints one
line: the cards and the addresses. Both sides know the contents: ``contents(source_index, region_index, …)``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.testing.packed import gather_openly
from kvferry.transport.cuda import Cuda
from kvferry.transport.nixl import NixlTransport

LISTEN = "SOURCES_LISTEN"


@dataclass(frozen=True)
class Source:
    """What a reader must know of a rank, and, to check, what it holds."""

    card: bytes
    regions: tuple[Region, ...]
    contents: tuple[NDArray[np.uint8], ...]


@dataclass(frozen=True)
class Sources:
    """Ranks that another process serves."""

    sources: tuple[Source, ...]
    pid: int


def contents(source_index: int, region_index: int, num_bytes: int) -> NDArray[np.uint8]:
    """What a region holds: bytes without a pattern, the same wherever they are asked for."""
    return np.random.default_rng([source_index, region_index]).integers(0, 256, num_bytes, np.uint8)


class Holder:
    """Memory on the host or on a device, with room for regions."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._cuda = None if device == "cpu" else Cuda(int(device.partition(":")[2] or 0))
        self._arrays: list[NDArray[np.uint8]] = []
        self.regions: tuple[Region, ...] = ()

    def add(self, name: str, data: NDArray[np.uint8]) -> None:
        """One more region that holds ``data``."""
        address = self._cuda.allocate(data.nbytes) if self._cuda else data.ctypes.data
        self._arrays.append(data)
        self.regions += (Region(name, data.nbytes, address, self.device),)
        self.store()

    def store(self) -> None:
        """Put the arrays' bytes to the device."""
        if self._cuda:
            for region, array in zip(self.regions, self._arrays, strict=True):
                self._cuda.upload(region.address, array.tobytes())

    def load(self) -> list[NDArray[np.uint8]]:
        """What the regions hold now, as copies."""
        if not self._cuda:
            return [array.copy() for array in self._arrays]
        return [
            np.frombuffer(self._cuda.download(region.address, region.num_bytes), np.uint8).copy()
            for region in self.regions
        ]

    def free(self) -> None:
        """Give device memory back."""
        if self._cuda:
            for region in self.regions:
                self._cuda.free(region.address)
            self._cuda.close()


@contextmanager
def serving(
    num_sources: int,
    region_bytes: Sequence[int],
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    *,
    enter: Callable[[], None] | None = None,
) -> Iterator[Sources]:
    """A process that serves ranks, until the end of the block.

    ``enter`` is called in it before anything else: it may move it to another network namespace. Where its
    ranks are asked to gather then is said by the variable ``SOURCES_LISTEN``.
    """
    command = [sys.executable, "-m", "kvferry.testing.sources", device, str(num_sources)]
    process = subprocess.Popen(
        [*command, *map(str, region_bytes)],
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=enter,  # noqa: PLW1509  (UCX must find the network that it enters)
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Sources(tuple(_told(process.stdout)), process.pid)
        process.stdin.close()
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _told(stdout: IO[str]) -> Iterator[Source]:
    for i, source in enumerate(json.loads(stdout.readline())):
        regions = tuple(Region(**region) for region in source["regions"])
        held = tuple(contents(i, j, region.num_bytes) for j, region in enumerate(regions))
        yield Source(bytes.fromhex(source["card"]), regions, held)


def _serve(device: str, num_sources: int, region_bytes: Sequence[int]) -> None:
    holders, transports, services, told = [], [], [], []
    for i in range(num_sources):
        holder, transport = Holder(device), NixlTransport()
        for j, num_bytes in enumerate(region_bytes):
            holder.add(f"region{j}", contents(i, j, num_bytes))
        transport.register(holder.regions)
        if transport.is_gathering:
            listen = os.environ.get(LISTEN, "tcp://127.0.0.1:*")
            services.append(gather_openly(transport, listen))
        names = ("name", "num_bytes", "address", "device")
        regions = [{name: getattr(region, name) for name in names} for region in holder.regions]
        told.append({"card": transport.card().hex(), "regions": regions})
        holders.append(holder)
        transports.append(transport)
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for service in services:
        service.close()
    for transport in transports:
        transport.close()
    for holder in holders:
        holder.free()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), [int(text) for text in sys.argv[3:]])
