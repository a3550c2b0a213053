"""The lock around the machine of reads, and the ends that are not collected yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Concatenate, ParamSpec

from kvferry.errors import TransportError
from kvferry.host.threads import quietly
from kvferry.transport.base import CANCELLED, ReadEnd
from kvferry.transport.reads import Read, ReadEffect, ReadQueue, Reads, Share, Work


class Gate:
    """Lets calls in until it is shut, and then waits for those inside. For any number of threads.

    >>> gate = Gate()
    >>> with gate:
    ...     gate.shut()
    ...     gate.wait_until_empty(timeout_s=0)
    False
    >>> gate.wait_until_empty(timeout_s=0)
    True
    >>> with gate:
    ...     pass
    Traceback (most recent call last):
    kvferry.errors.TransportError: closed: this transport was closed
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._is_shut = False

    def __enter__(self) -> None:
        """Raises TransportError if the gate is shut."""
        with self._changed:
            if self._is_shut:
                raise TransportError("closed", "this transport was closed")
            self._num_inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._changed:
            self._num_inside -= 1
            if self._is_shut:
                self._changed.notify_all()

    def shut(self) -> None:
        with self._changed:
            self._is_shut = True

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_inside, timeout_s)


P = ParamSpec("P")
_Tell = Callable[Concatenate[Reads, P], list[ReadEffect]]


class Transfers:
    """The transfers of one transport, and their ends until they are collected.

    >>> transfers = Transfers()
    >>> read = transfers.begin(7, [], is_held=True)
    >>> transfers.begin(7, [])
    Traceback (most recent call last):
    kvferry.errors.TransportError: under-way: transfer 7 is in use: poll its result first
    >>> transfers.come(read, "cable cut")
    >>> transfers.collect(), transfers.collect()
    ([ReadEnd(transfer=7, error='cable cut')], [])
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called, outside of any lock, when there is an end to collect."""
        self._lock = threading.Lock()
        self._has_all_ended = threading.Condition(self._lock)
        self._reads = Reads()
        self._under_way: dict[int, Read | None] = {}
        """None where a transfer cannot be cancelled."""
        self._ends: dict[int, ReadEnd] = {}

    # ---- for the transport

    def begin(self, number: int, work: Work, *, is_held: bool = False, can_cancel: bool = True) -> Read:
        """Raises TransportError, with no end to come, if it is rejected. ``is_held``: until ``come``."""
        read = Read(work, partial(self._report, number))
        with self._lock:
            if number in self._under_way or number in self._ends:
                raise TransportError("under-way", f"transfer {number} is in use: poll its result first")
            effects = self._reads.begin(read, is_held=is_held)
            self._under_way[number] = read if can_cancel else None
        self._carry_out(effects)
        return read

    def come(self, read: Read, error: str = "") -> None:
        """The device has reached the event that a read was held for, or failed."""
        self._tell(Reads.come, read, error)

    def cancel(self, number: int) -> None:
        if read := self._under_way.get(number):
            self.fail(read, CANCELLED)

    def forget(self, queues: Iterable[ReadQueue]) -> None:
        for queue in queues:
            why = TransportError("unknown-peer", f"{queue.name!r} was forgotten")
            self.refuse(queue, why, f"peer {queue.name!r} was forgotten")

    def close(self) -> None:
        """Accept no more transfers; posted ones go on."""
        why = TransportError("closed", "this transport was closed")
        self._tell(Reads.refuse_all, why, "the transport was closed")

    def wait_until_ended(self, timeout_s: float | None) -> bool:
        with self._lock:
            return self._has_all_ended.wait_for(lambda: not self._under_way, timeout_s)

    def collect(self) -> list[ReadEnd]:
        with self._lock:
            ends, self._ends = self._ends, {}
        return [*ends.values()]

    # ---- for carriers

    def add(self, queue: ReadQueue) -> ReadQueue:
        """Raises TransportError after ``close``."""
        with self._lock:
            self._reads.add(queue)
        return queue

    def submit(self, read: Read) -> None:
        """Begin a read without a number."""
        self._tell(Reads.begin, read)

    def post(self, queue: ReadQueue, *, is_last: bool = False) -> Share | None:
        if not queue.can_post:  # the usual case, without a lock
            return None
        with self._lock:
            return self._reads.post(queue, is_last=is_last)

    def post_share(self, share: Share) -> Share | None:
        with self._lock:
            return self._reads.post_share(share)

    def ended(self, share: Share, error: str = "", *, is_last: bool = False) -> None:
        with self._lock:
            effects = self._reads.ended(share, error, is_last=is_last)
        self._carry_out(effects)

    def fail(self, read: Read, error: str) -> None:
        self._tell(Reads.fail, read, error)

    def fail_all(self, queue: ReadQueue, error: str) -> None:
        self._tell(Reads.fail_all, queue, error)

    def refuse(self, queue: ReadQueue, why: TransportError, error: str) -> None:
        self._tell(Reads.refuse, queue, why, error)

    def _tell(self, call: _Tell[P], *args: P.args, **more: P.kwargs) -> None:
        with self._lock:
            effects = call(self._reads, *args, **more)
        self._carry_out(effects)

    def _carry_out(self, effects: Iterable[ReadEffect]) -> None:
        for call, *about in effects:
            quietly(call, *about)

    def _report(self, number: int, error: str) -> None:
        with self._lock:
            del self._under_way[number]
            self._ends[number] = ReadEnd(number, error)
            if not self._under_way:
                self._has_all_ended.notify_all()
        self.wake()
