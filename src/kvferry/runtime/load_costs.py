"""What loads from each peer will take, told before they begin, and learned from when they end.

What is predicted is what a load takes that has the link for itself. Loads that ran beside others, or waited
for the device, took longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.core.cost import Traffic
from kvferry.core.link_profile import first_guess
from kvferry.core.way import Way
from kvferry.runtime.learned_cost import LearnedCost
from kvferry.runtime.values import Peer

TrafficByWay = Mapping[Way, Traffic]


@dataclass(slots=True)
class _UnderWay:
    peer: Peer
    traffic: TrafficByWay
    is_alone: bool


class LoadCosts:
    """For one destination rank, and for its owner alone."""

    def __init__(self, *, is_on_device: bool) -> None:
        """``is_on_device``: whether the rank's memory is a device's."""
        self._is_on_device = is_on_device
        self._known: dict[Peer, dict[Way, LearnedCost]] = {}
        self._under_way: dict[int, _UnderWay] = {}

    def met(self, peer: Peer, ways: Iterable[Way]) -> None:
        """A peer is read by these ways from now on; nothing is known of it but what is usual."""
        guesses = {way: first_guess(way, is_on_device=self._is_on_device) for way in ways}
        self._known[peer] = {way: LearnedCost(guess.cost) for way, guess in guesses.items()}

    def forget(self, peer: Peer) -> None:
        """Forget what was learned of a peer."""
        self._known.pop(peer, None)

    def predict(self, peer: Peer, traffic: TrafficByWay) -> float:
        """Seconds that a load will take by itself; the ways of one load work side by side.

        A peer may be forgotten while a load from it is prepared: nothing is told of that one.
        """
        known = self._known.get(peer, {})
        told = [known[way].predict(some).seconds for way, some in traffic.items() if way in known]
        return max(told, default=0.0)

    def begin(self, handle: int, peer: Peer, traffic: TrafficByWay, *, is_waiting: bool) -> None:
        """A load was posted. ``is_waiting``: it begins when the device has come to a mark."""
        for other in self._under_way.values():
            other.is_alone = False
        is_alone = not self._under_way and not is_waiting
        self._under_way[handle] = _UnderWay(peer, traffic, is_alone)

    def end(self, handle: int, seconds: float | None) -> None:
        """A load has ended, and took so long; None: it failed."""
        load = self._under_way.pop(handle, None)
        if load is None or seconds is None or len(load.traffic) != 1:
            return
        ((way, traffic),) = load.traffic.items()
        learned = self._known.get(load.peer, {}).get(way)
        if learned is not None:
            learned.learn(traffic, seconds, is_alone=load.is_alone)

    def status(self) -> dict[str, dict[str, dict[str, float]]]:
        """By peer and way: what a read, a run and a byte cost, and how far to trust that."""
        return {
            f"{peer.engine}#{peer.generation}": {way.value: _shown(known) for way, known in ways.items()}
            for peer, ways in self._known.items()
        }


def _shown(known: LearnedCost) -> dict[str, float]:
    return {
        "seconds_per_read": known.cost.seconds_per_read,
        "seconds_per_run": known.cost.seconds_per_run,
        "bytes_per_second": known.cost.bytes_per_second,
        "num_loads": known.num_loads,
        "usual_error": known.usual_error,
    }
