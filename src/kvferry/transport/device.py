"""What a rank with device memory has besides NIXL: the device, what readers of its host get, the copier."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.cards import Card
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import RegionTable
from kvferry.transport.exports import Exporter
from kvferry.transport.mapped import DeviceCopier, MappedLink

log = log_of(__name__)


class RankDevice:
    """One device, made when a rank's memory is registered; everything slow about it is done here."""

    def __init__(
        self,
        index: int,
        memory: RegionTable,
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
        if self.is_mixed:
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

    def connect(self, name: str, card: Card, regions: Sequence[Region], timeout_s: float) -> MappedLink:
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


def device_of(memory: RegionTable, limits: CopyLimits | None, *, is_open: bool) -> RankDevice | None:
    """The one CUDA device of a rank, if it has one; ``is_open``: whether readers may open its memory."""
    devices = sorted({kind.device_index for kind in memory.kinds if kind.name == "VRAM"})
    if len(devices) > 1:
        raise TransportError("bad-device", f"a rank has one CUDA device, got {devices}")
    return RankDevice(devices[0], memory, limits, is_open=is_open) if devices else None
