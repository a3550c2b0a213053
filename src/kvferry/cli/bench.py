"""``kvferry bench``: the transfer modes compared, by the length of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.cli.options import check_output, examples, write_output

if TYPE_CHECKING:
    from kvferry.cli.reads import ReadsSeen

HELP = "\n\n".join(
    (
        "Measure every transfer mode between two processes, and verify every cell.",
        "For each mode, a source process holds memory and a reader process reads scattered blocks of it: 16"
        " MiB in runs of 256 B to 1 MiB. Compare medians within one run only. Every cell is verified; a"
        " wrong cell fails the command.",
        "Modes: direct (NIXL, with KVFERRY_EXPOSE=fabric), mapped (device memory only), packed (over TCP).",
        examples("kvferry bench --quick", "kvferry bench --memory cuda:0 --json bench.json"),
        "Exit codes: 0 all cells correct; 1 a wrong cell (the first is named), or a failed read; 2 bad usage"
        " (nothing is run or written).",
    )
)

READ_BYTES = 16 << 20
RUN_BYTES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
QUICK_RUN_BYTES = (16 << 10,)


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Measure one run length only.")] = False,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="host|cuda:N",
            help="Memory to read.",
            show_default="host, and cuda:0 if available",
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all results to a JSON file.")
    ] = None,
) -> None:
    """Measure every transfer mode."""
    from kvferry.cli import reads
    from kvferry.cli.machine import asked_memories
    from kvferry.cli.output import progress

    check_output("--json", json_file)
    memories = asked_memories(memory or ())
    sizes = [
        reads.ReadCase(each, READ_BYTES // reads.NUM_LAYERS // each)
        for each in (QUICK_RUN_BYTES if quick else RUN_BYTES)
    ]
    skipped: list[str] = []
    found: list[ReadsSeen] = []
    modes = [(each, way, env) for each in memories for way, env in environments(each, skipped).items()]
    with progress(len(modes), "measuring", visible=True) as step:
        for each, way, env in modes:
            found.append(reads.read_here(each, sizes, env))
            step(f"{each}: {way}")
    failures = [
        f"{each}, {way}: {seen.error or f'read {seen.way} ({seen.reason})'}"
        for (each, way, _), seen in zip(modes, found, strict=True)
        if seen.error or seen.way != way
    ]
    wrong = [f"{seen.memory}, {seen.way}, {seen.wrong}" for seen in found if seen.wrong]
    verdict = "wrong" if wrong else "failed" if failures else "right"
    show(found, skipped, verdict, [*wrong, *failures])
    if json_file:
        document = as_object(found, skipped, verdict, failures, wrong)
        write_output(json_file, json.dumps(document, indent=1).encode() + b"\n")
    if verdict != "right":
        raise typer.Exit(1)


def environments(memory: str, skipped: list[str]) -> dict[str, dict[str, str]]:
    """The environment for each mode; adds modes that cannot run to ``skipped``."""
    from kvferry.cli.processes import FABRICS
    from kvferry.errors import TransportError
    from kvferry.transport.nixl_agent import check_installed
    from kvferry.transport.settings import CUDA_ENVIRONMENT, EXPOSE_SETTING, WAY_SETTING, Expose

    direct, packed = FABRICS["cma"], FABRICS["tcp"]
    if memory != "host":
        direct = {**direct, **CUDA_ENVIRONMENT}
    found = {"direct": direct, "packed": packed}
    if memory != "host":
        found["mapped"] = {EXPOSE_SETTING: Expose.HOST.value, WAY_SETTING: "mapped"}
    try:
        check_installed()
    except TransportError as error:
        skipped.append(f"{memory}, direct: {error.detail}")
        del found["direct"]
    return found


def as_object(
    found: Sequence[ReadsSeen], skipped: list[str], verdict: str, failures: list[str], wrong: list[str]
) -> dict[str, Any]:
    from kvferry.cli.machine import describe_machine, package_versions

    rows = [
        {
            "memory": seen.memory,
            "way": seen.way,
            "run_bytes": time.run_bytes,
            "num_runs": time.num_runs,
            "total_bytes": time.total_bytes,
            "seconds": time.seconds,
            "median_seconds": time.median_seconds,
            "copy_bytes_per_second": seen.copy_bytes_per_second,
        }
        for seen in found
        for time in seen.times
    ]
    about = {"verdict": verdict, "machine": describe_machine(), "versions": package_versions()}
    return {**about, "rows": rows, "skipped": skipped, "failures": failures, "wrong": wrong}


def show(found: Sequence[ReadsSeen], skipped: Sequence[str], verdict: str, reasons: Sequence[str]) -> None:
    from kvferry.cli import output

    out, num_rows = output.console(), 0
    for memory in dict.fromkeys(seen.memory for seen in found):
        rows = [(time, seen) for seen in found if seen.memory == memory for time in seen.times]
        num_rows += len(rows)
        out.print(f"{memory} memory, {output.num_bytes(READ_BYTES)} per read", style="bold")
        table = output.table("size of a run", "mode", "median", "max/min", "rate", "vs copy", left=["mode"])
        for time, seen in sorted(rows, key=lambda row: row[0].run_bytes):
            rate = time.total_bytes / time.median_seconds
            table.add_row(
                output.num_bytes(time.run_bytes),
                str(seen.way),
                output.milliseconds(1e3 * time.median_seconds),
                output.ratio(max(time.seconds) / min(time.seconds)),
                output.gigabytes_per_second(rate / 1e9),
                output.ratio(rate / seen.copy_bytes_per_second),
            )
        output.print_table(out, table)
    output.wrapped(out, [f"skipped: {each}" for each in skipped])
    if verdict == "right":
        out.print(f"verified: {num_rows} rows, every cell correct", style="bold green")
        return
    output.verdict(out, verdict.upper(), f"{num_rows} rows verified")
    output.wrapped(out, reasons)
