"""Several NIXL agents of one rank, which share long reads.

NIXL spends time on every run in the posting thread; on one host it even copies there. So several agents, each
with a thread of its own, post a long list at once.

NIXL's own ``num_threads`` does not fit: when one of its threads fails, it reports the end of the request,
while bytes of the other threads may still arrive in blocks that have a new owner by then.
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
"""A run costs about as much time as so many bytes."""
SHARE_RUNS, SHARE_HOST_BYTES = 512, 16 << 20
"""The smallest share of an agent. Bytes count in host memory only, which the agent itself copies."""


class AgentTeam:
    """Agents that read every remote rank together. The first one's card is the rank's."""

    def __init__(self, first: AgentThread, size: int, make_another: Callable[[], AgentThread]) -> None:
        """The others are made when the first remote rank is connected: most device ranks need none."""
        self._agents, self.card = [first], first.card
        self._size, self._make_another = size, make_another
        self._lock = threading.Lock()
        self._is_closing = False

    def connect(self, name: str, card: Card, regions: Sequence[Region], timeout_s: float) -> TeamLink:
        """Connect every agent to a remote rank; only the first one's failure is an error."""
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
        """Stop posting; returns whether everything under way ended in time. Can be repeated."""
        deadline = monotonic() + timeout_s
        with self._lock:
            self._is_closing = True
            agents = [*self._agents]
        for agent in agents:  # stop all before waiting for one
            agent.close(0)
        are_over = [agent.close(max(0.0, deadline - monotonic())) for agent in agents]
        return all(are_over)

    def _others(self) -> list[AgentThread]:
        with self._lock:
            while len(self._agents) < self._size and not self._is_closing:
                try:
                    self._agents.append(self._make_another())
                except TransportError as error:
                    log.warning(
                        "long reads use %d agents instead of %d: %s", len(self._agents), self._size, error
                    )
                    self._size = len(self._agents)
            return self._agents[1:]


class TeamLink:
    connected, is_ordered = Connected(Way.DIRECT), False

    def __init__(self, ranks: Sequence[RemoteRank]) -> None:
        self._ranks = ranks
        self.queues = [rank.queue for rank in ranks]

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Work:
        runs = self._ranks[0].checked(product)
        shares = share_out(runs, self._num_shares(runs))
        return [rank.work(share) for rank, share in zip(self._ranks, shares, strict=False)]

    def _num_shares(self, runs: Runs) -> int:
        by_runs = len(runs) // SHARE_RUNS
        by_bytes = runs.total_bytes // SHARE_HOST_BYTES if self._ranks[0].copies_on_host else 0
        return max(1, min(len(self._ranks), max(by_runs, by_bytes)))


def share_out(runs: Runs, number: int) -> Iterator[Runs]:
    """The runs in order, in at most ``number`` shares of about the same cost.

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
