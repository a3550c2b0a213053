"""The answer of ``kvferry plan``, before anybody reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.asked import Asked, Billed
from kvferry.cli.bill import Bill, LinkBill
from kvferry.cli.cures import Cure, find_way
from kvferry.cli.engines import Side
from kvferry.cli.warned import Warned, not_served, warnings_of
from kvferry.core.identity import IdentityCheck, compare_identity
from kvferry.core.link_profile import LinkProfile
from kvferry.models.model import is_offline


@dataclass(frozen=True)
class PlanAnswer:
    """Whether two engines can talk, what a request costs, and what to do about it."""

    asked: Asked
    billed: Billed
    links: tuple[LinkBill, ...]
    """The request over each kind of link; nothing, where it is refused or moves nothing."""
    warnings: tuple[Warned, ...]
    way: Cure | None
    """Settings with which a refused pair is proved."""

    @property
    def bill(self) -> Bill:
        return self.billed.bill

    @property
    def identity(self) -> IdentityCheck:
        return compare_identity(self.billed.source.identity, self.billed.destination.identity)

    @property
    def model_sentence(self) -> str:
        """Whether it is the same model, as far as the two sides tell."""
        check, sides = self.identity, (self.billed.source, self.billed.destination)
        if check.num_equal and not check.differing and all(is_offline(side.identity) for side in sides):
            return "the same architecture; engines compare weights and settings when they meet"
        return check.sentence

    @property
    def way_command(self) -> str:
        """The command that shows that a refused pair can be mended; empty if nobody knows how."""
        return self.asked.command(self.way.src, self.way.dst) if self.way else ""


def answer(asked: Asked, src: Side, dst: Side, profiles: Sequence[LinkProfile]) -> PlanAnswer:
    """Bill the request, and look for what to warn of, or for a way out of a refusal."""
    billed = asked.billed(src, dst)
    if billed.bill.findings:
        return PlanAnswer(asked, billed, (), tuple(not_served(src, dst)), find_way(asked, src, dst))
    links = tuple(billed.bill.over(profile) for profile in profiles)
    return PlanAnswer(asked, billed, links, tuple(warnings_of(asked, src, dst, billed, links)), None)
