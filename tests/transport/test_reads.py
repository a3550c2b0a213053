"""Reads under way, as one machine: whatever happens in whatever order, each ends once and never early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import TransportError
from kvferry.transport.base import CANCELLED
from kvferry.transport.reads import PostRoom, Read, ReadCarrier, ReadEffect, ReadQueue, Reads, Share

FORGOTTEN = TransportError("unknown-peer", "it was forgotten")
CLOSED = TransportError("closed", "it was closed")


class Carrier(ReadCarrier):
    def __init__(self, machine: ReadsMachine) -> None:
        self._machine = machine

    def drop(self, share: Share) -> None:
        self._machine.dropped(share)

    def release(self, queue: ReadQueue) -> None:
        self._machine.released(queue)


class ReadsMachine(RuleBasedStateMachine):
    """Four queues of three kinds: two ranks of one connection, one that can drop, two that share a line."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()
        connection, lanes = PostRoom(2), PostRoom(1)
        line = ReadQueue("c", Carrier(self), lanes)
        self.queues = [
            ReadQueue("a", Carrier(self), connection),
            ReadQueue("b", Carrier(self), connection),
            ReadQueue("s", Carrier(self), PostRoom(3), can_drop=True),
            line,
            ReadQueue("d", Carrier(self), lanes, waiting=line.waiting),
        ]
        for queue in self.queues:
            self.reads.add(queue)
        self.known: list[Read] = []
        self.held: list[Read] = []
        """Whose event has not come."""
        self.parts: list[Share] = []
        """Posted, and not ended."""
        self.left: dict[Share, int] = {}
        """How many parts are to be posted."""
        self.posted: Counter[Share] = Counter()
        self.ends: Counter[Read] = Counter()
        self.releases: Counter[ReadQueue] = Counter()
        self.failed: dict[Read, str] = {}
        """The first error of each that has one."""

    def carry_out(self, effects: Iterable[ReadEffect]) -> None:
        for call, *about in effects:
            call(*about)

    def ended(self, read: Read, error: str) -> None:
        self.ends[read] += 1
        assert read.error == error == self.failed.get(read, "")
        assert not any(part.read is read for part in self.parts), "something of it is posted"
        if not error:
            assert not any(self.left[share] for share in read.shares), "not all of it was posted"

    def released(self, queue: ReadQueue) -> None:
        self.releases[queue] += 1
        assert queue.refusal
        assert not queue.shares
        assert not any(part.queue is queue for part in self.parts)

    def dropped(self, share: Share) -> None:
        assert share.queue.can_drop
        assert share.read in self.failed
        while share in self.parts:
            self.parts.remove(share)
            self.carry_out(self.reads.ended(share))

    @property
    def under_way(self) -> list[Read]:
        return [read for read in self.known if not self.ends[read]]

    def failing(self, reads: Iterable[Read], error: str) -> None:
        for read in reads:
            self.failed.setdefault(read, error)

    @rule(
        shares=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=3),
        is_held=st.booleans(),
    )
    def begin(self, shares: list[tuple[int, int]], is_held: bool) -> None:
        read = Read(
            [(self.queues[which], None) for which, _ in shares], lambda error: self.ended(read, error)
        )
        self.left |= {share: parts for share, (_, parts) in zip(read.shares, shares, strict=True)}
        if any(share.queue.refusal for share in read.shares):
            with pytest.raises(TransportError):
                self.reads.begin(read, is_held=is_held)
            assert not any(share in share.queue.shares for share in read.shares)
            return
        self.known.append(read)
        if is_held:
            self.held.append(read)
        effects = self.reads.begin(read, is_held=is_held)
        wakes = [(share.queue.carrier.wake,) for share in read.shares]
        assert is_held or effects[: len(wakes)] == wakes
        self.carry_out(effects)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), error=st.sampled_from(["", "", "the device failed"]))
    def come(self, data: st.DataObject, error: str) -> None:
        read = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if error and not self.ends[read]:
            self.failing([read], error)
        self.carry_out(self.reads.come(read, error))

    @rule(which=st.integers(0, 4), error=st.sampled_from(["", "", "it cannot be posted"]))
    def post(self, which: int, error: str) -> None:
        queue = self.queues[which]
        could, first = queue.can_post, next(iter(queue.waiting), None)
        is_whole = queue.room.limit == 1 and first is not None and self.left[first] == 1
        share = self.reads.post(queue, is_last=is_whole)
        assert (share is not None) == could
        if share is None:
            return
        assert share is first, "first come, first served"
        assert share.read not in self.held, "posted before its event"
        assert share.read not in self.failed, "posted after it had failed"
        assert not self.ends[share.read]
        if not self.left[share]:
            self.carry_out(self.reads.ended(share, is_last=True))
        elif error:
            self.failing([share.read], error)
            self.carry_out(self.reads.ended(share, error))
        else:
            self.left[share] -= 1
            self.parts.append(share)

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), error=st.sampled_from(["", "", "cable cut"]))
    def part_ended(self, data: st.DataObject, error: str) -> None:
        share = self.parts.pop(data.draw(st.integers(0, len(self.parts) - 1)))
        room, waits = share.queue.room, bool(share.queue.waiting)
        is_full = room.num_posted == room.limit
        if error:
            self.failing([share.read], error)
        effects = self.reads.ended(share, error)
        assert not (is_full and waits) or effects[0] == (share.queue.carrier.wake,), (
            "the next one is posted first"
        )
        self.carry_out(effects)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.known))
        if not self.ends[read]:
            self.failing([read], CANCELLED)
        self.carry_out(self.reads.fail(read, CANCELLED))
        is_posted = any(part.read is read for part in self.parts)
        assert self.ends[read] or is_posted, "what was never posted is cancelled at once"

    @rule(which=st.integers(0, 4))
    def lose(self, which: int) -> None:
        queue = self.queues[which]
        self.failing([share.read for share in queue.shares], "lost")
        self.carry_out(self.reads.fail_all(queue, "lost"))

    @precondition(lambda self: len(self.known) > 3)
    @rule(which=st.integers(0, 4))
    def forget(self, which: int) -> None:
        queue = self.queues[which]
        self.failing([s.read for s in queue.shares if s.is_open or queue.can_drop], "forgotten")
        self.carry_out(self.reads.refuse(queue, FORGOTTEN, "forgotten"))
        assert not any(share.is_open for share in queue.shares)

    @precondition(lambda self: len(self.known) > 8)
    @rule()
    def close(self) -> None:
        for queue in self.queues:
            self.failing([s.read for s in queue.shares if s.is_open or queue.can_drop], "closed")
        self.carry_out(self.reads.refuse_all(CLOSED, "closed"))
        with pytest.raises(TransportError, match="closed"):
            self.reads.add(ReadQueue("late", ReadCarrier(), PostRoom(1)))

    @invariant()
    def once(self) -> None:
        assert all(number == 1 for number in self.ends.values())
        assert all(number == 1 for number in self.releases.values())
        for queue in self.queues:
            mine = [part for part in self.parts if part.queue.room is queue.room]
            assert queue.room.num_posted == len(mine) <= queue.room.limit
            is_quiet = not any(queue is s.queue for r in self.under_way for s in r.shares)
            assert self.releases[queue] == (queue.refusal is not None and is_quiet)

    def teardown(self) -> None:
        """Whatever happened: once every event has come, and every part has ended, every read has."""
        for read in self.held:
            self.carry_out(self.reads.come(read))
        self.held = []
        for _ in range(1000):
            for part in self.parts[:]:
                if part in self.parts:
                    self.parts.remove(part)
                    self.carry_out(self.reads.ended(part))
            for which in range(len(self.queues)):
                ReadsMachine.post(self, which, "")
            if not self.under_way:
                break
        assert not self.under_way
        assert not any(queue.shares or queue.waiting or queue.room.num_posted for queue in self.queues)


TestReads = ReadsMachine.TestCase
TestReads.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_what_is_posted_ends_its_read_and_its_queue_is_released_after_that() -> None:
    reads, queue = Reads(), ReadQueue("src", ReadCarrier(), PostRoom(1))
    reads.add(queue)
    ends: list[str] = []
    read = Read([(queue, None)], ends.append)
    assert reads.begin(read) == [(queue.carrier.wake,)]
    share = reads.post(queue)
    assert share
    assert reads.fail(read, CANCELLED) == []
    assert reads.refuse(queue, FORGOTTEN, "forgotten") == []
    assert reads.ended(share) == [(queue.carrier.release, queue), (ends.append, CANCELLED)]
    assert read.error == CANCELLED
