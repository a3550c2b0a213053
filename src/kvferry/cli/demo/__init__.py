"""``kvferry demo``: move real bytes between engines of different shape, and check every cell by name."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from kvferry.cli.options import Json, Model, examples, topology_help
from kvferry.errors import SpecError

HELP = "\n\n".join(
    (
        "Move real bytes between engines of different shape, and check every cell by name.",
        "A prefill engine and a decode engine are started, each rank a process of its own, with a model's"
        " true dimensions and a few of its layers (by default KDA and MLA on shared tensors). Every item of"
        " every state gets bytes of its own; several requests at a time are offered, leased and read; what"
        " arrived is read back by name on every destination rank, and nothing may be left behind: no lease,"
        " no read, no block. The last request is moved several times, which gives the speeds. The way of"
        " reading is that of the environment (KVFERRY_WAY, KVFERRY_EXPOSE): by default mapped for device"
        " memory, packed for host memory.",
        "With --transport memory nothing outside this process is touched: three"
        " models (KDA and MLA, MLA with an indexer, GQA), each at two unequal topologies, in a few seconds.",
        topology_help(),
        examples(
            "kvferry demo",
            "kvferry demo --model qwen3-next-80b --src tp=2 --dst tp=4,conv=DS",
            "kvferry demo --model gpt-oss-20b --tokens 3000 --requests 10",
            "kvferry demo --device cuda",
            "kvferry demo --transport memory",
        ),
        "Exit codes: 0 all cells right and nothing left behind; 1 a cell is wrong (the first is named), a"
        " request failed, something leaked, or refused; 2 bad usage.",
    )
)


class Carrier(StrEnum):
    PROCESSES = "processes"
    MEMORY = "memory"


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


NUM_REQUESTS = {Carrier.PROCESSES: 7, Carrier.MEMORY: 3}
NUM_TOKENS_IN_MEMORY = 600


def demo(
    model: Model = "",
    src: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The source engine.")] = None,
    dst: Annotated[str | None, typer.Option(metavar="TOPOLOGY", help="The destination engine.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Requests per model.", show_default="7; in memory 3"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tokens of the longest request.", show_default="8000; in memory 600"
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="About how many layers.", show_default="4")
    ] = None,
    transport: Annotated[Carrier, typer.Option(help="What carries the bytes.")] = Carrier.PROCESSES,
    device: Annotated[Device, typer.Option(help="Where the caches are.")] = Device.CPU,
    as_json: Json = False,
) -> None:
    """Move real bytes between processes and check every cell by name."""
    from kvferry.cli.demo import engines, moves
    from kvferry.cli.demo.report import Verdict, as_object, show, worst
    from kvferry.cli.output import progress

    num_requests = requests or NUM_REQUESTS[transport]
    if transport is Carrier.PROCESSES:
        known = engines.OF_PROCESSES
        pair = known if model in ("", known.model) else engines.Pair(model)
        pair = pair.with_options(src, dst, layers)
        with progress(num_requests + 1, "starting processes", visible=not as_json) as step:
            results = [moves.demonstrate_between_processes(pair, num_requests, tokens, device.value, step)]
    else:
        if device is not Device.CPU:
            raise SpecError("--device cuda: --transport memory moves host memory only")
        if not model and (src or dst or layers):
            raise SpecError("--src, --dst and --layers belong to a --model: name one of `kvferry models`")
        num_tokens = tokens or NUM_TOKENS_IN_MEMORY
        pairs = [engines.Pair(model).with_options(src, dst, layers)] if model else engines.IN_MEMORY
        with progress(len(pairs) * num_requests, "moving and checking", visible=not as_json) as step:
            results = [moves.demonstrate_in_memory(each, num_requests, num_tokens, step) for each in pairs]
    if as_json:
        print(json.dumps(as_object(results), ensure_ascii=False))
    else:
        show(results)
    if worst(results) is not Verdict.VERIFIED:
        raise typer.Exit(1)
