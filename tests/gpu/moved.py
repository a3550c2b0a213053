"""Whether the cells that a load moved are the source's cells: a digest of each state, on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import kvferry
from kvferry.core.digest import cells_of, digest_parts
from kvferry.core.manifest import Manifest
from kvferry.core.plan import Plan
from kvferry.wire import manifest_from_json, request_from_json
from kvferry.wire.rank_asks import question_to_msgpack
from tests.e2e.harness import Engine

SEED = 20_26


@dataclass(frozen=True, slots=True)
class Moved:
    """What a load moved, and which states of it are not the source's."""

    num_states: int
    num_cells: int
    differing: Mapping[str, tuple[str, str]]
    """Of each such state the first digests that differ: the source's and the destination's."""


@dataclass(frozen=True)
class Watched:
    """Two engines of one rank each whose loads are compared, cell by cell.

    ``keep`` the source's bytes after a prefill and before anybody may change them; the destination keeps its
    own when a load is over. ``moved`` compares.
    """

    src: Engine
    dst: Engine

    def __post_init__(self) -> None:
        self.dst.workers("watch", True)

    def keep(self) -> None:
        self.src.workers("snapshot")

    def moved(self) -> Moved:
        """Of the last load."""
        text = self.dst.workers("last_load")[0]
        request, _ = request_from_json(text)
        parts = [part for some in digest_parts(self._plan, request).values() for part in some]
        question, states = question_to_msgpack(SEED, parts), [part.state for part in parts]
        theirs, ours = (
            engine.workers("sums", side, text, question, states)[0]
            for engine, side in ((self.src, "src"), (self.dst, "dst"))
        )
        found: dict[str, tuple[str, str]] = {}
        for state, mine, other in zip(states, ours, theirs, strict=True):
            if mine != other:
                found.setdefault(state, (other.hex(), mine.hex()))
        num_cells = sum(len(cells_of(part)) for part in parts)
        return Moved(len(set(states)), num_cells, found)

    @cached_property
    def manifests(self) -> tuple[Manifest, Manifest]:
        src, dst = (manifest_from_json(engine.workers("manifest")[0]) for engine in (self.src, self.dst))
        return src, dst

    @cached_property
    def _plan(self) -> Plan:
        return kvferry.plan(*self.manifests, 0)
