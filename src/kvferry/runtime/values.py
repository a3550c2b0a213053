"""Inputs, effects and results of the state machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.core.product import Product
from kvferry.core.request import BlockTable, Request
from kvferry.core.select import Slack
from kvferry.core.span import MAX_STOP, Span, Spans, holds, intersect, normal, subtract
from kvferry.errors import SpecError
from kvferry.runtime.failure import Failure
from kvferry.wire.messages import DigestTask, Join, Message, RankDescription
from kvferry.wire.ticket import Ticket

FAR = 1 << 60
"""Beyond every token."""
ALL: Spans = (Span(0, FAR),)
ANY_NUMBER = Span(0, MAX_STOP)
MAX_SHOWN = 20
"""Leases or loads that a status report lists: the oldest."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts, in seconds."""

    lease: float = 30.0
    """Duration of a lease, counted from the request for it."""
    meet: float = 10.0
    """Timeout of the first contact, planning included."""
    read: float = 120.0
    """Time after which an unfinished transfer is quarantined."""
    retry: float = 0.5
    """Time after which an unanswered message is sent again."""
    life: float = 3600.0
    """Maximum lifetime of a ticket, however often its lease is renewed."""
    reconnect: float = 0.5
    """Time for a peer to reconnect before it counts as gone."""
    silence: float = 2.0
    """Time without heartbeats after which a connection counts as broken."""

    def __post_init__(self) -> None:
        for name in ("lease", "meet", "read", "retry", "life", "reconnect", "silence"):
            if not 0 < getattr(self, name) < 1e6:
                raise SpecError(f"timing: {name} must be a number of seconds, got {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class Fetch:
    """A destination rank's request for one ticket."""

    ticket: Ticket
    dst: Mapping[str, BlockTable]
    need: Mapping[str, Spans]
    kept: Mapping[str, Spans] = field(default_factory=dict)
    slack: Slack = Slack.CLEAR
    after: object | None = None
    """A device event: no byte is written before the device reaches it."""
    early: frozenset[str] = frozenset()
    """Local groups that keep all tokens, which can be read in parts and from several sources."""
    tokens: Spans = ALL
    """The tokens of these groups to read from this source. Other groups are read with the last part."""
    is_open: bool = False
    """Whether more tokens may be added until ``finish``."""
    full: Span = ANY_NUMBER
    """Numbers of tokens with which a ticket can supply the last token, and the groups read with it."""

    @property
    def num_blocks(self) -> int:
        return sum(len(table.block_ids) for table in self.dst.values())

    def request(self) -> Request:
        return Request(self.ticket.block_tables(), self.dst, self.need, self.kept)

    def part(self, tokens: Spans) -> Fetch:
        """The fetch of these tokens; the part with the last token includes all other groups."""
        if tokens == ALL:
            return self
        in_parts, has_end = self._in_parts, bool(tokens) and tokens[-1].stop == FAR
        # A slot that is not named is needed by default.
        need: dict[str, Spans] = {} if has_end else dict.fromkeys(self.dst, ())
        need |= {name: spans if has_end else () for name, spans in self.need.items()}
        need |= {name: intersect(self.need[name], tokens) for name in in_parts}
        others = {name: subtract(ALL, _with_edges(tokens, self.need[name][0])) for name in in_parts}
        kept = {name: normal((*self.kept.get(name, ()), *spans)) for name, spans in others.items()}
        return replace(self, need=need, kept={**self.kept, **kept})

    @property
    def in_parts(self) -> Spans:
        """The needed tokens of the groups that are read in parts."""
        return normal(self.need[name][0] for name in self._in_parts)

    @property
    def early_stop(self) -> int:
        """Where early reads stop: the last token comes with the last part."""
        return min((self.need[name][0].stop - 1 for name in self._in_parts), default=0)

    @property
    def _in_parts(self) -> list[str]:
        return [name for name, spans in self.need.items() if name in self.early and len(spans) == 1]


def _with_edges(tokens: Spans, need: Span) -> Spans:
    """The part with the first or last needed token also clears the cells beyond it."""
    before, behind = Span(0, need.start), Span(need.stop, FAR)
    edges = ((before, need.start), (behind, need.stop - 1))
    return normal((*tokens, *(edge for edge, token in edges if holds(tokens, token))))


@dataclass(frozen=True, slots=True)
class Peer:
    """One start of one source engine."""

    engine: str
    generation: int
    authority: str


# -- effects, for an edge to carry out ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an address or a message's ``reply_to``."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class FindRanks:
    """Determine which ranks of a peer are read from; ends in ``found`` or ``not_built``. May be slow."""

    peer: Peer
    outline: bytes


@dataclass(frozen=True, slots=True)
class Build:
    """Prove, lower, connect; ends in ``built`` or ``not_built``. May be slow."""

    peer: Peer
    transport: str
    outline: bytes
    ranks: Mapping[int, RankDescription]


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge the ranks into the engine's outline; ends in ``merged`` or ``not_merged``. May be slow."""

    joins: Mapping[int, Join]


@dataclass(frozen=True, slots=True)
class Released:
    """The blocks of a request belong to the source engine again."""

    request_id: str
    reason: str
    ticket_id: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reader claims a soft offer: the engine pins the remaining blocks; ends in ``claimed``."""

    number: int
    ticket: Ticket
    num_tokens: int
    """Maximum number of its first tokens."""
    until: float
    """The claim is denied at this time."""


@dataclass(frozen=True, slots=True)
class Show:
    """Write a lease's mark to the board, before its grant is sent."""

    ticket_id: int
    mark: bytes


@dataclass(frozen=True, slots=True)
class Strike:
    """Remove a lease's mark from the board, before its end is announced."""

    ticket_id: int


@dataclass(frozen=True, slots=True)
class Select:
    """Turn a fetch into runs with the peer's route; ends in ``selected`` or ``not_selected``."""

    handle: int
    peer: Peer
    fetch: Fetch


@dataclass(frozen=True, eq=False)
class PostReads:
    """Submit the zeroing of a fetch's slack, and its reads. Each ends in ``ended``, once, also if rejected.

    If the slack cannot be zeroed, all reads end with that error.
    """

    peer: Peer
    clear: int
    """Transfer number of the zeroing, which ends even if there is nothing to zero."""
    zeros: Product
    reads: Mapping[int, tuple[int, Product]]
    """By transfer: the source rank, and its runs."""
    after: object | None = None
    permits: Mapping[int, bytes] = field(default_factory=dict)
    """By source rank: the permit for packed reads."""


@dataclass(frozen=True, slots=True)
class TakeDigest:
    """Digest the loaded bytes; ends in ``digest_asked``, then ``digest_taken`` or ``not_digested``. Slow."""

    handle: int
    peer: Peer
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class AnswerDigest:
    """Digest the bytes that a reader has read from this rank, and send it to the authority. May be slow."""

    task: DigestTask


@dataclass(frozen=True, slots=True)
class LookUp:
    """Check at once whether the authority's board shows the lease; if so, call ``stood``."""

    handle: int
    ticket_id: int
    board: str
    mark: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Post nothing more of a transfer. It still ends in ``ended``, after its posted reads."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop all state of a peer."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection to an address."""

    address: str


@dataclass(frozen=True, slots=True)
class AllRead:
    """An open fetch has read all tokens that it was given."""

    handle: int
    tokens: Spans


@dataclass(frozen=True, slots=True)
class Report:
    """The one outcome of a fetch."""

    handle: int
    failure: Failure | None
    record: Record


SourceEffect = Send | Merge | Released | Wanted | Show | Strike
MemberEffect = Send | Released | AnswerDigest
Effect = (
    Send
    | FindRanks
    | Build
    | Select
    | PostReads
    | TakeDigest
    | LookUp
    | Cancel
    | Drop
    | HangUp
    | AllRead
    | Report
)


@dataclass(frozen=True, slots=True)
class Record:
    request_id: str
    engine: str
    """The source; several are joined by +."""
    num_bytes: int = 0
    num_runs: int = 0
    num_sources: int = 0
    meet_seconds: float = 0.0
    """From the call until the lease is granted and the peer is met."""
    plan_seconds: float = 0.0
    """The part of it for comparing, planning, proving and lowering; 0 if the peer was known."""
    post_seconds: float = 0.0
    """Selecting: until the transport has the reads."""
    move_seconds: float = 0.0
    """Zeroing slack and reading."""
    digest_seconds: float = 0.0
    """Comparing digests; 0 if they were not compared."""
    confirm_seconds: float = 0.0
    """Until the source's authority confirms the read."""
    total_seconds: float = 0.0
    early_bytes: int = 0
    """The part of ``num_bytes`` that was read while the source was still computing the prompt."""
    way: str = ""
    """Transfer mode (``mapped``, ``direct`` …); several are joined by +."""
    digest: str = ""
    """Result of the digest comparison: ``equal``, ``differs`` or ``missing``; empty: not compared."""
    outcome: str = ""
    """``read``, or the failure's code."""
    detail: str = ""
    """Detail of the failure; for a successful load from several sources, the failed ones."""
    address: str = ""
    """The address of the source engine's authority; joined as ``engine``."""
