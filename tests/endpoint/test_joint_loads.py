"""One request from several engines of this process, each with an authority of its own."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry import SpecError
from kvferry.core.request import need_of
from kvferry.core.sample import sample_request
from kvferry.core.span import Span
from kvferry.core.state import Addressing
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.endpoint.meeting import remote_name
from kvferry.models import Topology, describe
from kvferry.pattern import check_rank, fill_rank
from kvferry.runtime import FailureCode, Timing
from kvferry.runtime.failure import NO_LAST_TOKEN
from kvferry.runtime.values import Peer
from kvferry.testing.small import small
from kvferry.transport.memory import MemoryTransport
from tests.endpoint.conftest import with_memory
from tests.endpoint.test_destination import until
from tests.support.faults import Faults, FaultyHub

NUM_TOKENS = 1000
HASTY = Timing(meet=1.0, retry=0.05, reconnect=0.2)


class Source:
    """An engine that holds the first tokens of the request, in blocks of its own size."""

    def __init__(self, world, number, num_tokens, timing=None, block=16):
        layout = Topology(block=block, blocks=1000)
        self.manifest, self.memory = with_memory(describe(small(world.model), layout, f"prefill-{number}"))
        self.num_tokens = num_tokens
        self.tables = sample_request(self.manifest, world.dst, num_tokens).src
        held = {group.name: (Span(0, num_tokens),) for group in self.manifest.groups}
        fill_rank(self.memory, self.manifest, 0, self.tables, held)
        if num_tokens != NUM_TOKENS:  # the state behind other tokens is another state
            states = [group.name for group in self.manifest.groups if group.addressing is Addressing.SLOT]
            fill_rank(
                self.memory, self.manifest, 0, self.tables, dict.fromkeys(states, (Span(0, 1),)), "older"
            )
        self.engine = SourceEngine(f"prefill-{number}", 1, timing=timing)
        self.rank = SourceRank(self.engine.invitation, self.manifest, MemoryTransport(world.hub))
        self.released = []
        self.is_open = True

    def offer(self, name="request", tables=None):
        return self.engine.offer(name, tables or self.tables, self.num_tokens)

    def releases(self):
        self.released += [each.reason for each in self.engine.poll()]
        return self.released

    def close(self):
        if self.is_open:
            self.rank.close()
            self.engine.close()
        self.is_open = False


class World:
    """A destination, and sources that hold so many first tokens of its request."""

    def __init__(self, *num_tokens, model="gqa", timings=(None,) * 9, **kwargs):
        self.model, self.faults = model, Faults()
        self.hub = FaultyHub(self.faults)
        scale = 16 if model == "compressed" else 1  # it has cells of 128 tokens
        layout = Topology(block=24 * scale, blocks=400)
        self.dst, self.memory = with_memory(describe(small(model), layout, "decode"))
        for region in self.memory.values():
            region[:] = 0xA5
        blocks = [size * scale for size in (16, 32, 8, 48)]
        self.sources = [
            Source(self, number, num, timing, block)
            for number, (num, timing, block) in enumerate(zip(num_tokens, timings, blocks, strict=False), 1)
        ]
        self.request = sample_request(self.sources[0].manifest, self.dst, NUM_TOKENS)
        self.destination = Destination(self.dst, 0, MemoryTransport(self.hub), **kwargs)

    def tickets(self):
        return [source.offer() for source in self.sources]

    def fetch(self, tickets, **kwargs):
        return self.destination.fetch(tickets, self.request.dst, self.request.need, **kwargs)

    def report(self, handle):
        (report,) = until(self.destination.poll)
        assert report.handle == handle
        assert self.destination.status()["in_flight"] == 0
        return report

    def check(self):
        names = {state.name: state.name for state in self.dst.states}
        found = check_rank(self.memory, self.dst, 0, self.request.dst, self.request.need, names)
        assert found.num_cells > 0
        assert found.num_wrong == 0, str(found.first)

    def wait_under_way(self, *far_ends):
        """Until reads from these are with the fabric: from then on they cannot be cancelled."""
        until(lambda: set(far_ends) <= {peer for peer, _ in self.faults._polls})

    def wait_part(self):
        """Until some tokens of a growing offer are here, and more are awaited."""
        until(lambda: any(job.done for job in [*self.destination._reader.fetches] if job.ticket.is_growing))

    def far_end(self, ticket):
        """What the transport calls the rank that a ticket's blocks are read from."""
        return remote_name(Peer(ticket.engine, ticket.generation, ticket.authority), 0)

    def close(self):
        self.destination.close()
        for source in self.sources:
            source.close()


@pytest.fixture
def world_of():
    worlds = []

    def make(*num_tokens, **kwargs):
        worlds.append(World(*num_tokens, **kwargs))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.mark.parametrize("model", ["gqa", "mla", "window", "gdn-gqa", "mamba2-gqa", "compressed"])
def test_each_token_is_read_from_the_first_ticket_that_has_it(world_of, model):
    world = world_of(300, 700, NUM_TOKENS, model=model, digest_every=1)
    record = world.report(world.fetch(world.tickets())).record
    world.check()
    assert (record.outcome, record.digest, record.detail) == ("read", "equal", "")
    assert (record.engine, record.num_sources) == ("prefill-1+prefill-2+prefill-3", 3)
    for source in world.sources:
        until(source.releases)
        assert source.released == ["read"]


def test_a_prefix_that_is_here_is_not_read_and_a_source_for_it_is_given_up(world_of):
    world = world_of(500, NUM_TOKENS)
    group = world.dst.groups[0]
    num_kept = 600  # a whole number of blocks
    before = {name: region.copy() for name, region in world.memory.items()}
    kept = {group.name: (Span(0, num_kept),)}
    need = {group.name: need_of(group, NUM_TOKENS, num_kept)}
    world.destination.fetch(world.tickets(), world.request.dst, need, kept=kept)
    record = until(world.destination.poll)[0].record
    assert (record.outcome, record.engine) == ("read", "prefill-2")
    assert [until(source.releases) for source in world.sources] == [["declined"], ["read"]]
    assert any((region != before[name]).any() for name, region in world.memory.items())


def killed_while_it_is_read(world, tickets):
    world.faults.delay(1 << 30, world.far_end(tickets[1]))
    handle = world.fetch(tickets)
    world.wait_under_way(world.far_end(tickets[1]))
    world.sources[1].close()
    return handle


def killed_when_it_has_been_read(world, tickets):
    """What it gave is here; but nobody can say that it counts."""
    world.faults.delay(1 << 30, world.far_end(tickets[0]))
    handle = world.fetch(tickets)
    until(lambda: world.destination.status()["fetches"] == {"reading": 1, "holding": 2})
    world.sources[1].close()
    until(lambda: world.destination.status()["fetches"] == {"reading": 1, "holding": 1})
    world.faults.calm()
    return handle


def cut_off(world, tickets):
    world.faults.fail("cable cut", num_runs=3, peer=world.far_end(tickets[1]))
    return world.fetch(tickets)


def withdrawn(world, tickets):
    world.sources[1].engine.withdraw("request")
    until(world.sources[1].releases)
    return world.fetch(tickets)


def expired(world, tickets):
    until(world.sources[1].releases)
    assert world.sources[1].released == ["expired"]
    return world.fetch(tickets)


def silent(world, tickets):
    """Something that accepts connections, and never says a word, as a stopped process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        handle = world.fetch([tickets[0], msgspec.structs.replace(tickets[1], authority=address), tickets[2]])
        until(lambda: world.destination.status()["fetches"].get("leasing", 0) == 0)
    return handle


def lying_about_its_tokens(world, tickets):
    """It says that it has 700 tokens. It lists the blocks of 300."""
    tables = sample_request(world.sources[1].manifest, world.dst, 300).src
    return world.fetch([tickets[0], world.sources[1].offer("a lie", tables), tickets[2]])


def forged(world, tickets):
    return world.fetch([tickets[0], msgspec.structs.replace(tickets[1], request_id="another"), tickets[2]])


def spoiled(world, tickets):
    """The bytes that come are not those that it has."""
    world.faults.spoil(world.far_end(tickets[1]))
    return world.fetch(tickets)


TROUBLES = {
    killed_while_it_is_read: "transport",
    killed_when_it_has_been_read: "source-gone",
    cut_off: "transport: cable cut",
    withdrawn: "ended",
    expired: "ended",
    silent: "no-answer",
    lying_about_its_tokens: "src-tables",
    forged: "forged",
}


@pytest.mark.parametrize(("trouble", "why"), TROUBLES.items(), ids=[trouble.__name__ for trouble in TROUBLES])
def test_of_three_sources_the_middle_one_fails(world_of, caplog, trouble, why):
    timing = Timing(lease=0.3, retry=0.05) if trouble is expired else None
    world = world_of(300, 700, NUM_TOKENS, timing=HASTY, timings=(None, timing, None))
    with caplog.at_level(logging.INFO, "kvferry"):
        report = world.report(trouble(world, world.tickets()))
    assert report.failure is None
    world.check()
    assert report.record.engine == "prefill-1+prefill-3"
    assert report.record.detail.startswith(f"prefill-2: {why}")
    assert any(f"; without prefill-2: {why}" in line for line in caplog.messages)
    for source in (world.sources[0], world.sources[2]):
        until(source.releases)
        assert source.released == ["read"]


@pytest.mark.parametrize("trouble", [cut_off, withdrawn, lying_about_its_tokens, spoiled])
def test_of_two_sources_the_one_that_has_the_end_fails(world_of, trouble):
    """Nobody has the rest: all of it is computed."""
    world = world_of(300, 700, digest_every=int(trouble is spoiled))
    world.request = sample_request(world.sources[0].manifest, world.dst, 700)
    tickets = world.tickets()
    report = world.report(trouble(world, [*tickets, tickets[0]]))
    assert report.failure is not None
    assert report.record.outcome == report.failure.code.value
    assert report.record.engine == "prefill-1+prefill-2"
    until(world.sources[0].releases)


def test_a_load_is_not_reported_while_another_read_is_in_flight(world_of):
    """Law 6: the end of the load has failed; what the first source may still write must come first."""
    world = world_of(300, NUM_TOKENS)
    tickets = world.tickets()
    first, last = map(world.far_end, tickets)
    for each in (first, last):
        world.faults.stall(each)
    handle = world.fetch(tickets)
    world.wait_under_way(first, last)
    world.faults.fail("cable cut", peer=last)
    world.faults.resume(last)
    until(lambda: world.destination.status()["fetches"] == {"failing": 1})
    time.sleep(0.3)
    assert world.destination.poll() == []
    world.faults.calm()
    assert world.report(handle).failure is not None


def test_what_may_still_be_written_is_not_read_from_another_source(world_of):
    """A stopped source: late bytes of it would overwrite those of another."""
    world = world_of(300, NUM_TOKENS, NUM_TOKENS, timing=Timing(read=0.3, retry=0.05))
    tickets = world.tickets()
    world.faults.stall(world.far_end(tickets[1]))
    handle = world.fetch(tickets)
    until(lambda: world.destination.status()["quarantined"] == 1)
    time.sleep(0.2)
    assert world.destination.poll() == []
    world.faults.calm()
    report = world.report(handle)
    assert (report.failure, report.record.engine) == (None, "prefill-1+prefill-3")
    world.check()


def test_tickets_are_held_together_before_it_is_known_where_the_bytes_go(world_of):
    world = world_of(300, 700, NUM_TOKENS)
    tickets = world.tickets()
    handle = world.destination.hold(tickets)
    until(lambda: world.destination.status()["fetches"] == {"holding": 3})
    world.sources[1].close()
    until(lambda: world.destination.status()["fetches"] == {"holding": 2})
    assert world.fetch(tickets, held=handle) == handle
    report = world.report(handle)
    assert (report.failure, report.record.engine) == (None, "prefill-1+prefill-3")
    world.check()


def test_a_load_that_is_given_up_frees_the_blocks_of_all_sources(world_of):
    world = world_of(300, NUM_TOKENS)
    tickets = world.tickets()
    world.faults.delay(1 << 30)
    handle = world.fetch(tickets)
    until(lambda: world.destination.status()["in_flight"] == 2)
    world.destination.abort(handle)
    assert world.report(handle).record.outcome == FailureCode.ABORTED
    assert [until(source.releases) for source in world.sources] == [["declined"], ["declined"]]
    held = world.destination.hold([source.offer("again") for source in world.sources])
    world.destination.abort(held)
    assert world.report(held).record.outcome == FailureCode.ABORTED


def test_a_ticket_that_may_not_be_used_is_left_out(world_of):
    world = world_of(300, NUM_TOKENS)
    first, last = world.tickets()
    stranger = msgspec.structs.replace(first, host="another")
    for tickets in ([stranger, last], [stranger, stranger, last]):
        held = world.destination.hold(tickets)
        assert world.report(world.fetch(tickets, held=held)).record.engine == "prefill-2"
        last = world.sources[1].offer(f"after {len(tickets)}")
    assert world.destination.figures["kvferry_rejected_tickets", "elsewhere"] == 3
    assert world.report(world.fetch([stranger, stranger])).record.outcome == "elsewhere"


SHORT, EXACT, LONG = (NUM_TOKENS - 1, False), (NUM_TOKENS, False), (NUM_TOKENS + 10, False)
STRANGER = NUM_TOKENS, True
"""Tickets: their numbers of tokens, and whether the destination refuses them at once."""


def without_full(need):
    return {name: spans if spans[0].start else () for name, spans in need.items()}


def only_states(need):
    return {name: spans if spans[-1].stop == 1 else () for name, spans in need.items()}


def in_two_intervals(need):
    return need | {name: (Span(0, 500), Span(600, NUM_TOKENS)) for name in need if need[name][-1].stop > 1}


@pytest.mark.parametrize("is_held", [False, True], ids=["fetched", "held first"])
@pytest.mark.parametrize(
    ("model", "offers", "change"),
    [
        ("gqa", [SHORT], None),
        ("gqa", [SHORT, STRANGER], None),
        ("gqa", [SHORT, SHORT], in_two_intervals),
        ("window", [SHORT, SHORT], without_full),
        ("mamba2-gqa", [LONG], None),
        ("mamba2-gqa", [LONG, STRANGER], None),
        ("mamba2-gqa", [LONG, SHORT], None),
        ("mamba2-gqa", [LONG, EXACT], only_states),  # nothing says which
    ],
)
def test_a_load_is_of_the_needed_tokens_whatever_tickets_are_left(world_of, model, offers, change, is_held):
    """None of these tickets has the last token, and a state of exactly these tokens."""
    world = world_of(*(num_tokens for num_tokens, _ in offers), model=model)
    tickets = [
        msgspec.structs.replace(ticket, host="another") if is_refused else ticket
        for ticket, (_, is_refused) in zip(world.tickets(), offers, strict=True)
    ]
    need = change(world.request.need) if change else world.request.need
    held = world.destination.hold(tickets) if is_held else None
    handle = world.destination.fetch(tickets, world.request.dst, need, held=held)
    assert world.report(handle).failure == NO_LAST_TOKEN
    assert all((region == 0xA5).all() for region in world.memory.values())


def test_a_state_of_more_tokens_is_passed_over_for_that_of_these(world_of):
    """Also if the other groups need two intervals, or nothing."""
    world = world_of(NUM_TOKENS + 10, NUM_TOKENS, model="mamba2-gqa")
    need = in_two_intervals(world.request.need)
    kept: dict[str, Any] = {}
    world.request = replace(world.request, need=need)
    for number in range(2):
        tickets = [source.offer(f"{number}") for source in world.sources]
        report = world.report(world.destination.fetch(tickets, world.request.dst, need, kept=kept))
        assert (report.failure, report.record.engine) == (None, "prefill-2")
        need = only_states(world.request.need)
        kept = {
            name: (Span(0, NUM_TOKENS),)
            for name, group in world.dst.group_by_name.items()
            if group.addressing is Addressing.TABLE
        }
    world.check()


def test_a_state_of_as_many_tokens_as_are_said(world_of):
    """A model of states only has no groups that tell the number of tokens."""
    world = world_of(NUM_TOKENS + 10, NUM_TOKENS, model="mamba2-gqa")
    need = only_states(world.request.need)
    world.request = replace(world.request, need=need)
    handle = world.destination.fetch(world.tickets(), world.request.dst, need, num_tokens=NUM_TOKENS)
    report = world.report(handle)
    assert (report.failure, report.record.engine) == (None, "prefill-2")
    world.check()


def test_a_gap_is_filled_from_a_ticket_that_ends_behind_it(world_of):
    """What is kept behind it is not the ticket's."""
    world = world_of(600)
    need, kept = {}, {}
    for name in world.request.need:
        need[name], kept[name] = (Span(100, 500),), (Span(0, 100), Span(500, NUM_TOKENS))
    world.request = replace(world.request, need=need, kept=kept)
    handle = world.destination.fetch(world.tickets()[0], world.request.dst, need, kept=kept)
    assert world.report(handle).failure is None
    world.check()


def test_a_fetch_keeps_what_it_was_given(world_of):
    """An engine may fill the same dictionaries for its next request at once."""
    world = world_of(NUM_TOKENS)
    need, tables = dict(world.request.need), dict(world.request.dst)
    handle = world.destination.fetch(world.tickets()[0], tables, need)
    tables.clear()
    need.clear()
    assert world.report(handle).failure is None
    world.check()


WRONG: dict[str, dict[str, Any]] = {
    "dst table of group .* expected a BlockTable": {"tables": [1, 2]},
    "need of group .* expected a list of spans, got Span": {"need": Span(0, 9)},
    "need of group .* expected a list of spans, got .*9": {"need": ((0, 9),)},
    "kept of group .* expected a list of spans": {"kept": None},
    "slack must be one of clear, leave, got 'bogus'": {"slack": "bogus"},
}


@pytest.mark.parametrize(
    ("message", "what"), WRONG.items(), ids=[next(iter(what)) for what in WRONG.values()]
)
def test_a_fetch_of_wrong_types_is_refused_and_others_go_on(world_of, message, what):
    world = world_of(NUM_TOKENS)
    group = world.dst.groups[0].name
    arguments: dict[str, Any] = {
        "tables": dict(world.request.dst),
        "need": dict(world.request.need),
        "kept": {},
        "slack": "clear",
    }
    wrong = {
        name: value if isinstance(value, str) else {**arguments[name], group: value}
        for name, value in what.items()
    }
    (ticket,) = world.tickets()
    with pytest.raises(SpecError, match=message):
        world.destination.fetch(ticket, **{**arguments, **wrong})
    assert world.report(world.destination.fetch(ticket, **arguments)).failure is None
    world.check()


def test_an_unexpected_error_concerns_one_load(world_of, monkeypatch):
    """Of two that wait for one first contact, and so are continued by one event."""
    world = world_of(NUM_TOKENS, timing=HASTY)
    start, broken = world.destination._selecting.start, list[int]()

    def start_all_but_the_first(effect, met):
        if not broken:
            broken.append(effect.handle)
            raise RuntimeError("broken")
        start(effect, met)

    monkeypatch.setattr(world.destination._selecting, "start", start_all_but_the_first)
    handles = [world.fetch(world.sources[0].offer(name)) for name in ("first", "second")]
    reports = {}

    def all_reported():
        reports.update({report.handle: report for report in world.destination.poll()})
        return len(reports) == len(handles)

    until(all_reported)
    assert [reports[each].record.outcome for each in handles if each not in broken] == ["read"]
    assert [reports[each].record.outcome for each in broken] == ["overdue"]


def test_a_growing_ticket_is_read_in_parts_while_another_source_gives_the_rest(world_of):
    """Its first tokens come while it computes."""
    world = world_of(512, NUM_TOKENS, timing=HASTY)
    source = world.sources[0]
    growing = source.engine.open("growing", {}, 512, transfer="t" * 32)
    handle = world.fetch([growing.ticket, world.sources[1].offer()])
    until(lambda: world.destination.status()["fetches"] == {"holding": 2})
    growing.grow(source.tables, 256)
    world.wait_part()
    growing.close(source.tables)
    report = world.report(handle)
    assert (report.failure, report.record.engine) == (None, "prefill-1+prefill-2")
    assert 0 < report.record.early_bytes < report.record.num_bytes
    world.check()


@pytest.mark.parametrize("model", ["gqa", "window", "mamba2-gqa"])
def test_a_growing_ticket_alone_is_read_in_parts(world_of, model):
    world = world_of(NUM_TOKENS, model=model, digest_every=1)
    source = world.sources[0]
    growing = source.engine.open("growing", {}, NUM_TOKENS, transfer="t" * 32)
    handle = world.fetch(growing.ticket)
    for num_complete in (100, 300, 800):
        growing.grow(source.tables, num_complete)
    world.wait_part()
    growing.close(source.tables)
    record = world.report(handle).record
    assert (record.outcome, record.digest) == ("read", "equal")
    assert 0 < record.early_bytes < record.num_bytes
    world.check()


def test_what_is_no_ticket_is_refused_by_name(world_of):
    world = world_of(NUM_TOKENS)
    with pytest.raises(SpecError, match="expected a Ticket, got none"):
        world.fetch([])
    with pytest.raises(SpecError, match="expected a Ticket, got str"):
        world.fetch([*world.tickets(), "a ticket"])
