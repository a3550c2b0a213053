"""Fetches become runs: in a worker, or at once where that is quicker than to hand it over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.core.select import select
from kvferry.endpoint.edges import Workers
from kvferry.endpoint.meeting import MetPeer, failure_of
from kvferry.endpoint.owner import Event
from kvferry.runtime import FailureCode, Reader
from kvferry.runtime.values import Effect, Select

SELECTIONS = "selections"
"""The workers' key: selecting computes, and more threads would not make it faster."""
QUICK_BLOCKS = 2048
"""Blocks of a fetch that is selected at once, a millisecond or two; and of all that are in one step."""


class Selecting:
    """Has fetches selected; what comes of it is put into the owner's inbox."""

    def __init__(self, workers: Workers, put: Callable[[Event[Effect]], None], reader: Reader) -> None:
        self._workers, self._put, self._reader = workers, put, reader
        self._room = QUICK_BLOCKS

    def step(self) -> None:
        """The owner begins another step."""
        self._room = QUICK_BLOCKS

    def start(self, wanted: Select, met: MetPeer) -> None:
        """The owner's to call."""
        job, num_blocks = partial(self._select, wanted, met), wanted.fetch.num_blocks
        if met.is_quick and num_blocks <= self._room:  # many of them would keep all others waiting
            self._room -= num_blocks
            job()
        else:
            self._workers.submit(SELECTIONS, job)

    def _select(self, wanted: Select, met: MetPeer) -> None:
        handle, fetch = wanted.handle, wanted.fetch
        try:
            selection = select(met.route, fetch.request(), slack=fetch.slack)
            num_runs = met.num_runs(selection)  # makes the lists here, not in a thread that others wait for
        except Exception as error:
            failure = failure_of(error, FailureCode.BAD_TABLES)
            self._put(lambda now: self._reader.not_selected(now, handle, failure))
        else:
            self._put(lambda now: self._reader.selected(now, handle, selection, num_runs, met.way))
