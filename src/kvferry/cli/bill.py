"""The cost of a plan: every destination rank planned, proved, lowered, and tried with one request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import kvferry
from kvferry import Code, Finding, Manifest, Product, Refused, Request, RequestError
from kvferry.cli.link_profile import NO_TRAFFIC, Cost, CostTerm, Estimate, LinkProfile, Traffic
from kvferry.core.choices import Way

SLOW = 3.0
"""A pair is slow from this multiple of the time of long runs on."""
NOTICED_SECONDS = 1e-3
"""Smaller losses are not reported, whatever the ratio."""


@dataclass(frozen=True, slots=True)
class Flow:
    src_rank: int
    dst_rank: int
    num_pieces: int
    num_runs: int
    total_bytes: int
    products: tuple[Product, ...] = ()
    """Empty if this request reads nothing."""

    @property
    def average_run_bytes(self) -> float:
        return self.total_bytes / self.num_runs if self.num_runs else 0.0

    def traffic(self, way: Way) -> Traffic:
        """The traffic of a mode: a kernel executes the product, the other modes the runs."""
        return Traffic.of(self.products, None if way is Way.MAPPED else self.num_runs)


@dataclass(frozen=True, slots=True)
class LinkBill:
    """A request over one kind of link; its time is that of the slowest rank."""

    profile: LinkProfile
    estimate: Estimate
    whose: str
    """The slowest rank: ``dst 0``, or ``src 0`` if sending takes longer than reading."""
    long_run_seconds: float
    """For the same bytes in one run from each source rank, the lower bound."""

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def slowdown(self) -> float:
        """By which factor short runs make it slower."""
        return self.seconds / self.long_run_seconds if self.long_run_seconds else 1.0

    @property
    def is_slow(self) -> bool:
        return self.slowdown >= SLOW and self.seconds - self.long_run_seconds >= NOTICED_SECONDS


@dataclass(frozen=True, slots=True)
class RankBill:
    dst_rank: int
    lines: tuple[str, ...]
    """The output of ``explain``."""
    flows: tuple[Flow, ...]
    route: kvferry.Route
    """For pictures."""
    zeroed_bytes: int


@dataclass(frozen=True)
class Bill:
    """The bills of all requested ranks, or the findings of a refusal."""

    ranks: tuple[RankBill, ...]
    findings: dict[Finding, list[int]] = field(default_factory=dict)
    """With the destination ranks that they concern."""
    num_more: int = 0
    """Findings beyond the limit."""

    @property
    def flows(self) -> tuple[Flow, ...]:
        return tuple(flow for rank in self.ranks for flow in rank.flows)

    @property
    def total_bytes(self) -> int:
        return sum(flow.total_bytes for flow in self.flows)

    @property
    def num_runs(self) -> int:
        return sum(flow.num_runs for flow in self.flows)

    def over(self, profile: LinkProfile) -> LinkBill:
        """The request over such a link: every rank has its own, and all read at once."""
        traffics = [(flow, flow.traffic(profile.way)) for flow in self.flows]
        whose, estimate = _longest(profile.cost, traffics)
        _, if_long = _longest(profile.cost, [(flow, _in_long_runs(traffic)) for flow, traffic in traffics])
        return LinkBill(profile, estimate, whose, if_long.seconds)

    @property
    def zeroed_bytes(self) -> int:
        return sum(rank.zeroed_bytes for rank in self.ranks)


def _longest(cost: Cost, traffics: Sequence[tuple[Flow, Traffic]]) -> tuple[str, Estimate]:
    received: dict[int, Traffic] = defaultdict(lambda: NO_TRAFFIC)
    sent: dict[int, Traffic] = defaultdict(lambda: NO_TRAFFIC)
    for flow, traffic in traffics:
        received[flow.dst_rank] += traffic
        sent[flow.src_rank] += traffic
    ends = {f"dst {rank}": cost.of(traffic) for rank, traffic in received.items()}
    # The reader pays for every read and run; a source for its bytes, from the first read on.
    ends |= {f"src {rank}": _sending(cost, traffic) for rank, traffic in sent.items()}
    whose = max(ends, key=lambda end: ends[end].seconds)
    return whose, ends[whose]


def _in_long_runs(traffic: Traffic) -> Traffic:
    return Traffic(traffic.num_reads, traffic.num_reads, traffic.num_bytes)


def _sending(cost: Cost, traffic: Traffic) -> Estimate:
    starting = cost.seconds_per_read if traffic.num_reads else 0.0
    parts = cost.of(traffic).parts
    return Estimate(traffic, {**parts, CostTerm.READS: starting, CostTerm.RUNS: 0.0})


def bill_of(
    src: Manifest, dst: Manifest, dst_ranks: Sequence[int], request: Request, max_runs_per_block: int
) -> Bill:
    """Bill every rank; a refused rank adds its findings, and the others are still tried."""
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
    plan = kvferry.plan(src, dst, dst_rank)
    route = kvferry.lower(kvferry.prove(plan), max_runs_per_block=max_runs_per_block)
    selection = kvferry.select(route, request)
    return RankBill(
        dst_rank,
        tuple(kvferry.explain(plan).splitlines()),
        tuple(_flows(plan, selection)),
        route,
        selection.zeros.total_bytes,
    )


def _flows(plan: kvferry.Plan, selection: kvferry.Selection) -> Iterator[Flow]:
    """One flow per source rank of the plan, even if this request reads nothing from it."""
    pieces = Counter(piece.src_rank for piece in plan.pieces)
    for src_rank, num_pieces in sorted(pieces.items()):
        product = selection.products.get(src_rank, Product(()))
        products = (product,) if product.num_runs else ()
        yield Flow(src_rank, plan.dst_rank, num_pieces, len(product.runs), product.total_bytes, products)
