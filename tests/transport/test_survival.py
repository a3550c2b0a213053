"""Whatever NIXL raises, the thread that owns the agent lives on, and says nothing that it does not know."""

import threading
import time

import pytest

from kvferry.cli.processes import FABRICS
from kvferry.errors import TransportError
from kvferry.testing.transport_world import REGION_BYTES, STALE, WHOLE, run, stale_memory, wait
from kvferry.transport import ReadEnd, agent_thread
from kvferry.transport.agent_thread import AgentThread
from kvferry.transport.nixl_agent import Agent
from kvferry.transport.process import ProcessTransport
from tests.support.sources import serving

pytest.importorskip("nixl", exc_type=ImportError)

SMALL = run((0, 0), (1, 0), 64)


class Spoilt:
    """The real agent, but for one call: it raises, before or after the real one, as often as told."""

    def __init__(self):
        self.call, self.num_left, self.error, self.is_late = "", 0, MemoryError("spoilt"), False
        self.num_raised = 0
        self.delays: dict[str, float] = {}
        self.is_stopped = False
        """Whether what is posted does not end meanwhile."""
        self.calls: list[str] = []

    def spoil(self, call, num_left=1, error=None, *, is_late=False):
        self.call, self.num_left, self.is_late = call, num_left, is_late
        self.error = error or MemoryError("spoilt")

    def heal(self):
        self.call = ""

    def make(self, name, engine_config):
        spoilt, agent = self, Agent(name, engine_config)

        class Around:
            def __getattr__(self, call):
                real = getattr(agent, call)
                return spoilt.around(call, real) if callable(real) else real

        return Around()

    def around(self, call, real):
        def called(*args):
            time.sleep(self.delays.get(call, 0))
            self.calls.append(call)
            if call != self.call or not self.num_left:
                if call == "check" and self.is_stopped:
                    return False
                done = real(*args)
                return False if call == "post" else done  # as over a network
            self.num_left -= 1
            self.num_raised += 1
            if self.is_late:
                real(*args)
            raise self.error

        return called


@pytest.fixture
def spoilt():
    return Spoilt()


@pytest.fixture
def holder():
    return stale_memory()


@pytest.fixture(scope="module")
def near():
    with serving(2, REGION_BYTES, env=FABRICS["cma"]) as served:
        yield served


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    for name, value in FABRICS["cma"].items():
        monkeypatch.setenv(name, value)


def transport_of(spoilt, holder, served, **timeouts):
    transport = ProcessTransport(make_agent=spoilt.make, **timeouts)
    transport.register(holder.regions)
    connect(transport, "src", served.sources[0])
    return transport


def connect(transport, name, source):
    transport.connect(name, source.card, source.regions)


def is_alive():
    return any(thread.name.startswith("kvferry-nixl") for thread in threading.enumerate())


def assert_well(transport):
    transport.read(99, "src", SMALL)
    assert wait(transport, 1) == [ReadEnd(99)]
    transport.close()
    assert transport.poll() == []
    assert not is_alive()


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["prepare", "post", "release"])
@pytest.mark.parametrize(
    "error", [MemoryError("spoilt"), TypeError("spoilt"), TransportError("nixl", "spoilt")]
)
def test_a_call_that_raises_harms_its_own_read_at_most(spoilt, holder, near, call, error, is_late):
    transport = transport_of(spoilt, holder, near)
    spoilt.spoil(call, error=error, is_late=is_late)
    transport.read(1, "src", SMALL)
    (end,) = wait(transport, 1)
    assert spoilt.num_raised == 1
    assert end.transfer == 1
    assert ("spoilt" in end.error) == (call != "release")
    assert_well(transport)


@pytest.mark.parametrize("num_times", [1, 3, 20])
def test_a_check_that_raises_is_no_end(spoilt, holder, near, num_times):
    transport = transport_of(spoilt, holder, near)
    spoilt.spoil("check", num_times)
    transport.read(1, "src", WHOLE)
    assert wait(transport, 1) == [ReadEnd(1)]
    assert spoilt.num_raised == num_times
    assert (holder.load()[0] == near.sources[0].contents[0]).all()
    assert_well(transport)


def test_a_failure_that_the_fabric_reports_is_the_end_of_its_read(spoilt, holder, near):
    """Law 5: whatever has arrived by then, it is no good read."""
    transport = transport_of(spoilt, holder, near)
    spoilt.spoil("check", error=TransportError("nixl", "spoilt"))
    transport.read(1, "src", WHOLE)
    (end,) = wait(transport, 1)
    assert spoilt.num_raised == 1
    assert (end.transfer, "spoilt" in end.error) == (1, True)
    transport.close()


def test_a_turn_that_raises_again_and_again_is_told_of_seldom(spoilt, holder, near, caplog, monkeypatch):
    transport = transport_of(spoilt, holder, near)
    take_a_turn, errors = AgentThread._take_a_turn, [RuntimeError(str(i)) for i in range(9)]

    def failing(thread):
        if errors:
            raise errors.pop()
        return take_a_turn(thread)

    monkeypatch.setattr(AgentThread, "_take_a_turn", failing)
    transport.read(1, "src", SMALL)
    assert wait(transport, 1) == [ReadEnd(1)]
    assert [record.args for record in caplog.records] == [(1,), (2,), (4,), (8,)]
    assert_well(transport)


def test_a_read_whose_checks_never_say_anything_is_never_reported(spoilt, holder, near, caplog):
    transport = transport_of(spoilt, holder, near, close_timeout_s=0.3)
    spoilt.spoil("check", num_left=10**9)
    transport.read(1, "src", WHOLE)
    time.sleep(0.3)
    transport.cancel(1)
    transport.forget("src")
    with pytest.raises(TransportError, match="still-under-way"):
        transport.close()
    assert transport.poll() == []
    assert spoilt.num_raised > 20
    assert 0 < len(caplog.records) <= spoilt.num_raised.bit_length()  # looked at often, told of seldom
    spoilt.heal()
    assert [end.transfer for end in wait(transport, 1)] == [1]
    transport.close()


@pytest.mark.parametrize("error", [MemoryError("spoilt"), TransportError("nixl", "spoilt")])
def test_what_was_posted_before_the_post_raised_is_waited_for(spoilt, holder, near, error):
    transport = transport_of(spoilt, holder, near)
    spoilt.is_stopped = True
    spoilt.spoil("post", error=error, is_late=True)
    transport.read(1, "src", WHOLE)
    time.sleep(0.2)
    assert spoilt.num_raised == 1
    assert transport.poll() == []
    spoilt.is_stopped = False
    (end,) = wait(transport, 1)
    assert "spoilt" in end.error
    quiet = holder.load()
    assert_well(transport)
    assert (holder.load()[0] == quiet[0]).all()


@pytest.mark.parametrize("call", ["add", "prepare", "post"])
def test_a_connection_that_fails_leaves_nothing_behind(spoilt, holder, near, call):
    transport = transport_of(spoilt, holder, near)
    spoilt.spoil(call)
    with pytest.raises(TransportError, match="spoilt"):
        connect(transport, "other", near.sources[1])
    connect(transport, "other", near.sources[1])
    transport.read(1, "other", SMALL)
    assert wait(transport, 1) == [ReadEnd(1)]
    assert_well(transport)


def test_who_asked_for_what_ends_the_thread_hears_of_it(spoilt, holder, near):
    transport = transport_of(spoilt, holder, near)
    spoilt.spoil("add", error=SystemExit("spoilt"))
    with pytest.raises(TransportError, match="spoilt"):
        connect(transport, "other", near.sources[1])
    transport.close()


@pytest.mark.parametrize("call", ["register", "metadata"])
def test_memory_that_cannot_be_registered_is_an_error_and_can_be_tried_again(spoilt, holder, call):
    transport = ProcessTransport(make_agent=spoilt.make)
    spoilt.spoil(call)
    with pytest.raises(TransportError, match="spoilt"):
        transport.register(holder.regions)
    transport.register(holder.regions)
    transport.close()
    assert not is_alive()


@pytest.mark.parametrize("call", ["remove", "deregister"])
def test_tidying_up_that_fails_keeps_nobody(spoilt, holder, near, call):
    transport = transport_of(spoilt, holder, near)
    spoilt.spoil(call, num_left=9)
    transport.close()
    assert spoilt.num_raised
    assert not is_alive()


def test_a_wake_that_raises_is_ignored(spoilt, holder, near):
    def wake():
        raise RuntimeError("not my day")

    transport = transport_of(spoilt, holder, near)
    transport.on_end(wake)
    transport.read(1, "src", SMALL)
    assert wait(transport, 1) == [ReadEnd(1)]
    assert_well(transport)


LEFT_BEHIND: list[object] = []
"""Memory that reads may still write to: kept until this process ends."""


def test_if_the_thread_must_end_everybody_hears_it(spoilt, holder, near, monkeypatch):
    """What waits ends with an error, what comes later is refused, and what was posted is never reported."""
    monkeypatch.setattr(agent_thread, "MAX_POSTED", 1)
    transport = transport_of(spoilt, holder, near, close_timeout_s=0.3)
    LEFT_BEHIND.append(holder)
    spoilt.is_stopped = True
    transport.read(0, "src", WHOLE)
    time.sleep(0.1)
    for i in range(1, 5):
        transport.read(i, "src", run((1, 0), (1, 0), 64))
    time.sleep(0.1)
    assert transport.poll() == []
    spoilt.spoil("check", error=SystemExit("spoilt"))
    ends = wait(transport, 4)
    assert [end.transfer for end in ends] == [1, 2, 3, 4]
    assert all(end.error.startswith("broken: ") for end in ends)
    for late in (
        lambda: transport.read(20, "src", SMALL),
        lambda: connect(transport, "again", near.sources[0]),
    ):
        with pytest.raises(TransportError, match="broken"):
            late()
    transport.cancel(0)
    transport.forget("src")
    with pytest.raises(TransportError, match="still-under-way"):
        transport.close()
    assert transport.poll() == []
    assert (holder.load()[1] == STALE).all()
    spoilt.is_stopped = False


@pytest.mark.timed
def test_an_agent_that_takes_too_long_to_connect_holds_nobody_up_for_ever(spoilt, holder, near):
    transport = transport_of(spoilt, holder, near, connect_timeout_s=0.3)
    spoilt.delays["add"] = 3.0
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"no-connection: other: no answer within 0\.3 s"):
        connect(transport, "other", near.sources[1])
    assert time.monotonic() - started < 2.5
    deadline = time.monotonic() + 10
    while "remove" not in spoilt.calls and time.monotonic() < deadline:
        time.sleep(0.01)
    assert spoilt.calls[-1] == "remove"  # it was connected too late, and is forgotten
    assert_well(transport)
