"""Who selects a fetch: the owner's thread where that is quick, and never so many that others wait."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.core.request import BlockTable
from kvferry.endpoint.posted_reads import QUICK_BLOCKS, SELECTIONS, Selecting
from kvferry.runtime.values import Fetch


def fetch(num_blocks) -> Any:
    return SimpleNamespace(handle=1, fetch=SimpleNamespace(num_blocks=num_blocks))


class Noted(Selecting):
    """Notes what it does at once, and what is left to a worker."""

    def __init__(self):
        self.later: list = []
        self.at_once = 0
        self._workers: Any = SimpleNamespace(submit=lambda key, job: self.later.append(key))
        self.step()

    def _select(self, wanted, met):
        self.at_once += 1


def start(selecting, num_blocks, *, is_quick=True):
    met: Any = SimpleNamespace(is_quick=is_quick)
    selecting.start(fetch(num_blocks), met)


def test_mapped_loads_are_selected_at_once():
    selecting = Noted()
    start(selecting, 256)
    assert (selecting.at_once, selecting.later) == (1, [])
    start(selecting, 256, is_quick=False)
    assert (selecting.at_once, selecting.later) == (1, [SELECTIONS])


def test_long_and_many_ones_are_left_to_a_worker():
    """4,096 fetches may have waited for one meeting: all others would wait for their selection."""
    selecting = Noted()
    start(selecting, QUICK_BLOCKS + 1)
    assert (selecting.at_once, len(selecting.later)) == (0, 1)
    for _ in range(4096):
        start(selecting, 256)
    assert (selecting.at_once, len(selecting.later)) == (QUICK_BLOCKS // 256, 1 + 4096 - QUICK_BLOCKS // 256)
    selecting.step()
    start(selecting, 256)
    assert selecting.at_once == QUICK_BLOCKS // 256 + 1


def test_a_fetch_counts_the_blocks_of_all_groups():
    tables = {"full": BlockTable.of(np.arange(3)), "window": BlockTable.of([7])}
    ticket: Any = None
    assert Fetch(ticket, tables, {}).num_blocks == 4
