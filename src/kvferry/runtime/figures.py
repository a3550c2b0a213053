"""The numbers that a machine counts, by the names of their metrics."""

from __future__ import annotations

from collections.abc import Mapping

Figures = Mapping[tuple[str, ...], float]
"""Where each counter and gauge of an endpoint stands: (metric, values of its labels) to number."""

NO_WAY = "none"


def by_label(metric: str, numbers: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """One number for each value of a metric's one label."""
    return {(metric, label): number for label, number in numbers.items()}
