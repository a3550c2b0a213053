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
from time import monotonic

import numpy as np

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.agent_thread import AgentThread, RemoteRank
from kvferry.transport.base import Connected, DeviceEvent
from kvferry.transport.cards import Card
from kvferry.transport.places import cut_long
from kvferry.transport.reads import Work

log = log_of(__name__)

RUN_COST_BYTES = 16 << 10
"""A run costs about as much as so many bytes: shares are cut alike by both together."""
SHARE_RUNS, SHARE_HOST_BYTES = 512, 16 << 20
"""What is worth an agent of its own; less is read by one. An agent copies host memory itself."""


class AgentTeam:
    """Agents that read every remote rank together. The first one's card is the rank's."""

    def __init__(self, first: AgentThread, size: int, make_another: Callable[[], AgentThread]) -> None:
        """The others are made when the first remote rank is connected: most ranks of a device need none."""
        self._agents = [first]
        self._size, self._make_another = size, make_another
        self._lock = threading.Lock()
        self._is_closing = False

    @property
    def card(self) -> Card:
        return self._agents[0].card

    def connect(self, name: str, card: Card, regions: Sequence[Region], timeout_s: float) -> TeamLink:
        """Connect a remote rank by every agent; who cannot is left out, but for the first."""
        deadline = monotonic() + timeout_s
        ranks = [self._agents[0].connect(name, card, regions, timeout_s)]
        for agent in self._others():
            try:
                ranks.append(agent.connect(name, card, regions, max(0.0, deadline - monotonic())))
            except (TransportError, TimeoutError) as error:
                log.warning(
                    "reads from %s use %d agents instead of %d: %s", name, len(ranks), self._size, error
                )
                break
        return TeamLink(ranks)

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
                    log.warning("long reads use %d agents only: %s", len(self._agents), error)
                    self._size = len(self._agents)
            return self._agents[1:]


class TeamLink:
    connected, is_ordered = Connected(Way.DIRECT), False

    def __init__(self, ranks: Sequence[RemoteRank]) -> None:
        """``ranks``: the remote one, as each agent has it."""
        self._ranks = ranks
        self.queues = [rank.queue for rank in ranks]

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Work:
        """Share a read out, if it is long; the first agent has the beginning."""
        runs = self._ranks[0].checked(product)
        shares = share_out(runs, self._num_shares(runs))
        return [rank.work(share) for rank, share in zip(self._ranks, shares, strict=False)]

    def _num_shares(self, runs: Runs) -> int:
        by_runs = len(runs) // SHARE_RUNS
        by_bytes = runs.total_bytes // SHARE_HOST_BYTES if self._ranks[0].copies_on_host else 0
        return max(1, min(len(self._ranks), max(by_runs, by_bytes)))


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
