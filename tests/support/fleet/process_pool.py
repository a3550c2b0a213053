"""Processes that serve one engine after another: starting one takes a second, an object in it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from kvferry.errors import SpecError
from tests.support.fleet.worker import Worker


class ObjectSlot:
    """A place in a process for one object after another; answers for the one that it holds."""

    def __init__(self) -> None:
        self._held: Any = None

    def open(self, factory: Callable[..., Any], *args: Any) -> None:
        """Make the next object."""
        self._held = factory(*args)

    def close(self) -> None:
        """Close the object, if there is one, and let go of it."""
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)


class ProcessPool:
    """So many processes; ``start`` stands for ``Worker`` where a fleet is made.

    A worker that a pool started gives its process back when it is closed.
    """

    def __init__(self, num_processes: int, env: Mapping[str, str] | None = None) -> None:
        self._all = [Worker(f"pool-{i}", ObjectSlot, env=env) for i in range(num_processes)]
        self._idle = [*self._all]

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def start(
        self, name: str, factory: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None
    ) -> Worker:
        """Have an idle process make ``factory(*args)``."""
        if env:
            raise SpecError("the environment of a pool is set once, when its processes start")
        if not self._idle:
            raise SpecError(f"all {len(self._all)} processes of this pool are busy")
        return _PooledWorker(self._idle, self._idle.pop(), name, factory, args)

    def close(self) -> None:
        """End the processes."""
        for worker in self._all:
            worker.close()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _PooledWorker(Worker):
    """A worker in a process that is not its own."""

    def __init__(
        self, idle: list[Worker], slot: Worker, name: str, factory: Callable[..., Any], args: Any
    ) -> None:
        slot.wait_ready()
        self.name = name
        self._idle, self._slot = idle, slot
        self._pipe, self._lock, self._process = slot._pipe, slot._lock, slot._process
        self._is_ready = self._is_stopped = False
        self._start = self._ask("open", (factory, *args), {})

    def close(self) -> None:
        """Close the object; the process waits for the next one."""
        self.call("close", timeout=60)
        self._idle.append(self._slot)
