"""Tests of the connector inside vLLM's own engine core; they need vLLM, but no model and no GPU."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvferry.transport import Hub
    from tests.vllm.engine import Engine, Setup

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

collect_ignore = [
    "checkpoints.py",
    "conversations.py",
    "engine.py",
    "host_tier.py",
    "pairs.py",
    "registered.py",
    "routers.py",
    "sabotage.py",
    "toy.py",
]
"""No tests, and only a process with vLLM can import them."""

if importlib.util.find_spec("vllm") and importlib.util.find_spec("nixl"):
    # Before pytest makes errors of warnings: those of other packages are not ours to fix.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import tests.vllm.engine  # noqa: F401
    gc.freeze()  # what was imported stays: looking for the garbage of engines is quick then


def pytest_itemcollected(item: pytest.Item) -> None:
    """Importing vLLM takes longer than the quick suite."""
    item.add_marker(pytest.mark.slow)
    item.add_marker(pytest.mark.filterwarnings("default"))


class Docks:
    """Engines that tests share, and engines of their own; all are closed in the end."""

    def __init__(self) -> None:
        self._shared: dict[tuple[str, Setup], Engine] = {}
        self._own: list[Engine] = []

    def shared(self, side: str, setup: Setup) -> Engine:
        """One that other tests use too: leave it as it was."""
        if (side, setup) not in self._shared:
            self._shared[side, setup] = self._start(setup)
        return self._shared[side, setup]

    def own(self, setup: Setup, hub: Hub | None = None) -> Engine:
        """One to break. It is closed after the test."""
        engine = self._start(setup, hub)
        self._own.append(engine)
        return engine

    def _start(self, setup: Setup, hub: Hub | None = None) -> Engine:
        from pydantic import ValidationError

        from tests.vllm.engine import Engine

        try:
            return Engine(setup, hub)
        except ValidationError as error:  # 0.33, whose worker for a CPU is that of the V1 runner
            if "Async scheduling is not supported" not in str(error):
                raise
            pytest.skip("this vLLM has no asynchronous scheduling with pipeline parallelism here")

    @property
    def all_shared(self) -> list[Engine]:
        return list(self._shared.values())

    def close_own(self) -> None:
        if not self._own:
            return
        while self._own:
            self._own.pop().close()
        gc.collect()  # an engine is full of cycles, and has a cache of its own

    def close(self) -> None:
        self.close_own()
        for engine in self._shared.values():
            engine.close()


@pytest.fixture(scope="session")
def all_docks() -> Iterator[Docks]:
    docks = Docks()
    yield docks
    docks.close()


@pytest.fixture
def docks(all_docks: Docks) -> Iterator[Docks]:
    yield all_docks
    all_docks.close_own()


_serials = count()


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """Prompts that no other test has: whatever is in a prefix cache is there by a test's own doing."""

    def make(num_tokens: int) -> list[int]:
        return random.Random(next(_serials)).choices(range(256), k=num_tokens)

    return make
