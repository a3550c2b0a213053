"""What is common to all ranks of an engine: enough to plan, and small however many ranks there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvferry.core.manifest import Holders, Manifest


@dataclass(frozen=True, eq=False, slots=True)
class Outline:
    """The states and groups of an engine, and which of its ranks holds what. Where that sits, each rank says.

    A plan is made of outlines; the proof and the bytes need the views of the ranks that are read from.

    >>> from kvferry.models import Topology, describe, model_named
    >>> outline = Outline.of(describe(model_named("llama-3.1-8b"), Topology(tp=4)))
    >>> print(outline.ranks, outline.holders["layers.0.attn/k"].boxes[3][1])
    (0, 1, 2, 3) channel [0, 128) × head [6, 8)
    """

    common: Manifest
    """The engine's manifest without its ranks."""
    holders: Mapping[str, Holders]
    """Who holds a part of each state."""

    @classmethod
    def of(cls, manifest: Manifest) -> Outline:
        """The outline of an engine whose ranks are all described."""
        return cls(replace(manifest, ranks=()), manifest.holders)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that holds something."""
        alike = {id(holders): holders for holders in self.holders.values()}
        return tuple(sorted({rank for holders in alike.values() for rank, _ in holders.boxes}))
