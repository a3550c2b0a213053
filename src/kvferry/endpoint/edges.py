"""An endpoint's environment: clock, randomness, channel, workers, lease board. Simulations replace it."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakMethod

from kvferry.channel import SILENCE_SECONDS, Channel, ContactChange, Received
from kvferry.endpoint.invitation import this_host
from kvferry.endpoint.owner import Owner
from kvferry.endpoint.status import StatusReport, StatusSocket, open_status
from kvferry.errors import KVFerryError
from kvferry.host.this_user import SharedMemory, open_place
from kvferry.host.threads import JobThread
from kvferry.log import is_worth_a_line, log_of
from kvferry.runtime import Timing
from kvferry.wire.messages import MARK_BYTES, MAX_MESSAGE_BYTES
from kvferry.wire.reading import printable
from kvferry.wire.secret import Secret

log = log_of(__name__)

Receive = Callable[[Received | ContactChange], None]
"""Takes messages, and changes of outgoing connections."""

WAIT_SECONDS = 1.0
BEHIND_SECONDS = 0.005
"""Polling interval while the receiver is behind."""
MAX_OUTBOX_BYTES = 16 << 20
"""Of messages that wait to be sent."""
CLOSE_SECONDS = 10.0


class ChannelThread:
    """Sends and receives control messages in a thread.

    Malformed messages are counted and dropped; none ends the thread.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.address = channel.address
        """Where it listens; empty if it does not."""
        self.dropped: Mapping[str, int] = channel.dropped
        """Messages that could not be sent or taken, by reason."""
        self._outbox: deque[tuple[str, bytes | None]] = deque()
        """Addresses and messages; None: hang up."""
        self._outbox_bytes = 0
        self._wake_lock = threading.Lock()
        self._is_closing = False
        self.refused: Mapping[str, int] = {}
        """Unreadable messages, by reason. Replaced, never changed: any thread may read it."""
        self._thread: threading.Thread | None = None

    def start(self, name: str, receive: Receive, is_behind: Callable[[], bool]) -> None:
        """Call ``receive`` in the thread for each message and change of an outgoing connection.

        It raises a KVFerryError for unreadable messages. While ``is_behind``, messages wait in the channel.
        """
        work = (receive, is_behind)
        self._thread = threading.Thread(target=self._run, args=work, name=name, daemon=True)
        self._thread.start()

    def send(self, to: str, data: bytes) -> None:
        """Queue a message to an address or a ``reply_to``; never blocks, from any thread.

        Answers are dropped if too many messages wait.
        """
        with self._wake_lock:
            is_full = self._outbox_bytes > MAX_OUTBOX_BYTES and self._channel.is_answer(to)
            self._outbox_bytes += 0 if is_full else len(data)
        if is_full:
            self._refuse("unread")
            return
        self._outbox.append((to, data))
        if threading.current_thread() is self._thread:
            self._flush()
        else:
            self._wake()

    def hang_up(self, address: str) -> None:
        """Close the connection to an address after its queued messages are sent; from any thread."""
        self._outbox.append((address, None))
        self._wake()

    def close(self) -> None:
        """Send queued messages, then close the channel."""
        self._is_closing = True
        if self._thread is None:
            self._channel.close()
            return
        self._wake()
        self._thread.join(CLOSE_SECONDS)

    def _wake(self) -> None:
        with self._wake_lock:
            if self._thread is not None and self._thread.is_alive():
                self._channel.wake()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self, receive: Receive, is_behind: Callable[[], bool]) -> None:
        while not self._is_closing:
            for received in self._taken(is_behind=is_behind()):
                self._guarded(lambda received=received: receive(received))  # type: ignore[misc]
            self._flush()
        self._flush()
        with self._wake_lock:
            self._channel.close()

    def _taken(self, *, is_behind: bool) -> list[Received | ContactChange]:
        most = BEHIND_SECONDS if is_behind else WAIT_SECONDS
        try:
            return self._channel.wait(0.0 if self._outbox else most, is_behind=is_behind)
        except Exception:  # this thread serves everybody
            self._refuse("unexpected")
            log.exception("unexpected error; the control channel continues")
            return []

    def _flush(self) -> None:
        while self._outbox:
            to, data = self._outbox.popleft()
            if data is None:
                self._guarded(lambda to=to: self._channel.hang_up(to))  # type: ignore[misc]
            else:
                with self._wake_lock:
                    self._outbox_bytes -= len(data)
                self._guarded(lambda to=to, data=data: self._channel.send(to, data))  # type: ignore[misc]

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except KVFerryError as error:
            number = self._refuse(type(error).__name__)
            if is_worth_a_line(number):
                log.warning(
                    "refused message number %d on the control channel: %s", number, printable(str(error))
                )
        except Exception:
            self._refuse("unexpected")
            log.exception("unexpected error; the control channel continues")

    def _refuse(self, why: str) -> int:
        with self._wake_lock:
            number = self.refused.get(why, 0) + 1
            self.refused = {**self.refused, why: number}
        return number


Work = Callable[[], object]

IDLE_SECONDS = 2.0
"""How long a thread waits for more work of its key: starting one takes as long as a short job."""


class WorkerThreads:
    """A queue and a thread per key; idle threads end.

    With a fixed number of threads, peers that do not answer would delay all others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: dict[Hashable, JobThread] = {}
        self._is_closed = False

    def submit(self, key: Hashable, job: Work) -> None:
        """Queue a job; jobs of one key run in order."""
        job = partial(self._do, job)
        with self._lock:  # a thread leaves only while it holds this, with nothing in its inbox
            if self._is_closed:
                return
            if thread := self._threads.get(key):
                thread.put(job)
            else:
                may_leave = partial(self._may_leave, key)
                self._threads[key] = JobThread(self._name, job, IDLE_SECONDS, may_leave)

    def close(self, seconds: float) -> bool:
        """Start no more jobs, and wait for running ones; whether all ended in time."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._is_closed = True
            threads = [*self._threads.values()]
        for thread in threads:
            thread.close()
        return all(thread.join(max(0.0, deadline - time.monotonic())) for thread in threads)

    def _do(self, job: Work) -> None:
        if not self._is_closed:
            job()

    def _may_leave(self, key: Hashable) -> bool:
        with self._lock:
            if (
                not self._is_closed and self._threads[key].num_waiting
            ):  # it came between the wait and the lock
                return False
            del self._threads[key]
            return True


NUM_MARKS = 4096
"""Leases whose numbers are equal modulo this share a place; readers of the overwritten one use messages."""
NAME = "kvferry-leases-"
NO_MARK = bytes(MARK_BYTES)


# The lease board shows readers on the same host which leases of a source engine stand.
#
# A load counts if its lease still stood after the last byte. Asking by message takes longer than a device
# takes to copy a gigabyte. So the authority writes a unique *mark* for each granted lease into shared memory
# that processes of the same user can open, and removes it before it announces that the blocks are free.
#
# A removed mark never returns, and a board can be opened only while its process lives. So a visible mark
# proves that after the last byte the authority lived and had not released the lease. If the board cannot be
# read, or shows another mark, the reader waits for the message.


class LeaseBoard:
    def __init__(self) -> None:
        """Raises OSError if shared memory is unavailable."""
        self._shared = SharedMemory(NAME, NUM_MARKS * MARK_BYTES)
        self._marks, self.place = self._shared.memory, self._shared.place
        leave = WeakMethod(self._leave)
        os.register_at_fork(after_in_child=lambda: (it := leave()) and it())

    def show(self, number: int, mark: bytes) -> None:
        if self._marks.closed:
            return
        start = number % NUM_MARKS * MARK_BYTES
        self._marks[start : start + MARK_BYTES] = mark

    def strike(self, number: int) -> None:
        self.show(number, NO_MARK)

    def close(self) -> None:
        if not self._marks.closed:
            self._marks[:] = bytes(len(self._marks))
            self._leave()

    def _leave(self) -> None:
        """Unmap it; forked children must, since one may get the pid of its dead parent."""
        self._shared.close()


def make_board() -> LeaseBoard | None:
    """A board; None if shared memory is unavailable."""
    with suppress(OSError):
        return LeaseBoard()
    return None


def is_shown(place: str, number: int, mark: bytes) -> bool:
    """Whether a board shows the mark of a lease; False proves nothing."""
    if len(mark) != MARK_BYTES or mark == NO_MARK:
        return False
    try:
        fd = open_place(place, NAME)
        try:
            return os.pread(fd, MARK_BYTES, number % NUM_MARKS * MARK_BYTES) == mark
        finally:
            os.close(fd)
    except OSError:
        return False


def open_channel(
    listen: str, secret: Secret | None, *, silence_seconds: float = SILENCE_SECONDS
) -> ChannelThread:
    """A channel over ZeroMQ with a thread of its own."""
    # Slightly above the limit, so that longer messages can be rejected with an error.
    max_bytes = MAX_MESSAGE_BYTES + (1 << 20)
    channel = Channel(listen=listen, secret=secret, max_bytes=max_bytes, silence_seconds=silence_seconds)
    return ChannelThread(channel)


@dataclass(frozen=True)
class Edges:
    """The environment of an endpoint, except its transport."""

    clock: Callable[[], float] = time.monotonic
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    """Source of random bytes for keys, generations and names; deterministic in a simulation."""
    host: Callable[[], str] = this_host
    """Identifies the host and network namespace."""
    open_channel: Callable[[str, Secret | None], ChannelThread] = open_channel
    make_workers: Callable[[str], WorkerThreads] = WorkerThreads
    open_status: Callable[[str, Callable[[], StatusReport]], StatusSocket | None] = open_status
    """Opens the socket for `kvferry status`."""
    make_board: Callable[[], LeaseBoard | None] = make_board
    """Creates the lease board of an authority; None: no board."""
    is_shown: Callable[[str, int, bytes], bool] = is_shown
    """Whether a board, by its path, shows the mark of a lease."""
    start_owner: Callable[[Owner[Any]], None] = Owner.start
    """Starts an owner; by default in a thread of its own."""

    @classmethod
    def of(cls, timing: Timing) -> Edges:
        """The real environment, with the heartbeats of this timing."""
        return cls(open_channel=partial(open_channel, silence_seconds=timing.silence))
