"""The values of the templates of a plan and of two manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.cli.manifest_diff import Effect, ManifestDiff, direction_time, state_facts, verdict
from kvferry.cli.output import finding_rows, milliseconds, num_bytes
from kvferry.cli.picture.bands import state_rows
from kvferry.cli.picture.blocks import engine_blocks
from kvferry.cli.picture.shapes import LogScale, strips
from kvferry.cli.plan_answer import PlanAnswer
from kvferry.cli.plan_page import summary
from kvferry.core.manifest import Manifest
from kvferry.errors import counted

MOST_LINES = 800
"""Limit of all tables of bands together, for pages of hundreds of ranks."""
PROVED = "is written exactly once, from the matching source byte."
REFUSED = "These two engines are incompatible; nothing would be transferred. Reasons and remedies:"
OTHER_MODEL = (
    "Running engines reject each other: they do not serve the same model. The bytes would fit, and are drawn"
    " below."
)


@dataclass(frozen=True, slots=True)
class Advice:
    word: str
    title: str
    rows: tuple[tuple[str, str], ...] = ()
    command: str = ""
    """Shows the remedy."""


def plan_page(answer: PlanAnswer) -> dict[str, object]:
    billed, asked = answer.billed, answer.asked
    source, destination = billed.source, billed.destination
    names = dict.fromkeys(each.model or each.engine for each in (source, destination))
    drawn = strips(state_rows(asked, billed) if answer.bytes_fit else (), billed.ranks)
    advice = list(_advice(answer))
    kept = f", {asked.kept:,} of them kept" if asked.kept else ""
    said = {
        "source": summary(source),
        "destination": summary(destination),
        "link": answer.assumed_link,
        "model": answer.model_sentence,
    }
    return {
        "answer": answer,
        "is_proved": not answer.findings,
        "word": "refused" if answer.findings else "proved",
        "sentence": _sentence(answer),
        "title": f"{' and '.join(names)}: {counted(len(source.ranks), 'rank')} to"
        f" {counted(len(destination.ranks), 'rank')}",
        "sides": [(label, words) for label, words in said.items() if words],
        "request": f"one request of {billed.tokens:,} tokens{kept}, {asked.placement.value} blocks",
        "key_numbers": list(_key_numbers(answer)),
        "advice": advice,
        "reasons": [each for each in advice if each.word != "slow"] if answer.findings else [],
        "strips": drawn,
        "blocks": _blocks({"source": source, "destination": destination}),
        "scale": LogScale.of(
            [each for bill in answer.links for each in (bill.seconds, bill.long_run_seconds)]
        ),
        "way": answer.links[0].profile.way.value if answer.links else "",
        "most_lines": MOST_LINES,
        "lines_of_a_table": max(16, MOST_LINES // max(1, len(drawn))),
    }


def _blocks(engines: dict[str, Manifest]) -> list[object]:
    return [engine_blocks(name, manifest) for name, manifest in engines.items() if manifest.ranks]


def _sentence(answer: PlanAnswer) -> str:
    if answer.findings:
        return OTHER_MODEL if answer.bytes_fit else REFUSED
    ranks = counted(len(answer.billed.ranks), "destination rank")
    return f"Every byte that the {ranks} need{'s' * ranks.startswith('1 ')} {PROVED}"


def _key_numbers(answer: PlanAnswer) -> Iterator[tuple[str, str]]:
    bill = answer.bill
    if bill.num_runs:
        yield num_bytes(bill.total_bytes), "moved"
        yield f"{bill.num_runs:,}", f"runs of {num_bytes(bill.total_bytes / bill.num_runs)} on average"
        for link in answer.links[:1]:
            yield milliseconds(1e3 * link.seconds), f"estimated over {link.profile.name}"
        if bill.zeroed_bytes:
            yield num_bytes(bill.zeroed_bytes), "to zero"


def _advice(answer: PlanAnswer) -> Iterator[Advice]:
    for code, rows in finding_rows(answer.findings, len(answer.billed.ranks)):
        yield Advice("refused", code, tuple(rows))
    if answer.num_more_findings:
        yield Advice("refused", f"… and {answer.num_more_findings:,} more")
    if answer.way:
        yield Advice("try", "This pair would be proved:", (), answer.way_command)
    for each in answer.warnings:
        word = "slow" if each.code == "short-runs" else "note"
        yield Advice(word, each.message, (("why", each.reason), ("remedy", each.remedy)), each.command)


LABEL_WIDTH, LABEL_LINES = 36, 3


def label_lines(name: str) -> list[str]:
    """A name on at most three lines of a drawing, wrapped after punctuation.

    >>> label_lines("layers.{0-2,4-6,8-10,12-14,16-18,20-22,24-25}.linear/conv.q")
    ['layers.{0-2,4-6,8-10,12-14,16-18,', '20-22,24-25}.linear/conv.q']
    >>> [len(line) for line in label_lines("x" * 200)]
    [35, 35, 35]
    """
    lines = [""]
    for part in re.findall(rf".[^,./}}]{{0,{LABEL_WIDTH - 2}}}[,./}}]*", name):
        if len(lines[-1]) + len(part) > LABEL_WIDTH:
            lines.append("")
        lines[-1] += part
    if len(lines) <= LABEL_LINES:
        return lines
    return [*lines[: LABEL_LINES - 1], f"{lines[LABEL_LINES - 1][:-1]}…"]


def diff_page(found: ManifestDiff, a: Manifest, b: Manifest, given: tuple[str, str]) -> dict[str, object]:
    """``given``: the arguments of the two sides."""
    word, words = verdict(found)
    words = words.replace("`", "")
    by_effect = {effect: [each for each in found.differences if each.effect is effect] for effect in Effect}
    return {
        "word": word.lower(),
        "sentence": f"{words[:1].upper()}{words[1:]}.",
        "sides": [("a", given[0], summary(a)), ("b", given[1], summary(b))],
        "directions": [(each.name, time) for each in found.directions if (time := direction_time(each))],
        "by_effect": {effect: some for effect, some in by_effect.items() if some},
        "states": state_facts(a, b),
        "blocks": _blocks({"a": a, "b": b}),
    }
