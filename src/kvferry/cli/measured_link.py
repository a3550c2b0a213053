"""Link profiles of one's own machine: fitted to what ``bench --json`` or ``doctor --save`` measured there."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvferry.cli.link_profile import (
    HOST_CMA,
    SAME_GPU,
    SAME_GPU_DIRECT,
    TCP_STREAM,
    Cost,
    LinkProfile,
    Origin,
    Traffic,
)
from kvferry.core.choices import Way
from kvferry.errors import SpecError

MIN_LOADS = 3
"""A read, a run and a byte are three unknowns."""
CLOSE = 0.3
"""How far a prediction may be off to count as close."""

HOLD_BACK = 1e-6
"""How strongly a coefficient is held back towards its first guess: it decides only what the loads do not."""
LEAST, MOST = 0.05, 100.0
"""Bounds of a coefficient, as a factor of its first guess."""
NUM_SWEEPS = 2000

Loads = list[tuple[Traffic, float]]
MeasuredCosts = Mapping[tuple[str, Way], Cost]
"""By the kind of memory, as the file names it, and by way."""


def measured_links(path: Path) -> list[LinkProfile]:
    """One profile for each kind of memory and each way of ours that the file has times of."""
    return list(_by_kind(path).values())


def measured_costs(path: Path) -> MeasuredCosts:
    """The same as costs."""
    return {kind: profile.cost for kind, profile in _by_kind(path).items()}


def known_cost(costs: MeasuredCosts, medium: str, way: str) -> Cost | None:
    """What is known of a kind of memory; who measured ``host`` memory did not say what carried it.

    >>> costs = {("host", Way.DIRECT): Cost(1e-4, 2e-6, 5e9)}
    >>> known_cost(costs, "host-cma", "direct") is not None, known_cost(costs, "tcp-stream", "packed")
    (True, None)
    """
    known = (cost for (name, each), cost in costs.items() if each == way and medium.startswith(name))
    return next(known, None)


def how_close(pairs: Sequence[tuple[float, float]]) -> str:
    """How well predicted seconds tell what was measured."""
    off = [abs(predicted / seconds - 1) for predicted, seconds in pairs]
    close = sum(each <= CLOSE for each in off)
    return f"{close} of {len(off)} sizes within {100 * CLOSE:.0f} %, median off by {100 * median(off):.0f} %"


def fitted(first: Cost, loads: Loads) -> Cost:
    """The cost with the smallest squared relative errors; each coefficient is near a guess, within bounds.

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


def _by_kind(path: Path) -> dict[tuple[str, Way], LinkProfile]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        loads = _loads(document["times"])
        machine = f"{document['machine']['processor']}, {document['machine']['num_cores']} cores"
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(
            f"{path}: not a result of `kvferry bench --json` or `kvferry doctor --save`"
        ) from error
    found = {
        (medium, way): _profile(f"{path.stem}/{medium}", way, not medium.startswith("host"), some, machine)
        for (medium, way), some in loads.items()
        if len(some) >= MIN_LOADS
    }
    if not found:
        raise SpecError(f"{path}: no way of kvferry was measured with {MIN_LOADS} sizes or more")
    return found


def _loads(times: Sequence[dict[str, Any]]) -> dict[tuple[str, Way], Loads]:
    """What kvferry's transport read, and the median of the turns, by kind of memory and way."""
    loads: dict[tuple[str, Way], Loads] = defaultdict(list)
    for time in times:
        if time["rival"] in (Way.DIRECT, Way.MAPPED, Way.PACKED):
            traffic = Traffic(1, int(time["num_runs"]), int(time["total_bytes"]))
            seconds = float(time["median_s"])
            if not 0 < seconds < float("inf"):
                raise ValueError(f"a time of {seconds} s")
            loads[str(time["medium"]), Way(time["way"])].append((traffic, seconds))
    return loads


def _profile(name: str, way: Way, is_on_device: bool, loads: Loads, machine: str) -> LinkProfile:
    cost = fitted(_first_guess(way, is_on_device).cost, loads)
    fit = how_close([(cost.of(traffic).seconds, seconds) for traffic, seconds in loads])
    return LinkProfile(name, way, cost, Origin.MEASURED, f"{machine}: {fit}")


def _first_guess(way: Way, is_on_device: bool) -> LinkProfile:
    if way is Way.MAPPED:
        return SAME_GPU
    if way is Way.PACKED:
        return TCP_STREAM
    return SAME_GPU_DIRECT if is_on_device else HOST_CMA
