"""What runs inside the processes of a fleet."""

from __future__ import annotations

import ctypes
import gc
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.demo.engines import DestinationProcess, SourceProcess
from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable
from kvferry.core.select import Slack
from kvferry.core.span import Spans
from kvferry.endpoint import Invitation, SourceEngine
from kvferry.runtime import Released, Timing
from kvferry.transport.base import Transport
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.secret import Secret, Trust
from kvferry.wire.ticket import Ticket


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


class AuthorityActor:
    """The lease authority of a source engine."""

    def __init__(self, engine: str, num_ranks: int, listen: str, secret: bytes, timing: Timing) -> None:
        self._engine = SourceEngine(engine, num_ranks, listen=listen, trust=trust_in(secret), timing=timing)

    def invitation(self) -> Invitation:
        return self._engine.invitation

    def hold_interpreter(self, seconds: int) -> None:
        """Let no other thread of this process run Python for so long."""
        ctypes.PyDLL(None).sleep(seconds)

    def is_whole(self) -> bool:
        return self._engine.is_whole

    def offer(self, request_id: str, tables: Mapping[str, BlockTable], num_tokens: int) -> Ticket:
        return self._engine.offer(request_id, tables, num_tokens)

    def withdraw(self, request_id: str) -> None:
        self._engine.withdraw(request_id)

    def poll(self) -> list[Released]:
        return self._engine.poll()

    def status(self) -> dict[str, object]:
        return self._engine.status()

    def health(self) -> Health:
        return health()

    def close(self) -> None:
        self._engine.close()


class SourceActor(SourceProcess):
    """One rank of a source engine."""

    def __init__(
        self, manifest: Manifest, rank: int, invitation: Invitation, secret: bytes, device: str
    ) -> None:
        super().__init__(manifest, rank, invitation, device, trust_in(secret))

    def is_joined(self) -> bool:
        return self._endpoint.is_joined

    def poll(self) -> list[Released]:
        return self._endpoint.poll()

    def health(self) -> Health:
        return health()


class DestinationActor(DestinationProcess):
    """One rank of a destination engine."""

    def __init__(
        self, manifest: Manifest, rank: int, reader: str, secret: bytes, timing: Timing, device: str
    ) -> None:
        self._transport = self.make_transport()
        super().__init__(manifest, rank, reader, timing, device, trust_in(secret), self._transport)

    def make_transport(self) -> Transport:
        return NixlTransport()

    def fetch(
        self,
        ticket: Ticket,
        tables: Mapping[str, BlockTable],
        need: Mapping[str, Spans],
        kept: Mapping[str, Spans] | None = None,
        slack: Slack = Slack.CLEAR,
    ) -> int:
        return self._endpoint.fetch(ticket, tables, need, kept=kept, slack=slack)

    def abort(self, handle: int) -> None:
        self._endpoint.abort(handle)

    def fingerprint(self) -> int:
        """A checksum of all memory: unchanged means that nothing was written."""
        self._memory.load()
        checksum = 0
        for buffer in self._memory.host.values():
            checksum = zlib.crc32(buffer.tobytes(), checksum)
        return checksum

    def health(self) -> Health:
        return health()
