"""``kvferry plan``: the compatibility of two engines, the traffic between ranks, and its cost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import Config, Json, Model, examples, topology_help
from kvferry.core.choices import MAX_RUNS_PER_BLOCK, Placement

if TYPE_CHECKING:
    from kvferry.cli.link_profile import LinkProfile

MAX_TOKENS = 1 << 26

HELP = "\n\n".join(
    (
        "Check whether two engines are compatible, and predict the cost of a request.",
        "Each side is a topology of a model, the command that starts a vLLM engine, the URL of a running"
        " prefill server, or a manifest file (of `kvferry describe`, or dumped by an engine). Positional"
        " files fill the sides without --src or --dst, the source first.",
        "The plan of every destination rank is proved: each needed byte is written exactly once, from the"
        " matching source byte. Anything that cannot be proved is refused with the cause. If a proved plan"
        " is slow, alternative settings are planned, and the fastest is shown with its command.",
        topology_help(),
        examples(
            "kvferry plan --model llama-3.1-70b --src tp=4 --dst tp=6,block=64",
            "kvferry plan --model kimi-linear-48b --src tp=8 --dst tp=2 --json",
            "kvferry plan --config ./config.json --src pp=2,tp=2 --dst tp=4",
            "kvferry plan src.json dst.json --tokens 32768 --kept 1024 --link 400Gb",
            "kvferry plan src.json --model qwen3-32b --dst tp=8,layout=NHD",
            "kvferry plan --model llama-3.1-70b --src tp=8 --dst tp=6 --html plan.html",
            'kvferry plan --src "vllm serve Qwen/Qwen3-32B -tp 4" --dst dst.json',
            "kvferry plan --src http://p0:8100 --model qwen3-32b --dst tp=8",
        ),
        "Exit codes: 0 every requested rank is proved; 1 refused: incompatible, or not the same model; 2"
        " bad usage or input.",
    )
)


def plan(
    first: Annotated[Path | None, typer.Argument(metavar="[SRC.json]", show_default=False)] = None,
    second: Annotated[Path | None, typer.Argument(metavar="[DST.json]", show_default=False)] = None,
    model: Model = "",
    src: Annotated[
        str | None,
        typer.Option(
            metavar="TOPOLOGY",
            help='The source engine: tp=4,block=16, "vllm serve MODEL …", http://HOST:PORT, or a file.',
        ),
    ] = None,
    dst: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The destination engine.")] = None,
    src_model: Annotated[str, typer.Option(metavar="NAME", help="The source's model, if it differs.")] = "",
    dst_model: Annotated[str, typer.Option(metavar="NAME", help="The destination's model.")] = "",
    config: Config = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of the sample request.",
            show_default="4096, or what fits",
        ),
    ] = None,
    kept: Annotated[
        int, typer.Option(min=0, metavar="N", help="First tokens that the destination already has.")
    ] = 0,
    placement: Annotated[
        Placement, typer.Option(help="Placement of the request's blocks in the pools.")
    ] = Placement.SCATTERED,
    dst_rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Only this destination rank.", show_default="all")
    ] = None,
    max_runs_per_block: Annotated[
        int, typer.Option(min=1, metavar="N", help="Refuse a state with more runs per block.")
    ] = MAX_RUNS_PER_BLOCK,
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="The link between the ranks: a name such as same-gpu, `all`, or a file from `kvferry doctor"
            " --save`; repeatable.",
            show_default="400Gb (assumed), nvlink, tcp-stream",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Show every piece and the traffic between ranks.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write an HTML page (needs Jinja).")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Also draw the plan as SVG.")] = None,
    as_json: Json = False,
) -> None:
    """Check whether two engines are compatible, and predict the cost."""
    from kvferry.cli.asked import Asked
    from kvferry.cli.engines import src_and_dst
    from kvferry.cli.picture.render import check_pictures, draw_plan
    from kvferry.cli.plan_answer import answer
    from kvferry.errors import SpecError

    check_pictures({"--html": html, "--svg": svg})
    profiles = asked_links(link or ())
    if tokens is not None and tokens > MAX_TOKENS:
        raise SpecError(f"--tokens {tokens}: the maximum is {MAX_TOKENS}")
    files = [file for file in (first, second) if file is not None]
    sides = src_and_dst(files, (src, dst), model, config, (src_model, dst_model))
    asked = Asked(tokens, kept, placement, dst_rank, max_runs_per_block, tuple(link or ()))
    found = answer(asked, *sides, profiles)
    draw_plan(found, html, svg)
    if as_json:
        from kvferry.cli.plan_page import as_object

        print(json.dumps(as_object(found), ensure_ascii=False))
    else:
        from kvferry.cli.plan_page import show

        show(found, full=full)
    if found.findings:
        raise typer.Exit(1)


def asked_links(names: Sequence[str]) -> list[LinkProfile]:
    """The links to bill: known ones by name, measured ones by file."""
    from kvferry.cli.link_profile import DEFAULT_LINKS, LINK_PROFILES, link_profile, measured_links

    asked: list[LinkProfile] = []
    for name in dict.fromkeys(names):
        if name == "all":
            asked += LINK_PROFILES
        elif name.endswith(".json"):
            asked += measured_links(Path(name))
        else:
            asked.append(link_profile(name))
    return asked or list(DEFAULT_LINKS)
