"""Writes docs/metrics.md from the table of metrics: ``python tools/metrics_page.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kvferry.endpoint.metric_table import METRICS, MetricSide

TITLES = {
    MetricSide.SOURCE: "Source engine (prefill)",
    MetricSide.DESTINATION: "Destination engine (decode)",
    MetricSide.BOTH: "Both",
}

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

HEAD = """# Metrics

`python tools/metrics_page.py` generates this page from `endpoint/metric_table.py`.

* **vLLM**: names start with `vllm:` (`vllm:kvferry_loads_total`) and appear at `/metrics`, with vLLM's labels
  (`model_name`, `engine`) first. They need no option. vLLM updates the values in each engine step, so an
  idle engine shows those of its last step. `kvferry status` is always current.
* **Your own engine**: create one `EngineMetrics()` (`kvferry.endpoint.metrics`) per process and pass it to
  each `SourceEngine(…, metrics=…)` and `Destination(…, metrics=…)`. It uses `prometheus_client`'s default
  registry unless you pass another.

Gauges are summed over the ranks of a process and return to 0 when an endpoint is closed. Failure codes are
listed under [errors](errors.md). `kvferry status` shows counters and gauges without Prometheus.
[`deploy/grafana/kvferry.json`](../deploy/grafana/kvferry.json) is a dashboard with every metric, for Grafana
10.4 and later.

| question | metric |
| --- | --- |
| Do loads fail, and why? | `kvferry_loads_total` by `outcome`: every value except `read` is a failure |
| Is the expected transfer mode in use? | `kvferry_loads_total` by `way` |
| Are loads getting slower? | `kvferry_load_seconds` by `part`: `move` is the transfer itself |
| Do tickets expire unread? | `kvferry_leases_ended_total{reason="expired"}` |
| Does memory stay pinned? | `kvferry_pinned_bytes`, `kvferry_leases` |
| Do reads hang? | `kvferry_quarantined`: should be 0 |
| Are tickets or messages rejected? | `kvferry_rejected_tickets_total`, `kvferry_denials_total`, \
`kvferry_refused_messages_total` |
"""


def markdown() -> Iterator[str]:
    """The table for people, line by line."""
    for side in MetricSide:
        yield f"\n## {TITLES[side]}\n"
        yield "| metric | kind | meaning | labels |"
        yield "| --- | --- | --- | --- |"
        for metric in METRICS.values():
            if metric.side is side:
                labels = "; ".join(f"`{name}`: {values}" for name, values in metric.labels)
                yield f"| `{metric.exposed}` | {metric.kind.value} | {metric.help} | {labels} |"


def page() -> str:
    """The page as it should be."""
    return HEAD + "\n".join(markdown()) + "\n"


def main() -> int:
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written: {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
