"""What an endpoint stands on: a clock, chance, a channel, workers, a thread. A simulation brings its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvferry.channel import SILENCE_SECONDS, Channel
from kvferry.endpoint.channel_thread import ChannelThread, Receive, Turn
from kvferry.endpoint.lease_board import is_shown, make_board
from kvferry.endpoint.owner import Owner
from kvferry.endpoint.status_socket import OpenStatus, StatusReport, open_status
from kvferry.endpoint.this_host import this_host
from kvferry.endpoint.workers import WorkerThreads
from kvferry.runtime import Timing
from kvferry.wire.messages import MAX_MESSAGE_BYTES
from kvferry.wire.secret import Secret


class ControlChannel(Protocol):
    """Small messages from and to other engines."""

    @property
    def address(self) -> str:
        """Where it listens; empty if it does not."""
        ...

    @property
    def refused(self) -> Mapping[str, int]:
        """Messages that could not be read, by why."""
        ...

    @property
    def dropped(self) -> Mapping[str, int]:
        """Messages that could not be sent or taken, by why."""
        ...

    def start(self, name: str, receive: Receive, is_behind: Callable[[], bool], turn: Turn = ...) -> None:
        """From now on ``receive`` is called with what arrives, and with what becomes of connections that were
        made here; messages wait while whoever listens ``is_behind``. It raises a KVFerryError for what cannot
        be read.

        ``turn`` is called in the same thread, after that: what it sends goes out without a hand-over.
        """
        ...

    def wake(self) -> None:
        """Have ``turn`` called soon; from any thread."""
        ...

    def send(self, to: str, data: bytes) -> None:
        """Send to an address, or to where a message said to reply to; never blocks."""
        ...

    def hang_up(self, address: str) -> None:
        """Keep no connection to an address, once what was handed over for it is sent; never blocks."""
        ...

    def close(self) -> None:
        """Send what was handed over, and stop."""
        ...


class Workers(Protocol):
    """Who does what is slow."""

    def submit(self, key: Hashable, job: Callable[[], object]) -> None:
        """Have a job done, after all that was submitted under the same key; never blocks."""
        ...

    def close(self, seconds: float) -> bool:
        """Start nothing more, and wait so long for what was started; whether all of it ended."""
        ...


class AuthorityBoard(Protocol):
    """Where an authority shows which leases stand."""

    place: str

    def show(self, number: int, mark: bytes) -> None:
        """A lease stands."""
        ...

    def strike(self, number: int) -> None:
        """It stands no more."""
        ...

    def close(self) -> None:
        """None stands any more."""
        ...


def open_channel(
    listen: str, secret: Secret | None, *, silence_seconds: float = SILENCE_SECONDS
) -> ControlChannel:
    """A channel over ZeroMQ, driven by a thread of its own."""
    # A little more than is read: what is too long can then be answered by name.
    max_bytes = MAX_MESSAGE_BYTES + (1 << 20)
    channel = Channel(listen=listen, secret=secret, max_bytes=max_bytes, silence_seconds=silence_seconds)
    return ChannelThread(channel)


@dataclass(frozen=True)
class Edges:
    """The outside of an endpoint, beside its transport."""

    clock: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    """So many bytes that nobody can guess: keys, generations, names. A simulation's own come again."""
    host: Callable[[], str] = this_host
    """Which host this is; its network namespace counts, since each has a loopback of its own."""
    open_channel: Callable[[str, Secret | None], ControlChannel] = open_channel
    make_workers: Callable[[str], Workers] = WorkerThreads
    open_status: Callable[[str, Callable[[], StatusReport]], OpenStatus | None] = open_status
    """Where `kvferry status` asks."""
    make_board: Callable[[], AuthorityBoard | None] = make_board
    """Where an authority shows which leases stand; None: nowhere."""
    is_shown: Callable[[str, int, bytes], bool] = is_shown
    """Whether a board, by its place, shows the mark of a lease."""
    start_owner: Callable[[Owner[Any]], None] = Owner.start
    """Has an owner's ``step`` called; by default in a thread of its own."""

    @classmethod
    def of(cls, timing: Timing) -> Edges:
        """The real outside, with heartbeats as an engine wants them."""
        return cls(open_channel=partial(open_channel, silence_seconds=timing.silence))
