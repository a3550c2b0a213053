"""What was asked of ``kvferry plan``, and its bill for any two sides: those given, and those tried."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.cli.bad_input import at
from kvferry.cli.bill import Bill, bill_of
from kvferry.cli.engines import Side, listed_ranks
from kvferry.cli.model_differences import short_window, without_requirement
from kvferry.core.choices import MAX_RUNS_PER_BLOCK, Placement
from kvferry.core.manifest import Manifest
from kvferry.core.sample import sample_request
from kvferry.errors import SpecError

DEFAULT_TOKENS = 4096


@dataclass(frozen=True)
class Billed:
    """Two engines, the request that was billed, and its bill."""

    source: Manifest
    destination: Manifest
    tokens: int
    ranks: tuple[int, ...]
    """The destination ranks that were asked for."""
    bill: Bill


@dataclass(frozen=True, slots=True)
class Asked:
    """The request that is to be billed, and the options that say so."""

    tokens: int | None = None
    """None: 4096, or what fits."""
    kept: int = 0
    placement: Placement = Placement.CONSECUTIVE
    dst_rank: int | None = None
    max_runs_per_block: int = MAX_RUNS_PER_BLOCK
    links: tuple[str, ...] = ()

    def billed(self, src: Side, dst: Side) -> Billed:
        """Describe both sides, and bill the request between them."""
        room = self.tokens or DEFAULT_TOKENS
        return self.billed_between(src.manifest(room), dst.manifest(room))

    def billed_between(self, source: Manifest, destination: Manifest) -> Billed:
        """The same of engines that are described already."""
        source, destination = without_requirement(source, destination)
        ranks = asked_ranks(destination, self.dst_rank)
        tokens = self.tokens or fitting_tokens(source, destination)
        if self.kept > tokens:
            raise SpecError(
                f"--kept {self.kept} must not exceed the {tokens} tokens of the request; --tokens N sets them"
            )
        window = short_window(source, destination)
        if window and tokens - self.kept > window:
            raise SpecError(
                f"--tokens {tokens}: the source keeps {window} tokens of some layers, the destination looks"
                f" further back: no longer request can be moved. --tokens {window} shows the rest"
            )
        with at(f"--tokens {tokens} --kept {self.kept}"):
            request = sample_request(
                source, destination, tokens, num_kept=self.kept, placement=self.placement
            )
            bill = bill_of(source, destination, ranks, request, self.max_runs_per_block)
        return Billed(source, destination, tokens, tuple(ranks), bill)

    def command(self, src: Side, dst: Side) -> str:
        """The command that asks the same of these two sides."""
        words = ["kvferry", "plan", *_sides(src, dst)]
        for option, value, default in (
            ("--tokens", self.tokens, None),
            ("--kept", self.kept, 0),
            ("--placement", self.placement.value, Placement.CONSECUTIVE.value),
            ("--dst-rank", self.dst_rank, None),
        ):
            if value != default:
                words += [option, str(value)]
        for link in self.links:
            words += ["--link", link]
        return shlex.join(words)


def _sides(src: Side, dst: Side) -> list[str]:
    words: list[str] = []
    same = src.model == dst.model and src.config == dst.config and not (src.file or dst.file)
    for side in (src, dst):
        if side.file is not None:
            words += [f"--{side.engine}", str(side.file)]
            continue
        if side.model and not (same and side is dst):
            words += ["--model" if same else f"--{side.engine}-model", side.model]
        if side.config and side.engine == ("src" if same else side.engine):
            words += ["--config", str(side.config)]
        words += [f"--{side.engine}", side.text]
    return words


def fitting_tokens(source: Manifest, destination: Manifest) -> int:
    """The default number of tokens, or what the source keeps, halved until both pools have room for them."""
    tokens = min(DEFAULT_TOKENS, short_window(source, destination) or DEFAULT_TOKENS)
    while tokens > 1:
        try:
            sample_request(source, destination, tokens)
            break
        except SpecError:
            tokens //= 2
    return tokens


def asked_ranks(destination: Manifest, dst_rank: int | None) -> Sequence[int]:
    """The destination ranks to plan for."""
    known = [rank.rank for rank in destination.ranks]
    if dst_rank is None:
        return known
    if dst_rank not in known:
        raise SpecError(f"--dst-rank {dst_rank}: engine {destination.engine} has {listed_ranks(destination)}")
    return [dst_rank]
