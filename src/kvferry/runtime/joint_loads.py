"""Loads of one request from several sources; each token is read from one of them.

A load has one fetch per ticket, each with its own lease, meeting and confirmation. Tokens of groups that keep
all tokens are read from the first ticket, in order of preference, that has them; other groups are read
together with the last token.

* If a fetch fails, its intervals are read from other sources; if those lack some tokens, the load fails.
* When everything is in, each fetch that has read something is confirmed by its source.
* A load is reported after all of its fetches: none of them can write to its blocks any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvferry.core.span import Span, Spans, intersect, normal, subtract
from kvferry.runtime.failure import NO_LAST_TOKEN, Failure, FailureCode
from kvferry.runtime.fetch_job import PART_TOKENS
from kvferry.runtime.reader import Reader
from kvferry.runtime.values import FAR, AllRead, Effect, Fetch, Record, Report
from kvferry.wire.messages import Outcome
from kvferry.wire.ticket import Ticket


@dataclass(slots=True, eq=False)
class _Share:
    """The part of a load that is read from one source."""

    handle: int
    ticket: Ticket
    given: Spans = ()
    read: Spans = ()
    is_open: bool = True
    """Whether more tokens can be added."""
    report: Report | None = None

    @property
    def is_read(self) -> bool:
        return not subtract(self.given, self.read)

    @property
    def failure(self) -> Failure | None:
        return self.report.failure if self.report else None


@dataclass(slots=True, eq=False)
class _Load:
    handle: int
    shares: list[_Share]
    """In order of preference."""
    started: float
    fetch: Fetch | None = None
    """None while the tickets are only held."""
    failure: Failure | None = None


class JointLoads:
    """The loads of one destination rank, from one ticket or several.

    All effects of the reader must go ``through`` here. ``handles`` are unique over fetches and loads.
    """

    def __init__(self, reader: Reader, handles: Iterator[int]) -> None:
        self._reader, self._handles = reader, handles
        self._loads: dict[int, _Load] = {}
        self._by_share: dict[int, _Load] = {}

    # -- the engine's calls ------------------------------------------------------------------------

    def fetch(self, now: float, handle: int, fetch: Fetch, tickets: Sequence[Ticket]) -> list[Effect]:
        """Start a load; the tickets are in order of preference."""
        if len(tickets) == 1:
            return self._reader.fetch(now, handle, replace(fetch, ticket=tickets[0]))
        load = self._begin(now, handle, tickets)
        if self._plan(load, fetch):
            starts = [(share.handle, _fetch_of(fetch, share)) for share in load.shares]
            return [effect for start in starts for effect in self._reader.fetch(now, *start)]
        self._forget(load)
        return [Report(handle, load.failure, _record(now, load))]

    def hold(self, now: float, handle: int, tickets: Sequence[Ticket]) -> list[Effect]:
        """Lease tickets and meet their engines before the destination blocks are known."""
        if len(tickets) == 1:
            return self._reader.hold(now, handle, tickets[0])
        holds = [(share.handle, share.ticket) for share in self._begin(now, handle, tickets).shares]
        return [effect for hold in holds for effect in self._reader.hold(now, *hold)]

    def supply(self, now: float, handle: int, fetch: Fetch, tickets: Sequence[Ticket]) -> list[Effect]:
        """Load held tickets, from the sources whose lease still stands."""
        load = self._loads.get(handle)
        if load is None:
            job = self._reader.fetches.get(handle)
            held = job.ticket if job and job.ticket in tickets else fetch.ticket
            return self._reader.supply(now, handle, replace(fetch, ticket=held))
        if load.fetch is not None or load.failure is not None:
            return []
        if any(share.ticket not in tickets for share in load.shares):
            return self._fail(now, load, Failure(FailureCode.TICKET, "the handle holds other tickets"))
        load.started = now
        if not self._plan(load, fetch):
            return self._fail(now, load, load.failure)
        supplies = [(share.handle, _fetch_of(fetch, share)) for share in load.shares if share.is_open]
        return [effect for supply in supplies for effect in self._reader.supply(now, *supply)]

    def abort(self, now: float, handle: int) -> list[Effect]:
        """Abort a load; reported once nothing of it is in flight."""
        load = self._loads.get(handle)
        if load is None:
            return self._reader.abort(now, handle)
        return self._fail(now, load, Failure(FailureCode.ABORTED))

    # -- the reader's effects ----------------------------------------------------------------------

    def through(self, now: float, effects: Iterable[Effect]) -> Iterable[Effect]:
        """Replace the reports of a load's fetches by their consequences; pass on all other effects."""
        if not self._loads:
            return effects
        told, others = deque(effects), list[Effect]()
        while told:
            effect = told.popleft()
            load = self._by_share.get(effect.handle) if isinstance(effect, AllRead | Report) else None
            if load is None or not isinstance(effect, AllRead | Report):
                others.append(effect)
            else:
                told += self._told(now, load, effect)
        return others

    def _told(self, now: float, load: _Load, said: AllRead | Report) -> list[Effect]:
        share = next(share for share in load.shares if share.handle == said.handle)
        if isinstance(said, AllRead):
            share.read = said.tokens
            return self._go_on(now, load)
        share.report, share.is_open = said, False
        effects: list[Effect] = []
        if said.failure is not None:  # and nothing of it is in flight
            lost, share.given = share.given, ()
            effects = self._read_elsewhere(now, load, lost, said.failure)
        return [*effects, *self._go_on(now, load)]

    def _read_elsewhere(self, now: float, load: _Load, lost: Spans, why: Failure) -> list[Effect]:
        if load.failure is not None or load.fetch is None:
            return []
        more = self._share_out(load, load.fetch, lost)
        if more is None:
            return self._fail(now, load, why)
        return [effect for share, spans in more for effect in self._reader.give(now, share.handle, spans)]

    def _go_on(self, now: float, load: _Load) -> list[Effect]:
        effects: list[Effect] = []
        needed = [share for share in load.shares if share.given]
        if load.failure is None and needed and all(share.is_read for share in needed):
            is_over = all(share.report for share in needed)
            for share in load.shares:
                if share.is_open and share.given:
                    share.is_open = False
                    effects += self._reader.finish(now, share.handle)
                elif share.is_open and is_over:  # not needed as a substitute
                    share.is_open = False
                    effects += self._reader.abort(now, share.handle)
        if all(share.report for share in load.shares):
            self._forget(load)
            if not needed:
                load.failure = load.failure or load.shares[-1].failure
            effects.append(Report(load.handle, load.failure, _record(now, load)))
        return effects

    # -- shares ------------------------------------------------------------------------------------

    def _begin(self, now: float, handle: int, tickets: Sequence[Ticket]) -> _Load:
        load = _Load(handle, [_Share(next(self._handles), ticket) for ticket in tickets], now)
        self._loads[handle] = load
        self._by_share |= {share.handle: load for share in load.shares}
        return load

    def _plan(self, load: _Load, fetch: Fetch) -> bool:
        """Assign all needed tokens to sources; False if some are missing."""
        load.fetch, in_parts = fetch, fetch.in_parts
        if self._share_out(load, fetch, (Span(in_parts[0].start if in_parts else FAR - 1, FAR),)) is not None:
            return True
        lost = [share.failure for share in load.shares if share.failure]
        load.failure = lost[-1] if lost else NO_LAST_TOKEN
        return False

    def _share_out(self, load: _Load, fetch: Fetch, missing: Spans) -> list[tuple[_Share, Spans]] | None:
        """Assign missing tokens to open fetches; None if some are in none of them."""
        found: list[tuple[_Share, Spans]] = []
        for share in load.shares if missing else ():
            reach = Span(0, _reach(fetch, share.ticket))
            if share.is_open and (spans := intersect(missing, (reach,))):
                found.append((share, spans))
                missing = subtract(missing, spans)
        if missing:
            return None
        for share, spans in found:
            share.given = normal((*share.given, *spans))
        return found

    def _fail(self, now: float, load: _Load, failure: Failure | None) -> list[Effect]:
        load.failure = load.failure or failure
        under_way = [share.handle for share in load.shares if share.report is None]
        return [effect for handle in under_way for effect in self._reader.abort(now, handle)]

    def _forget(self, load: _Load) -> None:
        del self._loads[load.handle]
        for share in load.shares:
            del self._by_share[share.handle]


def _reach(fetch: Fetch, ticket: Ticket) -> int:
    """Up to which token a source can be read: FAR if it can serve the last token and other groups."""
    num_tokens = max(0, min(ticket.num_tokens, fetch.full.start))  # the ticket's number is not trusted
    return FAR if ticket.num_tokens in fetch.full else num_tokens // PART_TOKENS * PART_TOKENS


def _fetch_of(fetch: Fetch, share: _Share) -> Fetch:
    return replace(fetch, ticket=share.ticket, tokens=share.given, is_open=True)


_SUMMED = ("num_bytes", "early_bytes", "num_runs", "num_sources")
_LONGEST = tuple(f"{part}_seconds" for part in ("meet", "plan", "post", "move", "digest", "confirm"))


def _record(now: float, load: _Load) -> Record:
    """The record of a load: over the fetches that count, or over all if it failed."""
    used = [share for share in load.shares if share.given or load.failure] or load.shares
    records = [share.report.record for share in used if share.report]
    lost = {share.ticket.engine: share.failure for share in load.shares if share.failure and not share.given}
    given_up = [f"{engine}: {why}" for engine, why in lost.items() if why.code is not FailureCode.ABORTED]
    ways = dict.fromkeys(way for record in records for way in record.way.split("+") if way)
    digests = {record.digest for record in records}

    figures: dict[str, Any] = {name: sum(getattr(each, name) for each in records) for name in _SUMMED}
    figures |= {name: max((getattr(each, name) for each in records), default=0.0) for name in _LONGEST}
    return Record(
        request_id=used[0].ticket.request_id,
        engine=_joined(share.ticket.engine for share in used),
        address=_joined(share.ticket.authority for share in used),
        total_seconds=now - load.started,
        way="+".join(ways),
        digest=next((each for each in ("differs", "missing", "equal") if each in digests), ""),
        outcome=load.failure.code.value if load.failure else Outcome.READ.value,
        detail=load.failure.detail if load.failure else "; ".join(given_up),
        **figures,
    )


def _joined(names: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(names))
