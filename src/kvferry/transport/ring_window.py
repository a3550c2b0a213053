"""A ring in memory that both processes have: on one host what was gathered need not be read first.

The source's rank gathers into memory that readers of its host can look at, and not change; they scatter from
there. Without this, each byte would be copied once more, by the fabric, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum

import numpy as np

from kvferry.errors import TransportError
from kvferry.host.shared_memory import SharedMemory, look_at
from kvferry.log import log_of
from kvferry.transport.quietly import quietly
from kvferry.transport.setting import chosen
from kvferry.transport.staging import Staging
from kvferry.transport.staging_ring import MAX_RING_BYTES, StagingSize

log = log_of(__name__)

SETTING = "KVFERRY_SHARED_RINGS"
PREFIX = "kvferry-ring-"


class SharedRings(Enum):
    """Whether ranks of one host look at each other's rings: the setting, as users write it."""

    ON = "on"
    """Where it is possible."""
    OFF = "off"
    """As between two hosts: rings are read by the fabric, or what is gathered is sent."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> SharedRings:
        """The setting; raises TransportError if it is none."""
        return chosen(SETTING, environ, cls.ON)

    def memory(self, size: StagingSize) -> SharedMemory | None:
        """For a ring to gather into, if others are to look at it, and that is possible here."""
        if self is SharedRings.ON:
            with suppress(OSError):
                return SharedMemory(PREFIX, size.num_bytes)
        return None


class RingWindow:
    """The ring of another process, as this one sees it."""

    def __init__(self, staging: Staging) -> None:
        """Raises OSError if it cannot be seen from here."""
        if not staging.is_on_host:
            raise OSError("it is on a device")
        if staging.ring_bytes > MAX_RING_BYTES:
            raise OSError(f"it is said to have {staging.ring_bytes} bytes")
        self._memory = look_at(staging.place, PREFIX, staging.ring_bytes)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def close(self) -> None:
        """Look at it no more; nothing may be copied from it meanwhile. Once is enough."""
        if hasattr(self, "_bytes"):
            del self._bytes
            self._memory.close()


class RingWindows:
    """The rings of others that this rank looks at."""

    def __init__(
        self, shared: SharedRings, open_window: Callable[[Staging], RingWindow] = RingWindow
    ) -> None:
        """``open_window``: raises OSError or TransportError if a ring cannot be seen from here."""
        self._shared, self._open_window = shared, open_window
        self._open: set[RingWindow] = set()

    def open(self, peer: str, staging: Staging) -> RingWindow | None:
        """A peer's ring, if it can be seen from here."""
        if not staging.place or self._shared is SharedRings.OFF:
            return None
        try:
            window = self._open_window(staging)
        except (OSError, TransportError) as error:
            log.debug("the ring of %s cannot be seen from here: %s", peer, error)
            return None
        self._open.add(window)
        return window

    def close_one(self, window: RingWindow) -> None:
        """Look at one no more; nothing may be copied from it meanwhile. Once is enough."""
        if window in self._open:
            self._open.remove(window)
            quietly(window.close)

    def close(self) -> None:
        """Look at none any more; nothing may be under way."""
        for window in [*self._open]:
            self.close_one(window)
