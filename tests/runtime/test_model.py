"""The state machines against a world that does its worst: a model of DESIGN's laws 5 to 8.

One source engine (an authority, ranks, a pool whose released blocks are overwritten at once), up to
two destination engines of up to three ranks, a network that delays, reorders, drops and repeats, a
transport whose reads end well, badly, late or never, planning that is slow or fails, restarts on both
sides, forgers who know every name, clocks that agree on nothing and may stop, or run too fast.
``KVFERRY_MODEL_EXAMPLES`` sets how many such lives are lived.
"""

import os
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.core.digest import DigestDifference
from kvferry.core.request import BlockTable
from kvferry.core.runs import NO_RUNS, Runs
from kvferry.core.select import Selection
from kvferry.core.span import Span
from kvferry.runtime import (
    Authority,
    Failure,
    FailureCode,
    Fetch,
    Member,
    Offers,
    Reader,
    Released,
    Report,
    Timing,
    fetch_job,
)
from kvferry.runtime.claims import ClaimEnd, Claimer
from kvferry.runtime.fetch_job import Phase
from kvferry.runtime.member import Membership
from kvferry.runtime.values import (
    AllRead,
    AnswerDigest,
    Build,
    Cancel,
    Drop,
    Effect,
    FindRanks,
    HangUp,
    LookUp,
    MemberEffect,
    Merge,
    Peer,
    PostReads,
    Select,
    Send,
    Show,
    SourceEffect,
    Strike,
    TakeDigest,
    Wanted,
)
from kvferry.wire.messages import (
    PROTOCOL,
    TOKEN_BYTES,
    Acquire,
    Claimed,
    DescribeRanks,
    DigestResult,
    FindTransfer,
    Join,
    Outcome,
    RankDescription,
    ReleaseAck,
    Renew,
    Settle,
    Watch,
    decode_from_authority,
    decode_to_authority,
    encode,
)
from kvferry.wire.ticket import NOT_SAID, Ticket

TIMING = Timing(lease=9.0, meet=4.0, read=20.0, retry=0.5)
ADDRESS = "source"
CLAIMER = "a scheduler that claims"
NUM_SRC_RANKS = 2
NUM_TOKENS, PART_TOKENS = 16, 4
RIGHT_SUMS = b"sums"
ONE_RUN = Runs(*(np.array([n], np.int64) for n in (0, 0, 8)))
"""Times, a third of a lease included, are multiples of 1/4, and offsets are whole: floats are exact here."""
FORGERIES = {
    "engine": "other",
    "generation": 99,
    "ticket_id": 77,
    "request_id": "forged",
    "authority": "nowhere",
    "num_tokens": 999,
    "tables": {},
    "lease_ms": 2**60,
    "digest": b"forged",
    "mac": b"forged",
}
index = st.integers(0, 63)
seldom = st.integers(0, 5).map(lambda number: number == 5)
"""For what would end every life early if it came as often as the rest."""
FORGED = b"forged".ljust(TOKEN_BYTES)


@pytest.fixture(autouse=True, scope="module")
def short_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_job, "PART_TOKENS", PART_TOKENS)
        yield


@dataclass
class Offer:
    """A request's blocks in the source's pool: content that is good until the release."""

    tickets: list[Ticket]
    """One for each stage, if it grows."""
    transfer: str = ""
    """The name of its prefill; empty: it was complete when it was offered."""
    num_written: int = NUM_TOKENS
    """Tokens that the device has written."""
    is_revoked: bool = False
    """Its blocks were taken away, and are written to by others."""
    releases: list[str] = field(default_factory=list)
    deadline: float = float("-inf")

    @property
    def ticket(self):
        return self.tickets[-1]

    @property
    def request_id(self):
        return self.ticket.request_id

    @property
    def is_owned(self):
        return not self.releases and not self.is_revoked


@dataclass
class Read:
    """A posted transfer, or the zeroing that comes before it."""

    handle: int
    offer: Offer
    after: "Read | None" = None
    """What must have ended before this is posted."""
    is_cancelled: bool = False
    is_stuck: bool = False
    has_ended: bool = False
    """For real; the reader hears of it later."""
    error: str = ""
    was_owned: bool = False
    src_rank: int = -1
    is_wrong: bool = False
    """Whether other bytes arrived than the source holds; nobody is told."""


@dataclass(frozen=True)
class OurDigest:
    """What a destination rank finds in its memory."""

    wrong_ranks: frozenset[int]
    """The source ranks of which other bytes are there."""

    def difference(self, src_rank, sums):
        is_equal = sums == RIGHT_SUMS and src_rank not in self.wrong_ranks
        return None if is_equal else DigestDifference("a state", Span(0, 1))


@dataclass(eq=False)
class Rank:
    """The edge of one destination rank: what it was asked to do and has not done yet."""

    engine: str
    reader: Reader
    offset: float
    rate: float = 1.0
    """How fast its clock runs."""
    finds: list[FindRanks] = field(default_factory=list)
    found: dict[Peer, set[int]] = field(default_factory=dict)
    """Which source ranks the last plan for a peer reads from."""
    builds: list[Build] = field(default_factory=list)
    selects: list[Select] = field(default_factory=list)
    selected: dict[int, Fetch] = field(default_factory=dict)
    """By handle: what was selected last."""
    posted: dict[int, list[Span]] = field(default_factory=dict)
    """By handle: the tokens that its reads have asked for."""
    digests: list[TakeDigest] = field(default_factory=list)
    connected: set[Peer] = field(default_factory=set)
    reads: dict[int, Read] = field(default_factory=dict)
    fetched: dict[int, tuple[Offer | None, float]] = field(default_factory=dict)
    held: dict[int, Ticket] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)

    @property
    def reply_to(self):
        return f"{self.engine}/{self.reader.rank}"

    @property
    def at_work_for(self):
        """The peers that somebody plans for or builds right now."""
        return [*(find.peer for find in self.finds), *(build.peer for build in self.builds)]


@dataclass
class SourceRank:
    """A rank of the source engine: hears what was released, each once. It may outlive its authority."""

    number: int
    name: str
    member: Member
    heard: list[str] = field(default_factory=list)
    """Of the start that it joined last."""

    @property
    def generation(self):
        return self.member._generation if self.member.state is Membership.JOINED else 0


@dataclass
class Packet:
    """A message under way."""

    to: str
    reply_to: str
    data: bytes


class TerseAuthority(Authority):
    """Describes one rank at a time: whoever reads from two has to ask twice."""

    MAX_DESCRIBED_BYTES = 1


def fetch_of(ticket):
    return Fetch(ticket, {}, {"full": (Span(0, NUM_TOKENS),)}, early=frozenset({"full"}))


def is_aborted(report):
    return report.failure is not None and report.failure.code is FailureCode.ABORTED


class World(RuleBasedStateMachine):
    """Everything at once."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.generation = 0
        self.packets: list[Packet] = []
        self.merges: list[Merge] = []
        self.src_ranks: list[SourceRank] = []
        self.offers: list[Offer] = []
        self.ranks: list[Rank] = []
        self.num_starts = self.num_claims = 0
        self.sought: set[str] = set()
        self.claimer = Claimer(patience=1.5, retry=0.5)
        self.claims_ended: dict[int, ClaimEnd] = {}
        self.winners: dict[tuple[int, int], set[str]] = {}
        self.restarted_at: dict[int, float] = {}
        self.src_rate = 1.0
        self.are_clocks_true = True
        """Whether all clocks have run at one rate so far."""
        self.described: dict[int, dict[int, RankDescription]] = {}
        """What the ranks of each start of the source engine are really like, once it is whole."""

    # -- the world's start ------------------------------------------------------------------------

    @initialize(
        sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2),
        offsets=st.lists(st.integers(-1000, 1000), min_size=3, max_size=3),
        is_late=seldom,
        has_boards=st.booleans(),
    )
    def begin(self, sizes, offsets, is_late, has_boards=False):
        self.has_boards = has_boards
        self.src_offset = float(offsets[0])
        self.start_source()
        self.start_members()
        for size, offset in zip(sizes, offsets[1:], strict=False):
            self.start_readers(size, float(offset))
        if not is_late:
            self.work()

    def start_source(self):
        self.generation += 1
        key = f"key {self.generation}".encode()
        # Another start may promise shorter leases: only what a grant says counts.
        lease = TIMING.lease if self.generation % 2 else TIMING.lease / 2
        timing = Timing(lease, TIMING.meet, TIMING.read, TIMING.retry)
        self.book = Offers("prefill", self.generation, key, ADDRESS, int(1000 * lease))
        self.board: dict[int, bytes] = {}
        place = f"board {self.generation}" if self.has_boards else ""
        self.authority = TerseAuthority(self.book, NUM_SRC_RANKS, timing, place)
        self.merges.clear()
        self.wanted: list[Wanted] = []
        self.released: list[str] = []

    def start_members(self):
        """Ranks as new processes: what went to or came from earlier ones is lost with their connections."""
        gone = {rank.name for rank in self.src_ranks}
        self.packets = [packet for packet in self.packets if not gone & {packet.reply_to, packet.to}]
        self.src_ranks = []
        self.num_starts += 1
        for number in range(NUM_SRC_RANKS):
            described = RankDescription(b"layout", (), b"card %d/%d" % (self.num_starts, number))
            join = Join(PROTOCOL, "prefill", number, "memory", b"manifest", described)
            name = f"src {self.num_starts}/{number}"
            self.src_ranks.append(SourceRank(number, name, Member(ADDRESS, join, TIMING)))
        self.tick_members()

    def tick_members(self):
        for rank in self.src_ranks:
            self.of_member(rank, rank.member.tick(self.src_now))

    def start_readers(self, size, offset):
        self.num_starts += 1
        name = f"decode-{self.num_starts}"
        for number in range(size):
            key = f"{name}/{number}".ljust(TOKEN_BYTES).encode()
            every = self.num_starts % 3  # none, each, or one of two is digested
            reader = Reader(name, number, size, TIMING, key=key, digest_every=every)
            self.ranks.append(Rank(name, reader, offset))

    @property
    def src_now(self):
        return self.now + self.src_offset

    def clock(self, rank):
        return self.now + rank.offset

    def wait(self, seconds):
        """Time passes, by each clock as fast as it runs."""
        self.now += seconds
        self.src_offset += seconds * (self.src_rate - 1)
        for rank in self.ranks:
            rank.offset += seconds * (rank.rate - 1)

    # -- effects ----------------------------------------------------------------------------------

    def of_member(self, rank, effects: list[MemberEffect]):
        for effect in effects:
            match effect:
                case Released():
                    rank.heard.append(effect.request_id)
                case Send():
                    self.packets.append(Packet(effect.to, rank.name, encode(effect.message)))
                case AnswerDigest(task):
                    result = DigestResult(task.generation, rank.number, task.number, RIGHT_SUMS)
                    self.packets.append(Packet(ADDRESS, rank.name, encode(result)))

    def of_authority(self, effects: list[SourceEffect]):
        for effect in effects:
            match effect:
                case Merge():
                    assert not self.merges, "merged twice at a time"
                    self.merges.append(effect)
                case Released():
                    self.on_released(effect)
                case Wanted():
                    self.wanted.append(effect)
                case Show():
                    (shown,) = (
                        offer for offer in self.current() if offer.ticket.ticket_id == effect.ticket_id
                    )
                    assert not shown.transfer, "what may be revoked is confirmed by message"
                    self.board[effect.ticket_id] = effect.mark
                case Strike():
                    self.board.pop(effect.ticket_id, None)
                case Send():
                    self.packets.append(Packet(effect.to, ADDRESS, encode(effect.message)))

    def on_released(self, effect):
        offers = [o for o in self.offers if o.request_id == effect.request_id]
        assert len(offers) == 1, "released under a name that the source never gave"
        offer = offers[0]
        assert offer.ticket.generation == self.generation
        assert not offer.releases, "released twice"
        offer.releases.append(effect.reason)
        self.released.append(effect.request_id)
        if offer.is_revoked:
            return  # whoever reads it is told
        if effect.reason == "expired":
            assert self.src_now >= offer.deadline, "expired before its deadline"
        else:
            assert not self.readers_of(offer), "released while a granted reader was at it"

    def current(self):
        """The offers of this start of the source."""
        return [offer for offer in self.offers if offer.ticket.generation == self.generation]

    def readers_of(self, offer):
        """Who was granted the offer and can still make it a success."""
        return [
            job
            for rank in self.ranks
            for job in rank.reader.fetches.by_handle.values()
            if rank.fetched[job.handle][0] is offer
            and job.covered_until > self.clock(rank)
            and job.phase in (Phase.SELECTING, Phase.READING, Phase.CHECKING)
        ]

    def of_reader(self, rank, effects: list[Effect]):
        for effect in effects:
            match effect:
                case Send():
                    self.packets.append(Packet(effect.to, rank.reply_to, encode(effect.message)))
                case FindRanks():
                    assert effect.peer not in rank.at_work_for, "planned for twice at a time"
                    rank.finds.append(effect)
                case Build():
                    self.on_build(rank, effect)
                case Select():
                    assert effect.peer in rank.connected
                    rank.selects.append(effect)
                case PostReads():
                    self.on_post(rank, effect)
                case TakeDigest():
                    reads = [read for read in rank.reads.values() if read.handle == effect.handle]
                    assert all(read.has_ended and not read.error for read in reads), "digested too early"
                    rank.digests.append(effect)
                case LookUp():
                    is_live = effect.board == f"board {self.generation}"
                    if is_live and self.board.get(effect.ticket_id) == effect.mark:
                        self.of_reader(rank, rank.reader.fetches.stood(self.clock(rank), effect.handle))
                case Cancel():
                    rank.reads[effect.transfer].is_cancelled = True
                case Drop():
                    assert effect.peer not in rank.at_work_for, "dropped while being built"
                    rank.connected.discard(effect.peer)
                case HangUp():
                    called = {job.peer.authority for job in rank.reader.fetches.by_handle.values()}
                    is_anew = any(isinstance(e, Send) and e.to == effect.address for e in effects)
                    assert is_anew or effect.address not in called, "hung up on somebody who is needed"
                case AllRead():
                    raise AssertionError("no fetch is open here")
                case Report():
                    self.on_report(rank, effect)

    def on_build(self, rank, build):
        assert build.peer not in rank.at_work_for, "built twice at a time"
        real = self.described[build.peer.generation]
        found = rank.found[build.peer]
        assert build.ranks == {number: real[number] for number in found}, "not the ranks that were found"
        rank.builds.append(build)

    def on_post(self, rank, post):
        handle = rank.reader.fetches.transfers[post.clear]
        offer, fetched_at = rank.fetched[handle]
        assert offer is not None, "a forged ticket led to a read"
        generation = offer.ticket.generation
        assert post.peer.generation == generation
        assert fetched_at <= self.restarted_at.get(generation, float("inf")), "a ticket of an earlier start"
        assert post.peer in rank.connected
        assert not {post.clear, *post.reads} & set(rank.reads)
        tokens = rank.selected[handle].need["full"]
        assert all(span.stop <= offer.num_written for span in tokens), "read beyond the watermark"
        rank.posted.setdefault(handle, []).extend(tokens)
        clear = rank.reads[post.clear] = Read(handle, offer)
        for transfer, (src_rank, _) in post.reads.items():
            rank.reads[transfer] = Read(handle, offer, after=clear, src_rank=src_rank)

    def on_report(self, rank, report):
        """Quiescence, fencing, fail closed."""
        handle = report.handle
        assert handle not in rank.reports, "reported twice"
        rank.reports[handle] = report
        reads = [read for read in rank.reads.values() if read.handle == handle]
        assert all(read.has_ended for read in reads), "reported while a read was under way"
        assert min(report.record.meet_seconds, report.record.move_seconds) >= 0
        assert report.record.meet_seconds + report.record.move_seconds <= report.record.total_seconds
        is_wrong = any(read.is_wrong for read in reads)
        if report.failure is not None:
            assert report.failure.code
            assert is_wrong or report.failure.code is not FailureCode.DIGEST_DIFFERS, "a false alarm"
            return
        assert not (is_wrong and report.record.digest), "wrong bytes were reported as good"
        every = rank.reader.fetches.checks._every
        has_read = any(read.src_rank >= 0 for read in reads)
        assert every != 1 or not has_read or report.record.digest == "equal", "it was not checked"
        offer = rank.fetched[handle][0]
        assert offer is not None, "a forged ticket was read"
        assert all(not read.error for read in reads), "a failed read was reported as good"
        assert all(read.was_owned for read in reads), "garbage was reported as good"
        read = sorted(rank.posted[handle])
        assert (read[0].start, read[-1].stop) == (0, NUM_TOKENS), "not all of it was read"
        assert all(one.stop == other.start for one, other in pairwise(read)), "left out, or read twice"
        winners = self.winners.setdefault((offer.ticket.generation, offer.ticket.ticket_id), set())
        winners.add(rank.engine)
        assert len(winners) == 1, "two engines read one ticket"

    # -- the source engine ------------------------------------------------------------------------

    @rule()
    def offer(self):
        request_id = f"request {len(self.offers)}"
        tables = {"full": BlockTable.of([len(self.offers)])}
        ticket = self.book.make(request_id, tables, NUM_TOKENS)
        self.offers.append(Offer([ticket]))
        self.of_authority(self.authority.offer(self.src_now, ticket))

    # -- prompts that are read while they are computed ---------------------------------------------

    @rule(is_anew=st.booleans(), num_written=st.integers(0, 5))
    def open(self, is_anew, num_written):
        """A prefill begins; perhaps one that was preempted, under the same name."""
        number = len(self.offers)
        names = [offer.transfer for offer in self.offers if offer.transfer]
        transfer = names[-1] if is_anew and names else f"transfer {number}"
        tables = {"full": BlockTable.of([number])}
        ticket = self.book.make(f"request {number}", tables, NUM_TOKENS, complete=num_written)
        self.offers.append(Offer([ticket], transfer, num_written))
        self.of_authority(self.authority.offer(self.src_now, ticket, transfer))

    def growing(self, which):
        """One of the prefills that are under way, if there is one: its offer may be over."""
        every = [offer for offer in self.current() if offer.ticket.is_growing and not offer.is_revoked]
        return every[which % len(every)] if every else None

    @rule(which=index, num_more=st.integers(0, 6), is_last=st.booleans())
    def grow(self, which, num_more, is_last):
        """A step's output has come back; what the next one writes is not there yet."""
        if offer := self.growing(-1 if is_last else which):
            offer.num_written = min(offer.num_written + num_more, NUM_TOKENS - 1)
            self.tell(offer, offer.num_written)

    @rule(which=index, is_last=st.booleans())
    def close(self, which, is_last):
        if offer := self.growing(-1 if is_last else which):
            offer.num_written = NUM_TOKENS
            self.tell(offer, NOT_SAID)

    def tell(self, offer, complete):
        tables = {"full": BlockTable.of([self.offers.index(offer)])}
        offer.tickets.append(self.book.stage(offer.ticket, tables, complete))
        self.of_authority(self.authority.grow(self.src_now, offer.ticket))

    @rule(which=index, is_last=st.booleans())
    def revoke(self, which, is_last):
        """The engine takes its blocks away, and asks nobody."""
        if offer := self.growing(-1 if is_last else which):
            offer.is_revoked = True
            self.of_authority(self.authority.revoke(self.src_now, offer.request_id))
            assert offer.releases, "its lease stands, and its blocks are others'"

    @rule(which=index)
    def refuse(self, which):
        self.of_authority(self.authority.refuse(f"transfer {which}", "nothing comes of it"))

    @rule(which=index)
    def find(self, which):
        """A scheduler seeks a prefill; whoever finds it may fetch it."""
        self.num_claims += 1
        self.sought.add(name := f"transfer {which % (len(self.offers) + 2)}")
        self.of_claimer(self.claimer.find(self.now, self.num_claims, ADDRESS, name))

    @rule(engine=index, chunks=st.lists(st.integers(0, 6), max_size=3), rounds=st.integers(0, 2))
    def serve_growing(self, engine, chunks, rounds):
        """The common case: parts are read, up to the rest, whose reads are under way."""
        self.open(is_anew=False, num_written=0)
        self.fetch(0, engine, is_latest=True, is_first_stage=True)
        self.calm(2, is_slow=False)
        for num_more in chunks:
            self.grow(0, num_more, is_last=True)
            self.calm(rounds, is_slow=False)
            self.end_reads(engine, has_poll=True)
            self.end_reads(engine, has_poll=True)
        self.close(0, is_last=True)
        self.calm(rounds, is_slow=False)

    @rule(num_tokens=st.sampled_from([16, 9999]))
    def claim(self, num_tokens):
        """A request has ended, and another engine claims what is left of it."""
        self.num_claims += 1
        soft = self.book.make_soft(f"ended {self.num_claims}", 64, b"parts of tokens")
        self.of_claimer(self.claimer.claim(self.now, self.num_claims, soft, num_tokens))

    @rule(is_left=st.booleans())
    def serve_a_claim(self, is_left):
        """The engine pins what is left, and answers; maybe too late."""
        for wanted in self.wanted[:1]:
            self.wanted.remove(wanted)
            assert wanted.num_tokens <= 64, "more than was offered"
            if is_left:
                self.offer()
            ticket = self.offers[-1].ticket if is_left else None
            self.of_authority(self.authority.claimed(self.src_now, wanted.number, ticket, ""))

    def of_claimer(self, effects):
        for effect in effects:
            if isinstance(effect, HangUp):
                continue
            if isinstance(effect, Send):
                self.packets.append(Packet(effect.to, CLAIMER, encode(effect.message)))
                continue
            assert effect.number not in self.claims_ended, "a claim ended twice"
            self.claims_ended[effect.number] = effect
            tickets = [ticket for offer in self.offers for ticket in offer.tickets]
            assert effect.ticket is None or effect.ticket in tickets, "granted, and never offered"

    @precondition(lambda self: self.offers)
    @rule(which=index)
    def withdraw(self, which):
        offer = self.offers[which % len(self.offers)]
        if offer.ticket.generation == self.generation:
            # A reader whose clock stands still believes in a lease that has run out.
            had_readers = offer.is_owned and bool(self.readers_of(offer))
            self.of_authority(self.authority.withdraw(self.src_now, offer.request_id))
            assert not had_readers or offer.is_owned, "withdrawn from under its reader"

    @rule(is_good=st.sampled_from([True, True, True, False]))
    def finish_merge(self, is_good):
        for merge in self.merges[:1]:
            self.do_merge(merge, is_good)

    def do_merge(self, merge, is_good=True):
        self.merges.remove(merge)
        assert sorted(merge.joins) == list(range(NUM_SRC_RANKS))
        if is_good:
            joins = merge.joins.items()
            self.described[self.generation] = {number: join.description for number, join in joins}
            self.of_authority(self.authority.merged(self.src_now, b"outline"))
        else:
            self.authority.not_merged(self.src_now, "they do not fit together")
            self.start_members()  # a rank that is turned away stays away: an operator starts them anew

    @rule(is_real=seldom, is_late=st.booleans(), has_living_ranks=st.booleans())
    def restart_source(self, is_real, is_late, has_living_ranks):
        """At the same address. What it offered is over: what still reads it cannot end well."""
        if not is_real:
            return
        self.restarted_at[self.generation] = self.now
        for offer in self.offers:
            if offer.ticket.generation == self.generation and offer.is_owned:
                offer.releases.append("restart")
        self.start_source()
        if not has_living_ranks:
            self.start_members()
        if not is_late:
            self.work()

    # -- destination engines ----------------------------------------------------------------------

    def engine(self, which):
        names = sorted({rank.engine for rank in self.ranks})
        return [rank for rank in self.ranks if rank.engine == names[which % len(names)]]

    def start_fetch(self, rank, ticket, offer):
        handle = len(rank.fetched)
        rank.fetched[handle] = (offer, self.now)
        self.of_reader(rank, rank.reader.fetch(self.clock(rank), handle, fetch_of(ticket)))

    @precondition(lambda self: self.offers)
    @rule(which=index, engine=index, is_latest=st.booleans())
    def hold(self, which, engine, is_latest):
        """The request is known, and waits for blocks."""
        offer = self.offers[-1 if is_latest else which % len(self.offers)]
        for rank in self.engine(engine):
            handle = len(rank.fetched)
            rank.fetched[handle] = (offer, self.now)
            rank.held[handle] = offer.ticket
            self.of_reader(rank, rank.reader.hold(self.clock(rank), handle, offer.ticket))

    @rule(engine=index, num_ranks=st.integers(1, 3))
    def supply(self, engine, num_ranks):
        for rank in self.engine(engine)[:num_ranks]:
            self.supply_all(rank)

    def supply_all(self, rank):
        """Also what failed meanwhile: the engine cannot know."""
        while rank.held:
            handle, ticket = rank.held.popitem()
            self.of_reader(rank, rank.reader.supply(self.clock(rank), handle, fetch_of(ticket)))

    @rule(engine=index, rounds=st.integers(1, 4))
    def serve_after_a_wait(self, engine, rounds):
        self.offer()
        self.hold(0, engine, is_latest=True)
        self.calm(rounds, is_slow=False)
        self.supply(engine, 3)
        self.calm(rounds, is_slow=False)

    @precondition(lambda self: self.offers)
    @rule(which=index, engine=index, is_latest=st.booleans(), is_first_stage=st.booleans())
    def fetch(self, which, engine, is_latest, is_first_stage=False):
        offer = self.offers[-1 if is_latest else which % len(self.offers)]
        ticket = offer.tickets[0 if is_first_stage else -1]
        for rank in self.engine(engine):
            self.start_fetch(rank, ticket, offer)

    @rule(engine=index, rounds=st.integers(1, 4))
    def serve(self, engine, rounds):
        """The common case, up to reads that are under way."""
        self.offer()
        self.fetch(0, engine, is_latest=True)
        self.calm(rounds, is_slow=False)

    @rule(engine=index, is_wrong=st.booleans())
    def serve_to_the_end(self, engine, is_wrong):
        """Perhaps with bytes that changed on their way."""
        self.serve(engine, rounds=3)
        for _ in range(2):  # what is zeroed first, then what is read
            for rank in self.engine(engine):
                for read in self.under_way(rank):
                    self.do_end(read)
                    read.is_wrong = is_wrong and read.src_rank >= 0
                self.do_poll(rank)
        self.calm(rounds=3, is_slow=False)

    @rule(engine=index, which=index, is_backwards=st.booleans())
    def fetch_give_up_and_fetch_again(self, engine, which, is_backwards):
        """Messages of both attempts are under way together."""
        self.offer()
        self.fetch(0, engine, is_latest=True)
        self.deliver_all(is_backwards)
        self.abort(engine, -1, 3)
        if which % 2:
            self.packets += self.packets[-3:]
        self.fetch(0, engine, is_latest=True)
        self.deliver_all(is_backwards)

    @rule(engine=index, is_held=st.booleans(), is_heard=st.booleans(), is_backwards=st.booleans())
    def give_back(self, engine, is_held, is_heard, is_backwards):
        """No rank of an engine needs a ticket: its blocks are free once all have said so, in any order."""
        self.offer()
        offer, ranks = self.offers[-1], self.engine(engine)
        if is_held:
            self.fetch(0, engine, is_latest=True)
        if is_heard:
            self.deliver_all(is_backwards)
        for rank in ranks:
            reader, now = rank.reader, self.clock(rank)
            last = len(rank.fetched) - 1
            self.of_reader(
                rank, reader.abort(now, last) if is_held else reader.decline(now, -1, offer.ticket)
            )
        self.deliver_all(is_backwards)
        # Whoever believes that the source is gone has asked it for nothing.
        is_asked = not is_held or all(is_aborted(rank.reports[len(rank.fetched) - 1]) for rank in ranks)
        assert offer.releases == ["declined"] or not is_asked, "nobody needs it, and it is not released"

    @precondition(lambda self: self.offers)
    @rule(which=index, engine=index, rank=index)
    def fetch_on_one_rank(self, which, engine, rank):
        offer = self.offers[which % len(self.offers)]
        ranks = self.engine(engine)
        self.start_fetch(ranks[rank % len(ranks)], offer.ticket, offer)

    @precondition(lambda self: self.offers)
    @rule(which=index, engine=index, name=st.sampled_from(sorted(FORGERIES)))
    def fetch_forged(self, which, engine, name):
        offer = self.offers[which % len(self.offers)]
        ticket = msgspec.structs.replace(offer.ticket, **{name: FORGERIES[name]})
        for rank in self.engine(engine):
            self.start_fetch(rank, ticket, None)

    @rule(engine=index, which=index, num_ranks=st.integers(1, 3))
    def abort(self, engine, which, num_ranks):
        for rank in self.engine(engine)[:num_ranks]:
            if rank.reader.fetches.by_handle:
                handles = list(rank.reader.fetches.by_handle)
                handle = handles[which % len(handles)]
                self.of_reader(rank, rank.reader.abort(self.clock(rank), handle))

    @rule(engine=index, is_real=seldom)
    def crash_readers(self, engine, is_real):
        """The engine comes back under another name; what it had under way is nobody's any more."""
        if not is_real:
            return
        dead = self.engine(engine)
        self.ranks = [rank for rank in self.ranks if rank not in dead]
        self.start_readers(len(dead), dead[0].offset)

    # -- what their edges do ----------------------------------------------------------------------

    def pick(self, items, which):
        """One of (rank, item), for whatever the ranks have of something."""
        every = [(rank, item) for rank in self.ranks for item in items(rank)]
        return every[which % len(every)] if every else (None, None)

    @rule(
        which=index,
        ranks=st.sets(st.integers(0, NUM_SRC_RANKS - 1)),
        is_good=st.sampled_from([True, True, True, False]),
    )
    def finish_find(self, which, ranks, is_good):
        rank, find = self.pick(lambda rank: rank.finds, which)
        if rank is not None:
            self.do_find(rank, find, ranks, is_good)

    def do_find(self, rank, find, ranks=frozenset(range(NUM_SRC_RANKS)), is_good=True):
        rank.finds.remove(find)
        if is_good:
            rank.found[find.peer] = set(ranks)
            self.of_reader(rank, rank.reader.meetings.found(self.clock(rank), find.peer, ranks))
        else:
            failure = Failure(FailureCode.BAD_MANIFEST, "an outline that makes no sense")
            self.of_reader(rank, rank.reader.not_built(self.clock(rank), find.peer, failure))

    @rule(which=index, is_good=st.sampled_from([True, True, True, False]))
    def finish_build(self, which, is_good):
        rank, build = self.pick(lambda rank: rank.builds, which)
        if rank is not None:
            self.do_build(rank, build, is_good)

    def do_build(self, rank, build, is_good=True):
        rank.builds.remove(build)
        if is_good:
            rank.connected.add(build.peer)
            self.of_reader(rank, rank.reader.built(self.clock(rank), build.peer))
        else:
            failure = Failure(FailureCode.REFUSED, "two descriptions that do not fit")
            self.of_reader(rank, rank.reader.not_built(self.clock(rank), build.peer, failure))

    @rule(which=index, num_sources=st.integers(0, 3), is_good=st.sampled_from([True, True, True, False]))
    def finish_select(self, which, num_sources, is_good):
        rank, select = self.pick(lambda rank: rank.selects, which)
        if rank is not None:
            self.do_select(rank, select, num_sources, is_good)

    def do_select(self, rank, select, num_sources=1, is_good=True):
        rank.selects.remove(select)
        rank.selected[select.handle] = select.fetch
        if is_good:
            selection = Selection.of(dict.fromkeys(range(num_sources), ONE_RUN), NO_RUNS)
            self.of_reader(rank, rank.reader.selected(self.clock(rank), select.handle, selection))
        else:
            failure = Failure(FailureCode.REQUEST, "too few blocks")
            self.of_reader(rank, rank.reader.not_selected(self.clock(rank), select.handle, failure))

    @rule(which=index, is_good=st.sampled_from([True, True, True, False]))
    def finish_digest(self, which, is_good):
        rank, wanted = self.pick(lambda rank: rank.digests, which)
        if rank is not None:
            self.do_digest(rank, wanted, is_good)

    def do_digest(self, rank, wanted, is_good=True):
        """Source ranks that are not there are asked for, too, and the authority says so."""
        rank.digests.remove(wanted)
        handle, now = wanted.handle, self.clock(rank)
        reads = [read for read in rank.reads.values() if read.handle == handle and read.src_rank >= 0]
        questions = {read.src_rank: b"question" for read in reads}
        self.of_reader(rank, rank.reader.fetches.digest_asked(now, handle, questions))
        if is_good:
            ours = OurDigest(frozenset(read.src_rank for read in reads if read.is_wrong))
            self.of_reader(rank, rank.reader.fetches.digest_taken(now, handle, ours))
        else:
            failure = Failure(FailureCode.NO_DIGEST, "memory that cannot be digested")
            self.of_reader(rank, rank.reader.fetches.not_digested(now, handle, failure))

    def under_way(self, rank):
        reads = [read for read in rank.reads.values() if not (read.has_ended or read.is_stuck)]
        return [read for read in reads if read.after is None or read.after.has_ended]

    @rule(which=index, error=st.sampled_from(["", "", "", "", "flushed"]), is_wrong=seldom)
    def end_read(self, which, error, is_wrong):
        """For real: from now on nothing of it arrives."""
        rank, read = self.pick(self.under_way, which)
        if rank is not None:
            self.do_end(read, error)
            read.is_wrong = is_wrong and read.src_rank >= 0

    def do_end(self, read, error=""):
        is_gone = read.offer.ticket.generation != self.generation
        read.has_ended, read.was_owned = True, read.offer.is_owned
        read.error = "the peer is gone" if is_gone else error
        if read.is_cancelled or (read.after is not None and read.after.error):
            read.error = read.error or "not all of it was posted"

    @rule(engine=index, has_poll=st.booleans())
    def end_reads(self, engine, has_poll):
        for rank in self.engine(engine):
            for read in self.under_way(rank):
                self.do_end(read)
            if has_poll:
                self.do_poll(rank)

    @rule(which=index)
    def hang_read(self, which):
        _, read = self.pick(self.under_way, which)
        if read is not None:
            read.is_stuck = True

    @rule(which=index)
    def poll(self, which):
        """A rank hears of the ends of its reads; some of them it hears twice."""
        rank = self.ranks[which % len(self.ranks)]
        self.do_poll(rank, repeat=which % 2)

    def do_poll(self, rank, repeat=0):
        for transfer, read in list(rank.reads.items()):
            if read.has_ended and (repeat or transfer in rank.reader.fetches.transfers):
                self.of_reader(rank, rank.reader.fetches.ended(self.clock(rank), transfer, read.error))

    # -- the network ------------------------------------------------------------------------------

    def do_deliver(self, packet):
        if packet.to == ADDRESS:
            message = decode_to_authority(packet.data)
            self.of_authority(self.authority.receive(self.src_now, packet.reply_to, message))
        for rank in self.ranks:
            if packet.to == rank.reply_to:
                answer = decode_from_authority(packet.data)
                self.of_reader(rank, rank.reader.receive(self.clock(rank), packet.reply_to, answer))
        if packet.to == CLAIMER:
            answer = decode_from_authority(packet.data)
            assert isinstance(answer, Claimed)
            self.of_claimer(self.claimer.receive(self.now, packet.reply_to, answer))
        for src_rank in self.src_ranks:
            if packet.to == src_rank.name:
                self.source_hears(src_rank, packet, decode_from_authority(packet.data))

    def source_hears(self, rank, packet, message):
        before = rank.member._generation
        effects = rank.member.receive(self.src_now, packet.reply_to, message)
        assert rank.member.state is not Membership.REFUSED, rank.member.refusal
        if rank.member._generation != before:
            rank.heard.clear()
        self.of_member(rank, effects)

    @precondition(lambda self: self.packets)
    @rule(which=index)
    def deliver(self, which):
        self.do_deliver(self.packets.pop(which % len(self.packets)))

    @rule(is_backwards=st.booleans())
    def deliver_all(self, is_backwards):
        packets, self.packets = self.packets, []
        for packet in reversed(packets) if is_backwards else packets:
            self.do_deliver(packet)

    @precondition(lambda self: self.packets)
    @rule(which=index)
    def drop(self, which):
        self.packets.pop(which % len(self.packets))

    @rule(is_real=seldom)
    def drop_all(self, is_real):
        if is_real:
            self.packets.clear()

    @precondition(lambda self: self.packets)
    @rule(which=index)
    def duplicate(self, which):
        packet = self.packets[which % len(self.packets)]
        self.packets.append(packet)

    @precondition(lambda self: self.offers)
    @rule(which=index, kind=st.integers(0, 10), engine=index)
    def spoof(self, which, kind, engine):
        """What nobody of this world would send."""
        ticket = self.offers[which % len(self.offers)].ticket
        name, ticket_id = self.engine(engine)[0].engine, ticket.ticket_id
        message = (
            Settle(self.generation, ticket_id, name, -1, 1 << 40, FORGED, Outcome.READ),
            Settle(self.generation, ticket_id, name, 7, 1 << 40, FORGED, Outcome.UNREAD),
            Settle(self.generation, ticket_id, "", 0, 1 << 40, FORGED, Outcome.READ),
            Settle(self.generation - 1, ticket_id, name, 0, 1 << 40, FORGED, Outcome.READ),
            Renew(1, self.generation, "", 0, ((ticket_id, FORGED),)),
            ReleaseAck(self.generation - 1, 0, 1 << 40),
            Acquire(1, ticket, "", 0, 1, 1 << 40, FORGED),
            DescribeRanks(1, self.generation - 1, (0, 1)),
            DescribeRanks(1, self.generation, (-1, 1 << 40, 0, 0)),
            Watch(1, self.generation, ticket_id, name, 0, FORGED, -1),
            FindTransfer(1, f"transfer {which} of nobody"),
        )[kind]
        self.packets.append(Packet(ADDRESS, "nobody", encode(message)))

    @rule(which=index, outcome=st.sampled_from(Outcome), is_delivered=st.booleans())
    def forge(self, which, outcome, is_delivered):
        """Somebody knows every name and number of a fetch that is under way, but not its token."""
        rank, job = self.pick(lambda rank: list(rank.reader.fetches.by_handle.values()), which)
        if job is None:
            return
        who = job.ticket.ticket_id, rank.engine, rank.reader.rank
        for attempt in (job.attempt, job.attempt + 1):
            settle = Settle(job.ticket.generation, *who, attempt, FORGED, outcome)
            self.packets.append(Packet(ADDRESS, "nobody", encode(settle)))
            if offer := rank.fetched[job.handle][0]:  # a ticket of the same number, by somebody else
                forged = msgspec.structs.replace(offer.ticket, num_tokens=FORGERIES["num_tokens"])
                declined = msgspec.structs.replace(
                    settle, reader_ranks=rank.reader.num_ranks, declined=forged
                )
                self.packets.append(Packet(ADDRESS, "nobody", encode(declined)))
        renew = Renew(1, job.ticket.generation, *who[1:], ((job.ticket.ticket_id, FORGED),))
        self.packets.append(Packet(ADDRESS, "nobody", encode(renew)))
        if is_delivered:
            self.deliver_all(is_backwards=False)

    @rule(which=index, is_real=seldom)
    def steal(self, which, is_real):
        """Somebody has a copy of a ticket, asks for it under its reader's name, and settles it."""
        rank, job = self.pick(lambda rank: list(rank.reader.fetches.by_handle.values()), which)
        if job is None or not is_real:
            return
        who = rank.engine, rank.reader.rank
        ask = Acquire(1, job.ticket, *who, rank.reader.num_ranks, 1 << 40, FORGED)
        settle = Settle(job.ticket.generation, job.ticket.ticket_id, *who, 1 << 40, FORGED, Outcome.READ)
        self.packets += [Packet(ADDRESS, "nobody", encode(message)) for message in (ask, settle)]

    @rule(which=index, name=st.sampled_from(["calling", "connected", "broken", "closed"]))
    def contact(self, which, name):
        """What the channel says of a rank's connection: too late, too often, or wrongly."""
        rank = self.ranks[which % len(self.ranks)]
        when = (self.clock(rank),) if name in ("calling", "broken") else ()
        getattr(rank.reader.connections, name)(*when, "nowhere" if which % 8 == 0 else ADDRESS)

    # -- time -------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 3.0, 8.75, 9.0, 25.0]), has_tick=st.booleans())
    def advance(self, seconds, has_tick):
        self.wait(seconds)
        if has_tick:
            self.tick()

    @rule(which=index, rate=st.sampled_from([0.0, 0.5, 1.0, 2.0]), is_real=seldom)
    def bend_a_clock(self, which, rate, is_real):
        """A paused virtual machine, a clock that is being corrected."""
        if is_real and rate != 1.0:
            self.are_clocks_true = False
            if which == 0:
                self.src_rate = rate
            else:
                self.ranks[which % len(self.ranks)].rate = rate

    @rule()
    def tick(self):
        self.tick_members()
        self.of_authority(self.authority.tick(self.src_now))
        assert self.authority.next_deadline() > self.src_now
        self.of_claimer(self.claimer.tick(self.now))
        assert self.claimer.next_deadline() > self.now
        for rank in self.ranks:
            self.of_reader(rank, rank.reader.tick(self.clock(rank)))
            assert rank.reader.next_deadline() > self.clock(rank)

    @rule(rounds=st.integers(1, 6), is_slow=st.booleans())
    def calm(self, rounds, is_slow):
        """For a while everything works, reads excepted: without this, little would ever succeed."""
        for _ in range(rounds):
            self.work()
            self.wait(0.5 if is_slow else 0.0)
            self.tick()

    def work(self):
        for _ in range(1 + NUM_SRC_RANKS):  # a peer is asked for one rank after the other
            packets, self.packets = self.packets, []
            for packet in packets:
                self.do_deliver(packet)
            for rank in self.ranks:
                for find in list(rank.finds):
                    self.do_find(rank, find)
        for merge in list(self.merges):
            self.do_merge(merge)
        for rank in self.ranks:
            for build in list(rank.builds):
                self.do_build(rank, build)
            for number, select in enumerate(list(rank.selects)):
                self.do_select(rank, select, 1 + number % 3)
            for wanted in list(rank.digests):
                self.do_digest(rank, wanted)

    # -- laws that hold at every moment -----------------------------------------------------------

    @invariant()
    def fencing(self):
        """Whatever cover a reader believes in is real, if clocks are: the blocks are still the ticket's."""
        for rank in self.ranks if self.are_clocks_true else ():
            for job in rank.reader.fetches.by_handle.values():
                offer, _ = rank.fetched[job.handle]
                if job.covered_until > self.clock(rank) and job.phase is not Phase.CONFIRMING:
                    assert offer is not None, "a forged ticket was granted"
                    assert offer.is_owned or offer.is_revoked or offer.releases == ["restart"]

    @invariant()
    def leases_cover_what_readers_believe(self):
        """A granted fetch is bound to its engine, until a deadline that is no earlier than it believes."""
        for rank in self.ranks:
            for job in rank.reader.fetches.by_handle.values():
                offer, _ = rank.fetched[job.handle]
                if offer is not None and offer.is_owned and job.covered_until > self.clock(rank):
                    lease = self.authority._leases[offer.ticket.ticket_id]
                    assert lease.reading is not None
                    assert lease.reading.reader == rank.engine, "granted, but bound to another"
                    outcome = lease.reading.grants[rank.reader.rank].outcome
                    is_wanted = job.phase is not Phase.CONFIRMING
                    assert outcome is None or not is_wanted, "settled while it is wanted"
                    if self.are_clocks_true:
                        assert job.covered_until - rank.offset <= lease.deadline - self.src_offset

    @invariant()
    def leases_never_shrink(self):
        for offer in self.offers:
            if offer.ticket.generation == self.generation and offer.is_owned:
                lease = self.authority._leases[offer.ticket.ticket_id]
                assert lease.deadline >= offer.deadline
                offer.deadline = lease.deadline

    @invariant()
    def quiescence(self):
        """What is under way is known to be under way, and is not reported."""
        for rank in self.ranks:
            in_flight = {number for number, read in rank.reads.items() if not read.has_ended}
            assert in_flight <= set(rank.reader.fetches.transfers)
            assert not {read.handle for n, read in rank.reads.items() if n in in_flight} & set(rank.reports)
            assert set(rank.fetched) == set(rank.reports) | set(rank.reader.fetches.by_handle)
            assert not set(rank.reports) & set(rank.reader.fetches.by_handle)

    @invariant()
    def notices_arrive_in_order(self):
        for rank in self.src_ranks if self.offers else ():
            if rank.generation == self.generation:
                assert rank.heard == self.released[: len(rank.heard)]

    @invariant()
    def bounded(self):
        for rank in self.ranks:
            assert len(rank.reader.fetches.settlements) <= len(rank.fetched) + len(self.offers)
            assert len(rank.reader.fetches.transfers) <= len(rank.reads)
            assert len(rank.reader.fetches.checks._checks) <= len(rank.reader.fetches.by_handle)
            assert len(rank.reader._questions) <= 40 * max(1, len(rank.fetched))
        if self.offers:
            assert self.authority.num_leases <= len(self.offers)
            assert len(self.authority._ended) <= len(self.offers)
            assert len(self.authority._by_deadline) <= len(self.offers)
            assert len(self.authority._named._open) <= self.authority.num_leases
            assert len(self.authority._named._finders) <= 2 * len(self.sought) + 64
            assert all(len(lease.watchers) <= 3 for lease in self.authority._leases.values())

    # -- and in the end ---------------------------------------------------------------------------

    def teardown(self):
        """Liveness: once the world behaves, everything ends, by the deadlines that the machines name."""
        if not self.ranks:
            return
        self.src_rate = 1.0
        for rank in self.ranks:
            rank.rate = 1.0
            self.supply_all(rank)
        for name in self.sought:  # an engine that began anew waits for prefills that it knows nothing of
            self.of_authority(self.authority.refuse(name, "nothing comes of it"))
        for _ in range(2000):
            self.work()
            for rank in self.ranks:
                for read in self.under_way(rank):
                    self.do_end(read)
                self.do_poll(rank)
            if not (self.packets or any(rank.at_work_for or rank.selects for rank in self.ranks)):
                # Ranks that have joined ask on and on whether their authority is still the same.
                late = [rank.member for rank in self.src_ranks if rank.generation != self.generation]
                wait = min(
                    self.authority.next_deadline() - self.src_now,
                    *(member.next_deadline() - self.src_now for member in late),
                    self.claimer.next_deadline() - self.now,
                    *(rank.reader.next_deadline() - self.clock(rank) for rank in self.ranks),
                )
                if wait == float("inf"):
                    break
                self.wait(max(0.0, wait))
            self.tick()
        else:
            raise AssertionError("it does not come to rest")
        self.nothing_leaks()
        self.late_ends_are_reported()

    def nothing_leaks(self):
        assert len(self.claims_ended) == self.num_claims, "a claim did not end"
        for rank in self.ranks:
            stuck = {number: read for number, read in rank.reads.items() if not read.has_ended}
            handles = {read.handle for read in stuck.values()}
            reader = rank.reader
            assert set(rank.reports) == set(rank.fetched) - handles, "each is reported, if its reads ended"
            assert reader.num_quarantined == len(handles)
            assert (set(reader.fetches.by_handle), set(reader.fetches.transfers)) == (handles, set(stuck))
            assert len(reader.fetches.by_ticket) == len(handles)
            assert not reader._questions
            assert all(one.is_up for one in reader.connections._by_address.values())
            assert not reader.fetches.settlements
        authority = self.authority
        assert authority.num_leases == 0
        assert not authority._by_request
        assert not authority._named._open
        assert not authority._by_deadline
        assert not authority._ended
        assert authority.status()["unheard"] == 0
        for offer in self.offers:
            assert len(offer.releases) == 1, "released once"
        assert authority.is_whole
        for src_rank in self.src_ranks:
            assert src_rank.heard == self.released, "each rank hears each release once"

    def late_ends_are_reported(self):
        for rank in self.ranks:
            for read in rank.reads.values():
                if not read.has_ended:
                    self.do_end(read)
            self.do_poll(rank)
            assert set(rank.reports) == set(rank.fetched)
            assert not rank.reader.fetches.by_handle
            assert not rank.reader.fetches.transfers


World.TestCase.settings = settings(
    max_examples=int(os.environ.get("KVFERRY_MODEL_EXAMPLES", "200")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestWorld = World.TestCase


def test_ranks_that_are_gone_do_not_make_an_engine_whole():
    """Found by the world: after a misfit all ranks started anew, and an old one's place was still taken."""
    world = World()
    world.begin([1], [0, 0, 0], is_late=True)
    world.fetch_give_up_and_fetch_again(0, 0, is_backwards=False)
    world.finish_merge(is_good=False)
    world.fetch_give_up_and_fetch_again(0, 0, is_backwards=True)
    world.teardown()


def test_a_reader_whose_clock_stands_still_does_not_forbid_a_withdrawal():
    """Found by the world: its lease had run out, and it believed in it; the world took that for a fault."""
    world = World()
    world.begin([1], [0, 0, 0], is_late=False, has_boards=False)
    world.serve(engine=0, rounds=1)
    world.bend_a_clock(which=1, rate=0.0, is_real=True)
    world.advance(seconds=9.0, has_tick=False)
    world.calm(rounds=1, is_slow=False)
    assert world.offers[0].releases == ["expired"]
    world.withdraw(which=0)
    world.teardown()
