"""The reads of a transport that are under way: one pure machine, beneath which each way has a small carrier.

::

    held ──come──▶ waiting ──post──▶ posted ──ended──▶ … ──▶ ended, exactly once
      │               │                 │
      └──────────── fail: cancelled, forgotten, refused ────▶ nothing more of it is posted

A read consists of *shares*, each of which waits in a *queue*: the reads of one remote rank that one carrier
posts, part by part, first come, first served. A queue posts no more parts at once than its *room* allows.

What was posted cannot be called back: only the carrier's word ends a part. So a failed read ends when all its
posted parts have, and a queue that is refused (forgotten, closed, broken) is released when no read is left in
it. Carriers that can drop what they posted (``can_drop``) are asked to.

``Reads`` has no thread, no lock and no clock: it returns the calls that are to be made. ``Transfers`` lets
one thread at a time into it, and makes them outside of the lock, in that order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import TransportError


class ReadCarrier:
    """Posts parts of reads. Every call may come from any thread, and none blocks; this one does nothing."""

    def wake(self) -> None:
        """Something waits in a queue of its own that has room."""

    def drop(self, share: Share) -> None:
        """Nobody wants what is posted of a share; asked only where a queue ``can_drop``, perhaps twice."""

    def release(self, queue: ReadQueue) -> None:
        """Nothing is under way by a queue, and nothing will be: let go of the remote rank."""


@dataclass(eq=False, slots=True)
class PostRoom:
    """How many parts may be posted at once: by a connection, on a stream, on a device."""

    limit: int
    num_posted: int = 0


@dataclass(eq=False, slots=True)
class ReadQueue:
    name: str
    """Of the remote rank."""
    carrier: ReadCarrier
    room: PostRoom
    can_drop: bool = False
    """Whether its carrier can end at once what it has posted."""
    waiting: deque[Share] = field(default_factory=deque)
    """Shares of which there may be more to post."""
    shares: dict[Share, None] = field(default_factory=dict)
    """Those of reads that have not ended, in the order of their begin."""
    refusal: TransportError | None = None
    """Why it takes no more reads."""

    @property
    def can_post(self) -> bool:
        return bool(self.waiting) and self.room.num_posted < self.room.limit


@dataclass(eq=False, slots=True)
class Share:
    """What one carrier is to move of a read."""

    read: Read
    queue: ReadQueue
    work: Any
    """The carrier's own: what is left to post, as a rule."""
    num_posted: int = 0
    is_open: bool = True
    """Whether more of it may be posted."""


Work = Iterable[tuple[ReadQueue, Any]]
"""The shares of a read: where each waits, and what its carrier is to move."""


class Read:
    """A read, or a clearing, from its begin to its end."""

    __slots__ = ("error", "has_ended", "is_held", "on_end", "shares")

    def __init__(self, work: Work, on_end: Callable[[str], None]) -> None:
        """``on_end``: called once, from whatever thread, with the error or an empty text."""
        self.shares = [Share(self, queue, each) for queue, each in work]
        self.on_end = on_end
        self.is_held = self.has_ended = False
        self.error = ""


ReadEffect = tuple[Callable[..., None], *tuple[Share | ReadQueue | str, ...]]
"""Whom to call, and with what: a carrier, or whoever waits for an end."""


class Reads:
    """For one caller at a time."""

    def __init__(self) -> None:
        self._queues: dict[ReadQueue, None] = {}
        """Those that are not released."""
        self._refusal: TransportError | None = None

    def add(self, queue: ReadQueue) -> None:
        """Take a queue in; raises TransportError once all are refused."""
        if self._refusal:
            raise _again(self._refusal)
        self._queues[queue] = None

    def begin(self, read: Read, *, is_held: bool = False) -> list[ReadEffect]:
        """Take a read in; raises TransportError, with no end to come, if a queue of it is refused."""
        for share in read.shares:
            if share.queue.refusal:
                raise _again(share.queue.refusal)
        for share in read.shares:
            share.queue.shares[share] = None
        read.is_held = True
        return [] if is_held else self.come(read)

    def come(self, read: Read, error: str = "") -> list[ReadEffect]:
        """The device has come to the event for which a read is held, or failed; it may have ended before."""
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
        """Whose turn it is, if there is room: one more part of it, or the last, counts as posted now."""
        return self.post_share(queue.waiting[0], is_last=is_last) if queue.can_post else None

    def post_share(self, share: Share, *, is_last: bool = False) -> Share | None:
        """The same for a certain share, if it still waits; where there is room for all."""
        if share.read.is_held or not share.is_open:
            return None
        share.num_posted += 1
        share.queue.room.num_posted += 1
        if is_last:
            self._close(share)
        return share

    def ended(self, share: Share, error: str = "", *, is_last: bool = False) -> list[ReadEffect]:
        """A posted part has ended. ``is_last``: there is no more to post of its share."""
        queue, room = share.queue, share.queue.room
        is_room_new = room.num_posted == room.limit and bool(queue.waiting)
        share.num_posted -= 1
        room.num_posted -= 1
        if is_last:
            self._close(share)
        effects = self.fail(share.read, error) if error else self._end_if_quiet(share.read)
        return [(queue.carrier.wake,), *effects] if is_room_new else effects

    def fail(self, read: Read, error: str) -> list[ReadEffect]:
        """Post nothing more of a read, which ends with its first error; one that has ended is left alone."""
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
        """Take no more reads; those of which something is not posted, or can be dropped, fail."""
        queue.refusal = queue.refusal or refusal
        effects: list[ReadEffect] = []
        for share in [*queue.shares]:
            if share.is_open or queue.can_drop:
                effects += self.fail(share.read, error)
        return effects + self._release_if_quiet(queue)

    def refuse_all(self, refusal: TransportError, error: str) -> list[ReadEffect]:
        """The same for every queue, and for those that come."""
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
    """Another one each time: an exception that is raised keeps its trace."""
    return TransportError(refusal.code, refusal.detail)
