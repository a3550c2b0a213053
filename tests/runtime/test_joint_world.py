"""Loads from several sources over the real machines: one reader, several authorities, and a bad network.

Messages are lost, delayed, reordered and repeated; reads end well, badly, late, or after they were given up;
leases grow, are revoked, withdrawn and lost; sources stop answering. A load ends once, and what is good was
read from blocks that still were what their ticket says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest

from kvferry.core.request import BlockTable
from kvferry.core.span import MAX_STOP, Span, Spans, intersect, subtract
from kvferry.runtime import (
    Authority,
    Failure,
    FailureCode,
    Fetch,
    Offers,
    Reader,
    Released,
    Report,
    Timing,
    fetch_job,
    joint_loads,
)
from kvferry.runtime.joint_loads import JointLoads
from kvferry.runtime.values import Build, Effect, FindRanks, Merge, PostReads, Select, Send
from kvferry.wire.messages import (
    PROTOCOL,
    Join,
    RankDescription,
    decode_from_authority,
    decode_to_authority,
    encode,
)
from kvferry.wire.ticket import NOT_SAID, Ticket
from tests.runtime.test_reader import selection

NUM_RUNS = 500
NUM_TOKENS = 20
LOAD = 10_000
LONG = 40
"""Seconds until reads that are stuck come to an end; they are quarantined before."""
TIMING = Timing(lease=10.0, meet=5.0, read=30.0, retry=0.5, life=100.0)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    for module in (fetch_job, joint_loads):
        monkeypatch.setattr(module, "PART_TOKENS", 4)


class Source:
    """An engine that offers the first tokens of one request, perhaps while it computes them."""

    def __init__(self, number, num_tokens, num_written):
        self.address, self.num_tokens = f"tcp://{number}", num_tokens
        self.book = Offers(f"e{number}", 1, b"key %d" % number, self.address, 1000 * int(TIMING.lease))
        self.authority = Authority(self.book, 1, TIMING)
        join = Join(PROTOCOL, f"e{number}", 0, "memory", b"", RankDescription(b"", (), b""), rank_key=b"")
        (merge,) = self.authority.receive(0.0, "rank", join)
        assert isinstance(merge, Merge)
        self.authority.merged(0.0, b"outline")
        self.is_growing, self.num_written = num_written < num_tokens, num_written
        complete = num_written if self.is_growing else NOT_SAID
        self.ticket = self.book.make("r", self.tables, num_tokens, complete=complete)
        self.authority.offer(0.0, self.ticket, "transfer" if self.is_growing else "")
        self.first_ticket = self.ticket
        self.is_owned, self.is_silent = True, False

    @property
    def tables(self):
        return {"full": BlockTable.of([1])}

    def grow(self, now, num_more):
        """A step has ended on the device; its last one closes the lease."""
        self.num_written = min(self.num_written + num_more, self.num_tokens)
        self.is_growing = self.num_written < self.num_tokens
        complete = self.num_written if self.is_growing else NOT_SAID
        self.ticket = self.book.stage(self.ticket, self.tables, complete)
        return self.authority.grow(now, self.ticket)

    def revoke(self, now):
        """The engine gives the blocks away, and asks nobody."""
        self.is_owned = self.is_growing = False
        return self.authority.revoke(now, "r")


@dataclass(eq=False)
class Read:
    handle: int
    tokens: Spans
    source: Source
    has_window: bool
    """Whether it is the one with the end."""
    num_parts: int
    """The read, and the zeroing that goes before it."""
    is_good: bool = True
    is_stuck: bool = False


@dataclass(eq=False)
class Write:
    handle: int
    tokens: Spans
    has_window: bool
    is_right: bool


@dataclass
class World:
    chance: Random
    sources: list[Source]
    now: float = 0.0
    packets: list[tuple[str, str, bytes]] = field(default_factory=list)
    todo: list[FindRanks | Build | Select] = field(default_factory=list)
    parts: dict[int, Fetch] = field(default_factory=dict)
    reads: dict[int, Read] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    good: set[int] = field(default_factory=set)
    reports: list[Report] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    is_held: bool = False

    def __post_init__(self):
        self.reader = Reader("A", 0, 1, TIMING, key=bytes(32))
        self.loads = JointLoads(self.reader, count(1))

    @property
    def tickets(self) -> list[Ticket]:
        return [source.first_ticket for source in self.sources]

    @property
    def fetch(self) -> Fetch:
        need = {"full": (Span(0, NUM_TOKENS),), "window": (Span(12, NUM_TOKENS),)}
        full = Span(NUM_TOKENS, MAX_STOP)
        return Fetch(self.tickets[0], {}, need, early=frozenset({"full"}), full=full)

    def at(self, address) -> Source:
        return next(source for source in self.sources if source.address == address)

    # -- effects ----------------------------------------------------------------------------------

    def of_source(self, source, effects):
        for effect in effects:
            if isinstance(effect, Send) and effect.to != "rank":
                self.packets.append((effect.to, source.address, encode(effect.message)))
            elif isinstance(effect, Released):
                source.is_owned = source.is_growing = False

    def of_reader(self, effects: list[Effect]):
        for effect in effects:
            if isinstance(effect, Report) and effect.failure is None:
                self.good.add(effect.handle)
        for effect in self.loads.through(self.now, effects):
            match effect:
                case Send():
                    self.packets.append((effect.to, "reader", encode(effect.message)))
                case FindRanks() | Build() | Select():
                    self.todo.append(effect)
                case PostReads():
                    self.post(effect)
                case Report():
                    self.on_report(effect)
                case _:
                    pass

    def post(self, post):
        handle = self.reader.fetches.transfers[post.clear]
        part, source = self.parts.pop(handle), self.at(post.peer.authority)
        tokens = part.need["full"]
        assert not subtract(tokens, (Span(0, source.num_written),)), "read beyond the watermark"
        others = [read.tokens for read in self.reads.values()]
        assert not any(intersect(tokens, spans) for spans in others), "two reads into one token"
        self.seen["early"] += source.is_growing
        read = Read(handle, tokens, source, bool(part.need["window"]), 1 + len(post.reads))
        self.reads |= dict.fromkeys((post.clear, *post.reads), read)

    def on_report(self, report):
        assert report.handle == LOAD
        self.reports.append(report)
        assert len(self.reports) == 1, "reported twice"
        assert not self.reads, "reported while a read was under way"
        if report.failure is not None:
            return
        missing: Spans = (Span(0, NUM_TOKENS),)
        for write in reversed(self.writes):
            if latest := intersect(missing, write.tokens):
                assert write.is_right, f"{latest}: garbage was reported as good"
                assert write.handle in self.good, f"{latest}: was not confirmed"
                missing = subtract(missing, latest)
        assert not missing, "not read"
        window = [write for write in self.writes if write.has_window][-1]
        assert window.is_right, "garbage was reported as good"
        assert window.handle in self.good, "was not confirmed"
        self.seen["joint"] += len({write.handle for write in self.writes} & self.good) > 1
        self.seen["stood in"] += not {write.handle for write in self.writes} <= self.good

    # -- what happens -----------------------------------------------------------------------------

    def start(self):
        self.is_held = self.chance.random() < 0.3
        if self.is_held:
            self.of_reader(self.loads.hold(self.now, LOAD, self.tickets))
        else:
            self.of_reader(self.loads.fetch(self.now, LOAD, self.fetch, self.tickets))

    def supply(self):
        if self.is_held:
            self.is_held = False
            self.of_reader(self.loads.supply(self.now, LOAD, self.fetch, self.tickets))

    def deliver(self, *, may_harm):
        """One message, from anywhere in the queue; perhaps lost, perhaps not the last time."""
        if not self.packets:
            return
        at = self.chance.randrange(min(4, len(self.packets))) if may_harm else 0
        fate = self.chance.random() if may_harm else 1.0
        to, reply_to, data = self.packets[at] if 0.05 < fate < 0.15 else self.packets.pop(at)
        if fate < 0.05:
            return
        if to == "reader":
            self.of_reader(self.reader.receive(self.now, reply_to, decode_from_authority(data)))
        elif to.startswith("tcp") and not (source := self.at(to)).is_silent:
            self.of_source(source, source.authority.receive(self.now, reply_to, decode_to_authority(data)))

    def work(self, *, may_harm):
        if not self.todo:
            return
        effect = self.todo.pop(0)
        is_bad = may_harm and self.chance.random() < 0.1
        failure = Failure(FailureCode.SRC_TABLES, "a lie")
        match effect:
            case FindRanks():
                self.of_reader(self.reader.meetings.found(self.now, effect.peer, (0,)))
            case Build():
                self.of_reader(self.reader.built(self.now, effect.peer))
            case Select() if is_bad:
                self.of_reader(self.reader.not_selected(self.now, effect.handle, failure))
            case Select():
                self.parts[effect.handle] = effect.fetch
                self.of_reader(self.reader.selected(self.now, effect.handle, selection(1)))

    def end_read(self, *, may_harm):
        """One read ends, or its zeroing; perhaps badly, perhaps not for a long time."""
        living = [transfer for transfer, read in self.reads.items() if not read.is_stuck]
        if not living:
            return
        transfer = self.chance.choice(living)
        fate = self.chance.random() if may_harm else 1.0
        if fate < 0.05:
            self.reads[transfer].is_stuck = True
            return
        error = "cable cut" if fate < 0.15 else ""
        read = self.reads.pop(transfer)
        read.is_good &= not error
        read.num_parts -= 1
        if not read.num_parts:  # until then it may have written anything
            is_right = read.is_good and read.source.is_owned
            self.writes.append(Write(read.handle, read.tokens, read.has_window, is_right))
        self.of_reader(self.reader.fetches.ended(self.now, transfer, error))

    def tick(self, seconds):
        self.now += seconds
        for source in self.sources:
            self.of_source(source, source.authority.tick(self.now))
        self.of_reader(self.reader.tick(self.now))

    def of_engine(self):
        """Something happens to a source."""
        source, what = self.chance.choice(self.sources), self.chance.random()
        if source.is_growing and what < 0.6:
            self.of_source(source, source.grow(self.now, self.chance.randint(1, 9)))
        elif source.is_growing and what < 0.68:
            self.of_source(source, source.revoke(self.now))
            self.seen["revoked"] += 1
        elif what < 0.7:
            self.of_source(source, source.authority.withdraw(self.now, "r"))
        elif what < 0.72:
            source.is_silent = True
        elif what < 0.73:
            self.of_reader(self.loads.abort(self.now, LOAD))

    def live(self, num_events):
        for _ in range(num_events):
            what = self.chance.random()
            if what < 0.55:
                self.deliver(may_harm=True)
            elif what < 0.75:
                self.work(may_harm=True)
            elif what < 0.9:
                self.end_read(may_harm=True)
            elif what < 0.95:
                self.of_engine()
            elif what < 0.97:
                self.supply()
            else:
                self.tick(self.chance.choice([0.1, 0.5, 0.5, 3.0]))

    def calm(self):
        """Nothing goes wrong any more, and at last what was stuck ends: everything comes to an end."""
        self.supply()
        for seconds in range(200):
            for _ in range(1000):
                if not (self.packets or self.todo):
                    break
                self.deliver(may_harm=False)
                self.work(may_harm=False)
            if seconds > LONG:
                for read in self.reads.values():
                    read.is_stuck = False
            for _ in range(len(self.reads)):
                self.end_read(may_harm=False)
            for source in self.sources:
                if source.is_growing and self.chance.random() < 0.3:
                    self.of_source(source, source.grow(self.now, self.chance.randint(1, NUM_TOKENS)))
            self.tick(1.0)
            self.seen["quarantined"] += self.reader.num_quarantined > 0 and seconds == LONG
            if self.is_over:
                return

    @property
    def is_over(self):
        fetches, has_leases = self.reader.fetches, any(s.authority.num_leases for s in self.sources)
        return bool(self.reports) and not (has_leases or fetches.by_handle or len(fetches.settlements))


def lived(seed) -> World:
    chance = Random(seed)
    sources = []
    for number in range(chance.randint(2, 4)):
        num_tokens = chance.choice([NUM_TOKENS, NUM_TOKENS, 13, 8])
        num_written = chance.choice([num_tokens, chance.randrange(num_tokens)])
        sources.append(Source(number, num_tokens, num_written))
    world = World(chance, sources)
    world.start()
    world.live(chance.choice([0, 40, 150]))
    world.calm()
    assert len(world.reports) == 1, "the load was never reported"
    assert world.is_over, "something is left"
    assert not world.loads._loads
    assert not world.loads._by_share
    assert not world.reader.fetches.transfers
    return world


def test_loads_from_several_sources_end_once_and_what_is_good_is_right():
    seen = Counter[str]()
    for seed in range(NUM_RUNS):
        try:
            world = lived(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen += world.seen
        seen["good"] += world.reports[0].failure is None
    print(dict(seen))
    assert seen["good"] > NUM_RUNS / 5
    assert NUM_RUNS - seen["good"] > NUM_RUNS / 10
    for what in ("joint", "stood in", "early", "revoked", "quarantined"):
        assert seen[what] > NUM_RUNS / 100, what
