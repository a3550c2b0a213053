"""Prompts that a simulated source computes step by step, and offers under a router's name while it does.

A device runs steps in order, and late; what a step writes is there when the step has ended, and not before.
Blocks are taken as they are needed. A request that is preempted gives all of them away at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from kvferry.core.request import BlockTable
from kvferry.core.span import Span, Spans, intersect
from kvferry.core.state import Addressing
from kvferry.endpoint.source import GrowingOffer
from tests.support.simulation.cells import Content, Placed, held_tokens, keeps_all
from tests.support.simulation.laws import SimulatedRequest

if TYPE_CHECKING:
    from kvferry.core.manifest import Manifest

PART_TOKENS = 4
"""In which multiples growing leases are read in this world, whose prompts are short."""
WAIT_SECONDS = 12.0
"""After how long a prefill that finds no room for its blocks is aborted."""


@dataclass(eq=False)
class SimulatedPrefill:
    """One prompt under one name: computed from its first token to its last, perhaps several times."""

    transfer: str
    content: Content
    generation: int
    """Of the source's starts: the next one knows nothing of it."""
    began_at: float
    chance: Random
    steps: list[int]
    """Up to which token each step computes it."""
    num_preemptions: int
    """How often its blocks will be taken away, between any two steps."""
    abort_at: int
    """After which step it is aborted; beyond all steps: never."""
    is_ahead: bool
    """Whether a step is scheduled before the output of the last one has come back."""
    step_seconds: float
    """How long the device takes for a step at most."""
    placed: Placed | None = None
    next_step: int = 0
    num_tries: int = 0
    """How often it was begun: steps of an earlier try write nothing any more."""
    device_at: float = 0.0
    """When the device has ended what it was given so far."""
    offer: GrowingOffer | None = None
    requests: list[SimulatedRequest] = field(default_factory=list)
    """Each of its offers."""
    is_over: bool = False
    was_sought: bool = False
    """Whether somebody who sought it has got an answer."""

    @classmethod
    def drawn(
        cls, transfer: str, content: Content, generation: int, now: float, chance: Random, *, is_plain: bool
    ) -> SimulatedPrefill:
        """A prompt of a few steps; if it is plain, nothing happens to it."""
        num_tokens = content.num_tokens
        edges = chance.sample(range(1, num_tokens), min(num_tokens - 1, chance.randint(1, 4)))
        steps = [*sorted(edges), num_tokens]
        num_preemptions = 0 if is_plain else chance.choice([0, 0, 1, 1, 2])
        is_aborted = not is_plain and chance.random() < 0.15
        abort_at = chance.randint(1, len(steps)) if is_aborted else len(steps) + 1
        is_ahead = chance.random() < 0.5
        step_seconds = 0.3 if is_plain or chance.random() < 0.8 else 5.0
        return cls(
            transfer,
            content,
            generation,
            now,
            chance,
            steps,
            num_preemptions,
            abort_at,
            is_ahead,
            step_seconds,
        )

    def written(self, manifest: Manifest, start: int, stop: int) -> dict[str, Spans]:
        """What the step writes that computes these tokens; a state holds all tokens, or nothing good."""
        held = held_tokens(manifest, self.content.num_tokens)
        for group in manifest.groups:
            if group.addressing is not Addressing.SLOT:
                held[group.name] = intersect(held[group.name], (Span(start, stop),))
            elif stop < self.content.num_tokens:
                del held[group.name]
        return held


def early_tables(manifest: Manifest, placed: Placed) -> Mapping[str, BlockTable]:
    return {group.name: placed.tables[group.name] for group in manifest.groups if keeps_all(group)}
