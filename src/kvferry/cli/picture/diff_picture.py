"""All that the picture of two manifests shows, as values."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cli.diff_words import WORDS, direction_time, sentence
from kvferry.cli.manifest_diff import Difference, Effect, ManifestDiff, StateFacts, state_facts
from kvferry.cli.output import together
from kvferry.cli.picture.blocks import EngineBlocks, engine_blocks
from kvferry.cli.plan_page import summary
from kvferry.core.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ComparedSide:
    """One of the two: what it was called, and what it is."""

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
        """What a request takes in each direction."""
        said = ((each.name, direction_time(each)) for each in self.found.directions)
        return tuple((name, time) for name, time in said if time)

    def states_of(self, difference: Difference) -> str:
        return together(difference.states)

    def label(self, facts: StateFacts) -> str:
        return together(facts.names)


def diff_picture(found: ManifestDiff, a: Manifest, b: Manifest, given: tuple[str, str]) -> DiffPicture:
    """Everything that there is to draw of a comparison."""
    sides = (ComparedSide("a", given[0], summary(a)), ComparedSide("b", given[1], summary(b)))
    blocks = tuple(engine_blocks(name, each) for name, each in (("a", a), ("b", b)) if each.ranks)
    return DiffPicture(found, sides, state_facts(a, b), blocks)
