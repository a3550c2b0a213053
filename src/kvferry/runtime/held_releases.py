"""Releases that an engine is not told of yet: ranks that gather for readers must have stopped first."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvferry.runtime.values import Released


@dataclass(frozen=True, slots=True)
class _Held:
    number: int
    released: Released
    tell_by: float


class HeldReleases:
    """What has ended, in order. A rank that says nothing holds a release up for so many seconds at most: its
    process is gone, or stands still with the memory that it would gather from.

    >>> held = HeldReleases(30.0)
    >>> held.add(0.0, Released("request-1", "read"))
    >>> held.pop(1.0, num_heard=0)
    []
    >>> [released.request_id for released in held.pop(2.0, num_heard=1)]
    ['request-1']
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._held: deque[_Held] = deque()
        self._num_ended = 0

    def add(self, now: float, released: Released) -> None:
        """A request is released; ranks hear of it under the next number."""
        self._num_ended += 1
        self._held.append(_Held(self._num_ended, released, now + self._patience))

    def pop(self, now: float, num_heard: float) -> list[Released]:
        """What the engine may be told, once: ``num_heard`` releases were heard by every rank that gathers."""
        told: list[Released] = []
        while self._held and (self._held[0].number <= num_heard or now >= self._held[0].tell_by):
            told.append(self._held.popleft().released)
        return told

    def next_deadline(self) -> float:
        """When something is to be told at the latest."""
        return self._held[0].tell_by if self._held else float("inf")
