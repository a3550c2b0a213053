"""The reads of a transport that are under way: one pure machine for all modes; each mode has a carrier.

::

    held ──come──▶ waiting ──post──▶ posted ──ended──▶ … ──▶ ended, exactly once
      │               │                 │
      └──────────── fail: cancelled, forgotten, refused ────▶ nothing more of it is posted

A read consists of *shares*. Each waits in the *queue* of one remote rank and one carrier, which posts its
parts in order. A queue posts no more parts at once than its *room* allows.

Only the carrier can end a posted part. So a failed read ends when all its posted parts have ended, and a
queue that is refused (forgotten, closed, broken) is released when no read is left in it. Carriers that can
drop posted parts (``can_drop``) do so.

``Reads`` has no thread, lock or clock: it returns calls. ``Transfers`` guards it by a lock, and makes these
calls outside of the lock, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import TransportError


class ReadCarrier:
    """Posts parts of reads. Calls come from any thread and must not block; these do nothing."""

    def wake(self) -> None:
        """A share waits in one of its queues that has room."""

    def drop(self, share: Share) -> None:
        """The posted parts of a share are not needed; called only if a queue ``can_drop``, perhaps twice."""

    def release(self, queue: ReadQueue) -> None:
        """A queue is not used any more: let go of the remote rank."""


@dataclass(eq=False, slots=True)
class PostRoom:
    """A limit of posted parts, which queues may share."""

    limit: int
    num_posted: int = 0


@dataclass(eq=False, slots=True)
class ReadQueue:
    name: str
    carrier: ReadCarrier
    room: PostRoom
    can_drop: bool = False
    """Whether its carrier can end posted parts at once."""
    waiting: deque[Share] = field(default_factory=deque)
    """Shares with parts that are not posted."""
    shares: dict[Share, None] = field(default_factory=dict)
    """Those of reads that have not ended, in the order of their begin."""
    refusal: TransportError | None = None
    """Set when it accepts no more reads."""

    @property
    def can_post(self) -> bool:
        return bool(self.waiting) and self.room.num_posted < self.room.limit


@dataclass(eq=False, slots=True)
class Share:
    """The part of a read that one carrier moves."""

    read: Read
    queue: ReadQueue
    work: Any
    num_posted: int = 0
    is_open: bool = True
    """Whether more of it may be posted."""


Work = Iterable[tuple[ReadQueue, Any]]
"""The shares of a read: queue and work of each."""


class Read:
    __slots__ = ("error", "has_ended", "is_held", "on_end", "shares")

    def __init__(self, work: Work, on_end: Callable[[str], None]) -> None:
        """``on_end``: called once, from any thread, with the error or an empty text."""
        self.shares = [Share(self, queue, each) for queue, each in work]
        self.on_end = on_end
        self.is_held = self.has_ended = False
        self.error = ""


ReadEffect = tuple[Callable[..., None], *tuple[Share | ReadQueue | str, ...]]
"""A call to make: function and arguments."""


class Reads:
    """For one caller at a time."""

    def __init__(self) -> None:
        self._queues: dict[ReadQueue, None] = {}
        """Those that are not released."""
        self._refusal: TransportError | None = None

    def add(self, queue: ReadQueue) -> None:
        """Raises TransportError after ``refuse_all``."""
        if self._refusal:
            raise _again(self._refusal)
        self._queues[queue] = None

    def begin(self, read: Read, *, is_held: bool = False) -> list[ReadEffect]:
        """Raises TransportError, with no end to come, if one of its queues is refused."""
        for share in read.shares:
            if share.queue.refusal:
                raise _again(share.queue.refusal)
        for share in read.shares:
            share.queue.shares[share] = None
        read.is_held = True
        return [] if is_held else self.come(read)

    def come(self, read: Read, error: str = "") -> list[ReadEffect]:
        """The device has reached the event that a read was held for, or failed; the read may have ended."""
        if not read.is_held:
            return []
        if error:
            return self.fail(read, error)
        read.is_held = False
        for share in read.shares:
            share.queue.waiting.append(share)
        wakes = [(share.queue.carrier.wake,) for share in read.shares]
        return [*wakes, *self._end_if_quiet(read)]

    def post(self, queue: ReadQueue, *, is_last: bool = False) -> Share | None:
        """The share whose turn it is, if there is room: one more part, or the last, counts as posted."""
        return self.post_share(queue.waiting[0], is_last=is_last) if queue.can_post else None

    def post_share(self, share: Share, *, is_last: bool = False) -> Share | None:
        """The same for one share, if it still waits; ignores the room."""
        if share.read.is_held or not share.is_open:
            return None
        share.num_posted += 1
        share.queue.room.num_posted += 1
        if is_last:
            self._close(share)
        return share

    def ended(self, share: Share, error: str = "", *, is_last: bool = False) -> list[ReadEffect]:
        """A posted part has ended. ``is_last``: its share has no more parts to post."""
        queue, room = share.queue, share.queue.room
        is_room_new = room.num_posted == room.limit and bool(queue.waiting)
        share.num_posted -= 1
        room.num_posted -= 1
        if is_last:
            self._close(share)
        effects = self.fail(share.read, error) if error else self._end_if_quiet(share.read)
        return [(queue.carrier.wake,), *effects] if is_room_new else effects

    def fail(self, read: Read, error: str) -> list[ReadEffect]:
        """Post nothing more of a read, which ends with its first error."""
        if read.has_ended:
            return []
        read.error = read.error or error
        read.is_held = False
        for share in read.shares:
            self._close(share)
        drops = [share for share in read.shares if share.num_posted and share.queue.can_drop]
        return [*((share.queue.carrier.drop, share) for share in drops), *self._end_if_quiet(read)]

    def fail_all(self, queue: ReadQueue, error: str) -> list[ReadEffect]:
        return [effect for share in [*queue.shares] for effect in self.fail(share.read, error)]

    def refuse(self, queue: ReadQueue, refusal: TransportError, error: str) -> list[ReadEffect]:
        """Accept no more reads; those that are not posted completely, or can be dropped, fail."""
        queue.refusal = queue.refusal or refusal
        effects: list[ReadEffect] = []
        for share in [*queue.shares]:
            if share.is_open or queue.can_drop:
                effects += self.fail(share.read, error)
        return effects + self._release_if_quiet(queue)

    def refuse_all(self, refusal: TransportError, error: str) -> list[ReadEffect]:
        """The same for every queue, now and later."""
        self._refusal = self._refusal or refusal
        return [effect for queue in [*self._queues] for effect in self.refuse(queue, refusal, error)]

    def _close(self, share: Share) -> None:
        if share.is_open:
            share.is_open = False
            if share in share.queue.waiting:
                share.queue.waiting.remove(share)

    def _end_if_quiet(self, read: Read) -> list[ReadEffect]:
        if read.has_ended:
            return []
        for share in read.shares:
            if share.is_open or share.num_posted:
                return []
        read.has_ended = True
        shares, read.shares = read.shares, []  # no circle is left for the collector
        effects: list[ReadEffect] = []
        for share in shares:
            del share.queue.shares[share]
            effects += self._release_if_quiet(share.queue)
        return [*effects, (read.on_end, read.error)]

    def _release_if_quiet(self, queue: ReadQueue) -> list[ReadEffect]:
        if not queue.refusal or queue.shares or queue not in self._queues:
            return []
        del self._queues[queue]
        return [(queue.carrier.release, queue)]


def _again(refusal: TransportError) -> TransportError:
    """A fresh copy: a raised exception keeps its traceback."""
    return TransportError(refusal.code, refusal.detail)
