"""Pictures of the site, drawn while it is built from the tables that the pages show: no figure is kept twice.

A page says ``<!-- picture: peers -->`` where one belongs. Lines and letters have the colour of its text,
so that a picture is as good on a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from site_tables import number, table

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
    finish(figure, panel, num_columns=3)
    return figure, said(rows, kinds)


def engines() -> tuple[Figure, str]:
    """What a request takes between two vLLM engines, by the pair of block sizes."""
    (_, *pairs), *rows = table("docs/why.md", "4,096 tokens of an 8B")
    pairs[1:] = [f"blocks {pair}" for pair in pairs[1:]]
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    panel = figure.subplots()
    for i, (row, colour) in enumerate(zip(rows, (GREEN, ORANGE), strict=True)):
        for j, cell in enumerate(row[1:]):
            at, time = j + 0.4 * i, number(cell)
            panel.barh(at, time or 0.0, height=0.36, color=colour, label=row[0] if j == 0 else None)
            panel.annotate(cell, (time or 0.0, at), xytext=(4, 0), textcoords="offset points", va="center")
    panel.set_yticks([j + 0.2 for j in range(len(pairs))], pairs)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlabel("milliseconds for 512 MiB, one H200")
    finish(figure, panel, num_columns=2)
    return figure, said(rows, pairs)


WAYS = {
    "mapped": ("kvferry, mapped", GREEN, "o"),
    "whole fetch": ("kvferry, whole fetch", BLUE, "s"),
    "direct, 4 agents": ("kvferry, direct", GREY, "D"),
    "vLLM's own worker": ("vLLM's own worker", PURPLE, "v"),
    "NIXL alone": ("NIXL alone", ORANGE, "^"),
}
"""Columns of the table of ways that are drawn: name, colour, mark."""


def ways() -> tuple[Figure, str]:
    """The same blocks by every way, by how many and how long their runs are."""
    heads, *rows = table("docs/performance.md", "runs | of | mapped")
    figure = Figure(figsize=(7, 0.3 * len(rows) + 1.0), layout="constrained")
    panel = figure.subplots()
    for head, (name, colour, mark) in WAYS.items():
        times = [number(row[heads.index(head)]) or float("nan") for row in rows]
        panel.plot(times, range(len(rows)), mark, color=colour, label=name, markersize=6)
    panel.set_yticks(range(len(rows)), [f"{row[0]} × {row[1]}" for row in rows])
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.grid(axis="x", which="major", alpha=0.3)
    panel.set_xlabel("milliseconds, one H200 (shorter is better)")
    finish(figure, panel, num_columns=3)
    return figure, said([[f"{row[0]} runs of {row[1]}", *row[2:]] for row in rows], heads[2:])


def finish(figure: Figure, panel: Any, *, num_columns: int) -> None:
    """What all pictures have in common."""
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=num_columns, frameon=False)


def said(rows: list[list[str]], heads: list[str]) -> str:
    """The figures in words, for whoever does not see the picture."""
    return "; ".join(
        f"{row[0]}: " + ", ".join(f"{head} {cell}" for head, cell in zip(heads, row[1:], strict=True))
        for row in rows
    )


PICTURES: dict[str, Callable[[], tuple[Figure, str]]] = {"peers": peers, "engines": engines, "ways": ways}


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
