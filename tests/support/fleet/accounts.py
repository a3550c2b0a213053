"""What two engines owe each other: every request, every block, every report, each exactly once.

An account does what an engine's scheduler does: it takes blocks from the pool for a request, and gives them
back when it is told that it may. It complains when it is told twice, or of something that it does not know.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.cli.demo.engines import BlockPool
from kvferry.cli.demo.moves import LEASES
from kvferry.cli.processes import until
from kvferry.core.request import BlockTable, need_of
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing
from kvferry.errors import KVFerryError
from kvferry.pattern import KEPT, Checked
from kvferry.runtime import Released, Report
from kvferry.wire.ticket import Ticket
from tests.support.fleet.engines import DestinationFleet, SourceFleet
from tests.support.fleet.worker import call_all


class Unbalanced(KVFerryError):
    """Something was reported twice, or never asked for."""


class SourceAccount:
    """A source engine's requests and blocks."""

    def __init__(self, fleet: SourceFleet) -> None:
        self.fleet, self.pool = fleet, BlockPool(fleet.manifest)
        self.out: dict[str, Mapping[str, BlockTable]] = {}
        """The blocks of every request that was offered and not released."""
        self.released: dict[str, str] = {}
        """Why each request was released, as the engine's scheduler heard it."""
        self.heard: list[dict[str, str]] = [{} for _ in fleet.ranks]
        """The same, as each rank heard it."""

    def offer(self, request_id: str, num_tokens: int, *, is_filled: bool = True) -> Ticket:
        """Offer a request; take blocks and write its pattern first, unless it has them or is to have none."""
        if request_id not in self.out:
            self.prefill(request_id, num_tokens, is_filled=is_filled)
        return self.fleet.offer(request_id, self.out[request_id], num_tokens)

    def prefill(
        self, request_id: str, num_tokens: int, *, is_filled: bool = True, wait_seconds: float = 0
    ) -> None:
        """Take blocks for a request once there are some, and write its pattern unless told not to."""
        deadline = time.monotonic() + wait_seconds
        while (tables := self.pool.take(num_tokens)) is None:
            if time.monotonic() > deadline:
                raise Unbalanced(f"{self.fleet.manifest.engine} has no blocks for {num_tokens} tokens")
            self.poll()
            time.sleep(0.01)
        self.out[request_id] = tables
        if is_filled:
            call_all(self.fleet.ranks, "fill", tables, num_tokens, request_id)

    def offer_again(self, request_id: str, written: str, num_tokens: int) -> Ticket:
        """Offer the blocks of a request that was written, under another name; they stay that request's."""
        self.out[request_id] = {}
        return self.fleet.offer(request_id, self.out[written], num_tokens)

    def give_back(self, request_id: str) -> None:
        """Take back the blocks of a request that was written and is not on offer."""
        self.pool.give_back(self.out.pop(request_id))

    def poll(self) -> None:
        """Collect what was released, where somebody answers, and take those blocks back."""
        if self.fleet.authority.is_running:
            for released in self.fleet.poll():
                _note(self.released, released, "the engine")
                self.give_back(released.request_id)
        for heard, rank in zip(self.heard, self.fleet.ranks, strict=True):
            if rank.is_running:
                for released in rank.call("poll"):
                    _note(heard, released, rank.name)

    def reason(self, request_id: str) -> str:
        """Why a request was released, once the engine and every living rank have heard of it."""
        until(lambda: self._has_heard(request_id), f"everybody hears that {request_id} is released")
        reasons = {self.released[request_id]}
        reasons |= {heard[request_id] for heard in self.heard if request_id in heard}
        if len(reasons) > 1:
            raise Unbalanced(f"{request_id} was released for several reasons: {sorted(reasons)}")
        return reasons.pop()

    def _has_heard(self, request_id: str) -> bool:
        self.poll()
        living = [heard for heard, rank in zip(self.heard, self.fleet.ranks, strict=True) if rank.is_alive]
        return request_id in self.released and all(request_id in heard for heard in living)

    def status(self) -> dict[str, Any]:
        """The authority's own view."""
        status: dict[str, Any] = self.fleet.authority.call("status")
        return status

    def left(self) -> dict[str, int]:
        """What is not over: leases, blocks that are out, releases that a living rank has not heard of."""
        self.poll()
        status = self.status()
        all_alive = all(rank.is_alive for rank in self.fleet.ranks)
        left = {
            LEASES: int(status["offered"]) + int(status["being_read"]),
            "source blocks not returned": self.pool.num_missing,
            "releases not confirmed by every rank": int(status["unheard"]) if all_alive else 0,
        }
        for heard, rank in zip(self.heard, self.fleet.ranks, strict=True):
            if all_alive:
                left[f"releases that {rank.name} did not hear of"] = len(self.released) - len(heard)
        return left

    def is_quiet(self) -> bool:
        """Whether nothing is left."""
        return not any(self.left().values())


def _note(seen: dict[str, str], released: Released, whom: str) -> None:
    if released.request_id in seen:
        raise Unbalanced(f"{whom} was told twice that {released.request_id} is released")
    seen[released.request_id] = released.reason


@dataclass(eq=False)
class TrackedLoad:
    """A request on its way into a destination engine."""

    request_id: str
    tables: Mapping[str, BlockTable]
    need: Mapping[str, Spans]
    kept: Mapping[str, Spans] = field(default_factory=dict)
    """Tokens that were there already."""
    handles: list[int] = field(default_factory=list)
    """One per rank, once it is started."""
    reports: dict[int, Report] = field(default_factory=dict)
    """By rank."""

    @property
    def codes(self) -> list[str]:
        """What each rank that reported said: a failure's code, or nothing if all is well."""
        reports = [report for _, report in sorted(self.reports.items())]
        return [report.failure.code if report.failure else "" for report in reports]


class DestinationAccount:
    """A destination engine's loads and blocks."""

    def __init__(self, fleet: DestinationFleet, src_names: Mapping[str, str] | None = None) -> None:
        self.fleet, self.pool = fleet, BlockPool(fleet.manifest, seed=1)
        self._by_handle: list[dict[int, TrackedLoad]] = [{} for _ in fleet.ranks]
        self._own_names = {state.name: state.name for state in fleet.manifest.states}
        self._src_names = src_names or self._own_names
        """State -> the name under which the source knows it."""

    def fetch(self, ticket: Ticket, num_tokens: int = 0) -> TrackedLoad:
        """Take blocks, and start the load on every rank."""
        load = self.prepare(ticket.request_id, num_tokens or ticket.num_tokens)
        self.start(load, ticket)
        return load

    def prepare(self, request_id: str, num_tokens: int, num_kept: int = 0) -> TrackedLoad:
        """Take blocks, and write the tokens that are there already while nothing is in flight."""
        tables = self.pool.take(num_tokens)
        if tables is None:
            raise Unbalanced(f"{self.fleet.manifest.engine} has no blocks for {num_tokens} tokens")
        groups = self.fleet.manifest.groups
        need = {group.name: need_of(group, num_tokens, num_kept) for group in groups}
        kept: dict[str, Spans] = {}
        if num_kept:
            paged = [group for group in groups if group.addressing is Addressing.TABLE]
            kept = {group.name: (Span(0, num_kept),) for group in paged}
            call_all(self.fleet.ranks, "fill", tables, kept, KEPT)
        return TrackedLoad(request_id, tables, need, kept)

    def start(self, load: TrackedLoad, ticket: Ticket) -> None:
        """Start a load on every rank."""
        load.handles = self.fleet.fetch(ticket, load.tables, load.need, kept=load.kept)
        for by_handle, handle in zip(self._by_handle, load.handles, strict=True):
            by_handle[handle] = load

    def abort(self, load: TrackedLoad) -> None:
        """Give a load up, on every rank that lives."""
        for rank, handle in zip(self.fleet.ranks, load.handles, strict=True):
            if rank.is_running:
                rank.call("abort", handle)

    def poll(self) -> list[TrackedLoad]:
        """Collect reports; the loads that are over now. Their blocks are back in the pool."""
        over = []
        for index, rank in enumerate(self.fleet.ranks):
            for report in rank.call("poll") if rank.is_running else ():
                load = self._by_handle[index].pop(report.handle, None)
                if load is None:
                    raise Unbalanced(f"{rank.name} reported {report.handle} twice, or nobody asked for it")
                load.reports[index] = report
                if self.is_over(load):
                    self.pool.give_back(load.tables)
                    over.append(load)
        return over

    def is_over(self, load: TrackedLoad) -> bool:
        """Whether every rank that lives has reported it."""
        living = (index for index, rank in enumerate(self.fleet.ranks) if rank.is_alive)
        return all(index in load.reports for index in living)

    def wait(self, load: TrackedLoad, seconds: float = 30) -> list[str]:
        """Until a load is over; its codes, one per rank."""

        def is_over() -> bool:
            self.poll()
            return self.is_over(load)

        until(is_over, f"{self.fleet.manifest.engine} reports {load.request_id}", seconds)
        return load.codes

    def check(self, load: TrackedLoad, salt: str = "") -> Sequence[Checked]:
        """Every needed cell, on every rank: whether it holds what the request's prefill wrote."""
        return self.fleet.check(load.tables, load.need, self._src_names, salt or load.request_id)

    def check_kept(self, load: TrackedLoad) -> Sequence[Checked]:
        """Every cell that was there already, on every rank."""
        return self.fleet.check(load.tables, load.kept, self._own_names, KEPT)

    def num_wrong(self, load: TrackedLoad, salt: str = "") -> int:
        """Needed cells that do not hold what the request's prefill wrote."""
        return sum(one.num_wrong for one in self.check(load, salt))

    def statuses(self) -> list[dict[str, Any]]:
        """The own view of every rank that answers."""
        return [rank.call("status") for rank in self.fleet.ranks if rank.is_running]

    def num_in_flight(self) -> int:
        """Posted reads that have not ended, on all ranks."""
        return sum(status["in_flight"] for status in self.statuses())

    def fingerprints(self) -> list[int]:
        """A checksum of every rank's memory."""
        return [rank.call("fingerprint") for rank in self.fleet.ranks if rank.is_running]

    def left(self) -> dict[str, int]:
        """What is not over: blocks that are out, fetches, reads, what is still to be said."""
        self.poll()
        left = {"destination blocks not returned": self.pool.num_missing}
        for rank in self.fleet.ranks:
            if rank.is_running:
                status = rank.call("status")
                left[f"fetches at {rank.name}"] = sum(status["fetches"].values())
                for what in ("in_flight", "settling", "quarantined"):
                    left[f"reads {what.replace('_', ' ')} at {rank.name}"] = int(status[what])
        return left

    def is_quiet(self) -> bool:
        """Whether nothing is left."""
        return not any(self.left().values())
