"""What runs inside the processes of a fleet."""

from __future__ import annotations

import ctypes
import gc
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cli.demo.engines import DestinationProcess, SourceProcess
from kvferry.core.manifest import Manifest
from kvferry.endpoint import Invitation, SourceEngine
from kvferry.runtime import Timing
from kvferry.transport.base import Transport
from kvferry.transport.process import ProcessTransport
from kvferry.wire.secret import Secret, Trust


@dataclass(frozen=True)
class Health:
    """What a process holds on to."""

    rss_bytes: int
    num_fds: int
    num_threads: int


def health() -> Health:
    """Of the calling process. What is free goes back first: an allocator's reserve is no leak."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    num_fds = len(list(Path("/proc/self/fd").iterdir()))
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    return Health(pages * os.sysconf("SC_PAGE_SIZE"), num_fds, num_threads)


def trust_in(secret: bytes) -> Trust:
    """Those who know a secret; without one, this host."""
    return Trust(Secret(secret)) if secret else Trust()


class AuthorityActor(SourceEngine):
    """The lease authority of a source engine."""

    def __init__(self, engine: str, num_ranks: int, listen: str, secret: bytes, timing: Timing) -> None:
        super().__init__(engine, num_ranks, listen=listen, trust=trust_in(secret), timing=timing)

    def get(self, name: str) -> Any:
        """A property: a worker's calls are of methods."""
        return getattr(self, name)

    def hold_interpreter(self, seconds: int) -> None:
        """Let no other thread of this process run Python for so long."""
        ctypes.PyDLL(None).sleep(seconds)

    def health(self) -> Health:
        return health()


class SourceActor(SourceProcess):
    """One rank of a source engine."""

    def __init__(
        self, manifest: Manifest, rank: int, invitation: Invitation, secret: bytes, device: str
    ) -> None:
        super().__init__(manifest, rank, invitation, device, trust_in(secret))

    def health(self) -> Health:
        return health()


class DestinationActor(DestinationProcess):
    """One rank of a destination engine."""

    def __init__(
        self, manifest: Manifest, rank: int, reader: str, secret: bytes, timing: Timing, device: str
    ) -> None:
        super().__init__(manifest, rank, reader, timing, device, trust_in(secret), self.make_transport())

    def make_transport(self) -> Transport:
        return ProcessTransport()

    def fingerprint(self) -> int:
        """A checksum of all memory: unchanged means that nothing was written."""
        checksum = 0
        for array in self.memory.arrays():
            checksum = zlib.crc32(array.tobytes(), checksum)
        return checksum

    def health(self) -> Health:
        return health()
