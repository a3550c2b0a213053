"""The answer of ``kvferry plan`` as text (for 60 columns and more), and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from kvferry.cli import output as page
from kvferry.cli.bill import LinkBill
from kvferry.cli.link_profile import CostTerm, Estimate, Origin
from kvferry.cli.output import finding_object, milliseconds, num_bytes, print_table, remedy, table, wrapped
from kvferry.cli.plan_answer import PlanAnswer, Warned
from kvferry.core.choices import Placement
from kvferry.core.manifest import Manifest
from kvferry.errors import counted

BEST_CASE = "best case; only an engine that has just started has consecutive blocks"
FITS = "The bytes would fit. Cost of the transfer, once both sides serve the same model:"


def show(answer: PlanAnswer, *, full: bool) -> None:
    out, bill, billed = page.console(), answer.bill, answer.billed
    asked = f"{counted(len(billed.ranks), 'destination rank')}"
    page.verdict(out, "REFUSED" if answer.findings else "PROVED", asked)
    rows = [("src", summary(billed.source)), ("dst", summary(billed.destination))]
    rows += [("link", answer.assumed_link), ("model", answer.model_sentence)]
    rows += [("layout", answer.assumed)]
    rows += [
        ("ignored", ", ".join(dict.fromkeys(each for flags in answer.ignored.values() for each in flags)))
    ]
    page.labelled(out, rows)
    if answer.findings:
        page.findings(out, answer.findings, len(billed.ranks), answer.num_more_findings)
        _show_way(out, answer)
        if answer.bytes_fit:
            out.print()
            wrapped(out, [FITS], "", hang=0)
    _show_warnings(out, answer.warnings)
    if not answer.bytes_fit:
        return
    if full:
        out.print("\nPieces by source and destination rank", style="bold")
        for rank in bill.ranks:
            page.wrapped(out, rank.lines)
    out.print()
    _show_request(out, answer, full=full)
    if bill.total_bytes:
        _show_links(out, answer.links, full=full)
    if not full:
        wrapped(out, ["--full shows every piece and the traffic between ranks."], "")


def _show_way(out: Console, answer: PlanAnswer) -> None:
    if answer.way:
        out.print("\nThis pair would be proved:", style="bold")
        page.command(out, "try", answer.way_command)


def _show_warnings(out: Console, warnings: Sequence[Warned]) -> None:
    for each in warnings:
        out.print()
        page.verdict(out, "SLOW" if each.code == "short-runs" else "NOTE", each.message)
        page.labelled(out, [("why", each.reason), ("remedy", each.remedy)])
        page.command(out, "try", each.command)


def summary(manifest: Manifest) -> str:
    blocks = sorted({group.tokens_per_block for group in manifest.groups if group.addressing == "table"})
    size = f", blocks of {'/'.join(map(str, blocks))} tokens" if blocks else ""
    return f"{manifest.model or manifest.engine}, {counted(len(manifest.ranks), 'rank')}{size}"


def _show_request(out: Console, answer: PlanAnswer, *, full: bool) -> None:
    """The bytes of the request; with ``full``, per pair of ranks."""
    bill, asked = answer.bill, answer.asked
    kept = f", {asked.kept} of them kept" if asked.kept else ""
    title = f"One request of {answer.billed.tokens} tokens{kept}, {asked.placement.value} blocks"
    out.print(title, style="bold")
    if asked.placement is Placement.CONSECUTIVE:
        wrapped(out, [BEST_CASE], hang=0)
    average = bill.total_bytes / bill.num_runs if bill.num_runs else 0
    if not full:
        moved = f"{num_bytes(bill.total_bytes)} in {counted(bill.num_runs, 'run')} of {num_bytes(average)}"
        wrapped(out, [f"{moved} on average; {num_bytes(bill.zeroed_bytes)} to zero"])
        out.print()
        return
    bills = table("src → dst", "bytes", "runs", "average run", left=["src → dst"])
    for flow in bill.flows:
        way = f"{flow.src_rank} → {flow.dst_rank}"
        row = (num_bytes(flow.total_bytes), f"{flow.num_runs:,}", num_bytes(flow.average_run_bytes))
        bills.add_row(way, *row)
    bills.add_section()
    bills.add_row("all", num_bytes(bill.total_bytes), f"{bill.num_runs:,}", num_bytes(average))
    bills.add_row("to zero", num_bytes(bill.zeroed_bytes), "", "")
    print_table(out, bills)


def _show_links(out: Console, bills: Sequence[LinkBill], *, full: bool) -> None:
    """The time over each kind of link; with ``full``, the slowest rank and its largest cost."""
    out.print("Estimated time to move it, by the link between two ranks", style="bold")
    more = ("rank", "mostly for") if full else ()
    times = table("link", "way", "time", "long runs", *more, left=["link", "way", "rank", "mostly for"])
    predicted = [bill.profile for bill in bills if bill.profile.origin is Origin.PREDICTED]
    for bill in bills:
        profile, estimate = bill.profile, bill.estimate
        mostly = f"{_reason(estimate)}, {100 * estimate.share:.0f} %"
        name = f"{profile.name} *" if profile in predicted else profile.name
        seconds = (milliseconds(1e3 * each) for each in (bill.seconds, bill.long_run_seconds))
        times.add_row(page.plain(name), profile.way.value, *seconds, *((bill.whose, mostly) if full else ()))
    print_table(out, times)
    if predicted:
        wrapped(out, ["* predicted from published figures; not measured with kvferry"])
        out.print()


def _reason(estimate: Estimate) -> str:
    traffic = estimate.traffic
    match estimate.mostly:
        case CostTerm.BYTES:
            return num_bytes(traffic.num_bytes)
        case CostTerm.RUNS:
            return f"{traffic.num_runs:,} runs of {num_bytes(traffic.average_run_bytes)}"
        case CostTerm.READS:
            return f"starting {counted(traffic.num_reads, 'read')}"


def as_object(answer: PlanAnswer) -> object:
    bill, billed, check = answer.bill, answer.billed, answer.identity
    same = {"num_equal": check.num_equal, "unknown": [finding_object(each) for each in check.unknown]}
    warned = [asdict(each) for each in answer.warnings]
    head = {
        "src": _engine(billed.source),
        "dst": _engine(billed.destination),
        "identity": same,
        "ignored": answer.ignored,
        "warnings": warned,
    }
    refusal: dict[str, object] = {}
    if answer.findings:
        found = [
            {**finding_object(each), "remedy": remedy(each), "dst_ranks": ranks}
            for each, ranks in answer.findings.items()
        ]
        more = {"num_more_findings": answer.num_more_findings, "command": answer.way_command}
        refusal = {"findings": found, **more}
        if not answer.bytes_fit:
            return {"verdict": "refused", **head, **refusal}
    asked = answer.asked
    request = {"tokens": billed.tokens, "kept": asked.kept, "placement": asked.placement.value}
    return {
        "verdict": "refused" if refusal else "proved",
        **head,
        **refusal,
        "request": request,
        "total_bytes": bill.total_bytes,
        "num_runs": bill.num_runs,
        "zeroed_bytes": bill.zeroed_bytes,
        "links": [_link(each) for each in answer.links],
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
        "seconds": float(f"{bill.seconds:.4g}"),
        "long_run_seconds": float(f"{bill.long_run_seconds:.4g}"),
        "mostly": estimate.mostly.value,
        "share": round(estimate.share, 3),
        "reason": _reason(estimate),
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
