"""A process of the simulated world: one endpoint, whose threads are stepped by the timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from random import Random
from typing import Any

from kvferry.endpoint.edges import Edges, WorkerThreads
from kvferry.endpoint.owner import Owner
from kvferry.log import log_of
from kvferry.wire.secret import Secret
from tests.support.simulation.network import Network, SimulatedChannel
from tests.support.simulation.timeline import Action, SimulatedClock, Timeline

log = log_of(__name__)

LOOPBACK = "simulated"
"""All hosts have one: without a secret engines talk to those of their own host only."""
SHORTEST_STEP = 1e-4
"""Two steps of one owner are at least so far apart: an owner that always wants the next one must not stop
time.
"""


class SimulatedHost:
    """What the processes of one engine share: a clock, and how quick they are."""

    def __init__(self, timeline: Timeline, chance: Random, name: str, *, is_healthy: bool) -> None:
        self.timeline, self.chance, self.name, self.is_healthy = timeline, chance, name, is_healthy
        self.clock = SimulatedClock(timeline, start=chance.uniform(-1000, 1000))
        self.is_slow = False
        """Whether its workers may take longer than anybody wants to wait."""

    def step_seconds(self) -> float:
        """How long a thread takes until it has seen what is in its inbox."""
        if self.is_healthy or self.chance.random() < 0.95:
            return self.chance.uniform(0.0001, 0.002)
        return self.chance.uniform(0.0, 0.5)

    def work_seconds(self) -> float:
        """How long a worker takes for a job."""
        if self.is_slow and self.chance.random() < 0.1:
            return self.chance.uniform(0.1, 8.0)
        if self.is_healthy or self.chance.random() < 0.9:
            return self.chance.uniform(0.0, 0.02)
        return self.chance.uniform(0.0, 0.5)


class SimulatedProcess:
    """Runs, stands still, or is dead. What is done to it while it stands still is done when it goes on."""

    def __init__(self, host: SimulatedHost, network: Network, name: str) -> None:
        self.host, self.name, self._network = host, name, network
        self._timeline = host.timeline
        self.is_alive, self.is_stopped = True, False
        self.channel: SimulatedChannel | None = None
        self._owner: Owner[Any] | None = None
        self._step_at = float("inf")
        self._waiting: list[Action] = []
        self.after_step: Action = lambda: None
        """What its engine does whenever the endpoint may have news."""

    @property
    def edges(self) -> Edges:
        """What an endpoint of this process stands on."""
        return Edges(
            clock=self.host.clock.read,
            random_bytes=self.host.chance.randbytes,
            host=lambda: LOOPBACK,
            open_channel=self._open_channel,
            make_workers=lambda name: SimulatedWorkers(self),
            open_status=lambda name, report: None,
            make_board=lambda: self._network.boards.make(self),
            is_shown=self._network.boards.is_shown,
            start_owner=self._start_owner,
        )

    def _open_channel(self, listen: str, secret: Secret | None) -> SimulatedChannel:
        self.channel = self._network.open(self, listen)
        return self.channel

    def _start_owner(self, owner: Owner[Any]) -> None:
        self._owner = owner
        self.wake()

    @property
    def is_running(self) -> bool:
        """Whether its threads run."""
        return self.is_alive and not self.is_stopped

    def do(self, action: Action) -> None:
        """Have something done in this process, and its owner look at what came of it."""
        if not self.is_alive:
            return
        if self.is_stopped:
            self._waiting.append(action)
            return
        action()
        self.wake()

    def stop(self) -> None:
        """Stand still."""
        self.is_stopped = True

    def resume(self) -> None:
        """Go on, with what came meanwhile first."""
        self.is_stopped = False
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self.do(action)
        self.wake()

    def kill(self) -> None:
        """It is gone, and with it all that it had begun."""
        self.is_alive = False
        self._waiting.clear()
        if self.channel is not None:
            self.channel.close()

    # -- its owner ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something is in the inbox: its owner's thread will see it soon."""
        self._step_by(self._timeline.now + self.host.step_seconds())

    def _step_by(self, when: float) -> None:
        if when < self._step_at:
            self._step_at = when
            self._timeline.at(when, partial(self._step_if_due, when))

    def _step_if_due(self, when: float) -> None:
        if when != self._step_at:
            return  # another step came first
        self._step_at = float("inf")
        if self.is_stopped:
            return  # whoever resumes it wakes it, too
        self.do_step()

    def do_step(self) -> None:
        """One round of the owner's loop."""
        if not self.is_alive or self._owner is None:
            return
        events, _ = self._owner.take(0)
        until = self._owner.step(events, self.host.clock.read())
        self.after_step()
        if self._owner.has_more:  # it told itself something
            self.wake()
        self._step_by(max(self.host.clock.time_of(until), self._timeline.now + SHORTEST_STEP))


class SimulatedWorkers(WorkerThreads):
    """Does jobs late: in order for each key, and in any order between keys."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._queues: dict[Hashable, deque[Callable[[], object]]] = {}

    def submit(self, key: Hashable, job: Callable[[], object]) -> None:
        """Have a job done, after all that was submitted under the same key."""
        queue = self._queues.setdefault(key, deque())
        queue.append(job)
        if len(queue) == 1:
            self._begin(key)

    def close(self, seconds: float) -> bool:
        """Start nothing more."""
        self._queues.clear()
        return True

    def _begin(self, key: Hashable) -> None:
        host = self._process.host
        host.timeline.after(host.work_seconds(), partial(self._process.do, partial(self._finish, key)))

    def _finish(self, key: Hashable) -> None:
        queue = self._queues.get(key)
        if not queue:
            return
        try:
            queue[0]()
        except Exception:
            log.exception("unexpected error; the worker continues")
        queue.popleft()
        if queue:
            self._begin(key)
        else:
            self._queues.pop(key, None)
