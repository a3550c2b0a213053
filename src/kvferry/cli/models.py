"""``kvferry models`` and ``kvferry describe``: the catalogue, and the manifest of an engine."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.cli.options import Config, Json, Model, examples, topology_help

if TYPE_CHECKING:
    from kvferry.models import Model as ServedModel
    from kvferry.models.model import Cache

HELP = "\n\n".join(
    (
        "List the known models and the size of their caches.",
        "Bytes are those of one copy (tp=1) in the model's own dtype: per token, and fixed per request"
        " (full windows, recurrent states).",
        examples("kvferry models", "kvferry models deepseek-v4 kimi-linear-48b", "kvferry models --json"),
        "A+B is model A with model B as its speculative draft, in every command.",
    )
)


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these models, with notes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the known models and the size of their caches."""
    from kvferry.models import catalogue

    entries = [entry(name) for name in names or catalogue()]
    if as_json:
        print(json.dumps({"models": entries}, ensure_ascii=False))
    elif names:
        _show_details(entries)
    else:
        _show_table(entries)


def entry(name: str) -> dict[str, Any]:
    """One model, as ``--json`` lists it."""
    from kvferry.models import catalogue, catalogued, model_named

    model = model_named(name)
    known = [catalogue()[catalogued(part) or part] for part in name.split("+")]
    growing, fixed = _bytes(model)
    layers = (*model.layers, *model.draft)
    return {
        "name": name,
        "title": " + ".join(str(each["title"]) for each in known),
        "family": str(known[0]["config"]["model_type"]),
        "num_layers": len(layers),
        # Layers per kind of cache: attn (k v), attn (k v, last 128 tokens) …
        "caches": dict(Counter(_kind(cache) for layer in layers for cache in layer.caches)),
        "bytes_per_token": growing,
        "fixed_bytes": fixed,
        "note": " ".join(str(each["note"]) for each in known),
        "source": "; ".join(str(each["source"]) for each in known),
    }


def _kind(cache: Cache) -> str:
    parts = " ".join(part.name for part in cache.page.parts)
    window = f", last {cache.window} tokens" if cache.window else ""
    every = f", one per {cache.page.tokens_per_cell} tokens" if cache.page.tokens_per_cell > 1 else ""
    return f"{cache.name} ({parts}{window}{every})"


def _bytes(model: ServedModel) -> tuple[int, int]:
    """(bytes per token, further bytes per request)."""
    growing = fixed = 0.0
    for cache in (cache for layer in (*model.layers, *model.draft) for cache in layer.caches):
        cell = sum(part.num_bytes for part in cache.page.parts)
        if cache.is_recurrent:
            fixed += cell
        elif cache.window:
            fixed += cell * cache.window / cache.page.tokens_per_cell
        else:
            growing += cell / cache.page.tokens_per_cell
    return round(growing), round(fixed)


def _show_table(entries: list[dict[str, Any]]) -> None:
    from kvferry.cli.output import console, num_bytes, print_table, table

    columns = ("name", "layers", "caches", "per token", "fixed")
    listed = table(*columns, left=["name", "caches"])
    for each in entries:
        caches = Counter[str]()
        for kind, count in each["caches"].items():
            caches[("windowed " if "attn (k v, last" in kind else "") + kind.partition(" (")[0]] += count
        kinds = ", ".join(f"{count} {kind}" for kind, count in caches.items())
        fixed = num_bytes(each["fixed_bytes"]) if each["fixed_bytes"] else "·"
        grows = num_bytes(each["bytes_per_token"]) if each["bytes_per_token"] else "·"
        listed.add_row(each["name"], str(each["num_layers"]), kinds, grows, fixed)
    out = console()
    print_table(out, listed)
    out.print("`kvferry models NAME` shows the details of one.")


def _show_details(entries: list[dict[str, Any]]) -> None:
    from kvferry.cli.output import console, labelled, num_bytes

    out = console()
    for each in entries:
        out.print(f"{each['name']}  {each['title']}", style="bold")
        rows = (
            ("family", each["family"]),
            ("layers", str(each["num_layers"])),
            ("caches", "; ".join(f"{count} {kind}" for kind, count in each["caches"].items())),
            ("per token", num_bytes(each["bytes_per_token"])),
            ("fixed", num_bytes(each["fixed_bytes"])),
            ("note", each["note"]),
            ("source", each["source"]),
        )
        labelled(out, rows)


# -- kvferry describe ----------------------------------------------------------------------------------------

DESCRIBE_HELP = "\n\n".join(
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
    from kvferry.cli.options import at, write_output
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
    else:
        write_output(output, text)
