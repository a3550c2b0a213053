"""Whole engines of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.cli.demo.engines import NUMBERED_CELLS
from kvferry.core.manifest import Manifest
from kvferry.core.request import BlockTable
from kvferry.core.span import Spans
from kvferry.endpoint import Invitation
from kvferry.errors import KVFerryError
from kvferry.pattern import Checked
from kvferry.runtime import Released, Report, Timing
from kvferry.wire.ticket import Ticket
from tests.support.fleet.actors import AuthorityActor, DestinationActor, SourceActor
from tests.support.fleet.worker import Worker, call_all


class SourceFleet:
    """A source engine: an authority and every rank of a manifest, as processes."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        timing: Timing,
        listen: str = "tcp://127.0.0.1:*",
        secret: bytes = b"",
        device: str = "cpu",
        env: Mapping[str, str] | None = None,
        start: Callable[..., Worker] = Worker,
    ) -> None:
        self.manifest = manifest = replace(manifest, identity=NUMBERED_CELLS)
        args = (manifest.engine, len(manifest.ranks), listen, secret, timing)
        self.authority = start(f"{manifest.engine}-authority", AuthorityActor, *args, env=env)
        invitation: Invitation = self.authority.call("get", "invitation")
        self.address = invitation.address
        self.ranks = [
            start(
                f"{manifest.engine}-{rank.rank}",
                SourceActor,
                manifest,
                rank.rank,
                invitation,
                secret,
                device,
                env=env,
            )
            for rank in manifest.ranks
        ]

    def wait_whole(self, seconds: float = 60) -> None:
        """Until every rank has joined."""
        for rank in self.ranks:
            rank.wait_ready(seconds)
        deadline = time.monotonic() + seconds
        while not self.authority.call("get", "is_whole"):
            if time.monotonic() > deadline:
                raise KVFerryError(f"{self.manifest.engine}: not all ranks joined within {seconds:g} s")
            time.sleep(0.02)

    def prefill(self, request_id: str, tables: Mapping[str, BlockTable], num_tokens: int) -> Ticket:
        """Write a request's pattern on every rank, and offer it."""
        call_all(self.ranks, "fill", tables, num_tokens, request_id)
        return self.offer(request_id, tables, num_tokens)

    def offer(self, request_id: str, tables: Mapping[str, BlockTable], num_tokens: int) -> Ticket:
        """Offer what the memory holds already."""
        ticket: Ticket = self.authority.call("offer", request_id, tables, num_tokens)
        return ticket

    def poll(self) -> list[Released]:
        """Released requests, as the engine's scheduler hears of them."""
        released: list[Released] = self.authority.call("poll")
        return released

    def workers(self) -> Sequence[Worker]:
        return [self.authority, *self.ranks]

    def close(self) -> None:
        for worker in self.workers():
            worker.close()


class DestinationFleet:
    """A destination engine: every rank of a manifest, as processes."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        timing: Timing,
        reader: str = "",
        secret: bytes = b"",
        device: str = "cpu",
        env: Mapping[str, str] | None = None,
        start: Callable[..., Worker] = Worker,
        actor: type[DestinationActor] = DestinationActor,
    ) -> None:
        self.manifest = manifest = replace(manifest, identity=NUMBERED_CELLS)
        self._reports: dict[tuple[int, int], Report] = {}
        self.reader = reader or f"{manifest.engine}#{time.time_ns()}"
        args = (self.reader, secret, timing, device)
        self.ranks = [
            start(f"{manifest.engine}-{rank.rank}", actor, manifest, rank.rank, *args, env=env)
            for rank in manifest.ranks
        ]

    def wait_ready(self, seconds: float = 60) -> None:
        for rank in self.ranks:
            rank.wait_ready(seconds)

    def fetch(
        self, ticket: Ticket, tables: Mapping[str, BlockTable], need: Mapping[str, Spans], **kwargs: Any
    ) -> list[int]:
        """Start the fetch on every rank; the handles, one per rank."""
        return call_all(self.ranks, "fetch", ticket, tables, need, **kwargs)

    def poll(self) -> list[list[Report]]:
        """What happened on each rank."""
        return call_all(self.ranks, "poll")

    def wait(self, handles: Sequence[int], seconds: float = 60, *, pause: float = 0.002) -> list[Report]:
        """Until every rank has reported its handle; the reports, one per rank. Others' reports are kept."""
        deadline = time.monotonic() + seconds
        wanted = list(enumerate(handles))
        while missing := [index for index, handle in wanted if (index, handle) not in self._reports]:
            for index, reports in enumerate(self.poll()):
                self._reports.update({(index, report.handle): report for report in reports})
            if time.monotonic() > deadline:
                raise KVFerryError(
                    f"{self.manifest.engine}: ranks {missing} reported nothing in {seconds:g} s"
                )
            time.sleep(pause)
        return [self._reports.pop(key) for key in wanted]

    def check(
        self, tables: Mapping[str, BlockTable], need: Mapping[str, Spans], names: Mapping[str, str], salt: str
    ) -> list[Checked]:
        """Look at every needed cell on every rank."""
        return call_all(self.ranks, "check", tables, need, names, salt)

    def workers(self) -> Sequence[Worker]:
        return self.ranks

    def close(self) -> None:
        for worker in self.workers():
            worker.close()
