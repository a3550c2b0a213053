"""The parts that an endpoint stands on, one at a time."""

import threading
import time
from functools import partial

import pytest

from kvferry.channel import Channel
from kvferry.endpoint import owner as owner_module
from kvferry.endpoint.edges import ChannelThread, WorkerThreads
from kvferry.endpoint.owner import MANY_BYTES, MAX_AT_ONCE, Owner
from kvferry.errors import KVFerryError, SpecError


class Machine:
    """Remembers what it was told, by whom, and what was carried out."""

    def __init__(self, until=float("inf")):
        self.until = until
        self.told: list = []
        self.threads: set[str] = set()
        self.num_ticks = 0
        self.owner: Owner = Owner("owner", self.carry_out, self.tick, time.monotonic)

    def tell(self, what):
        self.owner.put(lambda now: [what])

    def carry_out(self, effects):
        self.threads.add(threading.current_thread().name)
        for effect in effects:
            if effect == "burst":
                raise MemoryError
            self.told.append(effect)

    def tick(self, now):
        self.threads.add(threading.current_thread().name)
        self.num_ticks += 1
        return now + self.until


@pytest.fixture
def machine():
    machine = Machine()
    machine.owner.start()
    yield machine
    machine.owner.close()


def test_effects_are_carried_out_in_order_by_one_thread(machine):
    for number in range(3 * MAX_AT_ONCE):
        machine.tell(number)
    machine.owner.close()
    assert machine.told == list(range(3 * MAX_AT_ONCE))
    assert machine.threads == {"owner"}
    assert machine.num_ticks >= 3, "time is looked at in between"


def test_nothing_that_an_event_or_an_effect_raises_ends_the_owner(machine):
    machine.owner.put(lambda now: 1 // 0)
    machine.tell("burst")
    machine.tell("still there")
    machine.owner.close()
    assert machine.told == ["still there"]


def test_what_was_asked_for_before_the_end_is_done_and_nothing_after(machine):
    machine.tell("before")
    machine.owner.close()
    machine.tell("after")
    machine.owner.close()
    assert machine.told == ["before"]


def test_a_question_is_answered_by_the_owner_and_after_the_end_by_whoever_asks(machine):
    def where():
        return threading.current_thread().name

    assert machine.owner.ask(where) == "owner"
    with pytest.raises(ZeroDivisionError):
        machine.owner.ask(lambda: 1 // 0)
    machine.owner.close()
    assert machine.owner.ask(where) == threading.current_thread().name


def test_a_question_has_a_deadline(machine, monkeypatch):
    monkeypatch.setattr(owner_module, "ANSWER_SECONDS", 0.05)
    is_over = threading.Event()
    machine.owner.put(lambda now: [is_over.wait(20)])
    with pytest.raises(KVFerryError, match=r"owner did not answer within 0\.05 s"):
        machine.owner.ask(lambda: 1)
    is_over.set()


def test_an_owner_that_has_nothing_to_do_sleeps(machine):
    machine.tell("something")
    assert machine.owner.ask(lambda: True)
    before = machine.num_ticks
    time.sleep(0.2)
    assert machine.num_ticks == before


def test_an_owner_comes_again_when_its_machine_wants_it():
    machine = Machine(until=0.01)
    machine.owner.start()
    deadline = time.monotonic() + 20
    while machine.num_ticks < 5:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    machine.owner.close()


# -- workers --------------------------------------------------------------------------------------


def test_work_of_one_key_is_done_in_order_and_waits_for_no_other():
    workers, go_on, is_done = WorkerThreads("work"), threading.Event(), threading.Event()
    done: list[object] = []
    workers.submit("slow", lambda: done.append("slow" if go_on.wait(20) else "too late"))
    workers.submit("slow", lambda: done.append("slow too"))
    for number in range(100):
        workers.submit("quick", partial(done.append, number))
    workers.submit("quick", lambda: 1 // 0)
    workers.submit("quick", is_done.set)
    assert is_done.wait(20), "an error ends nothing"
    assert done == list(range(100))
    go_on.set()
    workers.submit("slow", lambda: done.append("last"))
    deadline = time.monotonic() + 20
    while len(done) < 103:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert done[100:] == ["slow", "slow too", "last"]
    assert workers.close(20)


def test_workers_close_in_time_and_start_nothing_more():
    workers, go_on = WorkerThreads("work"), threading.Event()
    done: list[str] = []
    has_begun = threading.Event()

    def slow():
        has_begun.set()
        go_on.wait(20)

    workers.submit("slow", slow)
    workers.submit("slow", lambda: done.append("queued"))
    assert has_begun.wait(20)
    started = time.monotonic()
    assert not workers.close(0.1)
    assert time.monotonic() - started < 5
    workers.submit("late", lambda: done.append("late"))
    go_on.set()
    assert workers.close(20)
    assert done == []


def test_idle_threads_end(monkeypatch):
    monkeypatch.setattr("kvferry.endpoint.edges.IDLE_SECONDS", 0.05)
    workers, done = WorkerThreads("idler"), threading.Semaphore(0)
    for _ in range(2):
        workers.submit("key", done.release)
        assert done.acquire(timeout=20)
        deadline = time.monotonic() + 20
        while any(thread.name == "idler" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert workers.close(1)


# -- the channel's thread -------------------------------------------------------------------------


def test_messages_wait_while_the_owner_is_behind():
    received: list = []
    is_behind = threading.Event()
    is_behind.set()
    listener = ChannelThread(Channel(listen="tcp://127.0.0.1:*"))
    listener.start("listener", received.append, is_behind.is_set)
    caller = ChannelThread(Channel())
    caller.start("caller", lambda message: None, lambda: False)
    caller.send(listener.address, b"hello")
    time.sleep(0.3)
    assert not received
    is_behind.clear()
    deadline = time.monotonic() + 20
    while not received:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert [one.data for one in received] == [b"hello"]
    caller.close()
    listener.close()


def test_an_owner_is_behind_with_messages_of_many_bytes():
    """Before, only their number counted: 1,000 renewals of 4,096 tickets, decoded, have 3.3 GB."""
    owner: Owner[None] = Owner("owner", lambda _: None, lambda now: now, time.monotonic)
    owner.put(lambda _: (), MANY_BYTES)
    assert not owner.is_behind
    owner.put(lambda _: (), 1)
    assert owner.is_behind
    owner.take(0.0)
    assert not owner.is_behind


def test_what_cannot_be_read_is_counted_and_ends_nothing():
    def read(message):
        if message.data == b"junk":
            raise SpecError("what is this?")
        received.append(1 // (message.data != b"bug"))

    received: list = []
    listener = ChannelThread(Channel(listen="tcp://127.0.0.1:*"))
    listener.start("listener", read, lambda: False)
    caller = ChannelThread(Channel())
    caller.start("caller", lambda message: None, lambda: False)
    for data in (b"junk", b"bug", b"junk", b"good"):
        caller.send(listener.address, data)
    deadline = time.monotonic() + 20
    while not received:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert listener.refused == {"SpecError": 2, "unexpected": 1}
    caller.close()
    listener.close()
