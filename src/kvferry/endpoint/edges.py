"""What an endpoint stands on: a clock, chance, a channel, workers, a thread. A simulation brings its own."""

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
from kvferry.host.private_files import SharedMemory, open_place
from kvferry.host.threads import JobThread
from kvferry.log import is_worth_a_line, log_of
from kvferry.runtime import Timing
from kvferry.wire.messages import MARK_BYTES, MAX_MESSAGE_BYTES
from kvferry.wire.reading import printable
from kvferry.wire.secret import Secret

log = log_of(__name__)

Receive = Callable[[Received | ContactChange], None]
"""Takes what arrives, and what happens to the connections to those who are called."""

WAIT_SECONDS = 1.0
BEHIND_SECONDS = 0.005
"""After how long to see whether whoever takes the messages has caught up."""
MAX_OUTBOX_BYTES = 16 << 20
"""Of messages that wait for the thread to send them."""
CLOSE_SECONDS = 10.0


class ChannelThread:
    """Small messages from and to other engines: hands over what arrives, and sends what it is given.

    No message, however malformed, ends the thread: what cannot be read is counted and dropped.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.address = channel.address
        """Where it listens; empty if it does not."""
        self.dropped: Mapping[str, int] = channel.dropped
        """Messages that could not be sent or taken, by why."""
        self._outbox: deque[tuple[str, bytes | None]] = deque()
        """What is to be sent, and where to; None: hang up."""
        self._outbox_bytes = 0
        self._wake_lock = threading.Lock()
        self._is_closing = False
        self.refused: Mapping[str, int] = {}
        """Messages that could not be read, by why. Never changed, but replaced: anybody may look at it."""
        self._thread: threading.Thread | None = None

    def start(self, name: str, receive: Receive, is_behind: Callable[[], bool]) -> None:
        """From now on ``receive`` is called, in the thread, with what arrives, and with what becomes of
        connections that were made here. It raises a KVFerryError for what cannot be read. While whoever
        listens ``is_behind``, messages wait in the channel.
        """
        work = (receive, is_behind)
        self._thread = threading.Thread(target=self._run, args=work, name=name, daemon=True)
        self._thread.start()

    def send(self, to: str, data: bytes) -> None:
        """Have a message sent soon to an address, or to where a message said to reply to; from any thread.

        Never blocks. Answers are dropped where too much waits.
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
        """Keep no connection to an address, once what was handed over for it is sent; from any thread."""
        self._outbox.append((address, None))
        self._wake()

    def close(self) -> None:
        """Send what was handed over, then close the channel."""
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
"""How long a thread waits for more work of its key: to start one takes as long as a short job."""


class WorkerThreads:
    """A queue per key, each served by a thread that lasts a little longer than its work.

    A fixed number of threads would not do: so many peers that do not answer would hold up all others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: dict[Hashable, JobThread] = {}
        self._is_closed = False

    def submit(self, key: Hashable, job: Work) -> None:
        """Have a job done after all that was submitted under the same key."""
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
        """Start nothing more, and wait for what was started; whether all of it ended in time."""
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
"""Leases are numbered; one that comes so much later takes the place, and the earlier one is asked for."""
NAME = "kvferry-leases-"
NO_MARK = bytes(MARK_BYTES)


# A source engine's board: which of its leases stand, for readers of the same host to see by themselves.
#
# A load counts if its lease still stood after the last byte. To ask for that takes a message and its
# answer, longer than a device takes to copy a gigabyte. Where both processes are on one host, the reader
# looks instead: for each lease that it grants, the authority writes a *mark* into memory of its own, which
# processes of the same user can open by its name; and it strikes the mark before anybody hears that the
# blocks are free.
#
# Why that is enough: a mark that was struck never comes again, and a board opens only while its process
# lives. So a mark that is seen stood at some moment after the last byte, at which the authority lived and
# had released nothing. An authority that stands still releases nothing either; one that is gone has no
# board, and the next one's has another name.
#
# Nothing that is read here can harm the reader: the name is compared before anything is opened, and what
# cannot be opened, or read, or has another mark, is no answer. Then the message is what counts, as between
# two hosts.


class LeaseBoard:
    """The authority's own board."""

    def __init__(self) -> None:
        """Raises OSError where there is no such memory."""
        self._shared = SharedMemory(NAME, NUM_MARKS * MARK_BYTES)
        self._marks, self.place = self._shared.memory, self._shared.place
        """Where readers look."""
        leave = WeakMethod(self._leave)
        os.register_at_fork(after_in_child=lambda: (it := leave()) and it())

    def show(self, number: int, mark: bytes) -> None:
        """A lease stands; on a closed board none does."""
        if self._marks.closed:
            return
        start = number % NUM_MARKS * MARK_BYTES
        self._marks[start : start + MARK_BYTES] = mark

    def strike(self, number: int) -> None:
        """It stands no more; or a later one that took its place has to be asked for."""
        self.show(number, NO_MARK)

    def close(self) -> None:
        """No lease stands any more; once is enough."""
        if not self._marks.closed:
            self._marks[:] = bytes(len(self._marks))
            self._leave()

    def _leave(self) -> None:
        """Let go of it, as a child that was forked must: it may get the number of its dead parent one day."""
        self._shared.close()


def make_board() -> LeaseBoard | None:
    """A board, where this system has what it takes."""
    with suppress(OSError):
        return LeaseBoard()
    return None


def is_shown(place: str, number: int, mark: bytes) -> bool:
    """Whether a lease stands, as far as can be seen from here; False says nothing."""
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
    """Source of random bytes for keys, generations and names; deterministic in a simulation."""
    host: Callable[[], str] = this_host
    """Identifies the host and network namespace."""
    open_channel: Callable[[str, Secret | None], ChannelThread] = open_channel
    make_workers: Callable[[str], WorkerThreads] = WorkerThreads
    open_status: Callable[[str, Callable[[], StatusReport]], StatusSocket | None] = open_status
    """Where `kvferry status` asks."""
    make_board: Callable[[], LeaseBoard | None] = make_board
    """Creates the lease board of an authority; None: no board."""
    is_shown: Callable[[str, int, bytes], bool] = is_shown
    """Whether a board, by its path, shows the mark of a lease."""
    start_owner: Callable[[Owner[Any]], None] = Owner.start
    """Has an owner's ``step`` called; by default in a thread of its own."""

    @classmethod
    def of(cls, timing: Timing) -> Edges:
        """The real outside, with heartbeats as an engine wants them."""
        return cls(open_channel=partial(open_channel, silence_seconds=timing.silence))
