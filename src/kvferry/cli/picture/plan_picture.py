"""All that the picture of a plan shows, as values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvferry.cli.output import finding_rows, milliseconds, num_bytes
from kvferry.cli.picture.bands import state_rows
from kvferry.cli.picture.bill_chart import BillChart, bill_chart
from kvferry.cli.picture.blocks import EngineBlocks, engine_blocks
from kvferry.cli.picture.shapes import Strip, strips
from kvferry.cli.plan_answer import PlanAnswer
from kvferry.cli.plan_page import summary
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
    """A number that matters, with what it counts."""

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
        """What the request moves, in a few numbers."""
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
    """Everything that there is to draw of an answer."""
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
