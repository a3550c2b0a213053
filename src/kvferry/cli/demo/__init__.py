"""``kvferry demo``: transfer caches between different engines, and verify every cell."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from kvferry.cli.options import Json, Model, examples, topology_help

HELP = "\n\n".join(
    (
        "Transfer caches between unequal engines on this host, and verify every cell.",
        "Starts a prefill engine and a decode engine, each rank a process, with a model's real dimensions"
        " and a few of its layers (by default KDA and MLA on shared tensors). Every element gets a unique"
        " value. Requests are offered, leased and read; every cell is verified, and no lease, read or"
        " block may be left over. KVFERRY_WAY and KVFERRY_EXPOSE select the transfer mode: by default mapped"
        " for device memory, packed for host memory.",
        topology_help(),
        examples(
            "kvferry demo",
            "kvferry demo --model qwen3-next-80b --src tp=2 --dst tp=4,conv=DS",
            "kvferry demo --model gpt-oss-20b --tokens 3000 --requests 10",
            "kvferry demo --device cuda",
        ),
        "Exit codes: 0 all cells correct and nothing left over; 1 a wrong cell, a failed request, a leak, or"
        " refused; 2 bad usage.",
    )
)


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def demo(
    model: Model = "",
    src: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The source engine.")] = None,
    dst: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The destination engine.")] = None,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Requests.")] = 7,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of the longest request.", show_default="8000"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Approximate number of layers.", show_default="4")
    ] = None,
    device: Annotated[Device, typer.Option(help="Memory of the caches.")] = Device.CPU,
    as_json: Json = False,
) -> None:
    """Transfer caches between local processes and verify every cell."""
    from kvferry.cli.demo.engines import DEFAULT_PAIR, Pair
    from kvferry.cli.demo.moves import Verdict, demonstrate, show
    from kvferry.cli.output import progress

    pair = DEFAULT_PAIR if model in ("", DEFAULT_PAIR.model) else Pair(model)
    pair = pair.with_options(src, dst, layers)
    with progress(requests + 1, "starting processes", visible=not as_json) as step:
        result = demonstrate(pair, requests, tokens, device.value, step)
    if as_json:
        print(json.dumps(result.as_object(), ensure_ascii=False))
    else:
        show(result)
    if result.verdict is not Verdict.VERIFIED:
        raise typer.Exit(1)
