"""``kvferry describe``: the manifest of an engine, from a model and a topology."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.options import Config, Model, examples, topology_help

HELP = "\n\n".join(
    (
        "Write the manifest of an engine: its states, and their addresses on each rank.",
        "The output is JSON. Pass it to `kvferry plan` or `kvferry runs`.",
        topology_help(),
        examples(
            "kvferry describe --model deepseek-v3.2 --at tp=8 -o src.json",
            "kvferry describe --model gpt-oss-20b --at tp=2,block=32 --rank 0",
            "kvferry describe --config ./config.json --at tp=4,layout=NHD",
        ),
        "Exit codes: 0 written; 2 bad usage or input.",
    )
)


def describe(
    topology: Annotated[str, typer.Option("--at", metavar="TOPOLOGY", help="Topology of the engine.")],
    model: Model = "",
    config: Config = None,
    rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Only this rank.", show_default="all")
    ] = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="The engine's name in the manifest.")] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write here.", show_default="standard output"),
    ] = None,
) -> None:
    """Write the manifest of an engine."""
    from dataclasses import replace

    from kvferry.cli.engines import chosen_model, listed_ranks
    from kvferry.cli.options import at
    from kvferry.errors import SpecError
    from kvferry.models import Topology
    from kvferry.models import describe as described
    from kvferry.wire.manifest import manifest_to_json

    chosen = chosen_model(model, config)
    with at(f"--at {topology}"):
        manifest = described(chosen, Topology.parse(topology), engine or f"{chosen.name} {topology}")
        if rank is not None and rank >= len(manifest.ranks):
            raise SpecError(f"--rank {rank}: the engine has {listed_ranks(manifest)}")
    if rank is not None:
        manifest = replace(manifest, ranks=(manifest.rank(rank),))
    text = manifest_to_json(manifest)
    if output is None:
        sys.stdout.write(text.decode())
        return
    with at(str(output)):
        output.write_bytes(text)
