"""What the pictures of a plan and of two manifests show, as values; and a plan on one sheet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvferry.cli.manifest_diff import (
    WORDS,
    Difference,
    Effect,
    ManifestDiff,
    StateFacts,
    direction_time,
    sentence,
    state_facts,
)
from kvferry.cli.output import finding_rows, milliseconds, num_bytes, together
from kvferry.cli.picture.bands import state_rows
from kvferry.cli.picture.blocks import EngineBlocks, engine_blocks
from kvferry.cli.picture.shapes import WIDTH, BillChart, HeldShape, Strip, bill_chart, strips
from kvferry.cli.plan_answer import PlanAnswer
from kvferry.cli.plan_page import summary
from kvferry.core.manifest import Manifest
from kvferry.core.words import counted

PROVED = "is written exactly once, from the byte that means the same."
REFUSED = "These two engines cannot talk, and nothing would be moved. The reasons, and what to do:"
OTHER_MODEL = (
    "Running engines would refuse each other: they do not serve the same model. The bytes would fit, and are"
    " drawn below."
)


@dataclass(frozen=True, slots=True)
class Advice:
    """A reason for a refusal, or a warning: what is the matter, and what to do."""

    word: str
    title: str
    rows: tuple[tuple[str, str], ...]
    command: str = ""
    """What shows that it helps."""


@dataclass(frozen=True, slots=True)
class KeyNumber:
    value: str
    words: str


@dataclass(frozen=True)
class PlanPicture:
    """The answer of ``kvferry plan``, ready to be drawn."""

    MOST_LINES: ClassVar[int] = 800
    """Lines of all tables of bands together: a page of hundreds of ranks stays one that a browser opens."""

    answer: PlanAnswer
    advice: tuple[Advice, ...]
    strips: tuple[Strip, ...]
    blocks: tuple[EngineBlocks, ...]
    chart: BillChart

    @property
    def is_proved(self) -> bool:
        return not self.answer.findings

    @property
    def word(self) -> str:
        return "proved" if self.is_proved else "refused"

    @property
    def sentence(self) -> str:
        ranks = counted(len(self.answer.billed.ranks), "destination rank")
        return (
            f"Every byte that the {ranks} need{'s' * (ranks.startswith('1 '))} {PROVED}"
            if self.is_proved
            else OTHER_MODEL
            if self.answer.bytes_fit
            else REFUSED
        )

    @property
    def reasons(self) -> tuple[Advice, ...]:
        """Why it is refused, and what to do, without what is said of its speed."""
        return () if self.is_proved else tuple(each for each in self.advice if each.word != "slow")

    @property
    def title(self) -> str:
        source, destination = self.answer.billed.source, self.answer.billed.destination
        names = dict.fromkeys((source.model or source.engine, destination.model or destination.engine))
        ranks = f"{counted(len(source.ranks), 'rank')} to {counted(len(destination.ranks), 'rank')}"
        return f"{' and '.join(names)}: {ranks}"

    @property
    def sides(self) -> tuple[tuple[str, str], ...]:
        """Both engines and their models in a few words, behind labels."""
        billed = self.answer.billed
        return (
            ("source", summary(billed.source)),
            ("destination", summary(billed.destination)),
            ("model", self.answer.model_sentence),
        )

    @property
    def request(self) -> str:
        asked = self.answer.asked
        kept = f", {asked.kept:,} of them kept" if asked.kept else ""
        return f"one request of {self.answer.billed.tokens:,} tokens{kept}, {asked.placement.value} blocks"

    @property
    def key_numbers(self) -> tuple[KeyNumber, ...]:
        bill, first = self.answer.bill, self.chart.first
        if not bill.num_runs:
            return ()
        average = num_bytes(bill.total_bytes / bill.num_runs)
        zeroed = (KeyNumber(num_bytes(bill.zeroed_bytes), "to zero"),) if bill.zeroed_bytes else ()
        time = (
            (KeyNumber(milliseconds(1e3 * first.bill.seconds), f"over {first.bill.profile.name}"),)
            if first
            else ()
        )
        moved = (KeyNumber(num_bytes(bill.total_bytes), "moved"),)
        return (*moved, KeyNumber(f"{bill.num_runs:,}", f"runs of {average} on average"), *time, *zeroed)

    @property
    def lines_of_a_table(self) -> int:
        """At most, for each row."""
        return max(16, self.MOST_LINES // max(1, len(self.strips)))

    @property
    def way(self) -> str:
        """The way of the link that is shown first; empty if none is."""
        return self.chart.first.bill.profile.way.value if self.chart.first else ""


def plan_picture(answer: PlanAnswer) -> PlanPicture:
    rows = state_rows(answer.asked, answer.billed) if answer.bytes_fit else ()
    drawn = strips(rows, answer.billed.ranks)
    sides = (("source", answer.billed.source), ("destination", answer.billed.destination))
    blocks = tuple(engine_blocks(name, manifest) for name, manifest in sides if manifest.ranks)
    return PlanPicture(answer, tuple(_advice(answer)), drawn, blocks, bill_chart(answer.links))


def _advice(answer: PlanAnswer) -> Iterator[Advice]:
    for code, rows in finding_rows(answer.findings, len(answer.billed.ranks)):
        yield Advice("refused", code, tuple(rows))
    if answer.num_more_findings:
        yield Advice("refused", f"… and {answer.num_more_findings:,} more", ())
    if answer.way:
        yield Advice("try", "This pair would be proved:", (), answer.way_command)
    for each in answer.warnings:
        word = "slow" if each.code == "short-runs" else "note"
        yield Advice(word, each.message, (("why", each.reason), ("remedy", each.remedy)), each.command)


TOP, ROW_HEIGHT, BOTTOM = 124, 182, 52
ADVICE_HEIGHT = 24
LABEL_WIDTH = 36
"""Characters of a row's name on one line."""
MOST_LINES = 3
MOST_NUMBERS = 24
"""Ranks of which each has its number; of more, some have."""


@dataclass(frozen=True, slots=True)
class SheetRow:
    """One row: how far down it is, and its name on several lines."""

    y: int
    label: tuple[str, ...]
    strip: Strip

    def every(self, shapes: Sequence[HeldShape]) -> int:
        """Which ranks have their number on the sheet: each, or one in so many."""
        return -(-len(shapes) // MOST_NUMBERS)


@dataclass(frozen=True, slots=True)
class Sheet:
    WIDTH: ClassVar[int] = 960
    LEFT: ClassVar[int] = 340
    """Where the strips begin."""
    STRIP_WIDTH: ClassVar[int] = 588
    height: int
    rows: tuple[SheetRow, ...]

    def x(self, shape: HeldShape) -> float:
        """The middle of a rank's column."""
        middle = shape.frame.x + shape.frame.width / 2
        return self.LEFT + self.STRIP_WIDTH * middle / WIDTH


def sheet(picture: PlanPicture) -> Sheet:
    top = TOP + ADVICE_HEIGHT * len(picture.reasons)
    rows = tuple(
        SheetRow(top + ROW_HEIGHT * i, tuple(_label(strip.row.label)), strip)
        for i, strip in enumerate(picture.strips)
    )
    return Sheet(top + ROW_HEIGHT * len(rows) + BOTTOM, rows)


def _label(name: str) -> list[str]:
    """A name on at most three lines, cut after its marks.

    >>> _label("layers.{0-2,4-6,8-10,12-14,16-18,20-22,24-25}.linear/conv.q")
    ['layers.{0-2,4-6,8-10,12-14,16-18,', '20-22,24-25}.linear/conv.q']
    >>> [len(line) for line in _label("x" * 200)]
    [35, 35, 35]
    """
    lines = [""]
    for part in re.findall(rf".[^,./}}]{{0,{LABEL_WIDTH - 2}}}[,./}}]*", name):
        if len(lines[-1]) + len(part) > LABEL_WIDTH:
            lines.append("")
        lines[-1] += part
    return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"{lines[MOST_LINES - 1][:-1]}…"]


@dataclass(frozen=True, slots=True)
class ComparedSide:
    letter: str
    given: str
    summary: str


@dataclass(frozen=True, slots=True)
class DiffPicture:
    """The answer of ``kvferry diff``, ready to be drawn."""

    found: ManifestDiff
    sides: tuple[ComparedSide, ComparedSide]
    states: tuple[StateFacts, ...]
    blocks: tuple[EngineBlocks, ...]

    @property
    def word(self) -> str:
        return WORDS[self.found.effect].lower()

    @property
    def sentence(self) -> str:
        words = sentence(self.found).replace("`", "")
        return f"{words[:1].upper()}{words[1:]}."

    @property
    def by_effect(self) -> dict[Effect, list[Difference]]:
        """The differences, the worst first."""
        return {
            effect: some
            for effect in Effect
            if (some := [each for each in self.found.differences if each.effect is effect])
        }

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        said = ((each.name, direction_time(each)) for each in self.found.directions)
        return tuple((name, time) for name, time in said if time)

    def states_of(self, difference: Difference) -> str:
        return together(difference.states)

    def label(self, facts: StateFacts) -> str:
        return together(facts.names)


def diff_picture(found: ManifestDiff, a: Manifest, b: Manifest, given: tuple[str, str]) -> DiffPicture:
    sides = (ComparedSide("a", given[0], summary(a)), ComparedSide("b", given[1], summary(b)))
    blocks = tuple(engine_blocks(name, each) for name, each in (("a", a), ("b", b)) if each.ranks)
    return DiffPicture(found, sides, state_facts(a, b), blocks)
