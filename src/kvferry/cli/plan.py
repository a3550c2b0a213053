"""``kvferry plan``: can two engines talk, who sends what, and what does it cost?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.help_text import examples, topology_help
from kvferry.cli.options import Config, Json, Model
from kvferry.core.choices import MAX_RUNS_PER_BLOCK, Placement

if TYPE_CHECKING:
    from rich.console import Console

    from kvferry.cli.bill import Bill, LinkBill
    from kvferry.core.cost import Estimate
    from kvferry.core.link_profile import LinkProfile
    from kvferry.core.manifest import Manifest

MAX_TOKENS = 1 << 26
DEFAULT_TOKENS = 4096
MATRIX_COLUMNS = 6
"""Destination ranks side by side in the traffic matrix."""

HELP = "\n\n".join(
    (
        "Say whether two engines can talk, who sends what, and what a request costs.",
        "Each side is a manifest file (see `kvferry describe`) or a topology of a model. Files stand for the"
        " sides without a topology, the source first.",
        "Every destination rank's plan is proved: each needed byte is written exactly once, from the byte"
        " that means the same. What cannot be proved is refused, by name.",
        topology_help(),
        examples(
            "kvferry plan --model llama-3.1-70b --src tp=4 --dst tp=6,block=64",
            "kvferry plan --model kimi-linear-48b --src tp=8 --dst tp=2 --json",
            "kvferry plan --config ./config.json --src pp=2,tp=2 --dst tp=4",
            "kvferry plan src.json dst.json --tokens 32768 --kept 1024 --link 400Gb",
            "kvferry plan src.json --model qwen3-32b --dst tp=8,layout=NHD",
        ),
        "Exit codes: 0 every asked rank is proved; 1 refused; 2 bad usage or input.",
    )
)


def plan(
    first: Annotated[Path | None, typer.Argument(metavar="[SRC.json]", show_default=False)] = None,
    second: Annotated[Path | None, typer.Argument(metavar="[DST.json]", show_default=False)] = None,
    model: Model = "",
    src: Annotated[
        str | None, typer.Option(metavar="TOPOLOGY", help="The source engine, such as tp=4,block=16.")
    ] = None,
    dst: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The destination engine.")] = None,
    src_model: Annotated[str, typer.Option(metavar="NAME", help="The source's model, if another.")] = "",
    dst_model: Annotated[str, typer.Option(metavar="NAME", help="The destination's model.")] = "",
    config: Config = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of the request that is billed.",
            show_default="4096, or what fits",
        ),
    ] = None,
    kept: Annotated[
        int, typer.Option(min=0, metavar="N", help="First tokens that the destination has already.")
    ] = 0,
    placement: Annotated[
        Placement, typer.Option(help="How the request's blocks lie in the pools.")
    ] = Placement.CONSECUTIVE,
    dst_rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Only this destination rank.", show_default="all")
    ] = None,
    max_runs_per_block: Annotated[
        int, typer.Option(min=1, metavar="N", help="Refuse a state that takes more runs per block.")
    ] = MAX_RUNS_PER_BLOCK,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The kind of link between the ranks, such as same-gpu, or a file that `kvferry bench --json`"
            " has written; may be given again.",
            show_default="all that are known",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Can two engines talk, who sends what, and what does it cost?"""
    from kvferry.cli.bad_input import at
    from kvferry.cli.bill import bill_of
    from kvferry.cli.engines import GivenModels, src_and_dst
    from kvferry.core.sample import sample_request
    from kvferry.errors import SpecError

    profiles = asked_links(link or ())
    if tokens is not None and tokens > MAX_TOKENS:
        raise SpecError(f"--tokens {tokens}: at most {MAX_TOKENS} are billed")
    files = [file for file in (first, second) if file is not None]
    given = GivenModels(model, config, (src_model, dst_model))
    src_side, dst_side = src_and_dst(files, (src, dst), given)
    room = tokens or DEFAULT_TOKENS
    source, destination = src_side.manifest(room), dst_side.manifest(room)
    ranks = asked_ranks(destination, dst_rank)
    tokens = tokens or fitting_tokens(source, destination)
    if kept > tokens:
        raise SpecError(
            f"--kept {kept} must not exceed the {tokens} tokens of the request; --tokens N sets them"
        )
    with at(f"--tokens {tokens} --kept {kept}"):
        request = sample_request(source, destination, tokens, num_kept=kept, placement=placement)
        bill = bill_of(source, destination, ranks, request, max_runs_per_block)
    about = {"tokens": tokens, "kept": kept, "placement": placement.value}
    if as_json:
        print(json.dumps(as_object(source, destination, bill, about, profiles), ensure_ascii=False))
    else:
        show(source, destination, bill, about, profiles, len(ranks))
    if bill.findings:
        raise typer.Exit(1)


def fitting_tokens(source: Manifest, destination: Manifest) -> int:
    """The default number of tokens, halved until both pools have room for them."""
    from kvferry.core.sample import sample_request
    from kvferry.errors import SpecError

    tokens = DEFAULT_TOKENS
    while tokens > 1:
        try:
            sample_request(source, destination, tokens)
            break
        except SpecError:
            tokens //= 2
    return tokens


def asked_links(names: Sequence[str]) -> list[LinkProfile]:
    """The links to bill: known ones by their names, measured ones by the files that have them."""
    from kvferry.cli.measured_link import measured_links
    from kvferry.core.link_profile import LINK_PROFILES, link_profile

    asked: list[LinkProfile] = []
    for name in dict.fromkeys(names):
        asked += measured_links(Path(name)) if name.endswith(".json") else [link_profile(name)]
    return asked or list(LINK_PROFILES)


def asked_ranks(destination: Manifest, dst_rank: int | None) -> list[int]:
    """The destination ranks to plan for."""
    from kvferry.cli.engines import listed_ranks
    from kvferry.errors import SpecError

    known = [rank.rank for rank in destination.ranks]
    if dst_rank is None:
        return known
    if dst_rank not in known:
        raise SpecError(f"--dst-rank {dst_rank}: engine {destination.engine} has {listed_ranks(destination)}")
    return [dst_rank]


# ------------------------------------------------------------------------------------------- JSON


def as_object(
    source: Manifest,
    destination: Manifest,
    bill: Bill,
    request: Mapping[str, object],
    profiles: Sequence[LinkProfile],
) -> object:
    """The whole answer as plain data."""
    from kvferry.cli.output import finding_object
    from kvferry.core.identity import compare_identity

    check = compare_identity(source.identity, destination.identity)
    same = {"num_equal": check.num_equal, "unknown": [finding_object(each) for each in check.unknown]}
    head = {"src": _engine(source), "dst": _engine(destination), "identity": same}
    if bill.findings:
        found = [{**finding_object(each), "dst_ranks": ranks} for each, ranks in bill.findings.items()]
        return {"verdict": "refused", **head, "findings": found, "num_more_findings": bill.num_more}
    return {
        "verdict": "proved",
        **head,
        "request": request,
        "total_bytes": bill.total_bytes,
        "num_runs": bill.num_runs,
        "zeroed_bytes": bill.zeroed_bytes,
        "plan_ms": round(bill.plan_ms, 3),
        "select_ms": round(bill.select_ms, 3),
        "links": [_link(bill.over(profile)) for profile in profiles],
        "flows": [
            {
                "src_rank": flow.src_rank,
                "dst_rank": flow.dst_rank,
                "num_pieces": flow.num_pieces,
                "total_bytes": flow.total_bytes,
                "num_runs": flow.num_runs,
                "average_run_bytes": round(flow.average_run_bytes, 1),
            }
            for flow in bill.flows
        ],
        "ranks": [
            {
                "dst_rank": rank.dst_rank,
                "total_bytes": sum(flow.total_bytes for flow in rank.flows),
                "num_runs": sum(flow.num_runs for flow in rank.flows),
                "zeroed_bytes": rank.zeroed_bytes,
                "plan_ms": round(rank.plan_ms, 3),
                "select_ms": round(rank.select_ms, 3),
                "explain": rank.lines,
            }
            for rank in bill.ranks
        ],
    }


def _link(bill: LinkBill) -> dict[str, object]:
    estimate, profile = bill.estimate, bill.profile
    return {
        "link": profile.name,
        "way": profile.way.value,
        "seconds": float(f"{estimate.seconds:.4g}"),
        "mostly": estimate.mostly.value,
        "share": round(estimate.share, 3),
        "reason": estimate.reason,
        "slowest_rank": bill.whose,
        "origin": profile.origin.value,
        "source": profile.source,
    }


def _engine(manifest: Manifest) -> dict[str, object]:
    return {
        "engine": manifest.engine,
        "model": manifest.model,
        "ranks": [rank.rank for rank in manifest.ranks],
        "groups": {group.name: group.tokens_per_block for group in manifest.groups},
    }


# ----------------------------------------------------------------------------------------- people


def show(
    source: Manifest,
    destination: Manifest,
    bill: Bill,
    request: Mapping[str, object],
    profiles: Sequence[LinkProfile],
    asked: int,
) -> None:
    """The whole answer for people."""
    from kvferry.cli import output as page
    from kvferry.core.identity import compare_identity

    out = page.console()
    page.verdict(out, "REFUSED" if bill.findings else "PROVED", f"{_count(asked, 'destination rank')}")
    identity = compare_identity(source.identity, destination.identity).sentence
    rows = [("src", _summary(source)), ("dst", _summary(destination)), ("model", identity)]
    page.labelled(out, rows)
    if bill.findings:
        page.findings(out, bill.findings, asked, bill.num_more)
        return
    out.print("\nWho sends what", style="bold")
    for rank in bill.ranks:
        page.wrapped(out, rank.lines)
    out.print()
    _show_flows(out, bill, request)
    if bill.total_bytes:
        _show_links(out, [bill.over(profile) for profile in profiles])
    _show_matrix(out, bill)
    ways = f"planned, proved and lowered in {page.milliseconds(bill.plan_ms)}"
    out.print(f"{ways}; runs of the request selected in {page.milliseconds(bill.select_ms)}")


def _summary(manifest: Manifest) -> str:
    blocks = sorted({group.tokens_per_block for group in manifest.groups if group.addressing == "table"})
    size = f", blocks of {'/'.join(map(str, blocks))} tokens" if blocks else ""
    return f"{manifest.model or manifest.engine}, {_count(len(manifest.ranks), 'rank')}{size}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _show_flows(out: Console, bill: Bill, request: Mapping[str, object]) -> None:
    from kvferry.cli.output import num_bytes, print_table, table

    kept = f", {request['kept']} of them kept" if request["kept"] else ""
    title = f"One request of {request['tokens']} tokens{kept}, {request['placement']} blocks"
    out.print(title, style="bold")
    bills = table("src → dst", "bytes", "runs", "average run", left=["src → dst"])
    for flow in bill.flows:
        way = f"{flow.src_rank} → {flow.dst_rank}"
        row = (num_bytes(flow.total_bytes), f"{flow.num_runs:,}", num_bytes(flow.average_run_bytes))
        bills.add_row(way, *row)
    bills.add_section()
    average = bill.total_bytes / bill.num_runs if bill.num_runs else 0
    bills.add_row("all", num_bytes(bill.total_bytes), f"{bill.num_runs:,}", num_bytes(average))
    bills.add_row("to zero", num_bytes(bill.zeroed_bytes), "", "")
    print_table(out, bills)


def _show_links(out: Console, bills: Sequence[LinkBill]) -> None:
    """How long moving takes over each kind of link, and what most of that is for."""
    from kvferry.cli.output import milliseconds, print_table, table, wrapped
    from kvferry.core.link_profile import Origin

    out.print("Time to move it, by the link between two ranks", style="bold")
    times = table("link", "way", "time", "rank", "mostly for", left=["link", "way", "rank", "mostly for"])
    predicted = [bill.profile for bill in bills if bill.profile.origin is Origin.PREDICTED]
    for bill in bills:
        profile, estimate = bill.profile, bill.estimate
        mostly = f"{_reason(estimate)}, {100 * estimate.share:.0f} %"
        name = f"{profile.name} *" if profile in predicted else profile.name
        times.add_row(name, profile.way.value, milliseconds(1e3 * estimate.seconds), bill.whose, mostly)
    print_table(out, times)
    if predicted:
        wrapped(out, ["* a prediction: nobody has measured this link"])
        out.print()


def _reason(estimate: Estimate) -> str:
    """What most of a time is for, in the units of this page."""
    from kvferry.cli.output import num_bytes
    from kvferry.core.cost import CostTerm

    traffic = estimate.traffic
    match estimate.mostly:
        case CostTerm.BYTES:
            return num_bytes(traffic.num_bytes)
        case CostTerm.RUNS:
            return f"{traffic.num_runs:,} runs of {num_bytes(traffic.average_run_bytes)}"
        case CostTerm.READS:
            return estimate.reason


def _show_matrix(out: Console, bill: Bill) -> None:
    """Bytes by source rank (down) and destination rank (across), a few columns at a time."""
    from kvferry.cli.output import num_bytes, print_table, table

    sent = {(flow.src_rank, flow.dst_rank): flow.total_bytes for flow in bill.flows}
    src_ranks = sorted({src_rank for src_rank, _ in sent})
    dst_ranks = [rank.dst_rank for rank in bill.ranks]
    out.print("Bytes from rank to rank", style="bold")
    for start in range(0, len(dst_ranks), MATRIX_COLUMNS):
        some = dst_ranks[start : start + MATRIX_COLUMNS]
        is_last = some[-1] == dst_ranks[-1]
        matrix = table("src \\ dst", *map(str, some), *["sent"] * is_last)
        for src_rank in src_ranks:
            cells = [sent.get((src_rank, dst_rank), 0) for dst_rank in some]
            total = sum(size for (rank, _), size in sent.items() if rank == src_rank)
            row = [num_bytes(size) if size else "·" for size in cells]
            matrix.add_row(str(src_rank), *row, *[num_bytes(total)] * is_last)
        matrix.add_section()
        columns = [sum(sent.get((src, dst), 0) for src in src_ranks) for dst in some]
        matrix.add_row("received", *map(num_bytes, columns), *[num_bytes(bill.total_bytes)] * is_last)
        print_table(out, matrix)
