"""What runs inside the processes of a fleet."""

from __future__ import annotations

import ctypes
import gc
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.request import BlockTable
from kvferry.core.select import Slack
from kvferry.core.span import Span, Spans
from kvferry.endpoint import Destination, Invitation, SourceEngine, SourceRank
from kvferry.runtime import Released, Report, Timing
from kvferry.testing.pattern import STALE, Checked, check_rank, fill_rank
from kvferry.transport.base import Transport
from kvferry.transport.cuda import Cuda
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.secret import Secret
from kvferry.wire.ticket import Ticket
from kvferry.wire.trust import Trust


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


class RankMemory:
    """A rank's regions as real memory: host buffers, or device memory with a mirror on the host."""

    def __init__(self, rank: Rank, device: str) -> None:
        self.host: dict[str, NDArray[np.uint8]] = {}
        self._cuda = Cuda(int(device.partition(":")[2] or 0)) if device.startswith("cuda") else None
        regions = []
        for region in rank.regions:
            buffer = self.host[region.name] = np.full(region.num_bytes, STALE, np.uint8)
            address = self._cuda.allocate(region.num_bytes) if self._cuda else buffer.ctypes.data
            regions.append(replace(region, address=address, device=device))
        self.regions: tuple[Region, ...] = tuple(regions)
        self.store()

    def store(self) -> None:
        """Make the device hold what the host mirror says."""
        if self._cuda:
            for region in self.regions:
                self._cuda.upload(region.address, self.host[region.name].tobytes())

    def load(self) -> None:
        """Make the host mirror say what the device holds."""
        if self._cuda:
            for region in self.regions:
                data = self._cuda.download(region.address, region.num_bytes)
                self.host[region.name][:] = np.frombuffer(data, np.uint8)


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


class SourceActor:
    """One rank of a source engine, with memory that can be filled."""

    def __init__(
        self, manifest: Manifest, rank: int, invitation: Invitation, secret: bytes, device: str
    ) -> None:
        self._manifest, self._rank = manifest, rank
        self._memory = RankMemory(manifest.rank(rank), device)
        own = replace(manifest, ranks=(replace(manifest.rank(rank), regions=self._memory.regions),))
        self._endpoint = SourceRank(invitation, own, NixlTransport(), trust=trust_in(secret))

    def is_joined(self) -> bool:
        return self._endpoint.is_joined

    def fill(self, tables: Mapping[str, BlockTable], num_tokens: int, salt: str) -> None:
        """Write a request's pattern into its blocks."""
        tokens = {group.name: (Span(0, num_tokens),) for group in self._manifest.groups}
        fill_rank(self._memory.host, self._manifest, self._rank, tables, tokens, salt)
        self._memory.store()

    def poll(self) -> list[Released]:
        return self._endpoint.poll()

    def health(self) -> Health:
        return health()

    def close(self) -> None:
        self._endpoint.close()


class DestinationActor:
    """One rank of a destination engine, with memory that can be checked."""

    def __init__(
        self, manifest: Manifest, rank: int, reader: str, secret: bytes, timing: Timing, device: str
    ) -> None:
        self._rank = rank
        self._memory = RankMemory(manifest.rank(rank), device)
        ranks = tuple(
            replace(r, regions=self._memory.regions) if r.rank == rank else r for r in manifest.ranks
        )
        self._manifest = replace(manifest, ranks=ranks)
        self._transport = self.make_transport()
        self._endpoint = Destination(
            self._manifest, rank, self._transport, reader=reader, trust=trust_in(secret), timing=timing
        )

    def make_transport(self) -> Transport:
        return NixlTransport()

    def fill(self, tables: Mapping[str, BlockTable], tokens: Mapping[str, Spans], salt: str) -> None:
        """Write the pattern of tokens that are here already, while nothing is in flight."""
        self._memory.load()
        fill_rank(self._memory.host, self._manifest, self._rank, tables, tokens, salt)
        self._memory.store()

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

    def poll(self) -> list[Report]:
        return self._endpoint.poll()

    def check(
        self, tables: Mapping[str, BlockTable], need: Mapping[str, Spans], names: Mapping[str, str], salt: str
    ) -> Checked:
        """Look at every needed cell of a request."""
        self._memory.load()
        return check_rank(self._memory.host, self._manifest, self._rank, tables, need, names, salt)

    def fingerprint(self) -> int:
        """A checksum of all memory: unchanged means that nothing was written."""
        self._memory.load()
        checksum = 0
        for buffer in self._memory.host.values():
            checksum = zlib.crc32(buffer.tobytes(), checksum)
        return checksum

    def status(self) -> dict[str, object]:
        return self._endpoint.status()

    def health(self) -> Health:
        return health()

    def close(self) -> None:
        self._endpoint.close()
