"""What ``kvferry plan`` warns of: pairs that are right and slow, and engines that would not start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.cli.asked import Asked, Billed
from kvferry.cli.bill import LinkBill
from kvferry.cli.cures import Cure, find_cure
from kvferry.cli.engines import Side
from kvferry.cli.link_profile import RDMA_400
from kvferry.cli.output import milliseconds, num_bytes, times
from kvferry.models import Topology
from kvferry.models.servable import why_not_served


@dataclass(frozen=True, slots=True)
class Warned:
    """One warning, for people and for programs."""

    code: str
    """``short-runs`` or ``not-served``."""
    message: str
    """What is the matter, in short."""
    reason: str
    remedy: str
    """What to do, as a sentence."""
    command: str = ""
    """The command that shows that it helps."""
    link: str = ""
    seconds: float = 0.0
    long_run_seconds: float = 0.0
    cured_seconds: float = 0.0
    """With the remedy, over the same link; 0 if there is none."""


def warnings_of(
    asked: Asked, src: Side, dst: Side, billed: Billed, links: Sequence[LinkBill]
) -> Iterator[Warned]:
    """Everything that a person should know of a pair whose bytes can be moved."""
    yield from not_served(src, dst)
    if slow := [bill for bill in links if bill.is_slow]:
        # One link stands for all: a network, if it is among them.
        worst = next((bill for bill in slow if bill.profile is RDMA_400), slow[0])
        yield _short_runs(asked, src, dst, billed, worst)


def not_served(src: Side, dst: Side) -> Iterator[Warned]:
    """Sides that an engine would refuse to be."""
    for side in (src, dst):
        if side.file is None:
            reasons = list(why_not_served(side.chosen_model, Topology.parse(side.topology)))
            if reasons:
                message = f"vLLM would not start as --{side.engine} says"
                yield Warned("not-served", message, "; ".join(reasons), "choose a tp by which they divide")


def _short_runs(asked: Asked, src: Side, dst: Side, billed: Billed, slow: LinkBill) -> Warned:
    bill, link = billed.bill, slow.profile.name
    average = num_bytes(bill.total_bytes / bill.num_runs)
    message = f"{milliseconds(1e3 * slow.seconds)} over {link}, because its runs are short"
    reason = (
        f"{bill.num_runs:,} runs of {average}; the same bytes in long runs would take"
        f" {milliseconds(1e3 * slow.long_run_seconds)}, {times(slow.slowdown)} as fast"
    )
    if not asked.links:
        reason += f". It is judged by {link}; --link names yours"
    cure = find_cure(asked, src, dst, slow)
    if cure is None:
        remedy = _without_a_cure(asked, src, dst, billed, slow)
        return Warned("short-runs", message, reason, remedy, "", *_of(slow))
    seconds = cure.billed.bill.over(slow.profile).seconds
    gain = f"{milliseconds(1e3 * seconds)} over {link}, {times(slow.seconds / seconds)} as fast"
    remedy = f"{_sentence(cure)}: {gain}"
    command = asked.command(cure.src, cure.dst)
    return Warned("short-runs", message, reason, remedy, command, *_of(slow), seconds)


def _of(slow: LinkBill) -> tuple[str, float, float]:
    return slow.profile.name, slow.seconds, slow.long_run_seconds


def _sentence(cure: Cure) -> str:
    sides = {"src": "the source", "dst": "the destination"}
    by_setting: dict[tuple[str, str], list[str]] = {}
    for each in cure.settings:
        by_setting.setdefault((each.key, each.value), []).append(sides[each.side])
    parts = []
    for each in cure.settings:
        who = by_setting.pop((each.key, each.value), None)
        if who:
            parts.append(f"{' and '.join(who)} {each.words}")
    return f"give {', and '.join(parts)}"


def _without_a_cure(asked: Asked, src: Side, dst: Side, billed: Billed, slow: LinkBill) -> str:
    """Of manifests nothing can be changed here, but an equal pair can be billed."""
    if src.file is None and dst.file is None:
        return "none: no layout and no block size that was tried makes it twice as fast"
    equal = {
        "destination": asked.billed_between(billed.destination, billed.destination),
        "source": asked.billed_between(billed.source, billed.source),
    }
    took = {
        name: each.bill.over(slow.profile).seconds for name, each in equal.items() if not each.bill.findings
    }
    if not took or min(took.values()) > slow.seconds / 2:
        return "none: two equal engines would not be twice as fast"
    best = min(took, key=took.__getitem__)
    return (
        f"two engines that are set up like the {best} take {milliseconds(1e3 * took[best])} over"
        f" {slow.profile.name}; `kvferry diff` says in what these two differ"
    )
