"""``kvferry diff``: the differences between two engines, and their effects on a transfer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import Config, Json, Model, examples

if TYPE_CHECKING:
    from kvferry.cli.manifest_diff import Difference, Direction, ManifestDiff

HELP = "\n\n".join(
    (
        "Show how two engines differ, and whether it matters for a transfer.",
        "A and B are manifest files (of `kvferry describe`, or dumped by an engine), topologies of a model,"
        " or commands that start a vLLM engine, as for `kvferry plan`.",
        "Differences are grouped by effect: refused (incompatible, or not the same model), slower (a"
        " request of 4,096 tokens, planned in both directions, needs short runs), harmless.",
        examples(
            "kvferry diff src.json dst.json",
            "kvferry diff --model llama-3.1-70b tp=4 tp=8,layout=NHD",
            "kvferry diff --model gpt-oss-20b dumped.json tp=2",
            "kvferry diff src.json dst.json --json",
            "kvferry diff src.json dst.json --html diff.html",
        ),
        "Exit codes: 0 no relevant difference; 1 a relevant difference; 2 bad usage or input.",
    )
)


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A manifest file, topology or command.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other engine.")],
    model: Model = "",
    config: Config = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write an HTML page (needs Jinja).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how two engines differ, and whether it matters."""
    from kvferry.cli.asked import Asked, model_differences
    from kvferry.cli.engines import src_and_dst
    from kvferry.cli.manifest_diff import Effect, manifest_diff
    from kvferry.cli.picture.render import check_pictures, draw_diff

    check_pictures({"--html": html})
    sides = src_and_dst((), (first, second), model, config, engines=("A", "B"))
    a, b = (side.manifest() for side in sides)
    found = manifest_diff(a, b, Asked(), model_differences(*sides, a, b))
    draw_diff(found, a, b, (first, second), html)
    if as_json:
        print(json.dumps(_as_object(found), ensure_ascii=False))
    else:
        _show(found, first, second)
    if found.effect not in (None, Effect.HARMLESS):
        raise typer.Exit(1)


def _as_object(found: ManifestDiff) -> object:
    return {
        "verdict": found.effect.value if found.effect else "same",
        "differences": [
            {
                "what": each.what,
                "a": each.a,
                "b": each.b,
                "effect": each.effect.value,
                "states": list(each.states),
            }
            for each in found.differences
        ],
        "directions": [_direction_object(each) for each in found.directions],
    }


def _direction_object(direction: Direction) -> dict[str, object]:
    from kvferry.cli.output import finding_object

    bill = direction.over_network
    return {
        "direction": direction.name,
        "is_refused": direction.is_refused,
        "lacks_ranks": direction.lacks_ranks,
        "findings": [finding_object(finding) for finding in direction.billed.bill.findings],
        "problem": direction.problem,
        "tokens": direction.billed.tokens,
        "link": bill.profile.name if bill else "",
        "seconds": bill.seconds if bill else 0.0,
        "long_run_seconds": bill.long_run_seconds if bill else 0.0,
    }


def _show(found: ManifestDiff, first: str, second: str) -> None:
    from kvferry.cli import output as page
    from kvferry.cli.manifest_diff import direction_time, verdict

    out = page.console()
    page.verdict(out, *verdict(found))
    page.labelled(out, [("a", first), ("b", second)])
    for effect in dict.fromkeys(each.effect for each in found.differences):
        out.print(f"\n{effect.value}", style="bold")
        for each in found.differences:
            if each.effect is effect:
                _show_difference(each)
    rows = [(each.name, direction_time(each)) for each in found.directions]
    if any(time for _, time in rows):
        tokens = min(each.billed.tokens for each in found.directions)
        out.print(f"\none request of {tokens} tokens", style="bold")
        page.labelled(out, rows)


def _show_difference(each: Difference) -> None:
    from kvferry.cli import output as page

    out = page.console()
    page.wrapped(out, [each.what])
    page.labelled(out, [("a", each.a), ("b", each.b), ("in", page.together(each.states))], "    ")
