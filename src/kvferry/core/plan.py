"""Planning: intersects the boxes of the source ranks with the needs of a destination rank.

One rule serves every model family. A needed box is split into *atoms*, each held entirely by the same set of
source ranks. If the set has more than one rank (replicated heads, MLA latents), the atoms are distributed so
that every holder sends an equal share of the bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise, product
from math import lcm

from kvferry.core.box import TOKEN, Box
from kvferry.core.manifest import Holders, Manifest, compare
from kvferry.core.span import Span, Spans, holds, normal, show
from kvferry.core.state import State
from kvferry.core.view import View
from kvferry.errors import Code, Finding, Refused


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one state that one source rank sends to one destination rank.

    >>> print(Piece(3, 1, "layers.3.attn/k", Box((("head", (Span(1, 2),)),))))
    dst 1 <- src 3  layers.3.attn/k  head [1, 2)
    """

    src_rank: int
    dst_rank: int
    state: str
    """The destination's name of the state."""
    box: Box

    def __str__(self) -> str:
        return f"dst {self.dst_rank} <- src {self.src_rank}  {self.state}  {self.box}"


@dataclass(frozen=True)
class Plan:
    """The pieces for one destination rank and one source engine, before their proof.

    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> print(plan(src, dst, dst_rank=1, states=["layers.3.attn/k"]).pieces[0])
    dst 1 <- src 3  layers.3.attn/k  channel [0, 256) × head [1, 2)
    """

    src: Manifest
    dst: Manifest
    dst_rank: int
    pieces: tuple[Piece, ...]
    states: tuple[str, ...]
    """The states that the destination rank needs, by its own names."""

    def __repr__(self) -> str:
        # The manifests would be thousands of lines; `explain` has the pieces.
        return (
            f"Plan({self.src.engine} -> {self.dst.engine} rank {self.dst_rank}:"
            f" {len(self.pieces)} pieces of {len(self.states)} states)"
        )

    def views(self, piece: Piece) -> tuple[View, View]:
        """The source's and the destination's view of the piece."""
        dst_view = self.dst.rank(piece.dst_rank).by_state[piece.state]
        return self.src.rank(piece.src_rank).by_state[self.src_name(piece.state)], dst_view

    def src_name(self, state: str) -> str:
        """The source's name of a state of the destination."""
        if state not in self._src_names:
            raise Refused(Finding(Code.MISSING_STATE, state=state))
        return self._src_names[state]

    @cached_property
    def _src_names(self) -> dict[str, str]:
        found = ((name, self.src.find(self.dst.state_by_name[name])) for name in self.states)
        return {name: state.name for name, state in found if state is not None}


def plan(
    src: Manifest,
    dst: Manifest,
    dst_rank: int,
    *,
    states: Collection[str] | None = None,
    holders: Mapping[str, Holders] | None = None,
) -> Plan:
    """Plan how destination rank ``dst_rank`` reads the states it needs from the source engine.

    ``states``: the states that the rank needs; by default all that it holds.
    ``holders``: the boxes of all source ranks, if ``src`` does not list every rank.
    Raises ``Refused`` with every relevant difference.

    >>> from kvferry.models import Topology, describe, model_named
    >>> model = model_named("qwen3-next-80b")
    >>> src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    >>> planned = plan(src, dst, dst_rank=0)
    >>> sorted({p.src_rank for p in planned.pieces if "ssm" in p.state})
    [0, 1]
    """
    if found := compare(src, dst, states):
        raise Refused(*found)
    held = dst.rank(dst_rank).by_state
    asked = held.keys() if states is None else {dst.name_of(name) for name in states}
    views = [view for view in held.values() if view.state in asked]
    if unknown := asked - held.keys():
        note = f"rank {dst_rank} of {dst.engine} does not hold it"
        raise Refused(*(Finding(Code.MISSING_STATE, state=s, note=note) for s in sorted(unknown)))
    deal = _Deal(src, src.holders if holders is None else holders, dst, dst_rank)
    for view in views:
        deal.add(view)
    pieces = tuple(deal.pieces())
    return Plan(src, dst, dst_rank, pieces, tuple(view.state for view in views))


@dataclass(frozen=True, slots=True)
class _Atom:
    """A part of a needed box, with the source ranks that hold all of it and the ranks that need it."""

    box: Box
    holders: tuple[int, ...]
    readers: tuple[int, ...]
    num_cells: int


class _Deal:
    """Collects the atoms of one destination rank's need, and assigns them to holders.

    Atoms with the same holders and readers form a row in the order of the states. The concatenated rows of
    all readers are cut into one equal part per holder: every holder sends the same share, and neighbouring
    layers stay together, which keeps runs long.
    """

    def __init__(self, src: Manifest, held: Mapping[str, Holders], dst: Manifest, dst_rank: int) -> None:
        self._src, self._held, self._dst, self._dst_rank = src, held, dst, dst_rank
        self._rows: dict[object, list[tuple[str, _Atom, int]]] = defaultdict(list)
        self._order: list[str] = []
        self._atoms: dict[tuple[Box, Holders, Holders], list[_Atom]] = {}
        self._needs = dst.rank(dst_rank).boxes

    def add(self, view: View) -> None:
        """Split the need of one state into atoms and append them to their rows."""
        state = self._dst.state_by_name[view.state]
        source = self._src.find(state)
        holders = self._held.get(source.name, NOBODY) if source else NOBODY
        key = (self._needs[view.state], holders, self._dst.holders[view.state])
        if key not in self._atoms:
            self._atoms[key] = list(_atoms(state, *key))
        self._order.append(view.state)
        for atom in self._atoms[key]:
            weight = atom.num_cells * state.item_bytes
            self._rows[atom.holders, atom.readers, state.kind].append((view.state, atom, weight))

    def pieces(self) -> Iterator[Piece]:
        """Each state's pieces, in the order of the states."""
        dealt: dict[str, list[tuple[int, Box]]] = defaultdict(list)
        for row in self._rows.values():
            for name, atom, holder in self._cut(row):
                dealt[name].append((holder, atom.box))
        joined: dict[tuple[tuple[int, int], ...], list[tuple[int, Box]]] = {}
        for name in self._order:
            alike = tuple((src_rank, id(box)) for src_rank, box in dealt[name])
            if alike not in joined:
                joined[alike] = _joined(dealt[name])
            for src_rank, box in joined[alike]:
                yield Piece(src_rank, self._dst_rank, name, box)

    def _cut(self, row: Sequence[tuple[str, _Atom, int]]) -> Iterator[tuple[str, _Atom, int]]:
        total = sum(weight for _, _, weight in row)
        passed = 0
        for name, atom, weight in row:
            turn = atom.readers.index(self._dst_rank)
            # The middle of this atom in the row of all readers decides its holder.
            middle = 2 * (turn * total + passed) + weight
            share = middle * len(atom.holders) // (2 * total * len(atom.readers))
            yield name, atom, atom.holders[share]
            passed += weight


NOBODY = Holders(())
NO_RANKS: frozenset[int] = frozenset()


def _atoms(state: State, need: Box, holders: Holders, readers: Holders) -> Iterator[_Atom]:
    """Cut ``need`` along every axis where the set of holders changes, and take the product."""
    period = lcm(need.period, *(box.period for _, box in holders.boxes))
    need = need.over(period)
    held = [(rank, dict(box.over(period).axes)) for rank, box in holders.boxes]
    cuts = [
        [(name, spans, ranks) for ranks, spans in _by_holders(name, needed, held).items()]
        for name, needed in need.axes
    ]
    everyone = frozenset(rank for rank, _ in held)
    for combination in product(*cuts):
        box = Box(tuple((name, spans) for name, spans, _ in combination), period)
        ranks = everyone.intersection(*(ranks for _, _, ranks in combination))
        if not ranks:
            raise Refused(_not_held(state, combination, held))
        wanting = tuple(sorted(rank for rank, other in readers.boxes if box & other))
        reduced = _reduced(box)
        yield _Atom(reduced, tuple(sorted(ranks)), wanting, reduced.num_cells())


def _by_holders(
    name: str, needed: Spans, held: Sequence[tuple[int, dict[str, Spans]]]
) -> dict[frozenset[int], Spans]:
    """The needed coordinates of one axis, by the set of ranks that hold them."""
    starts: dict[int, set[int]] = defaultdict(set)
    ends: dict[int, set[int]] = defaultdict(set)
    for rank, axes in held:
        for span in axes[name]:
            starts[span.start].add(rank)
            ends[span.stop].add(rank)
    edges = {e for span in needed for e in (span.start, span.stop)} | starts.keys() | ends.keys()
    found: dict[frozenset[int], list[Span]] = defaultdict(list)
    holding: set[int] = set()
    for start, stop in pairwise(sorted(edges)):
        holding -= ends.get(start, NO_RANKS)
        holding |= starts.get(start, NO_RANKS)
        if holds(needed, start):
            found[frozenset(holding)].append(Span(start, stop))
    return {ranks: normal(spans) for ranks, spans in found.items()}


def _not_held(
    state: State,
    combination: Sequence[tuple[str, Spans, frozenset[int]]],
    held: Sequence[tuple[int, dict[str, Spans]]],
) -> Finding:
    name, spans, _ = min(combination, key=lambda part: len(part[2]), default=("", (), None))
    have = normal(span for _, axes in held for span in axes.get(name, ()))
    return Finding(
        Code.NOT_HELD,
        state=state.name,
        field=f"{name} {show(spans)}",
        src=f"{name} {show(have)} on ranks {[rank for rank, _ in held]}",
        note="no source rank holds it",
    )


def _reduced(box: Box) -> Box:
    """The same box with period 1 if it has every cell."""
    axes = dict(box.axes)
    if TOKEN in axes and axes[TOKEN] == (Span(0, box.period),):
        axes[TOKEN] = (Span(0, 1),)
        return Box(tuple(axes.items()), 1)
    return box


def _joined(parts: Sequence[tuple[int, Box]]) -> list[tuple[int, Box]]:
    """Merges boxes of one source that differ in one axis only."""
    joined: list[tuple[int, Box]] = []
    of_rank: dict[int, list[int]] = defaultdict(list)
    for src_rank, box in parts:
        for i in of_rank[src_rank]:
            other = joined[i][1]
            differing = [
                k for k, pair in enumerate(zip(box.axes, other.axes, strict=True)) if pair[0] != pair[1]
            ]
            if other.period == box.period and len(differing) == 1:
                axes = list(other.axes)
                name, spans = axes[differing[0]]
                axes[differing[0]] = (name, normal((*spans, *box.axes[differing[0]][1])))
                joined[i] = (src_rank, Box(tuple(axes), box.period))
                break
        else:
            of_rank[src_rank].append(len(joined))
            joined.append((src_rank, box))
    return joined


_NUMBER = re.compile(r"\d+")


def explain(plan: Plan) -> str:
    """One line per source rank and kind of piece; layers with equal pieces share a line.

    >>> from kvferry.models import Topology, describe, model_named
    >>> src, dst = (describe(model_named("llama-3.1-8b"), Topology(tp=tp)) for tp in (2, 3))
    >>> from kvferry import plan as make
    >>> print(explain(make(src, dst, dst_rank=1, states=["layers.0.attn/k", "layers.1.attn/k"])))
    dst 1 <- src 0  layers.{0-1}.attn/k  channel [0, 128) × head [2, 4)
    dst 1 <- src 1  layers.{0-1}.attn/k  channel [0, 128) × head [4, 6)
    """
    pieces: dict[tuple[int, str, str], list[str]] = {}
    for piece in plan.pieces:
        kind = _NUMBER.sub("#", piece.state, count=1)
        pieces.setdefault((piece.src_rank, kind, str(piece.box)), []).append(piece.state)
    lines = [
        f"dst {plan.dst_rank} <- src {src_rank}  {name_together(names)}  {box}"
        for (src_rank, _, box), names in sorted(pieces.items(), key=lambda item: item[0][0])
    ]
    return "\n".join(lines)


def name_together(names: Sequence[str]) -> str:
    """One name for names that differ in their first number only.

    >>> name_together(["layers.0/k", "layers.1/k", "layers.2/k", "layers.7/k"])
    'layers.{0-2,7}/k'
    """
    matches = [_NUMBER.search(name) for name in names]
    first = matches[0]
    if len(names) == 1 or first is None:
        return names[0]
    numbers = sorted(int(match.group()) for match in matches if match)
    head, tail = names[0][: first.start()], names[0][first.end() :]
    return f"{head}{{{','.join(_ranges(numbers))}}}{tail}"


def _ranges(numbers: Iterable[int]) -> Iterable[str]:
    for _, neighbours in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in neighbours)
        yield f"{first}-{rest[-1]}" if rest else f"{first}"
