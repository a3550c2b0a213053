"""What a plan costs: every destination rank planned, proved, lowered, and tried with one request."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import kvferry
from kvferry import Code, Finding, Manifest, Product, Refused, Request, RequestError
from kvferry.cli.link_profile import NO_TRAFFIC, Cost, CostTerm, Estimate, LinkProfile, Traffic
from kvferry.core.choices import Way

SLOW = 3.0
"""From this many times the time of long runs on, a pair is called slow."""
NOTICED_SECONDS = 1e-3
"""Less than this is not worth a word, whatever the ratio."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What one source rank sends to one destination rank."""

    src_rank: int
    dst_rank: int
    num_pieces: int
    num_runs: int
    total_bytes: int
    products: tuple[Product, ...] = ()
    """The same before it became a list; nothing, where this request reads nothing."""

    @property
    def average_run_bytes(self) -> float:
        return self.total_bytes / self.num_runs if self.num_runs else 0.0

    def traffic(self, way: Way) -> Traffic:
        """What the way has to do; a kernel takes the product, everybody else the list."""
        return Traffic.of(self.products, None if way is Way.MAPPED else self.num_runs)


@dataclass(frozen=True, slots=True)
class LinkBill:
    """What a request takes over one kind of link: as long as the rank that takes longest."""

    profile: LinkProfile
    estimate: Estimate
    whose: str
    """The rank that takes longest: ``dst 0``, or ``src 0`` if it has more to send than others to read."""
    long_run_seconds: float
    """What the same bytes would take, one run from each source rank: no pair of engines is faster."""

    @property
    def seconds(self) -> float:
        return self.estimate.seconds

    @property
    def slowdown(self) -> float:
        """How many times as long it takes because its runs are short."""
        return self.seconds / self.long_run_seconds if self.long_run_seconds else 1.0

    @property
    def is_slow(self) -> bool:
        """Whether short runs are what this request waits for."""
        return self.slowdown >= SLOW and self.seconds - self.long_run_seconds >= NOTICED_SECONDS


@dataclass(frozen=True, slots=True)
class RankBill:
    """What one destination rank receives."""

    dst_rank: int
    lines: tuple[str, ...]
    """Who sends what, as ``explain`` says it."""
    flows: tuple[Flow, ...]
    route: kvferry.Route
    """What was proved, in bytes: a picture asks it for more than a bill says."""
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

    def over(self, profile: LinkProfile) -> LinkBill:
        """What the request takes over such a link: every rank has one of its own, and all read at once."""
        traffics = [(flow, flow.traffic(profile.way)) for flow in self.flows]
        whose, estimate = _longest(profile.cost, traffics)
        _, if_long = _longest(profile.cost, [(flow, _in_long_runs(traffic)) for flow, traffic in traffics])
        return LinkBill(profile, estimate, whose, if_long.seconds)

    @property
    def zeroed_bytes(self) -> int:
        return sum(rank.zeroed_bytes for rank in self.ranks)

    @property
    def plan_ms(self) -> float:
        return sum(rank.plan_ms for rank in self.ranks)

    @property
    def select_ms(self) -> float:
        return sum(rank.select_ms for rank in self.ranks)


def _longest(cost: Cost, traffics: Sequence[tuple[Flow, Traffic]]) -> tuple[str, Estimate]:
    received: dict[int, Traffic] = defaultdict(lambda: NO_TRAFFIC)
    sent: dict[int, Traffic] = defaultdict(lambda: NO_TRAFFIC)
    for flow, traffic in traffics:
        received[flow.dst_rank] += traffic
        sent[flow.src_rank] += traffic
    ends = {f"dst {rank}": cost.of(traffic) for rank, traffic in received.items()}
    # Whoever reads pays for every read and run; a source sends its bytes, from the first read on.
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
        route,
        selection.zeros.total_bytes,
        1e3 * (planned - started),
        1e3 * (selected - planned),
    )


def _flows(plan: kvferry.Plan, selection: kvferry.Selection) -> Iterator[Flow]:
    """One flow per source rank of the plan, also where this request reads nothing from it."""
    pieces = Counter(piece.src_rank for piece in plan.pieces)
    for src_rank, num_pieces in sorted(pieces.items()):
        product = selection.products.get(src_rank, Product(()))
        products = (product,) if product.num_runs else ()
        yield Flow(src_rank, plan.dst_rank, num_pieces, len(product.runs), product.total_bytes, products)
