"""What ``kvferry status`` is told: plain data, bounded, without cards, keys and tickets."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvferry.endpoint.metric_table import METRICS, MetricSide
from kvferry.runtime.figures import Figures
from kvferry.wire.messages import PROTOCOL


def status_report(
    side: MetricSide, status: Mapping[str, object], figures: Figures, up_seconds: float
) -> dict[str, Any]:
    """How an endpoint is, with what a person needs to know which one it is."""
    about = {
        "side": side.value,
        "kvferry": _version(),
        "protocol": PROTOCOL,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "up_seconds": round(up_seconds, 3),
    }
    return {**about, **{key: _plain(value) for key, value in status.items()}, "figures": _shown(figures)}


def _version() -> str:
    try:
        return version("kvferry")
    except PackageNotFoundError:  # run from its source, not installed
        return "unknown"


def _shown(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "metric": METRICS[name].exposed,
            "labels": dict(zip(METRICS[name].label_names, labels, strict=True)),
            "value": value,
        }
        for (name, *labels), value in figures.items()
        if value
    ]


def _plain(value: Any) -> Any:
    """A value that JSON has: it knows no infinity, and no keys but text."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value
