"""What is asked of an agent, and the descriptors (address, bytes, device) with which it is asked.

NIXL's agent is one (``nixl_agent``); tests put others around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport.places import Limit, Places, slices

HOST_SLICE = Limit(num_runs=1024, num_bytes=32 << 20)
"""A post of host memory copies before it returns: some milliseconds per slice."""
CUDA_SLICE = Limit(num_runs=1024, num_bytes=512 << 20)
"""A post of device memory takes time per run, hardly per byte."""
MAX_POSTED = 8
"""Slices under way per peer: enough to keep a fabric busy, few enough to be done soon after a failure."""


class MemoryKind(NamedTuple):
    """A kind of memory, as NIXL tells them apart, and the device."""

    name: str
    device_index: int

    @classmethod
    def of(cls, region: Region) -> MemoryKind:
        """The kind of a region, from its device ('cpu', 'cuda:0').

        >>> MemoryKind.of(Region("kv", 64, device="cuda:1"))
        MemoryKind(name='VRAM', device_index=1)
        """
        name, _, index = region.device.partition(":")
        if name == "cpu":
            return cls("DRAM", 0)
        if name == "cuda":
            return cls("VRAM", int(index))
        raise TransportError(
            "bad-device", f"region {region.name!r} is on {region.device!r}: not cpu or cuda:N"
        )


class RegionTable:
    """The regions of one rank, for lists of descriptors."""

    def __init__(self, whose: str, regions: Sequence[Region]) -> None:
        self.places = Places(whose, regions)
        self.kinds = tuple(MemoryKind.of(region) for region in regions)
        self.names = np.array([kind.name for kind in self.kinds])
        self._device_of = np.array([kind.device_index for kind in self.kinds], np.uint64)

    def descriptors(self, places: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Address, length and device of each run, the form NIXL takes."""
        table = np.empty((len(places), 3), np.uint64)
        table[:, 0] = self.places.addresses(places)
        table[:, 1] = num_bytes
        table[:, 2] = self._device_of[Places.split(places)[0]]
        return table

    def whole(self) -> NDArray[np.uint64]:
        """A descriptor of each region."""
        regions = self.places.regions
        starts = np.array([place(i, 0) for i in range(len(regions))])
        return self.descriptors(starts, np.array([region.num_bytes for region in regions]))


class SlicePair(NamedTuple):
    """What one post asks for: both sides' descriptors, each side of one kind of memory."""

    src_kind: str
    dst_kind: str
    src: NDArray[np.uint64]
    dst: NDArray[np.uint64]


def slice_pairs(runs: Runs, src: RegionTable, dst: RegionTable) -> Iterator[SlicePair]:
    """A read as posts; a list of descriptors is of one kind of memory, so mixed reads are sorted first."""
    src_names, dst_names = (
        memory.names[Places.split(places)[0]] for memory, places in ((src, runs.src), (dst, runs.dst))
    )
    for src_kind in dict.fromkeys(src.names.tolist()):
        for dst_kind in dict.fromkeys(dst.names.tolist()):
            at = (src_names == src_kind) & (dst_names == dst_kind)
            some = runs if at.all() else Runs(runs.src[at], runs.dst[at], runs.num_bytes[at])
            limit = HOST_SLICE if "DRAM" in (src_kind, dst_kind) else CUDA_SLICE
            for slice_runs in slices(some, limit):
                yield SlicePair(
                    src_kind,
                    dst_kind,
                    src.descriptors(slice_runs.src, slice_runs.num_bytes),
                    dst.descriptors(slice_runs.dst, slice_runs.num_bytes),
                )


class FabricAgent(Protocol):
    """For one thread. Each call may raise TransportError, and is expected to raise anything else, too."""

    @property
    def name(self) -> str:
        """Unique among all agents anywhere."""
        ...

    def register(self, kind: str, table: NDArray[np.uint64]) -> Any:
        """Make memory known; what comes back is for ``deregister``."""
        ...

    def deregister(self, registered: Any) -> None:
        """Give memory up."""
        ...

    def metadata(self) -> bytes:
        """What another agent must know to read the registered memory."""
        ...

    def add(self, remote: str, metadata: bytes) -> None:
        """Make a remote agent known, and start connecting to it."""
        ...

    def remove(self, remote: str) -> None:
        """Forget a remote agent; nothing may be under way with it."""
        ...

    def prepare(self, pair: SlicePair, remote: str) -> int:
        """A handle for a read; nothing moves yet."""
        ...

    def post(self, handle: int) -> bool:
        """Start; whether it is done already. If it raises, some of it may be under way."""
        ...

    def check(self, handle: int) -> bool:
        """Whether it is done. TransportError is the fabric's word that it failed, and nothing else is."""
        ...

    def release(self, handle: int) -> None:
        """Give up the handle of a read that has ended."""
        ...
