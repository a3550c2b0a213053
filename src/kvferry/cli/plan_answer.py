"""The answer of ``kvferry plan``, before anybody reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.asked import Asked, Billed
from kvferry.cli.bill import Bill, LinkBill
from kvferry.cli.cures import Cure, find_way
from kvferry.cli.engines import Side
from kvferry.cli.link_profile import LinkProfile
from kvferry.cli.model_differences import model_differences
from kvferry.cli.warned import Warned, not_served, warnings_of
from kvferry.core.identity import IdentityCheck, compare_identity
from kvferry.errors import Finding
from kvferry.models import Topology
from kvferry.models.model import is_offline

MAX_MODEL_DIFFERENCES = 4
"""So many differences between two models whose caches fit are named."""


@dataclass(frozen=True, slots=True)
class IgnoredFlags:
    """Flags of the commands that were given, which say nothing of the cache and were not read."""

    src: tuple[str, ...] = ()
    dst: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """All of them, each once; empty if there are none.

        >>> IgnoredFlags(("--port", "--seed"), ("--port",)).words
        '--port, --seed'
        """
        return ", ".join(dict.fromkeys((*self.src, *self.dst)))


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
    model_differences: tuple[Finding, ...] = ()
    """Why running engines would refuse each other, whatever their bytes."""
    assumed: str = ""
    """What nobody has said of these engines, and was taken to be so."""
    ignored: IgnoredFlags = IgnoredFlags()

    @property
    def bill(self) -> Bill:
        return self.billed.bill

    @property
    def findings(self) -> dict[Finding, list[int]]:
        """Each reason for a refusal, with the destination ranks that it concerns; nothing if it is proved."""
        ranks = list(self.billed.ranks)
        return {**self.bill.findings, **dict.fromkeys(self.model_differences[:MAX_MODEL_DIFFERENCES], ranks)}

    @property
    def num_more_findings(self) -> int:
        return self.bill.num_more + len(self.model_differences[MAX_MODEL_DIFFERENCES:])

    @property
    def bytes_fit(self) -> bool:
        """Whether the bytes could be moved; two models' bytes may fit, and mean something else."""
        return not self.bill.findings

    @property
    def identity(self) -> IdentityCheck:
        return compare_identity(self.billed.source.identity, self.billed.destination.identity)

    @property
    def model_sentence(self) -> str:
        """Whether it is the same model, as far as the two sides tell."""
        if self.model_differences:
            return "not the same: running engines would refuse each other" + (
                ", although the bytes would fit" if self.bytes_fit else ""
            )
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
    differences = model_differences(src, dst, billed.source, billed.destination)
    ignored = IgnoredFlags(src.ignored_flags, dst.ignored_flags)
    if billed.bill.findings:
        way, served = find_way(asked, src, dst), tuple(not_served(src, dst))
        if way and differences:  # engines would refuse each other all the same: no way, and one more reason
            return PlanAnswer(asked, billed, (), served, None, differences, ignored=ignored)
        return PlanAnswer(asked, billed, (), served, way, ignored=ignored)
    links = tuple(billed.bill.over(profile) for profile in profiles)
    warned = tuple(warnings_of(asked, src, dst, billed, links))
    return PlanAnswer(asked, billed, links, warned, None, differences, _assumed(src, dst), ignored)


def _assumed(src: Side, dst: Side) -> str:
    """Of which sides the layout is an assumption, and where it holds."""
    sides = [side.engine for side in (src, dst) if side.assumed_layout]
    if not sides:
        return ""
    layout = Topology().layout
    return (
        f"{layout} is assumed for {' and '.join(sides)}: what kvferry asks vLLM for on a GPU; on a CPU, and"
        " with some attention backends, it is another (layout=…)"
    )
