"""The cost of a transfer: the formula, known links, and links measured by ``doctor --save``.

One formula for every mode: the cost of reads, runs and bytes, added. Estimates are for people: no transfer
and no deadline depends on them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvferry.core.choices import Way
from kvferry.core.product import Product, Term
from kvferry.errors import SpecError

WORD_BYTES = 16
"""The widest word that a kernel copies at once."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The quantities of a transfer that decide its time.

    >>> Traffic(num_reads=1, num_runs=4, num_bytes=64) + Traffic(num_reads=1, num_runs=2, num_bytes=8)
    Traffic(num_reads=2, num_runs=6, num_bytes=72, num_words=5)
    """

    num_reads: int
    """One per source rank."""
    num_runs: int
    num_bytes: int
    num_words: int = -1
    """Words of 16 bytes, or fewer if the addresses require it; by default all have 16."""

    def __post_init__(self) -> None:
        if min(self.num_reads, self.num_runs, self.num_bytes) < 0:
            raise SpecError(f"traffic counts must be at least 0, got {self}")
        if self.num_words < 0:
            object.__setattr__(self, "num_words", -(-self.num_bytes // WORD_BYTES))

    @classmethod
    def of(cls, products: Iterable[Product], num_runs: int | None = None) -> Traffic:
        """Of products, one read each, without listing runs; ``num_runs`` if they are known.

        >>> from kvferry.core.runs import Runs
        >>> pattern = Runs(np.array([0, 64]), np.array([0, 64]), np.array([32, 24]))
        >>> Traffic.of([Product((Term(pattern, np.array([[0, 1024], [4096, 0]])),))])
        Traffic(num_reads=1, num_runs=4, num_bytes=112, num_words=14)
        """
        some = [product for product in products if product.num_runs]
        return cls(
            len(some),
            sum(product.num_runs for product in some) if num_runs is None else num_runs,
            sum(product.total_bytes for product in some),
            sum(_num_words(term) for product in some for term in product.terms),
        )

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.num_reads + other.num_reads,
            self.num_runs + other.num_runs,
            self.num_bytes + other.num_bytes,
            self.num_words + other.num_words,
        )

    @property
    def average_run_bytes(self) -> float:
        return self.num_bytes / self.num_runs if self.num_runs else 0.0


NO_TRAFFIC = Traffic(0, 0, 0)


def _num_words(term: Term) -> int:
    """The words of a term's runs, as wide as all addresses allow."""
    bits = term.pattern.bits | WORD_BYTES | int(np.bitwise_or.reduce(term.steps.ravel(), initial=0))
    return term.total_bytes // (bits & -bits)


class CostTerm(StrEnum):
    READS = "reads"
    RUNS = "runs"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Cost:
    """
    >>> cost = Cost(seconds_per_read=1e-4, seconds_per_run=2e-6, bytes_per_second=5e9)
    >>> round(cost.of(Traffic(num_reads=2, num_runs=32768, num_bytes=32768 * 512)).seconds, 4)
    0.0691
    """

    seconds_per_read: float
    seconds_per_run: float
    bytes_per_second: float
    is_by_words: bool = False
    """Whether words are copied, as by our kernel: words of half the width take twice as long."""

    def __post_init__(self) -> None:
        fixed = (self.seconds_per_read, self.seconds_per_run)
        if not (all(0 <= value < float("inf") for value in fixed) and self.bytes_per_second > 0):
            raise SpecError(f"costs must be finite and at least 0 seconds, and the speed above 0, got {self}")

    def of(self, traffic: Traffic) -> Estimate:
        """For traffic without other transfers."""
        num_bytes = traffic.num_words * WORD_BYTES if self.is_by_words else traffic.num_bytes
        seconds = (
            traffic.num_reads * self.seconds_per_read,
            traffic.num_runs * self.seconds_per_run,
            num_bytes / self.bytes_per_second,
        )
        return Estimate(traffic, dict(zip(CostTerm, seconds, strict=True)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A predicted time, and its parts."""

    traffic: Traffic
    parts: dict[CostTerm, float]
    """Seconds."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def mostly(self) -> CostTerm:
        """The largest part."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def share(self) -> float:
        """Of the largest part."""
        return self.parts[self.mostly] / self.seconds if self.seconds else 0.0


class Origin(StrEnum):
    MEASURED = "measured"
    PREDICTED = "predicted"
    """From published figures, not measured with kvferry."""


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One kind of link between two ranks.

    >>> link_profile("400Gb").origin.value, link_profile("same-gpu").way.value
    ('predicted', 'mapped')
    """

    name: str
    way: Way
    cost: Cost
    origin: Origin
    source: str
    """The machine and command of a measurement, or the basis of a prediction."""


HOST_CMA = LinkProfile(
    "host-cma",
    Way.DIRECT,
    Cost(seconds_per_read=5e-4, seconds_per_run=1.7e-6, bytes_per_second=9.2e9),
    Origin.MEASURED,
    "two processes, two aarch64 cores, NIXL 1.5.1 (benchmarks/cost.py cma): predicts 23 of 23 sizes"
    " within 30 %",
)
TCP_STREAM = LinkProfile(
    "tcp-stream",
    Way.PACKED,
    Cost(seconds_per_read=1.2e-3, seconds_per_run=3e-7, bytes_per_second=2.7e9),
    Origin.MEASURED,
    "two processes, two aarch64 cores, loopback (benchmarks/cost.py stream): predicts 22 of 23 sizes"
    " within 30 %",
)
SAME_GPU = LinkProfile(
    "same-gpu",
    Way.MAPPED,
    Cost(seconds_per_read=9.5e-5, seconds_per_run=1.7e-10, bytes_per_second=8.3e11, is_by_words=True),
    Origin.MEASURED,
    "two processes on one H200, copy kernel with default limits (benchmarks/device.py): predicts 8 of 8"
    " reads within 19 %",
)
SAME_GPU_DIRECT = LinkProfile(
    "same-gpu-direct",
    Way.DIRECT,
    Cost(seconds_per_read=7e-4, seconds_per_run=3.1e-6, bytes_per_second=4.5e11),
    Origin.MEASURED,
    "two processes on one H200, NIXL 1.5.1 over CUDA IPC, 4 agents (benchmarks/device.py): predicts 5 of 5"
    " reads within 10 %",
)
NVLINK = LinkProfile(
    "nvlink",
    Way.MAPPED,
    Cost(seconds_per_read=9.5e-5, seconds_per_run=1.7e-10, bytes_per_second=3e11, is_by_words=True),
    Origin.PREDICTED,
    "copy-kernel costs of one H200, with a published bandwidth between two GPUs (200 to 390 GB/s)",
)
RDMA_400 = LinkProfile(
    "400Gb",
    Way.DIRECT,
    Cost(seconds_per_read=1e-4, seconds_per_run=1.5e-6, bytes_per_second=4.5e10),
    Origin.PREDICTED,
    "90 % of the line rate; the cost per run is derived from a published deployment: 18 % of the line rate"
    " with runs of 16 KiB",
)

LINK_PROFILES = (
    HOST_CMA,
    TCP_STREAM,
    SAME_GPU,
    SAME_GPU_DIRECT,
    NVLINK,
    RDMA_400,
)
DEFAULT_LINKS = (RDMA_400, NVLINK, TCP_STREAM)
"""RDMA, one host, any network. The first is the default."""


def link_profile(name: str) -> LinkProfile:
    for profile in LINK_PROFILES:
        if profile.name == name:
            return profile
    known = ", ".join(profile.name for profile in LINK_PROFILES)
    raise SpecError(f"unknown link profile {name!r}; known are {known}, and all")


MIN_LOADS = 3
"""A read, a run and a byte are three unknowns."""
CLOSE = 0.3
"""The largest relative error of a close prediction."""

HOLD_BACK = 1e-6
"""The pull of a coefficient towards its first guess, for coefficients that the loads do not determine."""
LEAST, MOST = 0.05, 100.0
"""Bounds of a coefficient, as a factor of its first guess."""
NUM_SWEEPS = 2000

Loads = list[tuple[Traffic, float]]


def how_close(pairs: Sequence[tuple[float, float]]) -> str:
    """How well predicted seconds match measured ones."""
    off = [abs(predicted / seconds - 1) for predicted, seconds in pairs]
    close = sum(each <= CLOSE for each in off)
    return (
        f"predicts {close} of {len(off)} sizes within {100 * CLOSE:.0f} %,"
        f" median error {100 * median(off):.0f} %"
    )


def fitted(first: Cost, loads: Loads) -> Cost:
    """The cost with the smallest squared relative errors, each coefficient within bounds of a guess.

    >>> truth = Cost(seconds_per_read=1e-3, seconds_per_run=4e-6, bytes_per_second=1e9)
    >>> sizes = [Traffic(1, num_runs, num_bytes) for num_runs in (1, 9999) for num_bytes in (10**4, 10**8)]
    >>> cost = fitted(Cost(1e-4, 1e-6, 5e9), [(size, truth.of(size).seconds) for size in sizes])
    >>> f"{cost.seconds_per_read:.2e} {cost.seconds_per_run:.2e} {cost.bytes_per_second:.2e}"
    '1.00e-03 4.00e-06 1.00e+09'
    """
    shares = np.array([[*first.of(traffic).parts.values()] for traffic, _ in loads])
    shares /= np.array([[seconds] for _, seconds in loads])
    products, sums = shares.T @ shares + HOLD_BACK * np.eye(3), shares.sum(axis=0) + HOLD_BACK
    factors = np.ones(3)
    for _ in range(NUM_SWEEPS):  # one factor after the other, within its bounds
        for i in range(3):
            best = factors[i] + (sums[i] - products[i] @ factors) / products[i, i]
            factors[i] = min(MOST, max(LEAST, best))
    reads, runs, num_bytes = factors.tolist()
    return Cost(
        first.seconds_per_read * reads,
        first.seconds_per_run * runs,
        first.bytes_per_second / num_bytes,
        first.is_by_words,
    )


def measured_links(path: Path) -> list[LinkProfile]:
    """One profile per kind of memory and mode in the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        loads = _loads(document["times"])
        machine = f"{document['machine']['processor']}, {document['machine']['num_cores']} cores"
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{path}: not a result of `kvferry doctor --save`") from error
    found = [
        _profile(f"{path.stem}/{medium}", way, not medium.startswith("host"), some, machine)
        for (medium, way), some in loads.items()
        if len(some) >= MIN_LOADS
    ]
    if not found:
        raise SpecError(f"{path}: no transfer mode was measured with at least {MIN_LOADS} sizes")
    return found


def _loads(times: Sequence[dict[str, Any]]) -> dict[tuple[str, Way], Loads]:
    """Traffic and median seconds, by kind of memory and mode."""
    loads: dict[tuple[str, Way], Loads] = defaultdict(list)
    for time in times:
        traffic = Traffic(1, int(time["num_runs"]), int(time["total_bytes"]))
        seconds = float(time["median_s"])
        if not 0 < seconds < float("inf"):
            raise ValueError(f"the time must be positive and finite, got {seconds} s")
        loads[str(time["medium"]), Way(time["way"])].append((traffic, seconds))
    return loads


def _profile(name: str, way: Way, is_on_device: bool, loads: Loads, machine: str) -> LinkProfile:
    direct = SAME_GPU_DIRECT if is_on_device else HOST_CMA
    first_guess = {Way.MAPPED: SAME_GPU, Way.PACKED: TCP_STREAM}.get(way, direct)
    cost = fitted(first_guess.cost, loads)
    fit = how_close([(cost.of(traffic).seconds, seconds) for traffic, seconds in loads])
    return LinkProfile(name, way, cost, Origin.MEASURED, f"{machine}: {fit}")
