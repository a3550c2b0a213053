"""Every model of the catalogue at twenty pairs of topologies: verdict, bytes, runs, each counted twice.

Writes ``docs/compatibility.csv``, one line for each, and from that ``docs/compatibility.md``, families by
topologies: some minutes. ``--model NAME`` prints the lines of one model; ``--page`` writes the page only.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TextIO

from oracle_count import count_runs, needed_bytes

import kvferry
from kvferry import Manifest, Refused, Slack, SpecError
from kvferry.cli.link_profile import RDMA_400, Traffic
from kvferry.core.sample import sample_request
from kvferry.models import Topology, catalogue, describe, model_named
from kvferry.models.topology import why_not_served

PAIRS = (
    ("tp=1", "tp=1"),
    ("tp=1", "tp=2"),
    ("tp=2", "tp=1"),
    ("tp=2", "tp=4"),
    ("tp=4", "tp=2"),
    ("tp=8", "tp=1"),
    ("tp=1", "tp=8"),
    ("tp=16", "tp=8"),
    ("tp=2", "tp=3"),
    ("tp=4", "tp=6"),
    ("tp=2", "tp=2,block=64"),
    ("tp=2,block=64", "tp=4,block=32"),
    ("tp=2,block=48", "tp=2,block=32"),
    ("tp=2", "tp=2,layout=NHD"),
    ("tp=4,layout=NHD", "tp=2,layout=NHD"),
    ("tp=2,layout=cross-layer", "tp=4"),
    ("pp=2", "tp=2"),
    ("tp=2,pp=2", "tp=4"),
    ("tp=2", "tp=4,conv=DS"),
    ("tp=2", "tp=2,dtype=fp8"),
)
NUM_TOKENS = 768
"""A multiple of all block sizes and compressed cells."""
SLOW = 3.0

CSV = Path(__file__).resolve().parents[1] / "docs" / "compatibility.csv"
PAGE = CSV.with_suffix(".md")


@dataclass(frozen=True)
class Line:
    """What came out for one model and one pair."""

    model: str
    family: str
    src: str
    dst: str
    verdict: str
    """``proved``, ``slow``, ``refused`` or ``impossible``."""
    num_bytes: int = 0
    num_runs: int = 0
    note: str = ""
    """Why not; or that vLLM would not start so."""


def line(name: str, src: str, dst: str) -> Line:
    """Plan every destination rank, and compare bytes and runs with the oracle's count."""
    family = str(catalogue()[name]["config"]["model_type"])
    try:
        source, destination = engine(name, src, "src"), engine(name, dst, "dst")
    except SpecError as error:
        return Line(name, family, src, dst, "impossible", note=str(error))
    request = sample_request(source, destination, NUM_TOKENS)
    num_bytes = num_runs = 0
    is_slow = False
    for rank in destination.ranks:
        try:
            plan = kvferry.plan(source, destination, rank.rank)
            route = kvferry.lower(kvferry.prove(plan))
        except Refused as refused:
            return Line(name, family, src, dst, "refused", note=str(refused).splitlines()[0])
        selection = kvferry.select(route, request, slack=Slack.LEAVE)
        found = {at: (runs.total_bytes, len(runs)) for at, runs in selection.reads.items()}
        counted = {at: (each.num_bytes, each.num_runs) for at, each in count_runs(plan, request).items()}
        needed = needed_bytes(destination, rank.rank, request)
        if found != counted or needed != sum(size for size, _ in found.values()):
            raise SystemExit(f"{name} {src} -> {dst}, rank {rank.rank}: {found}, the oracle counts {counted}")
        traffic = Traffic(len(found), selection.num_runs, selection.total_bytes)
        at_best = Traffic(len(found), len(found), selection.total_bytes)
        cost = RDMA_400.cost
        is_slow |= cost.of(traffic).seconds >= SLOW * cost.of(at_best).seconds
        num_bytes, num_runs = num_bytes + selection.total_bytes, num_runs + selection.num_runs
    model = model_named(name)
    refusals = [why for text in (src, dst) for why in why_not_served(model, Topology.parse(text))]
    note = f"vLLM would not start: {refusals[0]}" if refusals else ""
    return Line(name, family, src, dst, "slow" if is_slow else "proved", num_bytes, num_runs, note)


@cache
def engine(name: str, text: str, side: str) -> Manifest:
    return describe(model_named(name), Topology.parse(text), side)


def lines_of(name: str) -> list[Line]:
    engine.cache_clear()
    return [line(name, src, dst) for src, dst in PAIRS]


def to_csv(lines: Iterable[Line], file: TextIO) -> None:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(field.name for field in fields(Line))
    writer.writerows([getattr(each, field.name) for field in fields(Line)] for each in lines)


def from_csv(path: Path) -> list[Line]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [[row[field.name] for field in fields(Line)] for row in csv.DictReader(file)]
    return [
        Line(model, family, src, dst, verdict, int(num_bytes), int(num_runs), note)
        for model, family, src, dst, verdict, num_bytes, num_runs, note in rows
    ]


# -- the page ----------------------------------------------------------------------------------------

SIGNS = {"proved": "✓", "slow": "slow", "refused": "no", "impossible": "·"}


def page(lines: Sequence[Line]) -> str:
    """Families by topologies, as Markdown."""
    return "\n".join(_page(lines)) + "\n"


def _page(lines: Sequence[Line]) -> Iterator[str]:
    proved = sum(each.verdict in ("proved", "slow") for each in lines)
    slow = sum(each.verdict == "slow" for each in lines)
    yield "# Compatibility: families by topologies"
    yield ""
    yield "`make compatibility` generates this page. It plans, proves and lowers every model of the"
    yield "catalogue, in its true dimensions, at twenty pairs of topologies, for every destination rank."
    yield f"The bytes and runs of a request of {NUM_TOKENS} tokens in consecutive blocks equal those counted"
    yield "by an independent oracle; [compatibility.csv](compatibility.csv) has them. No engine runs: see"
    yield "[live tests](support.md)."
    yield ""
    yield f"{len(lines)} pairs: {proved} proved ({slow} of them slow), {_num(lines, 'refused')} rejected,"
    yield f"{_num(lines, 'impossible')} impossible."
    yield ""
    yield "| sign | meaning |"
    yield "| --- | --- |"
    yield "| ✓ | proved |"
    yield (
        "| slow | proved, but short runs make it at least three times as long as long runs would, as"
        " predicted for direct reads over 400 Gb/s; `kvferry plan` names the setting that helps |"
    )
    yield "| no | rejected: the cache dtypes differ |"
    yield "| · | impossible: heads or blocks do not divide |"
    yield "| … * | vLLM does not start with one of the two, because heads do not divide |"
    yield ""
    yield "| | source | destination |"
    yield "| --- | --- | --- |"
    for number, (src, dst) in enumerate(PAIRS, 1):
        yield f"| {number} | `{src}` | `{dst}` |"
    yield ""
    yield f"|family|model|{'|'.join(str(number) for number in range(1, len(PAIRS) + 1))}|"
    yield f"|---|---|{'---|' * len(PAIRS)}"
    by_model: dict[tuple[str, str], dict[tuple[str, str], Line]] = {}
    for each in lines:
        by_model.setdefault((each.family, each.model), {})[each.src, each.dst] = each
    for (family, model), found in sorted(by_model.items()):
        signs = (_sign(found[pair]) for pair in PAIRS)
        yield f"|{family}|{model}|{'|'.join(signs)}|"


def _num(lines: Sequence[Line], verdict: str) -> int:
    return sum(each.verdict == verdict for each in lines)


def _sign(each: Line) -> str:
    return SIGNS[each.verdict] + "*" * (each.verdict in ("proved", "slow") and bool(each.note))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="only this one, to standard output")
    parser.add_argument("--page", action="store_true", help="only the page, from the lines that there are")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    args = parser.parse_args(argv)
    if args.model:
        to_csv(lines_of(args.model), sys.stdout)
        return
    if not args.page:
        with ProcessPoolExecutor(args.jobs) as pool:
            lines = [each for some in pool.map(lines_of, catalogue()) for each in some]
        with CSV.open("w", newline="", encoding="utf-8") as file:
            to_csv(lines, file)
    PAGE.write_text(page(from_csv(CSV)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
