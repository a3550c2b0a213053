"""What a doctor tells people and tools, and the profile that ``kvferry plan --link`` takes."""

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
"""How many times as long, or as short, reads may take before a profile counts as stale: machines are busy at
times."""
MACHINE = ("processor", "num_cores", "device")
PACKAGES = ("kvferry", "nixl")


def profile_document(
    reads: Sequence[ReadsSeen], machine: Mapping[str, Any], versions: Mapping[str, str]
) -> dict[str, Any]:
    """The document; empty if there is nothing to write."""
    times = [time for one in reads for time in _times(one)]
    if not times:
        return {}
    return {
        "format": FORMAT,
        "made_by": "kvferry doctor",
        "machine": dict(machine),
        "versions": dict(versions),
        "times": times,
    }


def _times(reads: ReadsSeen) -> Iterator[dict[str, Any]]:
    if reads.way is None or reads.wrong or reads.error:
        return
    for time in reads.times:
        yield {
            "medium": reads.memory,
            "rival": reads.way.value,
            "way": reads.way.value,
            "run_bytes": time.run_bytes,
            "num_runs": time.num_runs,
            "total_bytes": time.total_bytes,
            "num_turns": len(time.seconds),
            "median_s": time.median_seconds,
        }


def compared_profile(
    path: Path, reads: Sequence[ReadsSeen], machine: Mapping[str, Any], versions: Mapping[str, str]
) -> ProfileSeen:
    """A saved profile against what was measured now."""
    try:
        links = {link.name.rpartition("/")[2]: link for link in measured_links(path)}
        document = json.loads(path.read_text(encoding="utf-8"))
    except SpecError as error:
        return ProfileSeen(str(path), str(error).removeprefix(f"{path}: "))
    found = (
        *_unlike(document.get("machine"), machine, MACHINE),
        *_unlike(document.get("versions"), versions, PACKAGES),
        *(difference for one in reads for difference in _unlike_reads(links.get(one.memory), one)),
    )
    return ProfileSeen(str(path), "", found)


def _unlike(before: Any, now: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Named values that are not what they were; what nobody wrote down is not compared."""
    for name in names:
        if isinstance(before, dict) and name in before and before[name] != now.get(name):
            yield f"{name.replace('_', ' ')} was {before[name] or 'none'}, and is {now.get(name) or 'none'}"


def _unlike_reads(link: LinkProfile | None, reads: ReadsSeen) -> Iterator[str]:
    if reads.way is None or not reads.times:
        return
    if link is None:
        yield f"it has no times of {reads.memory} memory"
        return
    if link.way is not reads.way:
        yield f"{reads.memory} memory was read {link.way.value}, and is read {reads.way.value}"
        return
    ratio = median(
        time.median_seconds / link.cost.of(Traffic(1, time.num_runs, time.total_bytes)).seconds
        for time in reads.times
    )
    if not 1 / FAR_OFF <= ratio <= FAR_OFF:
        yield f"reads of {reads.memory} memory take {ratio:.2g} times as long as it says"


# -- for people, and tools -------------------------------------------------------------------------


READY, NOT_READY = "READY", "NOT READY"
STYLES = {Level.PROBLEM: "bold red", Level.WARNING: "bold yellow", Level.NOTE: "bold"}


def is_ready(found: Sequence[Diagnosis]) -> bool:
    """Whether nothing was found that stops work."""
    return all(diagnosis.level is not Level.PROBLEM for diagnosis in found)


def report_object(
    observed: Observed, found: Sequence[Diagnosis], machine: Mapping[str, Any]
) -> dict[str, Any]:
    """Plain data, for ``--json``."""
    return {
        "verdict": "ready" if is_ready(found) else "not-ready",
        "findings": [diagnosis.as_object() for diagnosis in found],
        "machine": dict(machine),
        "software": asdict(observed.software),
        "gpus": asdict(observed.gpus),
        "limits": asdict(observed.limits),
        "settings": dict(observed.settings),
        "secret": asdict(observed.secret),
        "reads": [_reads_object(reads) for reads in observed.reads],
        "listeners": [asdict(listener) for listener in observed.listeners],
        "listeners_error": observed.listeners_error,
        "profile": asdict(observed.profile) if observed.profile else None,
        "peer": asdict(observed.peer) if observed.peer else None,
    }


def _reads_object(reads: ReadsSeen) -> dict[str, Any]:
    return {
        **asdict(reads),
        "way": reads.way.value if reads.way else None,
        "bytes_per_second": reads.bytes_per_second,
        "seconds_per_run": reads.seconds_per_run,
        "times": [{**asdict(one), "median_seconds": one.median_seconds} for one in reads.times],
    }


def show(observed: Observed, found: Sequence[Diagnosis], machine: Mapping[str, Any]) -> None:
    """For people: the verdict, the machine, what reads did, and each finding with its cure."""
    out = console()
    _show_verdict(out, found)
    labelled(out, _about(observed, machine))
    out.print()
    if observed.reads:
        _show_reads(out, observed)
    _show_listeners(out, observed)
    for diagnosis in found:
        _show_diagnosis(out, diagnosis)


def _show_verdict(out: Console, found: Sequence[Diagnosis]) -> None:
    numbers = [
        counted(number, level.value)
        for level in Level
        if (number := sum(one.level is level for one in found))
    ]
    word, style, rest = READY, "bold green", "nothing found that stops work"
    if not is_ready(found):
        word, style, rest = NOT_READY, "bold red", "something found that stops work"
    out.print(Text.assemble((word, style), f"  {rest}"), soft_wrap=True)
    if numbers:
        out.print(f"  {', '.join(numbers)}")


def _about(observed: Observed, machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    software, gpus, limits, secret = observed.software, observed.gpus, observed.limits, observed.secret
    versions = ", ".join(f"{name} {version}" for name, version in software.versions.items())
    ucx = f"UCX {software.ucx_version}, from {software.wheel}" if software.ucx_version else ""
    memlock = (
        "no limit" if limits.memlock_bytes is None or limits.may_lock_all else num_bytes(limits.memlock_bytes)
    )
    peer = observed.peer
    return [
        (
            "machine",
            f"{machine['processor']}, {machine['num_cores']} cores, {num_bytes(limits.memory_bytes)}, load"
            f" {machine['load']}",
        ),
        ("packages", versions),
        ("NIXL", f"{ucx}; plugins {', '.join(software.plugins)}" if ucx else ""),
        (
            "GPUs",
            f"{', '.join(gpus.names) or 'none'} (driver for CUDA {gpus.driver_cuda})"
            if gpus.driver_cuda
            else "no CUDA driver",
        ),
        ("RDMA", ", ".join(limits.rdma_devices) or "no card"),
        ("may lock", memlock),
        ("settings", ", ".join(f"{name}={value}" for name, value in observed.settings.items())),
        ("secret", f"{secret.origin}, fingerprint {secret.fingerprint}" if secret.fingerprint else ""),
        ("peer", f"{peer.address}, host {peer.theirs.name}" if peer and peer.theirs else ""),
    ]


def _show_reads(out: Console, observed: Observed) -> None:
    whom = f"of {observed.peer.address}" if observed.peer else "of another process"
    out.print(f"Reads {whom}, each checked cell by cell", style="bold")
    made = table(
        "memory",
        "way",
        "carried by",
        "speed",
        "a plain copy",
        "",
        "per run",
        left=("memory", "way", "carried by"),
    )
    for reads in observed.reads:
        way = reads.way.value if reads.way else "none"
        if not reads.times:
            made.add_row(reads.memory, way, reads.carrier, "-", "-", "", "-")
            continue
        made.add_row(
            reads.memory,
            way,
            reads.carrier,
            gigabytes_per_second(reads.bytes_per_second / 1e9),
            gigabytes_per_second(reads.copy_bytes_per_second / 1e9),
            ratio(reads.bytes_per_second / reads.copy_bytes_per_second),
            microseconds(reads.seconds_per_run),
        )
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
    """Where another engine would listen: ports are chosen anew, and so are the names of files."""
    if listener.kind == "tcp":
        return f"TCP, a free port of {listener.address.rpartition(':')[0]}"
    folder, slash, _ = listener.address.rpartition("/")
    return f"Unix socket, {folder}{slash}…" if slash else "Unix socket without a file"


def _show_diagnosis(out: Console, diagnosis: Diagnosis) -> None:
    out.print(
        Text.assemble((diagnosis.level.value, STYLES[diagnosis.level]), f"  {diagnosis.condition.value}")
    )
    labelled(out, [("", diagnosis.what), ("why", diagnosis.why), ("do", diagnosis.cure)])
    out.print()
