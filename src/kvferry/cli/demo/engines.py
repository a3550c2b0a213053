"""The engines of a demonstration: each rank is a process, with real memory and a real transport."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvferry.cli.demo.pairs import BlockPool
from kvferry.cli.processes import Worker, call_all, until
from kvferry.core.identity import STATED, Identity
from kvferry.core.manifest import Manifest, Rank, Region
from kvferry.core.request import BlockTable
from kvferry.core.span import Span, Spans
from kvferry.endpoint import Destination, Invitation, SourceEngine, SourceRank
from kvferry.errors import KVFerryError
from kvferry.pattern import STALE, Checked, check_rank, fill_rank
from kvferry.runtime import Report, Timing
from kvferry.transport.base import Transport
from kvferry.transport.cuda import Cuda
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import Ticket

NUMBERED_CELLS = Identity.of({STATED: "cells numbered by kvferry.pattern"})
"""What fills the caches of these engines, whichever model they are described after."""
DEMO_TIMING = Timing(lease=30, meet=20, read=60, retry=0.2)
START_SECONDS = 60.0
LEASES = "leases outstanding"


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


class SourceProcess:
    """One rank of a source engine, with memory that can be filled."""

    def __init__(
        self, manifest: Manifest, rank: int, invitation: Invitation, device: str, trust: Trust | None = None
    ) -> None:
        self._manifest, self._rank = manifest, rank
        self._memory = RankMemory(manifest.rank(rank), device)
        own = replace(manifest, ranks=(replace(manifest.rank(rank), regions=self._memory.regions),))
        self._endpoint = SourceRank(invitation, own, NixlTransport(), trust=trust or Trust())

    def fill(self, tables: Mapping[str, BlockTable], num_tokens: int, salt: str) -> None:
        """Write a request's pattern into its blocks."""
        tokens = {group.name: (Span(0, num_tokens),) for group in self._manifest.groups}
        fill_rank(self._memory.host, self._manifest, self._rank, tables, tokens, salt)
        self._memory.store()

    def close(self) -> None:
        self._endpoint.close()


class DestinationProcess:
    """One rank of a destination engine, with memory that can be checked."""

    def __init__(
        self,
        manifest: Manifest,
        rank: int,
        reader: str,
        timing: Timing,
        device: str,
        trust: Trust | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._rank = rank
        self._memory = RankMemory(manifest.rank(rank), device)
        ranks = tuple(
            replace(r, regions=self._memory.regions) if r.rank == rank else r for r in manifest.ranks
        )
        self._manifest = replace(manifest, ranks=ranks)
        self._endpoint = Destination(
            self._manifest,
            rank,
            transport or NixlTransport(),
            reader=reader,
            trust=trust or Trust(),
            timing=timing,
        )

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
    ) -> int:
        return self._endpoint.fetch(ticket, tables, need, kept=kept)

    def poll(self) -> list[Report]:
        return self._endpoint.poll()

    def check(
        self, tables: Mapping[str, BlockTable], need: Mapping[str, Spans], names: Mapping[str, str], salt: str
    ) -> Checked:
        """Look at every needed cell of a request."""
        self._memory.load()
        return check_rank(self._memory.host, self._manifest, self._rank, tables, need, names, salt)

    def status(self) -> dict[str, object]:
        return self._endpoint.status()

    def close(self) -> None:
        self._endpoint.close()


class DemoSource:
    """A source engine: its authority in this process, each rank in one of its own, and its blocks."""

    def __init__(self, manifest: Manifest, device: str, env: Mapping[str, str]) -> None:
        manifest = replace(manifest, identity=NUMBERED_CELLS)
        self.pool = BlockPool(manifest)
        self._out: dict[str, Mapping[str, BlockTable]] = {}
        """The blocks of every request that was offered and not released."""
        self._engine = SourceEngine(manifest.engine, len(manifest.ranks), timing=DEMO_TIMING)
        invitation = self._engine.invitation
        self.ranks = [
            Worker(f"src-{each.rank}", SourceProcess, manifest, each.rank, invitation, device, env=env)
            for each in manifest.ranks
        ]

    def wait_ready(self) -> None:
        """Until every rank has joined."""
        for rank in self.ranks:
            rank.wait_ready(START_SECONDS)
        until(lambda: self._engine.is_whole, "all ranks of the source join it", START_SECONDS)

    def prefill(self, request_id: str, num_tokens: int, seconds: float) -> dict[str, BlockTable]:
        """Take blocks once there are some, and write a request's pattern on every rank."""
        deadline = time.monotonic() + seconds
        while (tables := self.pool.take(num_tokens)) is None:
            if time.monotonic() > deadline:
                raise KVFerryError(f"the source has no blocks for {num_tokens} tokens")
            self.poll()
            time.sleep(0.01)
        call_all(self.ranks, "fill", tables, num_tokens, request_id)
        return tables

    def offer(
        self, request_id: str, tables: Mapping[str, BlockTable], num_tokens: int, *, is_last: bool = True
    ) -> Ticket:
        """Offer a request; its blocks come back when it is released, unless they are offered again."""
        self._out[request_id] = tables if is_last else {}
        return self._engine.offer(request_id, tables, num_tokens)

    def poll(self) -> None:
        """Take back the blocks of what was released."""
        for released in self._engine.poll():
            self.pool.give_back(self._out.pop(released.request_id, {}))

    def left(self) -> dict[str, int]:
        """What is not over."""
        self.poll()
        status: dict[str, int] = self._engine.status()  # type: ignore[assignment]
        are_alive = all(rank.is_alive for rank in self.ranks)
        return {
            LEASES: status["offered"] + status["being_read"],
            "source blocks not given back": self.pool.num_missing,
            "releases not confirmed by every rank": status["unheard"] if are_alive else 0,
        }

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._engine.close()


class DemoDestination:
    """A destination engine: each rank a process, and its blocks."""

    def __init__(self, manifest: Manifest, device: str, env: Mapping[str, str]) -> None:
        manifest = replace(manifest, identity=NUMBERED_CELLS)
        self.groups, self.pool = manifest.groups, BlockPool(manifest, seed=1)
        self._reports: dict[tuple[int, int], Report] = {}
        args = (f"{manifest.engine}#{time.time_ns()}", DEMO_TIMING, device)
        self.ranks = [
            Worker(f"dst-{each.rank}", DestinationProcess, manifest, each.rank, *args, env=env)
            for each in manifest.ranks
        ]

    def wait(self, handles: Sequence[int], seconds: float) -> list[Report]:
        """Until every rank has reported its handle; the reports, one per rank. Others' reports are kept."""
        wanted = list(enumerate(handles))

        def are_in() -> bool:
            for index, reports in enumerate(call_all(self.ranks, "poll")):
                self._reports |= {(index, report.handle): report for report in reports}
            return all(key in self._reports for key in wanted)

        until(are_in, "every rank of the destination reports a load", seconds)
        return [self._reports.pop(key) for key in wanted]

    def left(self) -> dict[str, int]:
        """What is not over."""
        left = {"destination blocks not given back": self.pool.num_missing}
        for rank in self.ranks:
            status = rank.call("status")
            left[f"fetches at {rank.name}"] = sum(status["fetches"].values())
            for what in ("in_flight", "settling", "quarantined"):
                left[f"reads {what.replace('_', ' ')} at {rank.name}"] = int(status[what])
        return left

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
