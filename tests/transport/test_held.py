"""Reads that wait for the device: each is started or ended exactly once, and never before its event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.errors import TransportError
from kvferry.transport import held
from kvferry.transport.held import HeldReads
from tests.transport.fake_cuda import FakeCuda, FakeEvent


class ByHand:
    """Events that come when the test says so, in any order."""

    def __init__(self, cuda: object) -> None:
        self.waited: list[Callable[[str], None]] = []

    def follow(self, event: object) -> object:
        return event

    def submit(self, mark: object, then: Callable[[str], None]) -> None:
        self.waited.append(then)

    def close(self) -> None:
        pass


class Read:
    def __init__(self, number: int, link: Any, is_refused: bool) -> None:
        self.number, self.link, self.is_refused = number, link, is_refused
        self.has_come, self.num_started = False, 0
        self.ends: list[str] = []

    def start(self, transfer: int, report: Callable[[str], None]) -> None:
        assert self.has_come, "started before the device has come to its event"
        assert transfer == self.number
        assert not self.ends
        self.num_started += 1
        if self.is_refused:
            raise TransportError("closed", "no more")


class HeldMachine(RuleBasedStateMachine):
    """Any order of holding, events, cancelling, forgetting; numbers are used again when they are free."""

    def __init__(self) -> None:
        super().__init__()
        original, held.EventWait = held.EventWait, ByHand  # type: ignore[misc,assignment]
        try:
            self.held = HeldReads(FakeCuda())  # type: ignore[arg-type]
        finally:
            held.EventWait = original  # type: ignore[misc]
        self.events: Any = self.held._events
        self.reads: list[Read] = []
        self.waited: list[tuple[Read, Callable[[str], None]]] = []

    def is_over(self, read: Read) -> bool:
        return bool(read.ends) or read.num_started > 0

    @rule(number=st.integers(0, 2), link=st.sampled_from("ab"), is_refused=st.booleans())
    def hold(self, number: int, link: str, is_refused: bool) -> None:
        if any(read.number == number and not self.is_over(read) for read in self.reads):
            return
        read = Read(number, link, is_refused)
        self.reads.append(read)
        self.held.hold(number, read.link, read.start, read.ends.append, FakeEvent())
        self.waited.append((read, self.events.waited.pop()))

    @rule(data=st.data(), error=st.sampled_from(["", "", "device failed"]))
    def event(self, data: st.DataObject, error: str) -> None:
        if not self.waited:
            return
        read, then = self.waited.pop(data.draw(st.integers(0, len(self.waited) - 1)))
        was_over, read.has_come = self.is_over(read), True
        then(error)
        assert was_over or self.is_over(read), "its event has come: it was started, or has ended"

    @rule(number=st.integers(0, 2))
    def cancel(self, number: int) -> None:
        waits = [read for read in self.reads if read.number == number and not self.is_over(read)]
        assert self.held.cancel(number) == bool(waits)
        assert all(read.ends == ["cancelled"] for read in waits)

    @rule(link=st.sampled_from(["a", "b", None]))
    def forget(self, link: Any) -> None:
        waits = [read for read in self.reads if not self.is_over(read) and link in (None, read.link)]
        self.held.end_all("forgotten", link)
        assert all(read.ends == ["forgotten"] for read in waits)

    @invariant()
    def each_once(self) -> None:
        for read in self.reads:
            assert read.num_started <= 1
            assert len(read.ends) <= 1
            assert len(read.ends) + read.num_started <= 1 + read.is_refused


TestHeld = HeldMachine.TestCase
TestHeld.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
