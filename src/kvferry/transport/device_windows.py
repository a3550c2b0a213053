"""The ring of another process as a device of this one sees it."""

from __future__ import annotations

from kvferry.transport.cuda import Cuda
from kvferry.transport.exports import Export, Opened
from kvferry.transport.ring_window import RingWindow
from kvferry.transport.staging import Staging
from kvferry.transport.staging_ring import MAX_RING_BYTES

DEVICE = "cuda:0"
"""Which one does not matter to who opens it: that is in what was exported."""


class PinnedRingWindow(RingWindow):
    """A ring in the host's memory."""

    def __init__(self, cuda: Cuda, staging: Staging) -> None:
        """Raises OSError if it cannot be seen from here, TransportError if not by the device."""
        super().__init__(staging)
        self._cuda, self._is_pinned = cuda, False
        try:
            cuda.pin(self.address, staging.ring_bytes, is_read_only=True)
        except BaseException:
            super().close()
            raise
        self._is_pinned = True

    def close(self) -> None:
        """Look at it no more."""
        try:
            if self._is_pinned:
                self._is_pinned = False
                self._cuda.unpin(self.address)
        finally:
            super().close()


class DeviceRingWindow(RingWindow):
    """A ring in device memory."""

    def __init__(self, cuda: Cuda, staging: Staging) -> None:
        """Raises TransportError if it cannot be opened here."""
        if staging.ring_bytes > MAX_RING_BYTES:
            raise OSError(f"it is said to have {staging.ring_bytes} bytes")
        self._opened = Opened.open(cuda, Export.from_bytes(staging.place.encode()), [staging.ring_on(DEVICE)])
        self.address = self._opened.regions[0].address

    def close(self) -> None:
        """Unmap it; the source can free its memory after this."""
        self._opened.close()


def window_of_device(cuda: Cuda, staging: Staging) -> RingWindow:
    """A ring wherever it is; raises OSError or TransportError if this device cannot see it."""
    return PinnedRingWindow(cuda, staging) if staging.is_on_host else DeviceRingWindow(cuda, staging)
