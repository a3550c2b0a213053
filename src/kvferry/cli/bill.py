"""What a plan costs: every destination rank planned, proved, lowered, and tried with one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import kvferry
from kvferry import Code, Finding, Manifest, Refused, Request, RequestError


@dataclass(frozen=True, slots=True)
class Flow:
    """What one source rank sends to one destination rank."""

    src_rank: int
    dst_rank: int
    num_pieces: int
    num_runs: int
    total_bytes: int

    @property
    def average_run_bytes(self) -> float:
        return self.total_bytes / self.num_runs if self.num_runs else 0.0


@dataclass(frozen=True, slots=True)
class RankBill:
    """What one destination rank receives."""

    dst_rank: int
    lines: tuple[str, ...]
    """Who sends what, as ``explain`` says it."""
    flows: tuple[Flow, ...]
    zeroed_bytes: int
    plan_ms: float
    """To plan, prove and lower."""
    select_ms: float


@dataclass(frozen=True)
class Bill:
    """The bills of all ranks that were asked for, or the findings that stand in the way."""

    ranks: tuple[RankBill, ...]
    findings: dict[Finding, list[int]] = field(default_factory=dict)
    """Each reason for a refusal, with the destination ranks that it concerns."""
    num_more: int = 0
    """Reasons that are too many to be kept."""

    @property
    def flows(self) -> tuple[Flow, ...]:
        return tuple(flow for rank in self.ranks for flow in rank.flows)

    @property
    def total_bytes(self) -> int:
        return sum(flow.total_bytes for flow in self.flows)

    @property
    def num_runs(self) -> int:
        return sum(flow.num_runs for flow in self.flows)

    @property
    def zeroed_bytes(self) -> int:
        return sum(rank.zeroed_bytes for rank in self.ranks)

    @property
    def plan_ms(self) -> float:
        return sum(rank.plan_ms for rank in self.ranks)

    @property
    def select_ms(self) -> float:
        return sum(rank.select_ms for rank in self.ranks)


def bill_of(
    src: Manifest, dst: Manifest, dst_ranks: Sequence[int], request: Request, max_runs_per_block: int
) -> Bill:
    """Bill every rank; a refused rank adds its findings and the others are tried all the same."""
    if found := kvferry.compare(src, dst):
        return Bill((), {finding: list(dst_ranks) for finding in found})
    ranks: list[RankBill] = []
    findings: dict[Finding, list[int]] = {}
    num_more = 0
    for dst_rank in dst_ranks:
        try:
            ranks.append(_rank_bill(src, dst, dst_rank, request, max_runs_per_block))
        except Refused as refused:
            for finding in refused.findings:
                findings.setdefault(finding, []).append(dst_rank)
            num_more += refused.num_more
        except RequestError as error:
            if error.code != Code.TOO_MANY_RUNS:
                raise
            finding = Finding(Code.TOO_MANY_RUNS, field=f"group {error.group}", note=error.detail)
            findings.setdefault(finding, []).append(dst_rank)
    return Bill(tuple(ranks), findings, num_more)


def _rank_bill(
    src: Manifest, dst: Manifest, dst_rank: int, request: Request, max_runs_per_block: int
) -> RankBill:
    started = perf_counter()
    plan = kvferry.plan(src, dst, dst_rank)
    route = kvferry.lower(kvferry.prove(plan), max_runs_per_block=max_runs_per_block)
    planned = perf_counter()
    selection = kvferry.select(route, request)
    selected = perf_counter()
    return RankBill(
        dst_rank,
        tuple(kvferry.explain(plan).splitlines()),
        tuple(_flows(plan, selection)),
        selection.zeros.total_bytes,
        1e3 * (planned - started),
        1e3 * (selected - planned),
    )


def _flows(plan: kvferry.Plan, selection: kvferry.Selection) -> Iterator[Flow]:
    """One flow per source rank of the plan, also where this request reads nothing from it."""
    pieces = Counter(piece.src_rank for piece in plan.pieces)
    for src_rank, num_pieces in sorted(pieces.items()):
        runs = selection.reads.get(src_rank)
        num_runs, total_bytes = (len(runs), runs.total_bytes) if runs is not None else (0, 0)
        yield Flow(src_rank, plan.dst_rank, num_pieces, num_runs, total_bytes)
