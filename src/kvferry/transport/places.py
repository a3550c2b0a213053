"""Regions of one rank as arrays; lengths of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.core.runs import REGION_SHIFT, Runs, place
from kvferry.core.view import Ints
from kvferry.errors import TransportError


def one_length(num_bytes: int, num_runs: int) -> Ints:
    """Equal lengths of so many runs, stored once."""
    return np.broadcast_to(np.array([num_bytes], np.int64), num_runs)


def told_once(lengths: Ints) -> Ints:
    """The lengths, or only the first of those that ``one_length`` made.

    >>> told_once(one_length(8, 1000)).tolist(), told_once(np.array([8, 8])).tolist()
    ([8], [8, 8])
    """
    return lengths[:1] if lengths.strides == (0,) else lengths


def sum_of(lengths: Ints) -> int:
    once = told_once(lengths)
    return int(once[0]) * len(lengths) if len(once) == 1 else int(lengths.sum())


def cut_long(runs: Runs, max_bytes: int) -> Runs:
    if not len(runs) or (runs.each_bytes or int(runs.num_bytes.max())) <= max_bytes:
        return runs
    num_parts = -(-runs.num_bytes // max_bytes)
    at = np.repeat(np.arange(len(runs)), num_parts)
    first = np.cumsum(num_parts) - num_parts
    offsets = (np.arange(len(at)) - first[at]) * max_bytes
    return Runs(
        runs.src[at] + offsets, runs.dst[at] + offsets, np.minimum(runs.num_bytes[at] - offsets, max_bytes)
    )


OFFSET_MASK = (1 << REGION_SHIFT) - 1

Addresses = NDArray[np.uint64]


class Found(NamedTuple):
    region: int
    room: int
    """How far all of them can be moved up."""


class Places:
    """Turns places into addresses.

    >>> places = Places("ours", [Region("kv", 64, address=4096), Region("ssm", 16, address=8192)])
    >>> places.addresses(np.array([8, (1 << REGION_SHIFT) + 4])).tolist()
    [4104, 8196]
    >>> places.check(np.array([60]), np.array([8]))
    Traceback (most recent call last):
    kvferry.errors.TransportError: out-of-bounds: ours: a run of 8 bytes from 60 leaves 'kv' of 64 bytes
    """

    def __init__(self, whose: str, regions: Sequence[Region]) -> None:
        for region in regions:
            if not region.address:
                raise TransportError("no-address", f"{whose}: region {region.name!r} has no address")
        self.whose = whose
        self.regions = tuple(regions)
        self._bases = np.array([region.address for region in regions], np.uint64)
        self._lengths = np.array([region.num_bytes for region in regions], np.int64)

    def check(self, places: Ints, num_bytes: Ints) -> None:
        """Raise TransportError if a run leaves its region."""
        if not len(places) or self.only_region(places, num_bytes):
            return
        index, offset = self.split(places)
        if self._are_inside(index, offset, num_bytes):  # quicker than finding the first that is not
            return
        outside = (index < 0) | (index >= len(self.regions)) | (num_bytes < 0)
        inside = ~outside
        outside[inside] = offset[inside] > self._lengths[index[inside]] - num_bytes[inside]
        first = int(np.flatnonzero(outside)[0])
        i, run = int(index[first]), f"a run of {int(num_bytes[first])} bytes from {int(offset[first])}"
        if not 0 <= i < len(self.regions):
            detail = f"{run} names region {i}, but there are {len(self.regions)}"
            raise TransportError("unknown-region", f"{self.whose}: {detail}")
        region = self.regions[i]
        detail = f"{run} leaves {region.name!r} of {region.num_bytes} bytes"
        raise TransportError("out-of-bounds", f"{self.whose}: {detail}")

    def _are_inside(self, index: Ints, offset: Ints, num_bytes: Ints) -> bool:
        """Of one run at least; nothing overflows."""
        if int(index.min()) < 0 or int(num_bytes.min()) < 0 or int(index.max()) >= len(self.regions):
            return False
        return bool((offset <= self._lengths[index] - num_bytes).all())

    def only_region(self, places: Ints, num_bytes: Ints) -> Found | None:
        """The region that holds all runs, one at least, which is usual and quick to find; or None."""
        which, lengths = int(places.min()) >> REGION_SHIFT, told_once(num_bytes)
        if not 0 <= which < len(self.regions) or int(lengths.min()) < 0:
            return None
        if len(lengths) == 1:
            end = int(places.max()) + int(lengths[0])
        else:  # neither is negative, so no sum reaches 2^64; the last of 2^15 regions ends at 2^63
            end = int((places + num_bytes).view(np.uint64).max())
        room = (which << REGION_SHIFT) + self.regions[which].num_bytes - end
        return Found(which, room) if room >= 0 else None

    def located(self, places: Ints, num_bytes: Ints) -> tuple[Addresses, int]:
        """The addresses of runs, one at least, and how far all can be moved up; raises as ``check`` does."""
        if found := self.only_region(places, num_bytes):
            which, room = found
            shift = (self.regions[which].address - (which << REGION_SHIFT)) % (1 << 64)
            return places.view(np.uint64) + np.uint64(shift), room
        self.check(places, num_bytes)
        index, offset = self.split(places)
        return self.addresses(places), int((self._lengths[index] - offset - num_bytes).min())

    def addresses(self, places: Ints) -> Addresses:
        index, offset = self.split(places)
        return self._bases[index] + offset.astype(np.uint64)

    @staticmethod
    def split(places: Ints) -> tuple[Ints, Ints]:
        """Region index and byte offset of each place."""
        return places >> REGION_SHIFT, places & OFFSET_MASK


class MemoryKind(NamedTuple):
    name: str
    device_index: int

    @classmethod
    def of(cls, region: Region) -> MemoryKind:
        """
        >>> MemoryKind.of(Region("kv", 64, device="cuda:1"))
        MemoryKind(name='VRAM', device_index=1)
        """
        name, _, index = region.device.partition(":")
        if name == "cpu":
            return cls("DRAM", 0)
        if name == "cuda":
            return cls("VRAM", int(index))
        detail = f"region {region.name!r} is on {region.device!r}, which is neither cpu nor cuda:N"
        raise TransportError("bad-device", detail)


class RegionTable(Places):
    """Regions on the host or on CUDA devices, for NIXL's lists of descriptors."""

    def __init__(self, whose: str, regions: Sequence[Region]) -> None:
        super().__init__(whose, regions)
        self.kinds = tuple(MemoryKind.of(region) for region in regions)
        self.names = np.array([kind.name for kind in self.kinds])
        self._device_of = np.array([kind.device_index for kind in self.kinds], np.uint64)

    def descriptors(self, places: NDArray[np.int64], num_bytes: NDArray[np.int64]) -> NDArray[np.uint64]:
        table = np.empty((len(places), 3), np.uint64)
        table[:, 0] = self.addresses(places)
        table[:, 1] = num_bytes
        table[:, 2] = self._device_of[self.split(places)[0]]
        return table

    def whole(self) -> NDArray[np.uint64]:
        starts = np.array([place(i, 0) for i in range(len(self.regions))])
        return self.descriptors(starts, np.array([region.num_bytes for region in self.regions]))


def checked(runs: Runs, src: Places, dst: Places) -> Runs:
    """The runs that have bytes; raises TransportError if one leaves its region."""
    src.check(runs.src, runs.num_bytes)
    dst.check(runs.dst, runs.num_bytes)
    some = runs.num_bytes > 0
    return runs if some.all() else Runs(runs.src[some], runs.dst[some], runs.num_bytes[some])
