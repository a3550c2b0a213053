"""Writes deploy/grafana/kvferry.json from the list of panels below: ``python tools/dashboard.py``.

Every metric of the table is on it, and nothing else; tests/test_dashboard.py looks after that. Names are
matched with and without vLLM's prefix, so that one dashboard shows vLLM and engines of one's own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.endpoint.metric_table import METRICS, MetricKind

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "kvferry.json"

SCHEMA_VERSION = 39
"""Of the classic model, which Grafana 10.4 and all later ones read."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8


@dataclass(frozen=True)
class Panel:
    """One picture of one metric, or of a few that belong together."""

    title: str
    queries: tuple[tuple[str, str], ...]
    """(query, what each line is called)."""
    unit: str = "short"
    alarm_at: float | None = None
    """From which value on it is red."""
    about: str = ""
    width: int = 8


def selector(name: str, ending: str = "", extra: str = "") -> str:
    """All series of a metric, whoever exposes it."""
    metric = METRICS[name]
    ending = ending or ("_total" if metric.kind is MetricKind.COUNTER else "")
    wanted = ", ".join(filter(None, (extra, 'job=~"$job"', 'instance=~"$instance"')))
    return f'{{__name__=~"(vllm:)?{name}{ending}", {wanted}}}'


def rate(name: str, *labels: str, ending: str = "", extra: str = "") -> str:
    """How often per second, summed over everything but some labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({selector(name, ending, extra)}[$__rate_interval]))"


def total(name: str, *labels: str) -> str:
    """How much there is now, summed over everything but some labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} ({selector(name)})"


def quantiles(name: str, extra: str = "") -> tuple[tuple[str, str], ...]:
    """The median, and what one in a hundred exceeds."""
    buckets = rate(name, "le", ending="_bucket", extra=extra)
    return tuple(
        (f"histogram_quantile({q}, {buckets})", label) for q, label in ((0.5, "median"), (0.99, "99 %"))
    )


ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it well?": (
        Panel(
            "Failed loads per second",
            ((rate("kvferry_loads", "outcome", extra='outcome!="read"'), "{{outcome}}"),),
            alarm_at=0.001,
            about="By the code of the failure. Should be empty.",
        ),
        Panel(
            "Unread requests per second",
            ((rate("kvferry_leases_ended", "reason", extra='reason=~"expired|failed"'), "{{reason}}"),),
            alarm_at=0.001,
        ),
        Panel(
            "Quarantined loads",
            ((total("kvferry_quarantined"), "quarantined"),),
            alarm_at=1,
            about="Reads that the fabric neither ends nor fails: their blocks stay out of use. Should be 0.",
        ),
    ),
    "Loads (decode)": (
        Panel("Loads per second, by way", ((rate("kvferry_loads", "way"), "{{way}}"),)),
        Panel(
            "Bytes per second",
            (
                (rate("kvferry_loaded_bytes"), "bytes"),
                (rate("kvferry_loaded_early_bytes"), "during the prefill"),
            ),
            unit="Bps",
        ),
        Panel("Seconds of a load, in all", quantiles("kvferry_load_seconds", 'part="total"'), unit="s"),
        Panel(
            "Where the time goes, seconds per load",
            (
                (
                    f"{rate('kvferry_load_seconds', 'part', ending='_sum')}"
                    f" / {rate('kvferry_load_seconds', 'part', ending='_count')}",
                    "{{part}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Bytes and runs of a load, median",
            (
                (quantiles("kvferry_load_bytes")[0][0], "bytes"),
                (quantiles("kvferry_load_runs")[0][0], "runs"),
            ),
        ),
        Panel("Runs per second", ((rate("kvferry_loaded_runs"), "runs"),)),
        Panel(
            "Loads under way, by phase",
            (
                (total("kvferry_loads_under_way", "phase"), "{{phase}}"),
                (total("kvferry_reads_in_flight"), "reads in flight"),
            ),
        ),
        Panel("Source engines, by state", ((total("kvferry_peers", "state"), "{{state}}"),)),
        Panel(
            "Digests compared per second",
            ((rate("kvferry_load_digests", "digest"), "{{digest}}"),),
            about="Where digests are asked for: all should be equal.",
        ),
    ),
    "Prefix cache (decode)": (
        Panel(
            "Partly loaded blocks kept out of the prefix cache, per second",
            ((rate("kvferry_uncached_blocks"), "kept out"),),
        ),
    ),
    "Leases (prefill)": (
        Panel(
            "Requests offered and leases granted, per second",
            ((rate("kvferry_offers"), "offered"), (rate("kvferry_grants"), "granted")),
        ),
        Panel("Pinned requests", ((total("kvferry_leases", "state"), "{{state}}"),)),
        Panel("Pinned bytes", ((total("kvferry_pinned_bytes"), "pinned"),), unit="bytes"),
        Panel("Bytes granted per second", ((rate("kvferry_granted_bytes"), "granted"),), unit="Bps"),
        Panel("Renewals per second", ((rate("kvferry_renewals", "answer"), "{{answer}}"),)),
        Panel("Releases that ranks have not confirmed", ((total("kvferry_unheard_releases"), "unheard"),)),
    ),
    "Conversations": (
        Panel(
            "Earlier turns offered and claimed, per second (decode)",
            ((rate("kvferry_soft_offers"), "offered"), (rate("kvferry_claims", "outcome"), "{{outcome}}")),
        ),
        Panel(
            "Prompts with an earlier turn, per second (prefill)",
            ((rate("kvferry_read_backs", "outcome"), "{{outcome}}"),),
        ),
        Panel("Prompt tokens read back per second", ((rate("kvferry_read_back_tokens"), "tokens"),)),
    ),
    "What does not belong here": (
        Panel("Rejected tickets per second", ((rate("kvferry_rejected_tickets", "code"), "{{code}}"),)),
        Panel("Denied leases per second", ((rate("kvferry_denials", "code"), "{{code}}"),)),
        Panel(
            "Refused messages and retries, per second",
            (
                (rate("kvferry_refused_messages", "side", "why"), "{{side}}: {{why}}"),
                (rate("kvferry_retries", "message"), "again: {{message}}"),
            ),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    return {
        "uid": "kvferry",
        "title": "kvferry",
        "description": "KV caches on their way from prefill to decode engines.",
        "tags": ["kvferry", "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _variable("job"), _variable("instance")]},
        "annotations": {"list": []},
        "links": [],
        "panels": _panels(),
    }


def _data_source() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }


def _variable(label: str) -> dict[str, Any]:
    query = f'label_values({{__name__=~"(vllm:)?kvferry_.*"}}, {label})'
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "hide": 0,
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    x = y = 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            place = {"h": HEIGHT, "w": panel.width, "x": x, "y": y}
            made.append(_panel(panel, len(made) + 1, place))
            x += panel.width
        y += HEIGHT
    return made


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.alarm_at is not None:
        steps.append({"color": "red", "value": panel.alarm_at})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "palette-classic"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": {
            "lineWidth": 1,
            "fillOpacity": 10,
            "showPoints": "never",
            "thresholdsStyle": {"mode": "off" if panel.alarm_at is None else "dashed"},
        },
    }
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": query,
            "legendFormat": legend,
            "range": True,
        }
        for i, (query, legend) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")
    print(f"written: {FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
