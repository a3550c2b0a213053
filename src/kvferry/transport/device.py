"""What a rank with device memory has besides NIXL: the device, what readers of its host get, the copier."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.exports import Exporter
from kvferry.transport.mapped import DeviceCopier, MappedLink
from kvferry.transport.setting import chosen

log = log_of(__name__)

SETTING = "KVFERRY_MAPPED_READS"
BLOCKS_SETTING = "KVFERRY_COPY_BLOCKS"
LAUNCH_SETTING = "KVFERRY_COPY_LAUNCH_BYTES"


class MappedReads(Enum):
    """Whether device memory of the same host is opened and copied by our own kernel."""

    AUTO = "auto"
    """Wherever it can be opened and a probe of it is right; else the fabric reads it, with a warning."""
    REQUIRE = "require"
    """A peer whose memory cannot be opened is refused."""
    OFF = "off"
    """Never: neither opened nor offered."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> MappedReads:
        """The setting, as users write it.

        >>> MappedReads.from_environment({"KVFERRY_MAPPED_READS": "off"})
        <MappedReads.OFF: 'off'>
        """
        return chosen(SETTING, environment, cls.AUTO)


def copy_limits(environment: Mapping[str, str]) -> CopyLimits:
    """How much of the device one copy may take, as users write it.

    >>> copy_limits({"KVFERRY_COPY_BLOCKS": "16"}).num_blocks
    16
    """
    numbers = []
    for name, default in (
        (BLOCKS_SETTING, CopyLimits().num_blocks),
        (LAUNCH_SETTING, CopyLimits().launch_bytes),
    ):
        value = environment.get(name, str(default))
        if not value.isdecimal():
            raise TransportError("bad-setting", f"{name}={value!r}: not a whole number")
        numbers.append(int(value))
    return CopyLimits(*numbers)


class RankDevice:
    """One device, made when a rank's memory is registered; everything slow about it is done here."""

    def __init__(
        self,
        index: int,
        memory: RegionTable,
        mapped_reads: MappedReads,
        limits: CopyLimits | None = None,
        *,
        is_open: bool = True,
    ) -> None:
        """``is_open``: whether readers of this host may open its memory."""
        self.cuda, self.limits = Cuda(index), limits or CopyLimits()
        self.is_mixed = "DRAM" in memory.names
        """Whether some of the rank's memory is the host's, which a kernel does not copy."""
        self.copier: DeviceCopier | None = None
        self._why_not = ""
        self._exporter: Exporter | None = None
        if mapped_reads is MappedReads.OFF:
            self._why_not = f"{SETTING} is off"
        elif self.is_mixed:
            self._why_not = "some of this rank's memory is the host's"
        else:
            try:
                self._make_copier(memory)
                if is_open:
                    self._exporter = Exporter(self.cuda, memory.places.regions)
            except BaseException:
                self.close()
                raise
            if self._exporter and (refusal := self._exporter.export.refusal):
                log.warning("readers on this host cannot open this rank's memory: %s", refusal)

    def _make_copier(self, memory: RegionTable) -> None:
        try:
            self.copier = DeviceCopier(self.cuda, memory.places, self.limits)
        except TransportError as error:
            self._why_not = f"the copy kernel cannot be made: {error}"
            log.warning("%s", self._why_not)

    @property
    def card_part(self) -> bytes:
        """What readers of this host need, for the card."""
        return self._exporter.export.to_bytes() if self._exporter else b""

    def connect(self, name: str, card: bytes, regions: Sequence[Region], timeout_s: float) -> MappedLink:
        """Open a remote rank's memory, or raise TransportError."""
        if self.copier is None:
            raise TransportError("not-mapped", self._why_not)
        return self.copier.connect(name, card, regions, timeout_s)

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        if self.copier:
            self.copier.close(0)
        if self._exporter:
            self._exporter.close()
        self.cuda.close()


def device_of(memory: RegionTable, mapped_reads: MappedReads, *, is_open: bool) -> RankDevice | None:
    """The one CUDA device of a rank, if it has one; ``is_open``: whether readers may open its memory."""
    devices = sorted({kind.device_index for kind in memory.kinds if kind.name == "VRAM"})
    if len(devices) > 1:
        raise TransportError("bad-device", f"a rank has one CUDA device, got {devices}")
    if not devices:
        return None
    return RankDevice(devices[0], memory, mapped_reads, copy_limits(os.environ), is_open=is_open)
