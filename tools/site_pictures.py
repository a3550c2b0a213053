"""Plots of the docs, drawn from README's table and from the files of benchmarks/results.

``python tools/site_pictures.py`` writes docs/plots/NAME.svg anew. Pages show these; the site draws them
into the page (``picture``), in the colour of its text, so that they are as good on a dark page.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from site_tables import ROOT, number, table

INK = "#010203"
"""Stands for the colour of the page's text until the picture is in the page."""

GREEN, GREY, RED, BLUE, ORANGE, PURPLE = "#0a9a6e", "#8c959f", "#d1242f", "#2f81f7", "#d9730d", "#9a5bd6"


def peers() -> tuple[Figure, str]:
    """Who gets how many pairs right."""
    (_, *kinds), *rows = table("README.md", "all 368 legal pairs")
    figure = Figure(figsize=(7, 0.42 * len(rows) + 0.7), layout="constrained")
    panel = figure.subplots()
    lefts = [0.0] * len(rows)
    names = [row[0] for row in rows]
    for kind, colour, column in zip(kinds, (GREEN, GREY, RED), range(1, 4), strict=True):
        widths = [number(row[column]) or 0.0 for row in rows]
        bars = panel.barh(names, widths, left=lefts, color=colour, label=kind, height=0.7)
        labels = [f"{width:.0f}" if width else "" for width in widths]
        panel.bar_label(bars, labels, label_type="center", color="white")
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    panel.invert_yaxis()
    panel.set_xlabel("legal pairs of unequal tensor parallelism")
    finish(figure, num_columns=3)
    return figure, said(rows, kinds)


RESULTS = ROOT / "benchmarks" / "results"
CONNECTORS = {"kvferry": GREEN, "NixlConnector": ORANGE}


@dataclass(frozen=True)
class Result:
    """A file of benchmarks/results: what was measured, with what, and the numbers."""

    columns: list[str]
    rows: list[list[Any]]
    source: str

    @classmethod
    def named(cls, name: str) -> Result:
        said = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        source = f"{said['hardware']}; {said['versions']}; {said['date']}"
        return cls(said["columns"], said["rows"], source)

    def column(self, name: str, **where: Any) -> list[Any]:
        """The cells of a column, of the rows that have these values."""
        wanted = {self.columns.index(key.replace("_", " ")): value for key, value in where.items()}
        rows = [row for row in self.rows if all(row[i] == value for i, value in wanted.items())]
        return [row[self.columns.index(name)] for row in rows]

    @property
    def words(self) -> str:
        rows = [[str(cell) for cell in row] for row in self.rows]
        return said(rows, self.columns[1:])


def under_load() -> tuple[Figure, str]:
    """Time to first token of 64 clients, by connector."""
    result = Result.named("ttft-under-load")
    figure = Figure(figsize=(7, 2.3), layout="constrained")
    panel = figure.subplots()
    for i, (name, colour) in enumerate(CONNECTORS.items()):
        for j, column in enumerate(("ttft p50", "ttft p99")):
            (time,) = result.column(column, connector=name)
            bars = panel.barh(j + 0.4 * i, time, height=0.36, color=colour, label=None if j else name)
            panel.bar_label(bars, [f"{time:,} ms"], padding=4)
    panel.set_yticks([0.2, 1.2], ["median", "99th percentile"])
    panel.invert_yaxis()
    panel.margins(x=0.14)
    panel.set_xlabel("time to first token, 64 clients (shorter is better)")
    finish(figure, result, num_columns=2)
    return figure, result.words


def by_tokens() -> tuple[Figure, str]:
    """Time to first token by prompt length, for each pair of block sizes."""
    result = Result.named("ttft-by-tokens")
    pairs = list(dict.fromkeys(result.column("blocks")))
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    panels = figure.subplots(1, len(pairs), sharey=True)
    for panel, pair in zip(panels, pairs, strict=True):
        for name, colour in CONNECTORS.items():
            times = [math.nan if time is None else time for time in result.column(name, blocks=pair)]
            label = name if pair == pairs[0] else None
            panel.plot(result.column("prompt tokens", blocks=pair), times, "o-", color=colour, label=label)
            if all(map(math.isnan, times)):
                panel.text(
                    0.5, 0.9, f"{name}: rejected", transform=panel.transAxes, ha="center", color=colour
                )
        panel.set_title(f"blocks {pair}", fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_xticks([128, 1024, 4096, 16384], ["128", "1K", "4K", "16K"])
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("ms to first token")
    panels[1].set_xlabel("prompt tokens")
    finish(figure, result, num_columns=2)
    return figure, result.words


WAYS = {
    "mapped": ("kvferry, mapped read", GREEN, "o"),
    "whole fetch": ("kvferry, whole fetch", BLUE, "s"),
    "direct, 4 agents": ("kvferry, direct read", GREY, "D"),
    "NixlConnector's worker": ("NixlConnector's worker", PURPLE, "v"),
    "NIXL alone": ("NIXL alone", ORANGE, "^"),
}
"""Ways that are drawn: name, colour, mark."""


def throughput() -> tuple[Figure, str]:
    """Throughput of 16,384 scattered runs by their length, for each way."""
    result = Result.named("transports")
    lengths = result.column("run bytes", runs=16384)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    panel = figure.subplots()
    for column, (name, colour, mark) in WAYS.items():
        times = result.column(column, runs=16384)
        rates = [16384 * length / time / 1e6 for length, time in zip(lengths, times, strict=True)]
        panel.plot(lengths, rates, f"{mark}-", color=colour, label=name, markersize=6)
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, ["256 B", "4 KiB", "16 KiB"])
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(axis="y", alpha=0.3)
    panel.set_xlabel("length of a run (16,384 scattered runs)")
    panel.set_ylabel("GB/s (higher is better)")
    finish(figure, result, num_columns=3)
    return figure, result.words


def decodes() -> tuple[Figure, str]:
    """How much loads delay running decodes."""
    result = Result.named("running-decodes")
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    panel = figure.subplots()
    places = [i + 0.5 * (row[0] != "kvferry") for i, row in enumerate(result.rows)]
    for place, (name, _, alone, loaded) in zip(places, result.rows, strict=True):
        panel.plot([alone, loaded], [place, place], color=CONNECTORS[name], linewidth=3)
        panel.plot(alone, place, "o", color=GREY, markersize=7, label="" if place else "no loads")
        panel.plot(loaded, place, "o", color=CONNECTORS[name], markersize=9)
        panel.annotate(f"{loaded:g}", (loaded, place), xytext=(8, 0), textcoords="offset points", va="center")
    for name, colour in CONNECTORS.items():
        panel.plot([], [], "o-", color=colour, label=f"loads by {name}")
    panel.set_yticks(places, [f"{name}, run {run}" for name, run, *_ in result.rows])
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.set_xlabel("ms between two tokens, p99 of 32 running decodes (shorter is better)")
    finish(figure, result, num_columns=3)
    return figure, result.words


def digest() -> tuple[Figure, str]:
    """What a digest costs beside a load."""
    result = Result.named("digest")
    figure = Figure(figsize=(7, 2.5), layout="constrained")
    panel = figure.subplots()
    panel.axvspan(3.1, 3.7, color=GREY, alpha=0.4, label="a load of Llama 3.1 8B, mapped")
    bars = panel.barh(result.column("model"), result.column("digest"), color=BLUE, height=0.6, label="digest")
    panel.bar_label(bars, [f"{time:g} ms" for time in result.column("digest")], padding=4)
    panel.invert_yaxis()
    panel.margins(x=0.1)
    panel.set_xlabel("ms per GB of a checked load")
    finish(figure, result, num_columns=2)
    return figure, result.words


def finish(figure: Figure, result: Result | None = None, *, num_columns: int) -> None:
    """What all pictures have in common; measured ones name hardware, versions and date."""
    for panel in figure.axes:
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=num_columns, frameon=False)
    if result is not None:
        figure.suptitle(result.source, fontsize=7.5, x=0.99, ha="right", alpha=0.8)


def said(rows: list[list[str]], heads: list[str]) -> str:
    """The figures in words, for whoever does not see the picture."""
    return "; ".join(
        f"{row[0]}: " + ", ".join(f"{head} {cell}" for head, cell in zip(heads, row[1:], strict=True))
        for row in rows
    )


PICTURES: dict[str, Callable[[], tuple[Figure, str]]] = {
    "peers": peers,
    "ttft-under-load": under_load,
    "ttft-by-tokens": by_tokens,
    "throughput": throughput,
    "running-decodes": decodes,
    "digest": digest,
}
STYLE = """<style>
svg {color: #1f2328; font-family: sans-serif}
@media (prefers-color-scheme: dark) {svg {color: #e6edf3}}
</style>
"""
"""What a file needs that a page gives to a picture inside of it."""


def picture(name: str) -> str:
    """A picture as SVG that stands in a page, with its text alternative."""
    settings: dict[Any, Any] = {
        **{f"{part}.color": INK for part in ("text", "xtick", "ytick")},
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.facecolor": "none",
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 9,
        "font.family": "sans-serif",
    }
    with mpl.rc_context(settings):
        figure, words = PICTURES[name]()
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = drawn.getvalue()
    svg = re.sub(r" <metadata>.*?</metadata>\n", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'font-family: [^;"]*', "font-family: inherit", svg).replace(INK, "currentColor")
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    size = re.search(r'<svg [^>]*?width="([\d.]+)pt" height="[\d.]+pt"', svg)
    assert size is not None
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{words}" style="max-width: 100%" ', 1)
    return re.sub(r'(<svg [^>]*?)width="[\d.]+pt" height="[\d.]+pt"', r'\1width="44em"', svg, count=1)


def as_file(name: str) -> str:
    """A plot that stands alone, for pages that show it as an image."""
    svg = picture(name)
    head = svg.index(">") + 1
    return f"{svg[:head]}\n{STYLE}{svg[head:]}"


if __name__ == "__main__":
    for name in PICTURES:
        (ROOT / "docs" / "plots" / f"{name}.svg").write_text(as_file(name), encoding="utf-8")
