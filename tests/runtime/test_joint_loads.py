"""Loads from several sources as one machine: in whatever order things happen, all counts or nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.span import Span, Spans, intersect, normal, subtract
from kvferry.models import Topology, describe
from kvferry.runtime import Failure, FailureCode, Fetch, Reader, Report, fetch_job
from kvferry.runtime.joint_loads import JointLoads
from kvferry.runtime.values import ALL, FAR, AllRead, Effect, Record
from kvferry.testing.small import small
from kvferry.wire.ticket import Ticket

LOAD = 77
GONE = Failure(FailureCode.SOURCE_GONE, "killed")


def ticket(number, num_tokens):
    return Ticket(f"e{number}", 1, number, f"r{number}", f"tcp://{number}", num_tokens, {}, 30_000)


def fetch(num_tokens=1000, num_kept=0, **more):
    need = {"full": (Span(num_kept, num_tokens),), **more}
    full = Span(num_tokens, num_tokens + 1 if more else FAR)
    return Fetch(ticket(0, 1), {}, need, early=frozenset({"full"}), full=full)


@dataclass
class Job:
    """A fetch of one source, as its reader sees it."""

    ticket: Ticket
    todo: Spans = ()
    in_flight: Spans = ()
    done: Spans = ()
    is_supplied: bool = False
    is_open: bool = True
    failure: Failure | None = None
    is_over: bool = False

    def next(self):
        """What can happen to it."""
        if self.is_over:
            return []
        if self.failure:
            return ["drain"]
        if self.in_flight:
            return ["end", "fail"]
        if self.todo:
            return ["post", "fail"]
        return ["confirm", "fail"] if self.is_supplied and not self.is_open else ["fail"]


@dataclass
class World:
    """A reader without wires, and the memory that it loads into."""

    jobs: dict[int, Job] = field(default_factory=dict)
    memory: list[tuple[Span, int]] = field(default_factory=list)
    """What was written, and by whom."""
    reports: list[Report] = field(default_factory=list)
    asked: list[tuple[str, int]] = field(default_factory=list)
    num_failed: int = 0

    def __post_init__(self):
        self.loads = JointLoads(cast(Reader, self), count(1))

    @property
    def fetches(self):
        return self

    def get(self, handle):
        return self.jobs.get(handle)

    # -- what is asked of a reader --------------------------------------------------------------------

    def hold(self, now, handle, held):
        assert handle not in self.jobs
        self.jobs[handle] = Job(held)
        return []

    def fetch(self, now, handle, wanted):
        return [*self.hold(now, handle, wanted.ticket), *self.supply(now, handle, wanted)]

    def supply(self, now, handle, wanted):
        job = self.jobs[handle]
        assert wanted.ticket == job.ticket
        job.is_supplied, job.todo = True, wanted.tokens
        return self.go_on(handle)

    def give(self, now, handle, tokens):
        self.asked.append(("give", handle))
        self.jobs[handle].todo = normal((*self.jobs[handle].todo, *tokens))
        return []

    def finish(self, now, handle):
        self.asked.append(("finish", handle))
        self.jobs[handle].is_open = False
        return []

    def abort(self, now, handle):
        self.asked.append(("abort", handle))
        return self.fail(handle, Failure(FailureCode.ABORTED))

    # -- what happens ---------------------------------------------------------------------------------

    def go_on(self, handle):
        job = self.jobs[handle]
        is_idle = job.is_supplied and job.is_open and not (job.todo or job.in_flight or job.is_over)
        return [AllRead(handle, job.done)] if is_idle else []

    def fail(self, handle, failure):
        job = self.jobs[handle]
        if job.is_over:
            return []
        job.failure = job.failure or failure
        return [] if job.in_flight else self.over(handle)

    def over(self, handle):
        job = self.jobs[handle]
        job.is_over = True
        outcome = job.failure.code.value if job.failure else "read"
        return [Report(handle, job.failure, Record("r", job.ticket.engine, num_bytes=1, outcome=outcome))]

    def happens(self, handle, what):
        job = self.jobs[handle]
        match what:
            case "post":
                others = (each.in_flight for each in self.jobs.values())
                assert not any(intersect(job.todo, spans) for spans in others), "two reads into one token"
                limit = FAR if job.ticket.num_tokens >= 1000 else job.ticket.num_tokens
                assert not subtract(job.todo, (Span(0, limit),)), "more than its ticket has"
                job.in_flight, job.todo = job.todo, ()
            case "end" | "drain":
                writer = handle if what == "end" else -handle
                self.memory += [(span, writer) for span in job.in_flight]
                job.done, job.in_flight = normal((*job.done, *job.in_flight)), ()
                return self.go_on(handle) if what == "end" else self.over(handle)
            case "confirm":
                return self.over(handle)
            case "fail":
                self.num_failed += 1
                return self.fail(handle, GONE)
            case _:
                raise AssertionError(what)
        return []

    def carry_out(self, effects):
        for effect in self.loads.through(0.0, effects):
            assert isinstance(effect, Report)
            assert effect.handle == LOAD
            assert not any(job.in_flight for job in self.jobs.values()), (
                "reported while something is in flight"
            )
            assert all(job.is_over for job in self.jobs.values())
            if effect.failure is None:
                self.check()
            self.reports.append(effect)
            assert len(self.reports) == 1, "reported twice"

    def check(self):
        """Every token was written last by a fetch that was confirmed."""
        good = {handle for handle, job in self.jobs.items() if job.is_over and job.failure is None}
        missing = ALL
        for spans, writer in reversed(self.memory):
            latest = intersect(missing, (spans,))
            assert not latest or writer in good, "not confirmed"
            missing = subtract(missing, latest)
        assert not missing, "not read"


def play(choose, num_tokens, is_held=False, may_abort=False, most_failures=9):
    """One run; ``choose(n)`` says which of so many things comes next."""
    world = World()
    tickets = [ticket(number, num) for number, num in enumerate(num_tokens, 1)]
    if is_held:
        world.carry_out(world.loads.hold(0.0, LOAD, tickets))
    else:
        world.carry_out(world.loads.fetch(0.0, LOAD, fetch(), tickets))
    can_supply, is_aborted = is_held, False
    late: list[Effect] = []
    for _ in range(100):
        happenings = [(handle, what) for handle, job in world.jobs.items() for what in job.next()]
        if world.num_failed >= most_failures:
            happenings = [each for each in happenings if each[1] != "fail"]
        happenings += [(0, "supply")] * can_supply + [(0, "abort")] * (may_abort and not is_aborted)
        if world.reports or not (late or any(what not in ("fail", "abort") for _, what in happenings)):
            break
        handle, what = happenings[choose(len(happenings))] if happenings else (0, "wait")
        effects = late
        if what == "supply":
            can_supply = False
            effects = [*effects, *world.loads.supply(0.0, LOAD, fetch(), tickets)]
        elif what == "abort":
            is_aborted = True
            effects = [*effects, *world.loads.abort(0.0, LOAD)]
        elif handle:
            effects = [*effects, *world.happens(handle, what)]
        # The reader may tell of two things at once: the first of them is old news by then.
        is_late = bool(handle and not late and choose(2))
        late = effects if is_late else []
        world.carry_out([] if is_late else effects)
    (report,) = world.reports
    if not is_aborted and not world.num_failed:
        assert report.failure is None
    if report.failure is not None:
        assert world.num_failed or is_aborted
    return world


class Every:
    """Every sequence of choices, one after the other."""

    def __init__(self):
        self.taken, self.at = [], 0

    def __call__(self, num):
        if self.at == len(self.taken):
            self.taken.append([0, num])
        self.at += 1
        assert self.taken[self.at - 1][1] == num
        return self.taken[self.at - 1][0]

    def next(self):
        self.at = 0
        while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
            self.taken.pop()
        if self.taken:
            self.taken[-1][0] += 1
        return bool(self.taken)


def played_in_every_order(*num_tokens):
    """How many of all runs with at most one failure are good; and how many there are."""
    every, num_runs, num_good = Every(), 0, 0
    while num_runs == 0 or every.next():
        num_runs += 1
        num_good += play(every, num_tokens, most_failures=1).reports[0].failure is None
    return num_good, num_runs


def test_two_sources_in_every_order_of_events():
    num_good, num_runs = played_in_every_order(512, 1000)
    assert num_runs > num_good > num_runs / 10


def test_a_source_that_has_everything_stands_in_for_any_other_in_every_order_of_events():
    num_good, num_runs = played_in_every_order(1000, 1000)
    assert num_good == num_runs > 100


@given(st.data(), st.lists(st.sampled_from([256, 512, 700, 1000]), min_size=1, max_size=4), st.booleans())
def test_several_sources_in_any_order_of_events(data, num_tokens, is_held):
    play(lambda n: data.draw(st.integers(0, n - 1)), [*num_tokens, 1000], is_held, may_abort=True)


# -- one behaviour at a time ----------------------------------------------------------------------


def started(*num_tokens, **kwargs):
    world = World()
    world.carry_out(world.loads.fetch(0.0, LOAD, fetch(**kwargs), [ticket(n, num) for n, num in num_tokens]))
    return world


def tell(world, *happenings):
    for happening in happenings:
        world.carry_out(world.happens(*happening))
    return world


def todo(world):
    return [[(span.start, span.stop) for span in job.todo] for job in world.jobs.values()]


def test_the_first_ticket_that_has_a_token_gives_it():
    assert todo(started((1, 512), (2, 300), (3, 1000))) == [[(0, 512)], [], [(512, FAR)]]
    assert todo(started((1, 300), (2, 700), (3, 1200))) == [[(0, 256)], [(256, 512)], [(512, FAR)]]
    assert todo(started((1, 512), (2, 1000), num_kept=600)) == [[], [(600, FAR)]]


@pytest.mark.parametrize("num_tokens", [0, -1, -1000, -(2**63)])
def test_a_ticket_of_no_tokens_is_read_by_nobody(num_tokens):
    """A negative number once left the load without any report."""
    world = started((1, num_tokens), (2, 1000))
    assert todo(world) == [[], [(0, FAR)]]
    tell(world, (2, "post"), (2, "end"), (2, "confirm"))
    assert world.reports[0].failure is None


def test_a_state_comes_from_a_ticket_of_exactly_its_tokens():
    world = World()
    wanted = fetch(state=(Span(0, 1),))
    world.carry_out(world.loads.fetch(0.0, LOAD, wanted, [ticket(1, 1001), ticket(2, 1000)]))
    assert todo(world) == [[(0, 768)], [(768, FAR)]]
    parts = wanted.part((Span(0, 768),)), wanted.part((Span(768, FAR),))
    assert [part.need["state"] for part in parts] == [(), (Span(0, 1),)]


def test_without_a_ticket_that_reaches_the_end_nothing_is_read():
    world = started((1, 512), (2, 999))
    (report,) = world.reports
    assert (report.failure.code, report.record.engine) == (FailureCode.SRC_TABLES, "e1+e2")
    assert world.jobs == {}
    assert list(world.loads.through(0.0, [])) == []


def test_a_failed_interval_is_read_from_another_source():
    world = started((1, 512), (2, 700), (3, 1000))
    tell(world, (1, "post"), (2, "post"), (2, "fail"))
    assert todo(world) == [[], [], [(512, FAR)]], "what it may still write is not given to anybody"
    tell(world, (2, "drain"))
    assert todo(world)[2] == [(512, FAR)], "512 of its 700 tokens had been given by the first"


def test_a_load_that_no_other_source_can_complete_fails_closed():
    world = tell(started((1, 512), (2, 1000)), (1, "post"), (2, "post"), (2, "fail"))
    assert world.reports == [], "two reads are in flight"
    tell(world, (2, "drain"))
    assert world.reports == []
    tell(world, (1, "drain"))
    assert world.reports[0].failure == GONE


def test_nobody_is_confirmed_before_everything_is_in():
    """Whoever has given its part may still be needed for another."""
    world = tell(started((1, 512), (2, 1000)), (1, "post"), (2, "post"), (2, "end"))
    assert world.asked == []
    tell(world, (1, "fail"), (1, "drain"))
    assert world.asked == [("give", 2)]
    tell(world, (2, "post"), (2, "end"))
    assert world.asked == [("give", 2), ("finish", 2)]
    tell(world, (2, "confirm"))
    assert world.reports[0].failure is None


def test_a_source_that_does_not_confirm_is_stood_in_for():
    """Whoever is not needed holds its lease until all others are confirmed."""
    world = tell(started((1, 1000), (2, 1000)), (1, "post"), (1, "end"))
    assert world.asked == [("finish", 1)]
    tell(world, (1, "fail"))
    assert todo(world)[1] == [(0, FAR)]
    tell(world, (2, "post"), (2, "end"), (2, "confirm"))
    (report,) = world.reports
    assert report.failure is None
    assert (report.record.engine, report.record.detail) == ("e2", "e1: source-gone: killed")


def test_whoever_is_not_needed_is_given_up_in_the_end():
    world = tell(started((1, 1000), (2, 1000)), (1, "post"), (1, "end"), (1, "confirm"))
    assert world.asked == [("finish", 1), ("abort", 2)]
    record = world.reports[0].record
    assert (record.engine, record.num_bytes, record.detail) == ("e1", 1, "")


def test_tickets_that_cannot_be_held_are_reported_once_all_are_lost():
    world = World()
    tickets = [ticket(1, 1000), ticket(2, 1000)]
    world.loads.hold(0.0, LOAD, tickets)
    tell(world, (1, "fail"))
    assert world.reports == []
    tell(world, (2, "fail"))
    assert world.reports[0].failure == GONE


def test_only_the_tickets_that_are_held_can_be_fetched():
    world = World()
    world.loads.hold(0.0, LOAD, [ticket(1, 1000), ticket(2, 1000)])
    world.carry_out(world.loads.supply(0.0, LOAD, fetch(), [ticket(1, 1000), ticket(3, 1000)]))
    assert world.reports[0].record.outcome == FailureCode.TICKET


def test_parts_lie_side_by_side_and_clear_the_edges_of_a_block_once():
    whole = fetch(900, 10)
    parts = [whole.part(spans) for spans in ((Span(0, 256),), (Span(256, 512),), (Span(512, FAR),))]
    assert [part.need["full"] for part in parts] == [(Span(10, 256),), (Span(256, 512),), (Span(512, 900),)]
    assert [part.kept["full"] for part in parts] == [
        (Span(256, FAR),),
        (Span(0, 256), Span(512, FAR)),
        (Span(0, 512),),
    ]
    assert whole.part(ALL) is whole


@pytest.mark.parametrize(
    ("part", "tail", "are_all"), [(256, "partial", True), (192, "partial", False), (192, "complete", True)]
)
def test_groups_whose_partial_cells_cross_the_start_of_a_part_are_read_whole(
    monkeypatch, part, tail, are_all
):
    """Of two sources, each would have a piece of such a cell."""
    monkeypatch.setattr(fetch_job, "PART_TOKENS", part)
    described = describe(small("compressed"), Topology(block=384, blocks=100), "decode")
    manifest = replace(described, states=tuple(replace(state, tail=tail) for state in described.states))
    long_cells = {
        view.group
        for view in manifest.ranks[0].views
        if manifest.state_by_name[view.state].tokens_per_cell == 128
    }
    tables = {group.name for group in manifest.groups if not group.window}
    assert long_cells < tables
    assert fetch_job.groups_in_parts(manifest, 0) == (tables if are_all else tables - long_cells)
