"""The answer of ``kvferry plan`` as plain data."""

from __future__ import annotations

from dataclasses import asdict

from kvferry.cli.bill import LinkBill
from kvferry.cli.output import finding_object
from kvferry.cli.plan_answer import PlanAnswer
from kvferry.cli.remedies import remedy
from kvferry.core.manifest import Manifest


def as_object(answer: PlanAnswer) -> object:
    """The whole answer as plain data."""
    bill, billed, check = answer.bill, answer.billed, answer.identity
    same = {"num_equal": check.num_equal, "unknown": [finding_object(each) for each in check.unknown]}
    warned = [asdict(each) for each in answer.warnings]
    head = {
        "src": _engine(billed.source),
        "dst": _engine(billed.destination),
        "identity": same,
        "ignored": {"src": list(answer.ignored.src), "dst": list(answer.ignored.dst)},
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
        "plan_ms": round(bill.plan_ms, 3),
        "select_ms": round(bill.select_ms, 3),
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
        "seconds": float(f"{bill.seconds:.4g}"),
        "long_run_seconds": float(f"{bill.long_run_seconds:.4g}"),
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
