"""Writes docs/metrics.md from the table of metrics: ``python tools/metrics_page.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kvferry.endpoint.metric_table import METRICS, MetricSide

TITLES = {
    MetricSide.SOURCE: "Of a source engine (prefill)",
    MetricSide.DESTINATION: "Of a destination engine (decode)",
    MetricSide.BOTH: "Of both",
}

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

HEAD = """# Every metric

This page is written by `python tools/metrics_page.py` from `endpoint/metric_table.py`; a test compares.

* **In vLLM** the names begin with `vllm:` (`vllm:kvferry_loads_total`), stand beside vLLM's own metrics at
  `/metrics`, and have vLLM's labels (`model_name`, `engine`) before ours. There is nothing to switch on.
  Figures come with the engine's steps: an engine that has nothing to do shows those of its last step.
* **In an engine of your own** make one `EngineMetrics()` (`kvferry.endpoint.metrics`) per process, and give
  it to each `SourceEngine(…, metrics=…)` and `Destination(…, metrics=…)`. The metrics appear in
  `prometheus_client`'s registry, or in the one that you give.

Counters only grow. Gauges are summed over the ranks of a process, and go back to 0 when an endpoint is
closed. A failure's code is one of a closed list ([errors.md](errors.md)). `kvferry status` shows counters and
gauges of one running engine without Prometheus.

[`deploy/grafana/kvferry.json`](../deploy/grafana/kvferry.json) is a dashboard for Grafana 10.4 and later
(Dashboards, New, Import): every metric below is on it, of vLLM and of engines of your own.
`tools/dashboard.py` writes it.

What to look at first:

| question | metric |
| --- | --- |
| Do loads fail, and why? | `kvferry_loads_total` by `outcome`: all but `read` are failures |
| Do the bytes come by the way that I expect? | `kvferry_loads_total` by `way` |
| Do loads become slower? | `kvferry_load_seconds` by `part`: `move` is the transfer itself |
| Do requests expire before anybody reads them? | `kvferry_leases_ended_total{reason="expired"}` |
| Does memory stay pinned? | `kvferry_pinned_bytes`, `kvferry_leases` |
| Is memory lost to reads that never end? | `kvferry_quarantined`: should be 0 |
| Do tickets or messages come that do not belong here? | `kvferry_rejected_tickets_total`, \
`kvferry_denials_total`, `kvferry_refused_messages_total` |
"""


def markdown() -> Iterator[str]:
    """The table for people, line by line."""
    for side in MetricSide:
        yield f"\n## {TITLES[side]}\n"
        yield "| metric | kind | what it says | labels |"
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
