"""The report of an examination, for people and tools, and the profile that ``kvferry plan --link`` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from kvferry.cli.doctor.seen import Diagnosis, Level, ListenerSeen, Observed, ProfileSeen, ReadsSeen
from kvferry.cli.link_profile import LinkProfile, Traffic, measured_links
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
from kvferry.core.words import counted
from kvferry.errors import SpecError

if TYPE_CHECKING:
    from rich.console import Console

# -- profiles --------------------------------------------------------------------------------------


FORMAT = 1
"""The version of the document: a part of what ``kvferry bench --json`` writes."""
FAR_OFF = 3.0
"""A profile is stale if reads take so many times as long, or as short. Busy machines vary by less."""
MACHINE = ("processor", "num_cores", "device")
PACKAGES = ("kvferry", "nixl")


def profile_document(observed: Observed) -> dict[str, Any]:
    """The document; empty if no read succeeded."""
    times = [
        {
            "medium": reads.memory,
            "rival": reads.way,
            "way": reads.way,
            "run_bytes": time.run_bytes,
            "num_runs": time.num_runs,
            "total_bytes": time.total_bytes,
            "num_turns": len(time.seconds),
            "median_s": time.median_seconds,
        }
        for reads in observed.reads
        if not (reads.wrong or reads.error)
        for time in reads.times
    ]
    about = {"machine": dict(observed.machine), "versions": dict(observed.software.versions)}
    return {"format": FORMAT, "made_by": "kvferry doctor", **about, "times": times} if times else {}


def compared_profile(path: Path, observed: Observed) -> ProfileSeen:
    try:
        links = {link.name.rpartition("/")[2]: link for link in measured_links(path)}
        document = json.loads(path.read_text(encoding="utf-8"))
    except SpecError as error:
        return ProfileSeen(str(path), str(error).removeprefix(f"{path}: "))
    found = (
        *_unlike(document.get("machine"), observed.machine, MACHINE),
        *_unlike(document.get("versions"), observed.software.versions, PACKAGES),
        *(_unlike_reads(links.get(one.memory), one) for one in observed.reads if one.times),
    )
    return ProfileSeen(str(path), "", tuple(filter(None, found)))


def _unlike(before: Any, now: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Named values that have changed; values that were not written down are not compared."""
    for name in names:
        if isinstance(before, dict) and name in before and before[name] != now.get(name):
            yield f"{name.replace('_', ' ')} was {before[name] or 'none'}, and is {now.get(name) or 'none'}"


def _unlike_reads(link: LinkProfile | None, reads: ReadsSeen) -> str:
    """How reads of one kind of memory have changed; empty if they have not."""
    if link is None:
        return f"it has no times of {reads.memory} memory"
    if link.way is not reads.way:
        return f"{reads.memory} memory was read {link.way}, and is read {reads.way}"
    factor = median(
        time.median_seconds / link.cost.of(Traffic(1, time.num_runs, time.total_bytes)).seconds
        for time in reads.times
    )
    is_far_off = not 1 / FAR_OFF <= factor <= FAR_OFF
    return f"reads of {reads.memory} memory take {factor:.2g} times as long as it says" if is_far_off else ""


# -- for tools, and for people ---------------------------------------------------------------------


STYLES = {Level.PROBLEM: "bold red", Level.WARNING: "bold yellow", Level.NOTE: "bold"}


def is_ready(found: Sequence[Diagnosis]) -> bool:
    """Whether nothing was found that stops work."""
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
    word, style, rest = "READY", "bold green", "nothing found that stops work"
    if not is_ready(found):
        word, style, rest = "NOT READY", "bold red", "something found that stops work"
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
    out.print(f"Reads {whom}, each checked cell by cell", style="bold")
    texts = ("memory", "way", "carried by")
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
        made.add_row(reads.memory, way, reads.carrier, *(cells if reads.times else ("-", "-", "", "-")))
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
    """Without the parts that every engine chooses anew: ports, and the names of files."""
    if listener.kind == "tcp":
        return f"TCP, a free port of {listener.address.rpartition(':')[0]}"
    folder, slash, _ = listener.address.rpartition("/")
    return f"Unix socket, {folder}{slash}…" if slash else "Unix socket without a file"
