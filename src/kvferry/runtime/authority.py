"""The lease authority of a source engine: grants and ends all of its leases.

A lease is the promise to keep a ticket's blocks untouched until a deadline, which never moves nearer. It ends
when its reader has settled, or at the deadline. If the lease is still held when the settlement arrives, the
blocks were untouched during the read, whatever any clock says; only the authority's confirmation makes a read
count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from kvferry.errors import counted
from kvferry.runtime.claims import Claims, NamedPrefills
from kvferry.runtime.digest_checks import DigestRelay
from kvferry.runtime.failure import FailureCode
from kvferry.runtime.figures import Figures, LeaseTally, by_label
from kvferry.runtime.lease import Assembly, EndedReadings, HeldReleases, JoinedRank, Lease, Offers
from kvferry.runtime.member import NOT_JOINED
from kvferry.runtime.values import MAX_SHOWN, Merge, Released, Send, Show, SourceEffect, Strike, Timing
from kvferry.wire.messages import (
    MAX_BATCH,
    PROTOCOL,
    Acquire,
    AskStatus,
    Claimed,
    ClaimOffer,
    Denial,
    DescribeRanks,
    DigestRequest,
    DigestResult,
    FindTransfer,
    Grant,
    Grown,
    Hello,
    Join,
    JoinAck,
    Outcome,
    RankDescription,
    RankDescriptions,
    Rejected,
    ReleaseAck,
    ReleaseNotice,
    Renew,
    Renewal,
    Settle,
    SettleAck,
    ToAuthority,
    Watch,
    Welcome,
    is_spoken,
)
from kvferry.wire.ticket import Ticket, make_proofs

CLAIM_SECONDS = 1.0
"""How long a claim waits for the engine's own thread; it takes steps while there are young soft offers."""
CLAIM_LEASES = 2
"""A claim lasts at most this many leases, however often it is renewed. Two engines whose requests wait for
blocks that the other has claimed continue after that.
"""


@dataclass(slots=True)
class _Notices:
    """Releases that one rank has not acknowledged; collected from the start, also before it joins."""

    unheard: deque[Released] = field(default_factory=deque)
    first: int = 1
    """The number of the first notice in ``unheard``."""
    last_sent: int = 0
    sent_at: float = float("-inf")


class Authority:
    """Keeps the leases of one start of one source engine. Call it with events and ``now``; carry out what it
    returns.
    """

    MAX_UNHEARD = 100_000
    """Unacknowledged releases of one rank, beyond which offers are rejected."""
    MAX_DESCRIBED_BYTES = 512 << 10
    """Descriptions in one answer; a longer one is sent alone."""

    def __init__(self, offers: Offers, num_ranks: int, timing: Timing | None = None, board: str = "") -> None:
        """``board``: the path of the lease board for readers on this host; empty: none."""
        self._offers, self._num_ranks, self._board = offers, num_ranks, board
        self._timing = timing or Timing()
        self._leases: dict[int, Lease] = {}
        self._ended = EndedReadings(self._timing.lease)
        self._by_request: dict[str, int] = {}
        self._by_deadline: list[tuple[float, int]] = []
        """A heap of deadlines, each no later than its lease's own."""
        self._ranks: dict[int, JoinedRank] = {}
        """Those that have joined, in that order."""
        self._notices = {rank: _Notices() for rank in range(num_ranks)}
        self._assembly = Assembly.GATHERING
        self._welcome: Welcome | None = None
        self._tally = LeaseTally()
        self._digests = DigestRelay(offers.generation)
        self._claims = Claims(CLAIM_SECONDS)
        self._named = NamedPrefills()
        self._held = HeldReleases(self._timing.lease)

    # -- the engine's own calls --------------------------------------------------------------------

    def offer(self, now: float, ticket: Ticket, transfer: str = "") -> list[SourceEffect]:
        """Pin the blocks of a new ticket; ``transfer``: the router's name of its prefill, if it has one."""
        deadline = now + self._timing.lease
        lease = self._leases[ticket.ticket_id] = Lease(ticket, deadline, deadline + self._timing.life)
        heappush(self._by_deadline, (lease.deadline, ticket.ticket_id))
        self._by_request[ticket.request_id] = ticket.ticket_id
        self._tally.offered(ticket)
        lease.transfer = transfer
        return self._named.open(transfer, ticket) if transfer else []

    def refuse(self, transfer: str, why: str) -> list[SourceEffect]:
        return self._named.refuse(transfer, why)

    def grow(self, now: float, ticket: Ticket) -> list[SourceEffect]:
        """The next stage of a growing lease, or its last; waiting readers are notified."""
        lease = self._leases.get(ticket.ticket_id)
        if lease is None:
            return []
        lease.ticket = ticket
        self._tally.grown(ticket)
        self._extend(now, lease)
        self._named.grown(lease.transfer, ticket)
        watchers, lease.watchers = lease.watchers, {}
        proofs = self._proofs(ticket) if watchers else {}
        return [Send(reply_to, Grown(nonce, ticket, proofs)) for reply_to, nonce in watchers.values()]

    def revoke(self, now: float, request_id: str) -> list[SourceEffect]:
        """The engine has taken back the blocks of a growing lease: no read of it counts from now on."""
        lease = self._leases.get(self._by_request.get(request_id, 0))
        return self._end(now, lease, "withdrawn") if lease else []

    def withdraw(self, now: float, request_id: str, ticket_id: int = 0) -> list[SourceEffect]:
        """Withdraw an offer: at once if unread, otherwise when its reader has settled or timed out.

        ``ticket_id``: withdraw only this offer of the request.
        """
        lease = self._leases.get(self._by_request.get(request_id, 0))
        if lease is None or ticket_id not in (0, lease.ticket.ticket_id):
            return []
        lease.is_withdrawn = True
        lease.ends_by = min(lease.ends_by, now + self._timing.lease + self._timing.read)
        return [] if lease.reading else self._end(now, lease, "withdrawn")

    def count_soft(self) -> list[SourceEffect]:
        """A soft offer was made; it is counted, and nothing is kept of it."""
        self._tally.num_soft_offers += 1
        return []

    def claimed(self, now: float, number: int, ticket: Ticket | None, detail: str) -> list[SourceEffect]:
        """What the engine found of a soft offer: a ticket for it, which was offered before; or nothing."""
        if send := self._claims.answer(now, number, ticket, detail):
            lease = self._leases.get(ticket.ticket_id) if ticket else None
            if lease:
                lease.ends_by = min(lease.ends_by, now + CLAIM_LEASES * self._timing.lease)
            self._tally.claims["granted" if ticket else "missed"] += 1
            return [send]
        return self.withdraw(now, ticket.request_id) if ticket else []

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def is_whole(self) -> bool:
        return self._assembly is Assembly.WHOLE

    @property
    def overload(self) -> str:
        """Why new offers must be rejected; empty if they need not."""
        for rank, notices in self._notices.items():
            if len(notices.unheard) >= self.MAX_UNHEARD:
                return f"rank {rank} has not acknowledged {self.MAX_UNHEARD} release notices"
        return ""

    def status(self) -> dict[str, object]:
        read = sum(1 for lease in self._leases.values() if lease.reading)
        return {
            "engine": self._offers.engine,
            "generation": self._offers.generation,
            "ranks": f"{len(self._ranks)}/{self._num_ranks}",
            "offered": len(self._leases) - read,
            "being_read": read,
            "unheard": self._num_unheard,
        }

    @property
    def _num_unheard(self) -> int:
        return sum(len(notices.unheard) for notices in self._notices.values())

    def shown_leases(self, now: float) -> list[dict[str, object]]:
        return [
            {
                "request_id": lease.ticket.request_id,
                "num_tokens": lease.ticket.num_tokens,
                "reader": lease.reading.reader if lease.reading else "",
                "seconds_left": round(lease.deadline - now, 1),
            }
            for lease in islice(self._leases.values(), MAX_SHOWN)
        ]

    def figures(self) -> Figures:
        read = sum(1 for lease in self._leases.values() if lease.reading)
        leases = {"offered": len(self._leases) - read, "being-read": read}
        return {
            **by_label("kvferry_leases", leases),
            ("kvferry_unheard_releases",): self._num_unheard,
            **self._tally.figures(),
        }

    # -- events ------------------------------------------------------------------------------------

    def receive(self, now: float, reply_to: str, message: ToAuthority) -> list[SourceEffect]:
        match message:
            case Hello():
                return [Send(reply_to, self._greet(message))]
            case DescribeRanks():
                return [Send(reply_to, self._describe(message))]
            case Acquire():
                answer = self._acquire(now, message)
                if isinstance(answer, Grant) and answer.board:
                    return [Show(answer.ticket_id, answer.mark), Send(reply_to, answer)]
                return [Send(reply_to, answer)]
            case ClaimOffer():
                return self._claim(now, reply_to, message)
            case FindTransfer():
                return [Send(reply_to, self._named.find(now, reply_to, message))]
            case Watch():
                return self._watch(reply_to, message)
            case Renew():
                return [Send(reply_to, self._renew(now, message))]
            case Settle():
                ack, effects = self._settle(now, message)
                return [Send(reply_to, ack), *effects]
            case Join():
                return self._join(now, reply_to, message)
            case ReleaseAck():
                return self._acknowledged(now, reply_to, message)
            case AskStatus():
                return []  # answered by the edge
            case DigestRequest():
                places = {number: rank.reply_to for number, rank in self._ranks.items()}
                return self._digests.ask(reply_to, message, self._leases.get(message.ticket_id), places)
            case DigestResult():
                return self._digests.answer(reply_to, message)

    def tick(self, now: float) -> list[SourceEffect]:
        """End expired leases, and repeat unacknowledged notices."""
        effects: list[SourceEffect] = []
        while self._by_deadline and self._by_deadline[0][0] <= now:
            _, ticket_id = heappop(self._by_deadline)
            lease = self._leases.get(ticket_id)
            if lease is None:
                continue
            if lease.deadline <= now:
                effects += self._end(now, lease, "expired")
            else:  # renewed since it was queued
                heappush(self._by_deadline, (lease.deadline, ticket_id))
        # The end of one lease may release the blocks of the next: strike all of them first.
        effects.sort(key=lambda effect: not isinstance(effect, Strike))
        self._ended.tick(now)
        self._named.tick(now)
        if denied := self._claims.tick(now):
            self._tally.claims["late"] += len(denied)
        effects += [*denied, *self._tell(now)]
        for rank, notices in self._notices.items():
            if notices.unheard and now >= notices.sent_at + self._timing.retry:
                effects += self._notify(now, rank)
        return effects

    def next_deadline(self) -> float:
        deadlines = [self._ended.next_deadline(), self._held.next_deadline(), self._claims.next_deadline()]
        deadlines += [self._by_deadline[0][0]] if self._by_deadline else []
        pending = [self._notices[rank] for rank in self._ranks if self._notices[rank].unheard]
        deadlines += [notices.sent_at + self._timing.retry for notices in pending]
        return min(deadlines)

    # -- readers -----------------------------------------------------------------------------------

    def _greet(self, hello: Hello) -> Welcome | Rejected:
        if not is_spoken(hello.protocol):
            return Rejected(
                "protocol", f"this engine speaks protocol {PROTOCOL}, the reader protocol {hello.protocol}"
            )
        if self._welcome is None:
            return Rejected("not-ready", f"ranks joined: {len(self._ranks)} of {self._num_ranks}")
        return self._welcome

    def _describe(self, ask: DescribeRanks) -> RankDescriptions:
        """The requested ranks, or the first of them; the reader asks for the rest."""
        is_known = self.is_whole and ask.generation == self._offers.generation
        chosen: dict[int, RankDescription] = {}
        num_bytes = 0
        for number in ask.ranks[:MAX_BATCH] if is_known else ():
            if number in self._ranks:
                description = self._ranks[number].join.description
                num_bytes += description.num_bytes
                if chosen and num_bytes > self.MAX_DESCRIBED_BYTES:
                    break
                chosen[number] = description
        return RankDescriptions(ask.nonce, self._offers.generation, chosen)

    def _acquire(self, now: float, ask: Acquire) -> Grant | Denial:
        def no(code: FailureCode, detail: str) -> Denial:
            self._tally.denials[code.value] += 1
            return Denial(ask.nonce, ask.ticket.ticket_id, code.value, detail)

        ticket, offers = ask.ticket, self._offers
        if (ticket.engine, ticket.generation) != (offers.engine, offers.generation):
            return no(FailureCode.RESTARTED, f"this is {offers.engine}, generation {offers.generation}")
        if not offers.is_own(ticket):
            return no(FailureCode.FORGED, "the ticket was not issued by this engine, or was modified")
        lease = self._leases.get(ticket.ticket_id)
        if lease is None:
            return no(FailureCode.ENDED, "the ticket was read, declined or withdrawn, or its lease expired")
        if not self._may_last(now, lease):
            return no(FailureCode.ENDED, "its lease is over")
        is_first, is_known = lease.reading is None, lease.is_held_by(ask.reader_rank)
        if refusal := lease.bind(ask):
            return no(*refusal)
        if not is_known:
            self._tally.granted(ticket, is_first=is_first)
        self._extend(now, lease)
        proofs = self._proofs(ticket)
        # A preempted prefill's blocks may be overwritten before its lease is struck from the board.
        is_shown = self._board and not lease.transfer
        seen = (self._board, offers.mark(ticket.ticket_id)) if is_shown else ()
        lease_ms = int(self._timing.lease * 1000)
        return Grant(ask.nonce, ticket.ticket_id, lease_ms, proofs, self.is_whole, *seen)

    def _proofs(self, ticket: Ticket) -> dict[int, bytes]:
        return make_proofs(ticket, {number: rank.join.rank_key for number, rank in self._ranks.items()})

    def _watch(self, reply_to: str, ask: Watch) -> list[SourceEffect]:
        """Tell a reader of the newest stage, now or when there is one."""
        lease = self._leases.get(ask.ticket_id) if ask.generation == self._offers.generation else None
        reading = lease.reading if lease else None
        if lease is None or reading is None or not reading.is_held(ask.reader, ask.reader_rank, ask.token):
            detail = "the prefill was withdrawn, or its lease is over"
            return [Send(reply_to, Denial(ask.nonce, ask.ticket_id, FailureCode.ENDED.value, detail))]
        ticket = lease.ticket
        if ticket.is_growing and ticket.num_complete <= ask.num_complete:
            lease.watchers[ask.reader_rank] = reply_to, ask.nonce
            return []
        return [Send(reply_to, Grown(ask.nonce, ticket, self._proofs(ticket)))]

    def _claim(self, now: float, reply_to: str, claim: ClaimOffer) -> list[SourceEffect]:
        if not self._offers.is_own(claim.ticket) or not claim.ticket.is_soft or claim.num_tokens <= 0:
            self._tally.claims["unknown"] += 1
            return [
                Send(
                    reply_to,
                    Claimed(
                        claim.nonce,
                        detail="the engine has restarted since it made this offer, or never made it",
                    ),
                )
            ]
        return self._claims.ask(now, reply_to, claim)

    def _renew(self, now: float, ask: Renew) -> Renewal:
        kept, ended = [], []
        for ticket_id, token in ask.tickets[:MAX_BATCH]:
            lease = self._leases.get(ticket_id) if ask.generation == self._offers.generation else None
            reading = lease.reading if lease is not None and self._may_last(now, lease) else None
            if lease and reading and reading.is_held(ask.reader, ask.reader_rank, token):
                self._extend(now, lease)
                kept.append(ticket_id)
            else:
                ended.append(ticket_id)
        self._tally.renewals.update(kept=len(kept), ended=len(ended))
        return Renewal(ask.nonce, int(self._timing.lease * 1000), tuple(kept), tuple(ended))

    def _may_last(self, now: float, lease: Lease) -> bool:
        """Whether it can be granted or renewed; earlier grants stand until their deadline in any case."""
        return now < lease.deadline and now + self._timing.lease <= lease.ends_by

    def _extend(self, now: float, lease: Lease) -> None:
        lease.deadline = max(lease.deadline, now + self._timing.lease)

    def _settle(self, now: float, message: Settle) -> tuple[SettleAck, list[SourceEffect]]:
        """A rank of a reader has settled: whether its read counts, and what follows."""

        def ack(code: FailureCode | None = None, detail: str = "") -> SettleAck:
            told = "" if code is None else code.value
            return SettleAck(message.ticket_id, message.reader_rank, message.attempt, told, detail)

        engine, generation = self._offers.engine, self._offers.generation
        if message.generation != generation:
            return ack(FailureCode.RESTARTED, f"this is {engine}, generation {generation}"), []
        lease = self._leases.get(message.ticket_id)
        if lease is not None and (ask := message.acquire) and self._offers.is_own(ask.ticket):
            lease.bind(ask)
        if lease is not None and lease.reading is not None and lease.reading.settle(message):
            lease.watchers.pop(message.reader_rank, None)
            return ack(), self._settled(now, lease)
        ended = lease.left if lease is not None else self._ended.find(message.ticket_id)
        if ended is not None and ended.is_settled(message):
            return ack(), []
        return ack(FailureCode.LEASE_ENDED, "the source no longer holds a lease for this read"), []

    def _settled(self, now: float, lease: Lease) -> list[SourceEffect]:
        reading = lease.reading
        outcomes = reading.outcomes if reading else set()
        if reading is None or not outcomes:
            return []
        if outcomes == {Outcome.READ}:
            return self._end(now, lease, "read")
        if reading.is_declined:
            return self._end(now, lease, "declined")
        if outcomes != {Outcome.UNREAD}:
            return self._end(now, lease, "failed")
        if lease.is_withdrawn:
            return self._end(now, lease, "withdrawn")
        lease.left, lease.reading = reading, None
        return []

    # -- this engine's ranks -----------------------------------------------------------------------

    def _join(self, now: float, reply_to: str, join: Join) -> list[SourceEffect]:
        def no(detail: str) -> list[SourceEffect]:
            return [Send(reply_to, Rejected("join", detail))]

        engine = self._offers.engine
        is_ours = join.engine == engine and 0 <= join.rank < self._num_ranks
        if not is_spoken(join.protocol) or not is_ours:
            ranks = counted(self._num_ranks, "rank")
            return no(f"this engine is {engine}, with {ranks}, and speaks protocol {PROTOCOL}")
        known = self._ranks.get(join.rank)
        if known is not None and known.is_same(join):
            known.reply_to = reply_to
        elif self._assembly is Assembly.MERGING:
            return []  # it asks again after the merge
        elif known is not None and not self._may_replace(known.join, join):
            return no(f"rank {join.rank} has already joined with different memory")
        else:
            others = {rank.join.transport for number, rank in self._ranks.items() if number != join.rank}
            if others - {join.transport}:
                return no(f"its transport is {join.transport}, another rank has {others.pop()}")
            self._ranks.pop(join.rank, None)  # the last joined comes last
            self._ranks[join.rank] = JoinedRank(reply_to, join)
        if self._assembly is Assembly.WHOLE or len(self._ranks) < self._num_ranks:
            return self._joined(now, join.rank)
        if self._assembly is Assembly.MERGING:
            return []
        self._assembly = Assembly.MERGING
        return [Merge({number: rank.join for number, rank in self._ranks.items()})]

    def _may_replace(self, known: Join, join: Join) -> bool:
        """Until the engine is whole, the last to join counts, but no leftover of an earlier start."""
        return self._assembly is Assembly.GATHERING and not (join.previous and not known.previous)

    def _joined(self, now: float, rank: int) -> list[SourceEffect]:
        joined = JoinAck(self._offers.engine, self._offers.generation)
        return [Send(self._ranks[rank].reply_to, joined), *self._notify(now, rank)]

    def merged(
        self, now: float, outline: bytes, block_bytes: Mapping[str, int] | None = None
    ) -> list[SourceEffect]:
        """The ranks fit together. ``block_bytes``: bytes per block of each group, for metrics."""
        self._tally.block_bytes = block_bytes or {}
        engine, generation = self._offers.engine, self._offers.generation
        transport = next(rank.join.transport for rank in self._ranks.values())
        self._assembly = Assembly.WHOLE
        self._welcome = Welcome(PROTOCOL, engine, generation, transport, outline)
        return [effect for rank in self._ranks for effect in self._joined(now, rank)]

    def not_merged(self, now: float, detail: str) -> list[SourceEffect]:
        """The last rank to join does not fit the others; all have to join again.

        The others may be restarted together with it: a rank that is gone must not make the engine whole.
        """
        self._assembly = Assembly.GATHERING
        *_, last = self._ranks.values()
        self._ranks.clear()
        return [Send(last.reply_to, Rejected("join", detail))]

    def _acknowledged(self, now: float, reply_to: str, ack: ReleaseAck) -> list[SourceEffect]:
        known = self._ranks.get(ack.rank)
        if known is None or known.reply_to != reply_to or ack.generation != self._offers.generation:
            return [Send(reply_to, Rejected(NOT_JOINED, "the rank has not joined since the engine started"))]
        notices = self._notices[ack.rank]
        number = min(ack.number, notices.last_sent)
        if number < notices.first:
            return []  # a duplicate
        while notices.first <= number:
            notices.unheard.popleft()
            notices.first += 1
        return [*self._tell(now), *self._notify(now, ack.rank)]

    # -- the end of a lease ------------------------------------------------------------------------

    def _end(self, now: float, lease: Lease, reason: str) -> list[SourceEffect]:
        """Release a request, to the engine and to every rank, read from or not."""
        request_id, ticket_id = lease.ticket.request_id, lease.ticket.ticket_id
        del self._leases[ticket_id]
        self._tally.ended_lease(lease.ticket, reason)
        named = self._named.end(lease.transfer, ticket_id, may_come_again=reason == "withdrawn")
        over = [
            Send(reply_to, Denial(nonce, ticket_id, FailureCode.ENDED.value, f"the lease is over: {reason}"))
            for reply_to, nonce in lease.watchers.values()
        ]
        if lease.reading is not None:
            self._ended.remember(now, ticket_id, lease.reading)
        del self._by_request[request_id]
        released = Released(request_id, reason, ticket_id)
        self._held.add(now, released)
        struck = [Strike(ticket_id)] if self._board else []
        effects = [*struck, *over, *named, *self._tell(now)]
        for rank, notices in self._notices.items():
            notices.unheard.append(released)
            if len(notices.unheard) == 1:  # else it is sent when the previous one is acknowledged
                effects += self._notify(now, rank)
        return effects

    def _tell(self, now: float) -> list[SourceEffect]:
        """Report releases to the engine once every rank has stopped serving packed reads of them."""
        gathering = (number for number, rank in self._ranks.items() if rank.join.rank_key)
        num_heard = min((self._notices[rank].first - 1 for rank in gathering), default=float("inf"))
        return [*self._held.pop(now, num_heard)]

    def _notify(self, now: float, rank: int) -> list[SourceEffect]:
        """Send a joined rank all unacknowledged releases, in one message."""
        notices = self._notices[rank]
        if not notices.unheard or rank not in self._ranks:
            return []
        batch = tuple(islice(notices.unheard, MAX_BATCH))
        notices.sent_at = now
        notices.last_sent = max(notices.last_sent, notices.first + len(batch) - 1)
        requests = tuple((each.request_id, each.reason) for each in batch)
        ticket_ids = tuple(each.ticket_id for each in batch)
        notice = ReleaseNotice(self._offers.generation, notices.first, requests, ticket_ids)
        return [Send(self._ranks[rank].reply_to, notice)]
