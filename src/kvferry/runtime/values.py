"""What the state machines take and give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.core.product import Product
from kvferry.core.request import BlockTable, Request
from kvferry.core.select import Slack
from kvferry.core.span import Span, Spans, holds, intersect, normal, subtract
from kvferry.errors import SpecError
from kvferry.runtime.failure import Failure
from kvferry.wire.messages import DigestTask, Join, Message, RankDescription
from kvferry.wire.ticket import Ticket

FAR = 1 << 60
"""Behind all tokens."""
ALL: Spans = (Span(0, FAR),)
MAX_SHOWN = 20
"""How many leases, or loads, a person is shown one by one: the oldest."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Every wait has a deadline; these are their lengths, in seconds."""

    lease: float = 30.0
    """Duration of a lease, from the request on."""
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
    """How long a peer may leave heartbeats unanswered before its connection counts as broken. Its network
    thread answers them, whatever else it does."""

    def __post_init__(self) -> None:
        for name in ("lease", "meet", "read", "retry", "life", "reconnect", "silence"):
            if not 0 < getattr(self, name) < 1e6:
                raise SpecError(f"timing: {name} must be a number of seconds, got {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class Fetch:
    """What a destination rank wants of one ticket."""

    ticket: Ticket
    dst: Mapping[str, BlockTable]
    need: Mapping[str, Spans]
    kept: Mapping[str, Spans] = field(default_factory=dict)
    slack: Slack = Slack.CLEAR
    after: object | None = None
    """A mark of the device's, for the transport: no byte is written before the device has come to it."""
    early: frozenset[str] = frozenset()
    """Groups here that keep every token they have: they can be read in parts, while a lease grows, or from
    several sources."""
    tokens: Spans = ALL
    """Those of these groups that are read from this source. All other groups are read with the end."""
    is_open: bool = False
    """Whether more tokens may be given to it: it is not over before it is finished."""

    @property
    def num_blocks(self) -> int:
        return sum(len(table.block_ids) for table in self.dst.values())

    def request(self) -> Request:
        return Request(self.ticket.block_tables(), self.dst, self.need, self.kept)

    def part(self, tokens: Spans) -> Fetch:
        """These tokens of the groups that are read in parts; with the end, also what others need."""
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
        """The tokens that are needed of the groups that are read in parts."""
        return normal(self.need[name][0] for name in self._in_parts)

    @property
    def early_stop(self) -> int:
        """Up to which token a source may be read that still computes: the last one comes with the rest."""
        return min((self.need[name][0].stop - 1 for name in self._in_parts), default=0)

    @property
    def _in_parts(self) -> list[str]:
        return [name for name, spans in self.need.items() if name in self.early and len(spans) == 1]


def _with_edges(tokens: Spans, need: Span) -> Spans:
    """Whoever reads the first token of a need, or the last, clears what is before it, or behind."""
    before, behind = Span(0, need.start), Span(need.stop, FAR)
    edges = ((before, need.start), (behind, need.stop - 1))
    return normal((*tokens, *(edge for edge, token in edges if holds(tokens, token))))


@dataclass(frozen=True, slots=True)
class Peer:
    """One start of one source engine."""

    engine: str
    generation: int
    authority: str


# -- effects: what an edge is asked to do ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to whoever is at ``to`` (an address, or where a message said to reply to)."""

    to: str
    message: Message


@dataclass(frozen=True, slots=True)
class FindRanks:
    """Find out which ranks of a peer are read from; then say ``found`` or ``not_built``. May be slow."""

    peer: Peer
    outline: bytes


@dataclass(frozen=True, slots=True)
class Build:
    """Prove, lower, connect; then say ``built`` or ``not_built``. May be slow."""

    peer: Peer
    transport: str
    outline: bytes
    ranks: Mapping[int, RankDescription]
    """Those that were found."""


@dataclass(frozen=True, slots=True)
class Merge:
    """Make the engine's outline of its ranks; then say ``merged`` or ``not_merged``. May be slow."""

    joins: Mapping[int, Join]


@dataclass(frozen=True, slots=True)
class Released:
    """A request's blocks are the source engine's own again."""

    request_id: str
    reason: str
    ticket_id: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A reader claims a soft offer: the engine pins what is left of it, and says ``claimed``."""

    number: int
    ticket: Ticket
    num_tokens: int
    """At most so many of its first tokens."""
    until: float
    """The claim is denied at this time."""


@dataclass(frozen=True, slots=True)
class Show:
    """Show on the board that a lease stands, before its grant is sent."""

    ticket_id: int
    mark: bytes


@dataclass(frozen=True, slots=True)
class Strike:
    """Strike a lease from the board, before anybody hears that it is over."""

    ticket_id: int


@dataclass(frozen=True, slots=True)
class Select:
    """Turn a fetch into runs with the peer's route; then say ``selected`` or ``not_selected``."""

    handle: int
    peer: Peer
    fetch: Fetch


@dataclass(frozen=True, eq=False)
class PostReads:
    """Submit the zeroing of a fetch's slack, and its reads. Each of these ends as ``ended``, once.

    A read that is refused before anything moved ends, too; so do all of them if the slack cannot be zeroed.
    """

    peer: Peer
    clear: int
    """The number of the zeroing; it ends also where nothing is to be zeroed."""
    zeros: Product
    reads: Mapping[int, tuple[int, Product]]
    """By transfer: the source rank, and what to read from it."""
    after: object | None = None
    """A mark of the device's: nothing is written before the device has come to it."""
    permits: Mapping[int, bytes] = field(default_factory=dict)
    """By source rank: what it wants to see before it gathers, if it does that for readers."""


@dataclass(frozen=True, slots=True)
class TakeDigest:
    """Digest what a fetch has brought; say ``digest_asked``, then ``digest_taken`` or ``not_digested``.

    May be slow.
    """

    handle: int
    peer: Peer
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class AnswerDigest:
    """Digest what was read from this rank, and send the result to its authority. May be slow."""

    task: DigestTask


@dataclass(frozen=True, slots=True)
class LookUp:
    """See whether a lease stands on its authority's board, at once; if so, say ``stood``."""

    handle: int
    ticket_id: int
    board: str
    mark: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Post nothing more of a transfer. It still ends as ``ended``, once what was posted has ended."""

    transfer: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a peer whole."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class HangUp:
    """Keep no connection to an address: nobody there is asked or told anything any more."""

    address: str


@dataclass(frozen=True, slots=True)
class AllRead:
    """Of a fetch that is open: these tokens are in, and it has no others to read."""

    handle: int
    tokens: Spans


@dataclass(frozen=True, slots=True)
class Report:
    """The one outcome of a fetch."""

    handle: int
    failure: Failure | None
    record: Record


SourceEffect = Send | Merge | Released | Wanted | Show | Strike
"""What the machines of a source engine ask for."""
MemberEffect = Send | Released | AnswerDigest
"""What the machine of a source rank asks for."""
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
    """The source; several, joined by +, if the load was from several."""
    num_bytes: int = 0
    num_runs: int = 0
    num_sources: int = 0
    meet_seconds: float = 0.0
    """From the call until it was leased and its peer planned for."""
    plan_seconds: float = 0.0
    """Of that, comparing, planning, proving and lowering; 0 where the peer was known already."""
    post_seconds: float = 0.0
    """From there to the hand-over to the transport: selecting."""
    move_seconds: float = 0.0
    """From there to the last end: zeroing slack, and reading."""
    digest_seconds: float = 0.0
    """From there until both sides' digests were compared; 0 if they were not."""
    confirm_seconds: float = 0.0
    """From there until the source's authority had confirmed that the read counts."""
    total_seconds: float = 0.0
    early_bytes: int = 0
    """Of ``num_bytes``, those that were read while the source was still computing the prompt."""
    way: str = ""
    """Transfer mode (``mapped``, ``direct`` …); several are joined by +."""
    digest: str = ""
    """Result of the digest comparison: ``equal``, ``differs`` or ``missing``; empty: not compared."""
    outcome: str = ""
    """``read``, or the failure's code: one word of a closed list, fit for a metric's label."""
    detail: str = ""
    """Detail of the failure; for a successful load from several sources, the failed ones."""
    address: str = ""
    """Where the source engine's authority is called; joined as ``engine``."""
