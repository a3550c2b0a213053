"""Several NIXL agents of one rank, which share out long reads.

NIXL pays for every run in the thread that posts it; on one host it even copies there. So a long list is
posted by several agents at once, each with a thread of its own, and no caller waits for any of them.

NIXL can split a request over threads by itself (``num_threads``). But when one of its threads fails, it
reports the end of the whole request, while what the others were asked for may still arrive: bytes in blocks
that have a new owner by then. Here a read has ended when every agent says so of its share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic

import numpy as np

from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.agent_thread import AgentLink, AgentThread
from kvferry.transport.base import Connected, DeviceEvent, OnEnd, Start
from kvferry.transport.cards import Card
from kvferry.transport.places import cut_long

log = log_of(__name__)

RUN_COST_BYTES = 16 << 10
"""A run costs about as much as so many bytes: shares are cut alike by both together."""


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """What is worth an agent of its own; less is read by one."""

    num_runs: int = 512
    host_bytes: int = 16 << 20
    """Of host memory, which an agent copies itself."""


class AgentTeam:
    """Agents that read every remote rank together. The first one's card is the rank's."""

    def __init__(
        self,
        first: AgentThread,
        size: int,
        make_another: Callable[[], AgentThread],
        limits: ShareLimits | None = None,
    ) -> None:
        """The others are made when the first remote rank is connected: most ranks of a device need none."""
        self._agents = [first]
        self._size, self._make_another = size, make_another
        self._limits = limits or ShareLimits()
        self._lock = threading.Lock()
        self._is_closing = False

    @property
    def card(self) -> Card:
        return self._agents[0].card

    def connect(self, name: str, card: Card, regions: Sequence[Region], timeout_s: float) -> TeamLink:
        """Connect a remote rank by every agent; who cannot is left out, but for the first."""
        deadline = monotonic() + timeout_s
        links = [self._agents[0].connect(name, card, regions, timeout_s)]
        for agent in self._others():
            try:
                links.append(agent.connect(name, card, regions, max(0.0, deadline - monotonic())))
            except (TransportError, TimeoutError) as error:
                log.warning("%s is read by %d agents, not by %d: %s", name, len(links), self._size, error)
                break
        return TeamLink(links, self._limits)

    def close(self, timeout_s: float) -> bool:
        """Post nothing more; whether everything under way ended in time. Can be tried again."""
        deadline = monotonic() + timeout_s
        with self._lock:
            self._is_closing = True
            agents = [*self._agents]
        for agent in agents:  # all of them hear it before one is waited for
            agent.close(0)
        are_over = [agent.close(max(0.0, deadline - monotonic())) for agent in agents]
        return all(are_over)

    def _others(self) -> list[AgentThread]:
        with self._lock:
            while len(self._agents) < self._size and not self._is_closing:
                try:
                    self._agents.append(self._make_another())
                except TransportError as error:
                    log.warning("long reads are shared by %d agents only: %s", len(self._agents), error)
                    self._size = len(self._agents)
            return self._agents[1:]


class TeamLink:
    def __init__(self, links: Sequence[AgentLink], limits: ShareLimits) -> None:
        self._links, self._limits = links, limits

    @property
    def connected(self) -> Connected:
        return self._links[0].connected

    is_ordered = False

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Start:
        """Check that all runs are inside of their regions."""
        return partial(self._start, self._links[0].checked(product))

    def _start(self, runs: Runs, transfer: int, on_end: OnEnd) -> None:
        """Share a read out, if it is long."""
        shares = list(share_out(runs, self._num_shares(runs)))
        if len(shares) == 1:
            self._links[0].submit(transfer, runs, on_end)
            return
        read = _SharedRead(len(shares), on_end, partial(self.cancel, transfer))
        for i, (link, share) in enumerate(zip(self._links, shares, strict=False)):
            try:
                link.submit(transfer, share, read.end)
            except TransportError as error:
                if i == 0:
                    raise
                read.end(str(error))

    def cancel(self, transfer: int) -> None:
        for link in self._links:
            link.cancel(transfer)

    def forget(self) -> None:
        """Post nothing more; the agents forget the rank once nothing is under way with it."""
        for link in self._links:
            link.forget()

    def _num_shares(self, runs: Runs) -> int:
        by_runs = len(runs) // self._limits.num_runs
        by_bytes = runs.total_bytes // self._limits.host_bytes if self._links[0].copies_on_host else 0
        return max(1, min(len(self._links), max(by_runs, by_bytes)))


class _SharedRead:
    """Ends when all its shares have ended. The first error counts, and ends the others early."""

    def __init__(self, num_shares: int, on_end: OnEnd, cancel: Callable[[], None]) -> None:
        self._on_end, self._cancel = on_end, cancel
        self._lock = threading.Lock()
        self._num_left, self._error = num_shares, ""

    def end(self, error: str) -> None:
        with self._lock:
            self._num_left -= 1
            is_over, is_first = not self._num_left, bool(error and not self._error)
            self._error = self._error or error
        if is_over:
            self._on_end(self._error)
        elif is_first:
            self._cancel()


def share_out(runs: Runs, number: int) -> Iterator[Runs]:
    """The runs in order, in so many shares that cost about the same, or fewer.

    >>> runs = Runs(np.arange(3) << 20, np.arange(3) << 20, np.array([10, 10, 1 << 20]))
    >>> [share.num_bytes.tolist() for share in share_out(runs, 2)]
    [[10, 10, 548874], [499702]]
    """
    if number == 1 or not len(runs):
        yield runs
        return
    total = runs.total_bytes + RUN_COST_BYTES * len(runs)
    runs = cut_long(runs, max(RUN_COST_BYTES, total // number))
    cost = runs.num_bytes + RUN_COST_BYTES
    middles = np.cumsum(cost) - cost // 2
    stops = np.searchsorted(middles, cost.sum() * np.arange(1, number) // number).tolist()
    for start, stop in zip([0, *stops], [*stops, len(runs)], strict=True):
        if start < stop:
            yield Runs(runs.src[start:stop], runs.dst[start:stop], runs.num_bytes[start:stop])
