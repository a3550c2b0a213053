"""Whom an endpoint tells its numbers. ``metrics`` needs Prometheus' package; endpoints need only this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.runtime import Report
from kvferry.runtime.figures import Figures


class EndpointMetrics(Protocol):
    """Takes the numbers of all endpoints in a process; ``EngineMetrics`` shows them to Prometheus."""

    def count(self, report: Report) -> None:
        """One load ended."""
        ...

    def watch(self, endpoint: object, figures: Callable[[], Figures]) -> None:
        """Show an endpoint's figures from now on."""
        ...

    def forget(self, endpoint: object) -> None:
        """An endpoint has ended."""
        ...
