"""The report of an examination, and the profile for ``kvferry plan --link``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from kvferry.cli.doctor.checks import Diagnosis, Level
from kvferry.cli.doctor.examine import Observed
from kvferry.cli.doctor.sockets import ListenerSeen
from kvferry.cli.output import (
    console,
    gigabytes_per_second,
    labelled,
    microseconds,
    num_bytes,
    print_table,
    ratio,
    table,
    wrapped,
)
from kvferry.errors import counted

if TYPE_CHECKING:
    from rich.console import Console


def profile_document(observed: Observed) -> dict[str, Any]:
    """Empty if no read succeeded."""
    times = [
        {
            "medium": reads.memory,
            "way": reads.way,
            "num_runs": time.num_runs,
            "total_bytes": time.total_bytes,
            "median_s": time.median_seconds,
        }
        for reads in observed.reads
        if not (reads.wrong or reads.error)
        for time in reads.times
    ]
    about = {"machine": dict(observed.machine), "versions": dict(observed.software.versions)}
    return {"made_by": "kvferry doctor", **about, "times": times} if times else {}


def busy_words(observed: Observed) -> str:
    """The load before the measurement; empty if at least half of the cores were idle."""
    load, num_cores = observed.machine["load"], observed.machine["num_cores"]
    return f"the load average was {load:g} on {counted(num_cores, 'core')}" if load > num_cores / 2 else ""


STYLES = {Level.PROBLEM: "bold red", Level.WARNING: "bold yellow", Level.NOTE: "bold"}


def is_ready(found: Sequence[Diagnosis]) -> bool:
    """Whether there is no problem."""
    return all(diagnosis.level is not Level.PROBLEM for diagnosis in found)


def report_object(observed: Observed, found: Sequence[Diagnosis]) -> dict[str, Any]:
    return {
        "verdict": "ready" if is_ready(found) else "not-ready",
        "findings": [asdict(diagnosis) for diagnosis in found],
        **asdict(observed),
        "reads": [
            {
                **asdict(reads),
                "bytes_per_second": reads.bytes_per_second,
                "seconds_per_run": reads.seconds_per_run,
                "times": [{**asdict(one), "median_seconds": one.median_seconds} for one in reads.times],
            }
            for reads in observed.reads
        ],
    }


def show(observed: Observed, found: Sequence[Diagnosis]) -> None:
    out = console()
    word, style, rest = "READY", "bold green", "no problem found"
    if not is_ready(found):
        word, style, rest = "NOT READY", "bold red", "at least one problem found"
    out.print(Text.assemble((word, style), f"  {rest}"), soft_wrap=True)
    levels = [one.level for one in found]
    if found:
        out.print("  " + ", ".join(counted(levels.count(one), one.value) for one in Level if one in levels))
    labelled(out, _about(observed))
    out.print()
    _show_reads(out, observed)
    _show_listeners(out, observed)
    for one in found:
        out.print(Text.assemble((one.level.value, STYLES[one.level]), f"  {one.name}"))
        labelled(out, [("", one.what), ("why", one.why), ("do", one.cure)])
        out.print()


def _about(observed: Observed) -> list[tuple[str, str]]:
    software, gpus, limits, secret = observed.software, observed.gpus, observed.limits, observed.secret
    machine, peer = observed.machine, observed.peer
    where = f"{machine['processor']}, {machine['num_cores']} cores, {num_bytes(limits.memory_bytes)}"
    versions = ", ".join(f"{name} {version}" for name, version in software.versions.items())
    nixl = f"UCX {software.ucx_version}, from {software.wheel}; plugins {', '.join(software.plugins)}"
    devices = f"{', '.join(gpus.names) or 'none'} (driver for CUDA {gpus.driver_cuda})"
    memlock = None if limits.may_lock_all else limits.memlock_bytes
    return [
        ("machine", f"{where}, load {machine['load']}"),
        ("packages", versions),
        ("NIXL", nixl if software.ucx_version else ""),
        ("GPUs", devices if gpus.driver_cuda else "no CUDA driver"),
        ("RDMA", ", ".join(limits.rdma_devices) or "no card"),
        ("may lock", "no limit" if memlock is None else num_bytes(memlock)),
        ("settings", ", ".join(f"{name}={value}" for name, value in observed.settings.items())),
        ("secret", f"{secret.origin}, fingerprint {secret.fingerprint}" if secret.fingerprint else ""),
        ("peer", f"{peer.address}, host {peer.theirs.name}" if peer and peer.theirs else ""),
    ]


def _show_reads(out: Console, observed: Observed) -> None:
    if not observed.reads:
        return
    whom = f"of {observed.peer.address}" if observed.peer else "of another process"
    out.print(f"Reads {whom}, every cell verified", style="bold")
    texts = ("memory", "way")
    made = table(*texts, "speed", "a plain copy", "", "per run", left=texts)
    for reads in observed.reads:
        speed, copy_speed = reads.bytes_per_second, reads.copy_bytes_per_second
        cells = (
            gigabytes_per_second(speed / 1e9),
            gigabytes_per_second(copy_speed / 1e9),
            ratio(speed / copy_speed) if copy_speed else "",
            microseconds(reads.seconds_per_run),
        )
        way = reads.way.value if reads.way else "none"
        made.add_row(reads.memory, way, *(cells if reads.times else ("-", "-", "", "-")))
    print_table(out, made)
    for most in {one.most_runs.num_runs: one.most_runs for one in observed.reads if one.most_runs}.values():
        wrapped(out, [f"per run: of {most.num_runs:,} scattered runs of {num_bytes(most.run_bytes)}"])
    out.print()


def _show_listeners(out: Console, observed: Observed) -> None:
    rows = [(one.purpose, f"{_place(one)}: {one.reach}. {one.meaning}") for one in observed.listeners]
    if observed.listeners_error:
        rows.append(("unknown", f"no engine could be started: {observed.listeners_error}"))
    if rows:
        out.print("Sockets that an engine with these settings listens on", style="bold")
        labelled(out, rows)
        out.print()


def _place(listener: ListenerSeen) -> str:
    """Without the parts that differ between engines: ports and file names."""
    if listener.kind == "tcp":
        return f"TCP, a free port of {listener.address.rpartition(':')[0]}"
    folder, slash, _ = listener.address.rpartition("/")
    return f"Unix socket, {folder}{slash}…" if slash else "Unix socket without a file"
