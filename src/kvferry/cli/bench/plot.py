"""A picture of a benchmark; the only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.cli.bench.grid import BlockOrder
from kvferry.cli.bench.report import BenchReport, RivalTimes
from kvferry.cli.bench.rivals import Rival
from kvferry.cli.output import num_bytes
from kvferry.errors import SpecError

INSTALL = 'matplotlib is not installed, which draws plots; install it with: pip install "kvferry[plot]"'
SUFFIXES = (".svg", ".png")
STYLES = {
    Rival.DIRECT: ("#0b6", "o", "kvferry, direct"),
    Rival.MAPPED: ("#06c", "o", "kvferry, mapped"),
    Rival.FETCH: ("#0b6", "s", "kvferry, whole fetch"),
    Rival.NIXL: ("#c60", "^", "NIXL, same list"),
    Rival.ONE_RUN: ("#c60", "x", "NIXL, one run"),
    Rival.COPY: ("#888", ".", "plain copy"),
    Rival.VLLM: ("#93c", "v", "vLLM's own worker"),
}
"""Colour, mark and name."""


def check_plot(path: Path) -> None:
    """Raise SpecError if no plot can be drawn into such a file."""
    if path.suffix not in SUFFIXES:
        raise SpecError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise SpecError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SpecError(f"--plot: {INSTALL}") from None


def draw(report: BenchReport, path: Path) -> None:
    """Speed by the length of a run: a row for each kind of memory, a column for each order of blocks.

    Where a length was run with several numbers of runs, the largest counts.
    """
    import matplotlib

    matplotlib.use("agg")
    # The same figures give the same file.
    settings: dict[Any, Any] = {"svg.hashsalt": "kvferry", "svg.fonttype": "none", "font.size": 8}
    with matplotlib.rc_context(settings):
        figure = _figure(report)
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata, dpi=120)


def _figure(report: BenchReport) -> Any:
    from matplotlib.figure import Figure

    media = list(dict.fromkeys(one.medium for one in report.times))
    orders = [order for order in BlockOrder if any(one.case.order is order for one in report.times)]
    figure = Figure(figsize=(3.2 * len(orders) + 1.2, 2.6 * len(media) + 0.6), layout="constrained")
    panels = figure.subplots(len(media), len(orders), squeeze=False, sharex=True, sharey="row")
    for row, medium in enumerate(media):
        for column, order in enumerate(orders):
            times = [one for one in report.times if one.medium == medium and one.case.order is order]
            _panel(panels[row][column], times)
            panels[row][column].set_title(f"{medium}, {order.value}")
        panels[row][0].set_ylabel("GB/s")
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        lines, names = panel.get_legend_handles_labels()
        handles |= dict(zip(names, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(panel: Any, times: Sequence[RivalTimes]) -> None:
    for rival, (colour, mark, name) in STYLES.items():
        longest: dict[int, RivalTimes] = {}
        for one in times:
            if one.rival is rival:
                known = longest.get(one.case.shape.run_bytes, one)
                longest[one.case.shape.run_bytes] = max(known, one, key=lambda each: each.case.num_pages)
        if longest:
            lengths = sorted(longest)
            speeds = [longest[length].gigabytes_per_second for length in lengths]
            line = "--" if rival in (Rival.COPY, Rival.ONE_RUN) else "-"
            panel.plot(lengths, speeds, line, color=colour, marker=mark, markersize=4, label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    lengths = sorted({one.case.shape.run_bytes for one in times})
    panel.set_xticks(lengths, [num_bytes(length) for length in lengths], rotation=30)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
