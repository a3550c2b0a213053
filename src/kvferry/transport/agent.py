"""What the thread that owns an agent asks of it: NIXL's agent is one, and tests put others around it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.descriptors import SlicePair


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
