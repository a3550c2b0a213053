"""``kvferry demo``: move real bytes between engines of different shape, and check every cell by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.options import Json, Model
from kvferry.cli.words import examples, topology_help

if TYPE_CHECKING:
    from kvferry.cli.crossing import Crossing, Speed
    from kvferry.cli.trip import Trip
    from kvferry.core.manifest import Manifest

HELP = "\n\n".join(
    (
        "Move real bytes between engines of different shape, and check every cell by name.",
        "A prefill engine and a decode engine are started, each rank a process of its own, with a model's"
        " true dimensions and a few of its layers (by default KDA and MLA on shared tensors). Every item of"
        " every state gets bytes of its own; several requests at a time are offered, leased and read over"
        " NIXL, while others are written; what arrived is read back by name on every destination rank, and"
        " nothing may be left behind: no lease, no read, no block. The last request is moved in turns with"
        " NIXL alone, which gives the speeds.",
        "With --transport memory nothing outside this process is touched, and NIXL is not needed: three"
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


class Over(StrEnum):
    """What carries the bytes."""

    NIXL = "nixl"
    MEMORY = "memory"


class Device(StrEnum):
    """Where the caches are."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of engines to demonstrate."""

    model: str
    num_layers: int
    src: str
    dst: str


CROSSING = Case("kimi-linear-48b", 4, "tp=4,block=512", "tp=2,block=960,layout=cross-layer")
"""What is shown over NIXL where nothing else is asked for."""
TRIPS = (
    Case("kimi-linear-48b", 4, "tp=4,block=256", "tp=8,block=96,layout=cross-layer"),
    Case("deepseek-v3.2", 4, "tp=3,block=64", "tp=5,block=128,layout=cross-layer"),
    Case("llama-3.1-70b", 4, "tp=4,block=16,layout=HND", "tp=6,block=24,layout=NHD"),
)
"""What is shown in memory where nothing else is asked for."""

MAX_MEMORY = 4 << 30
"""Bytes that the two engines may take together."""
MAX_PROCESSES = 64
DEFAULT_SRC, DEFAULT_DST = "tp=2", "tp=4,layout=NHD"
NUM_REQUESTS = {Over.NIXL: 7, Over.MEMORY: 3}
NUM_TOKENS = {Over.NIXL: 8000, Over.MEMORY: 600}
NUM_LAYERS = 4


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
    transport: Annotated[Over, typer.Option(help="What carries the bytes.")] = Over.NIXL,
    device: Annotated[Device, typer.Option(help="Where the caches are.")] = Device.CPU,
    as_json: Json = False,
) -> None:
    """Move real bytes over NIXL and check every cell by name."""
    num_requests = requests or NUM_REQUESTS[transport]
    if transport is Over.NIXL:
        case = _crossing_case(model, src, dst, layers)
        is_good = _cross(case, num_requests, tokens, device, as_json=as_json)
    else:
        cases = _trip_cases(model, src, dst, layers)
        is_good = _travel(cases, num_requests, tokens or NUM_TOKENS[transport], device, as_json=as_json)
    if not is_good:
        raise typer.Exit(1)


def _engine(case: Case, name: str, topology: str, num_tokens: int, num_requests: int) -> Manifest:
    from kvferry.cli.bad_input import at
    from kvferry.cli.sides import a_model, snug
    from kvferry.cli.trip import shortened

    model = shortened(a_model(case.model, None), case.num_layers)
    with at(f"--{name} {topology}"):
        return snug(model, topology, name, num_tokens, num_requests)


def _memory_of(*manifests: Manifest) -> int:
    return sum(region.num_bytes for each in manifests for rank in each.ranks for region in rank.regions)


def _check_memory(*manifests: Manifest) -> None:
    from kvferry.cli.show import num_bytes
    from kvferry.errors import SpecError

    total = _memory_of(*manifests)
    if total > MAX_MEMORY:
        raise SpecError(
            f"the two engines would take {num_bytes(total)} of memory, more than {num_bytes(MAX_MEMORY)}:"
            " fewer --tokens, --layers or ranks take less"
        )


@contextmanager
def _progress(num_steps: int, doing: str, *, visible: bool) -> Iterator[Callable[[str], None]]:
    """A bar, on a terminal only; gives the function that moves it on and says what comes next."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, transient=True, disable=not visible) as bar:
        task = bar.add_task(doing, total=num_steps)

        def step(then: str) -> None:
            bar.update(task, advance=1, **({"description": then} if then else {}))  # type: ignore[arg-type]

        yield step


# -- over NIXL, between processes ------------------------------------------------------------------


def _crossing_case(model: str, src: str | None, dst: str | None, layers: int | None) -> Case:
    own = model in ("", CROSSING.model)
    return Case(
        model or CROSSING.model,
        layers or NUM_LAYERS,
        src or (CROSSING.src if own else DEFAULT_SRC),
        dst or (CROSSING.dst if own else DEFAULT_DST),
    )


def _engines(case: Case, num_requests: int, num_tokens: int) -> tuple[Manifest, Manifest]:
    from kvferry.cli.crossing import WAVE

    src = _engine(case, "src", case.src, num_tokens, min(num_requests, 2 * WAVE) + 1)
    return src, _engine(case, "dst", case.dst, num_tokens, min(num_requests, WAVE) + 1)


def _cross(case: Case, num_requests: int, tokens: int | None, device: Device, *, as_json: bool) -> bool:
    from kvferry.cli import show
    from kvferry.cli.crossing import Crossing, cross, some_passages
    from kvferry.errors import SpecError

    num_tokens = tokens or NUM_TOKENS[Over.NIXL]
    src, dst = _engines(case, num_requests, num_tokens)
    while tokens is None and num_tokens > 1 and _memory_of(src, dst) > MAX_MEMORY:
        num_tokens //= 2  # nobody asked for so many
        src, dst = _engines(case, num_requests, num_tokens)
    _check_memory(src, dst)
    if len(src.ranks) + len(dst.ranks) >= MAX_PROCESSES:
        raise SpecError(f"each rank is a process; at most {MAX_PROCESSES} are started")
    env = _check_nixl(device)
    crossing = Crossing(case.model, case.src, case.dst, device.value)
    visible = show.console().is_terminal and not as_json
    with _progress(num_requests + 1, "starting processes", visible=visible) as step:
        cross(crossing, src, dst, some_passages(dst, num_requests, num_tokens), env, step)
    if as_json:
        print(json.dumps({"verdict": crossing.verdict, **asdict(crossing)}, ensure_ascii=False))
    else:
        _show_crossing(crossing)
    return crossing.verdict == "verified"


def _check_nixl(device: Device) -> dict[str, str]:
    """What the demonstration needs of this machine is there; the environment of its processes."""
    from kvferry.errors import SpecError, TransportError
    from kvferry.transport.cuda import has_cuda
    from kvferry.transport.nixl import check_installed

    try:
        check_installed()
    except TransportError as error:
        raise SpecError(f"{error.detail}. Without NIXL: kvferry demo --transport memory") from None
    if device is Device.CPU:
        return {}
    if not has_cuda():
        raise SpecError("--device cuda: this machine has no CUDA driver, or no device that it can use")
    return {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}


def _show_crossing(crossing: Crossing) -> None:
    from kvferry.cli.show import console, labelled, milliseconds, num_bytes

    out = console()
    rows = [
        ("model", crossing.model),
        ("from", crossing.src),
        ("to", crossing.dst),
        ("by", f"NIXL, {crossing.device} memory, {crossing.num_processes} processes"),
        ("moved", f"{num_bytes(crossing.total_bytes)} in {crossing.num_runs:,} runs"),
    ]
    labelled(out, rows)
    out.print()
    if crossing.speeds:
        _show_speeds(crossing.speeds)
        plan, meet = milliseconds(crossing.plan_ms), milliseconds(crossing.meet_ms)
        post = milliseconds(max(one.post_ms for one in crossing.speeds))
        raw_post = milliseconds(max(one.raw_post_ms for one in crossing.speeds))
        rows = [
            ("planning", f"{plan}, once for all ranks; first contact {meet}, all told"),
            ("posting", f"{post} of the caller's time; NIXL alone takes {raw_post} of it"),
            ("leases", f"{crossing.num_leases} outstanding"),
        ]
        labelled(out, rows)
        out.print()
    _conclude(crossing)


def _show_speeds(speeds: list[Speed]) -> None:
    from kvferry.cli.show import console, gigabytes_per_second, num_bytes, put, ratio, table

    rows = table("dst", "bytes", "runs", "average run", "kvferry", "NIXL, same runs", "NIXL, one run")
    for one in speeds:
        rows.add_row(
            str(one.dst_rank),
            num_bytes(one.total_bytes),
            f"{one.num_runs:,}",
            num_bytes(one.total_bytes / max(1, one.num_runs)),
            gigabytes_per_second(one.gigabytes_per_second(one.move_ms)),
            *(
                f"{gigabytes_per_second(one.gigabytes_per_second(ms))} {ratio(ms / max(one.move_ms, 1e-6))}"
                for ms in (one.raw_move_ms, one.one_run_move_ms)
            ),
        )
    put(console(), rows)


def _conclude(crossing: Crossing) -> None:
    """The last line: what was found; after a failure, the first of everything that is wrong."""
    from kvferry.cli.show import console, verdict, wrapped

    out = console()
    summary = f"{crossing.num_cells:,} cells of {crossing.num_requests} requests, {crossing.num_wrong} wrong"
    if crossing.verdict == "verified":
        out.print(f"verified: {summary}", style="bold green")
        return
    verdict(out, crossing.verdict.upper(), summary)
    first = [f"first: {crossing.first_wrong}"] if crossing.first_wrong else []
    wrapped(out, [*first, *crossing.failures, *crossing.leaks])


# -- in memory, in this process --------------------------------------------------------------------


def _trip_cases(model: str, src: str | None, dst: str | None, layers: int | None) -> tuple[Case, ...]:
    from kvferry.errors import SpecError

    if model:
        return (Case(model, layers or NUM_LAYERS, src or DEFAULT_SRC, dst or DEFAULT_DST),)
    if src or dst or layers:
        raise SpecError("--src, --dst and --layers belong to a --model: name one of `kvferry models`")
    return TRIPS


def _travel(
    cases: tuple[Case, ...], num_requests: int, num_tokens: int, device: Device, *, as_json: bool
) -> bool:
    from kvferry.cli import show
    from kvferry.errors import SpecError

    if device is not Device.CPU:
        raise SpecError("--device cuda: --transport memory moves host memory only")
    visible = show.console().is_terminal and not as_json
    with _progress(len(cases) * num_requests, "moving and checking", visible=visible) as step:
        trips = [_trip(case, num_requests, num_tokens, step) for case in cases]
    if as_json:
        print(json.dumps(_trips_as_object(trips), ensure_ascii=False))
    else:
        _show_trips(trips)
    return not any(trip.num_wrong for trip in trips)


def _trip(case: Case, num_requests: int, num_tokens: int, step: Callable[[str], None]) -> Trip:
    from kvferry.cli.trip import Trip, some_requests, travel

    src, dst = (_engine(case, *side, num_tokens, 2) for side in (("src", case.src), ("dst", case.dst)))
    _check_memory(src, dst)
    trip = Trip(case.model, case.src, case.dst)
    travel(trip, src, dst, list(some_requests(src, dst, num_requests, num_tokens)), step)
    return trip


def _trips_as_object(trips: list[Trip]) -> object:
    """The whole account as plain data."""
    num_wrong = sum(trip.num_wrong for trip in trips)
    return {
        "verdict": "wrong" if num_wrong else "verified",
        "num_cells": sum(trip.num_cells for trip in trips),
        "num_wrong": num_wrong,
        "num_requests": sum(trip.num_requests for trip in trips),
        "first_wrong": next((trip.first_wrong for trip in trips if trip.first_wrong), ""),
        "trips": [asdict(trip) for trip in trips],
    }


def _show_trips(trips: list[Trip]) -> None:
    from kvferry.cli.show import console, labelled, milliseconds, num_bytes, put, table, verdict, wrapped

    out = console()
    labelled(out, [(trip.model, f"{trip.src} → {trip.dst}") for trip in trips])
    out.print()
    columns = ("model", "bytes", "runs", "average run", "copy", "plan", "select")
    rows = table(*columns, left=["model"])
    for trip in trips:
        rows.add_row(
            trip.model,
            num_bytes(trip.total_bytes),
            f"{trip.num_runs:,}",
            num_bytes(trip.total_bytes / max(1, trip.num_runs)),
            f"{trip.gigabytes_per_second:.1f} GB/s",
            milliseconds(trip.plan_ms),
            milliseconds(trip.select_ms),
        )
    put(out, rows)
    cells, wrong = sum(trip.num_cells for trip in trips), sum(trip.num_wrong for trip in trips)
    requests = sum(trip.num_requests for trip in trips)
    summary = f"{cells:,} cells of {requests} requests, {wrong} wrong"
    if not wrong:
        out.print(f"verified: {summary}", style="bold green")
        return
    verdict(out, "WRONG", summary)
    wrapped(out, (f"first: {trip.first_wrong}" for trip in trips if trip.first_wrong))
