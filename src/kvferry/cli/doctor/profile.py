"""What was measured, as a file that ``kvferry plan --link`` takes, and whether such a file is still true."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvferry.cli.doctor.seen import ProfileSeen, ReadsSeen
from kvferry.cli.link_profile import LinkProfile
from kvferry.cli.measured_link import measured_links
from kvferry.core.cost import Traffic
from kvferry.errors import SpecError

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
