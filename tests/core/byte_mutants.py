"""One-line mutants of planning, shared code, lowering and selection, against the checker alone.

    python -m tests.core.byte_mutants

Each mutant runs twice over the same cases, with ``prove`` switched off: without the checker, so that the
oracle sees whether bytes are wrong; and with it, where nothing that the oracle rejects may leave ``select``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvferry
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe
from kvferry.testing import oracle
from kvferry.testing.small import small
from kvferry.wire.manifest import manifest_to_msgpack

CORE = Path(kvferry.__file__).parent / "core"


class Mutant(NamedTuple):
    module: str
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.module}: {self.old.strip()}  ->  {self.new.strip()}"


def _mutants(module: str, *pairs: tuple[str, str]) -> list[Mutant]:
    return [Mutant(module, old, new) for old, new in pairs]


MUTANTS = [
    *_mutants(
        "plan",
        ("yield name, atom, atom.holders[share]", "yield name, atom, 0"),
        (
            "yield Piece(src_rank, self._dst_rank, name, box)",
            "yield Piece(src_rank, self._dst_rank, self._order[0], box)",
        ),
        ("holding |= starts.get(start, NO_RANKS)", "holding |= starts.get(stop, NO_RANKS)"),
        ("holding -= ends.get(start, NO_RANKS)", "holding -= ends.get(stop, NO_RANKS)"),
        ("if holds(needed, start):", "if holds(needed, start) and start:"),
        (
            "found[frozenset(holding)].append(Span(start, stop))",
            "found[frozenset(holding)].append(Span(start, start + 1))",
        ),
        ("for name in self._order:", "for name in self._order[1:]:"),
        ("ranks = everyone.intersection(*(ranks for _, _, ranks in combination))", "ranks = everyone"),
        ("axes[TOKEN] = (Span(0, 1),)", "axes[TOKEN] = (Span(0, 0),)"),
        (
            "return {name: state.name for name, state in found if state is not None}",
            "return {name: self.src.states[0].name for name, state in found if state is not None}",
        ),
    ),
    *_mutants(
        "span",
        (
            "start, stop = max(x[i].start, y[j].start), min(x[i].stop, y[j].stop)",
            "start, stop = max(x[i].start, y[j].start), x[i].stop",
        ),
        ("left.append(Span(start, max(start, hole.start)))", "left.append(Span(start, start))"),
        ("start = min(hole.stop, span.stop)", "start = hole.start"),
    ),
    *_mutants(
        "view",
        (
            "for digit in self.digits:\n            values",
            "for digit in self.digits[::-1]:\n            values",
        ),
        ("inside = (values >= span.start) & (values < span.stop)", "inside = values >= span.start"),
        ("return (Span(self.start, self.start + self.size),)", "return (Span(0, self.size),)"),
        ("return AxisMap(axis.digits[lowest:]).spans()", "return (Span(0, axis.period),)"),
        ("return prod(d.size for d in self.digits[i:])", "return prod(d.size for d in self.digits[i + 1 :])"),
    ),
    *_mutants(
        "manifest",
        (
            "return next((self.state_by_name[n] for n in names if n in self.state_by_name), None)",
            "return self.states[0]",
        ),
        (
            "return {region.name: i for i, region in enumerate(self.regions)}",
            "return {region.name: 0 for i, region in enumerate(self.regions)}",
        ),
        (
            "return {view.state: boxes[id(view.axes)] for view in self.views}",
            "return {view.state: boxes[id(self.views[0].axes)] for view in self.views}",
        ),
        (
            "return {view.state: view for view in self.views}",
            "return {view.state: self.views[0] for view in self.views}",
        ),
    ),
    *_mutants(
        "lower",
        (
            "at = np.concatenate([np.arange(span.start, span.stop) for span in spans])",
            "at = np.arange(spans[0].start, max(spans[0].start + 1, spans[0].stop - 1))",
        ),
        (
            "return _held(src[at - src_start]), _held(dst[at - dst_start])",
            "return _held(src[at - src_start])[::-1], _held(dst[at - dst_start])",
        ),
        (
            "return _held(src[cells + shape.src_cell]), _held(dst[cells + shape.dst_cell])",
            "return _held(src[cells + shape.dst_cell]), _held(dst[cells + shape.dst_cell])",
        ),
        ("residues = (cells + shape.phase) % period", "residues = cells % period"),
        (
            "cells = np.arange(shape.num_cells)\n    if period",
            "cells = np.arange(max(1, shape.num_cells - 1))\n    if period",
        ),
        ("np.add.outer(dst, runs.dst).ravel(),", "np.add.outer(dst, runs.src).ravel(),"),
        (
            "np.add.outer(each.src_places, one.src).ravel(),",
            "np.add.outer(each.dst_places, one.src).ravel(),",
        ),
        (
            "np.tile(one.num_bytes, len(each.src_places)),",
            "np.repeat(one.num_bytes, len(each.src_places)) // 2,",
        ),
        (
            "key = BundleKey(move.src.rank, src_view.block_stride, dst_view.block_stride, move.is_blank)",
            "key = BundleKey(move.src.rank, src_view.block_stride, src_view.block_stride, move.is_blank)",
        ),
        (
            "place(m.src.region_index[m.src_view.region], m.src_view.offset)",
            "place(m.src.region_index[m.src_view.region], 0)",
        ),
        (
            "place(m.dst.region_index[m.dst_view.region], m.dst_view.offset)",
            "place(0, m.dst_view.offset)",
        ),
        ("_bundles(moves, period, patterns),", "_bundles(moves[:-1], period, patterns),"),
        ("np.array([geometry.item_bytes])", "np.array([1])"),
    ),
    *_mutants(
        "runs",
        ("starts[1:] |= src[:-1] + num_bytes[:-1] != src[1:]", "pass"),
        ("np.not_equal(dst[:-1] + num_bytes[:-1], dst[1:], out=starts[1:])", "starts[1:] = False"),
        (
            "return Runs(src[at], dst[at], np.add.reduceat(num_bytes, at))",
            "return Runs(src[at], dst[at], num_bytes[at])",
        ),
        (
            "src, dst, num_bytes = src[order], dst[order], num_bytes[order]",
            "dst, num_bytes = dst[order], num_bytes[order]",
        ),
    ),
    *_mutants(
        "select",
        ("np.multiply(dst_ids, dst_stride, out=steps[1])", "np.multiply(dst_ids, src_stride, out=steps[1])"),
        ("np.multiply(src_ids, src_stride, out=steps[0])", "np.multiply(dst_ids, src_stride, out=steps[0])"),
        ("stops[at - 1] = span.stop", "stops[at - 1] = max(starts[at - 1] + 1, span.stop - 1)"),
        ("src_ids, dst_ids = src_ids[order], dst_ids[order]", "dst_ids = dst_ids[order]"),
        ("by_rank[src_rank].append(term)", "by_rank[0].append(term)"),
        (
            "free = subtract(dst.touched(need), (*need, *dst.kept(kept, need)))",
            "free = subtract(dst.touched(need), need)",
        ),
        ("is_whole = src_stride == dst_stride == pattern.each_bytes", "is_whole = src_stride == dst_stride"),
        ("up = size - 1 if tail is Tail.PARTIAL else 0", "up = 0"),
        (
            "keys = np.stack([src_cells, dst_cells, stops - starts, starts % period])",
            "keys = np.stack([dst_cells, dst_cells, stops - starts, starts % period])",
        ),
        ("for lane in route.lanes:\n        try", "for lane in route.lanes[1:]:\n        try"),
        (
            "blank = list(_segments(subtract(free, need), dst, dst, lane.dst_period))",
            "blank = list(_segments(free, dst, dst, lane.dst_period))",
        ),
    ),
    *_mutants(
        "select",
        (
            "index, inside = np.divmod(cells - self.first, self.num_cells)",
            "index, inside = np.divmod(cells, self.num_cells)",
        ),
        ("cuts[0] = span.start", "pass"),
        ("ids = self.block_ids[index]", "ids = self.block_ids[np.sort(index)[::-1]]"),
    ),
    *_mutants(
        "product",
        ("steps = steps[:, self._heads]", "steps = steps[:, : len(self._heads)]"),
        (
            "return np.concatenate(([0], np.flatnonzero(~(is_next[0] & is_next[1])) + 1))",
            "return np.concatenate(([0], np.flatnonzero(~is_next[1]) + 1))",
        ),
        (
            "np.multiply.outer(self.pattern.num_bytes, counts).ravel(),",
            "np.multiply.outer(self.pattern.num_bytes, np.ones_like(counts)).ravel(),",
        ),
        (
            "np.add.outer(self.pattern.src, steps[0]).ravel(),",
            "np.add.outer(self.pattern.src, steps[1]).ravel(),",
        ),
    ),
]


# -- cases ---------------------------------------------------------------------------------------------

PAIRS = [
    # family, source, destination, rank, tokens, kept
    ("gqa", "tp=2,block=4", "tp=3,block=6", 1, 17, 0),
    ("gqa", "tp=1,block=4,layout=NHD", "tp=1,block=8,layout=HND", 0, 21, 5),
    ("gqa", "tp=1,block=4,alloc=separate", "tp=2,pp=2,block=4,alloc=separate", 3, 13, 4),
    ("gqa", "block=8,layout=cpu-vec,alloc=separate", "block=4,layout=cpu-vec,alloc=separate", 0, 19, 0),
    ("mqa", "tp=3,block=4", "tp=2,block=4", 1, 12, 0),
    ("window", "tp=2,block=8", "tp=1,block=4", 0, 30, 0),
    ("shared-layers", "tp=1,block=4", "tp=2,block=6", 1, 25, 0),
    ("mla", "tp=4,block=4,cp=2", "tp=2,block=6,cp=1", 1, 33, 0),
    ("mla", "tp=2,block=4,cp=1", "tp=4,block=4,cp=2", 1, 29, 0),
    ("gqa+mla", "tp=2,block=4", "tp=1,block=8", 0, 18, 0),
    ("attention-beside-mamba2", "tp=2,block=4", "tp=3,block=4", 2, 11, 0),
    ("mla-indexer", "tp=2,block=4,kernel=2", "tp=1,block=8", 0, 21, 0),
    ("compressed", "tp=2,block=128", "tp=1,block=256", 0, 300, 0),
    ("mla", "block=4,alloc=separate", "block=4,alloc=separate", 0, 26, 0),
    ("mqa", "block=8,layout=opaque", "block=8,layout=opaque", 0, 21, 8),
]


@dataclass
class Case:
    """A pair of engines and a request, as plain data for mutated code, and what is right."""

    src: kvferry.Manifest
    dst: kvferry.Manifest
    rank: int
    request: kvferry.Request
    right: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wire = manifest_to_msgpack(self.src), manifest_to_msgpack(self.dst)
        self.plan = kvferry.plan(self.src, self.dst, self.rank)
        self.right = _runs(kvferry.select(kvferry.lower(kvferry.prove(self.plan)), self.request))

    def is_right(self, found: dict[Any, Any]) -> bool:
        """Whether runs do what they should: the same runs, or others that the oracle finds right."""
        if found.keys() == self.right.keys() and all(
            all(np.array_equal(a, b) for a, b in zip(found[key], self.right[key], strict=True))
            for key in found
        ):
            return True
        runs = {key: kvferry.Runs(*columns) for key, columns in found.items()}
        zeros = runs.pop("zeros")
        try:
            return not oracle.check(self.plan, self.request, kvferry.Selection.of(runs, zeros))
        except Exception:
            return False  # places that no region has


def _runs(selection: Any) -> dict[Any, Any]:
    found = {**selection.reads, "zeros": selection.zeros}
    return {key: (runs.src, runs.dst, runs.num_bytes) for key, runs in found.items()}


def make_cases() -> list[Case]:
    cases = []
    for family, src_topology, dst_topology, rank, num_tokens, num_kept in PAIRS:
        src, dst = (
            describe(small(family), Topology.parse(f"blocks=40,{each}"), name)
            for each, name in ((src_topology, "src"), (dst_topology, "dst"))
        )
        placements = (Placement.CONSECUTIVE,) if "alloc=separate" in src_topology else (Placement.SCATTERED,)
        for placement in placements:
            request = sample_request(src, dst, num_tokens, num_kept=num_kept, placement=placement)
            if (
                placement is Placement.CONSECUTIVE
            ):  # some neighbours, and some not, at other places on each side
                turned = {side: _turned(getattr(request, side), by) for side, by in (("src", 1), ("dst", 3))}
                request = replace(request, **turned)
            cases.append(Case(src, dst, rank, request))
    return cases


def _turned(tables: Any, by: int) -> Any:
    return {k: kvferry.BlockTable.of(np.roll(t.block_ids, by), t.first_token) for k, t in tables.items()}


# -- running mutated code ------------------------------------------------------------------------------


class MutantError(Exception):
    """The line that a mutant changes is not there, or not once."""


class _Finder(MetaPathFinder):
    """Finds one module of the core with one line changed."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != f"kvferry.core.{self._mutant.module}":
            return None
        file = CORE / f"{self._mutant.module}.py"
        return importlib.util.spec_from_file_location(
            name, file, loader=_Loader(name, str(file), self._mutant)
        )


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        if text.count(self._mutant.old) != 1:
            raise MutantError(f"not once in {self._mutant.module}: {self._mutant.old!r}")
        return compile(text.replace(self._mutant.old, self._mutant.new), self.path, "exec")


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Import kvferry anew with a mutant in place; afterwards the modules from before are back."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kvferry"}
    finder = _Finder(mutant)
    sys.meta_path.insert(0, finder)
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvferry"]:
            del sys.modules[name]
        sys.modules.update(before)


def run(case: Case) -> dict[Any, Any]:
    """What the code that is imported now makes of a case."""
    core = {name: importlib.import_module(f"kvferry.core.{name}") for name in _USED}
    wire = importlib.import_module("kvferry.wire.manifest")
    src, dst = (wire.manifest_from_msgpack(data) for data in case.wire)
    request = _rebuilt(case.request, core["request"], core["span"])
    plan = core["plan"].plan(src, dst, case.rank)
    return _runs(core["select"].select(core["lower"].lower(core["prove"].prove(plan)), request))


def switch_off_prove() -> None:
    importlib.import_module("kvferry.core.prove")._broken_laws = lambda *_: ()  # type: ignore[attr-defined]


def switch_off_checker() -> None:
    none = type("NoChecker", (), {"check_selection": lambda *_: None})
    importlib.import_module("kvferry.core.lower")._check = lambda *_: none()  # type: ignore[attr-defined]
    importlib.import_module("kvferry.core.product").check_list = lambda *_: None  # type: ignore[attr-defined]


_USED = ("plan", "prove", "lower", "select", "product", "request", "span")


def _rebuilt(request: kvferry.Request, of: Any, span: Any) -> Any:
    def spans(by_group: Any) -> Any:
        return {k: tuple(span.Span(s.start, s.stop) for s in some) for k, some in by_group.items()}

    def tables(by_group: Any) -> Any:
        return {k: of.BlockTable.of(t.block_ids.tolist(), t.first_token) for k, t in by_group.items()}

    return of.Request(tables(request.src), tables(request.dst), spans(request.need), spans(request.kept))


class Outcome(NamedTuple):
    wrong: int
    """Cases in which bytes would be wrong, or missing, without the checker."""
    crashed: int
    """Cases that end in an exception without it."""
    found: int
    """Wrong cases that the checker stops."""
    missed: int
    """Cases in which wrong bytes pass."""


def outcome(mutant: Mutant, cases: Sequence[Case]) -> Outcome:
    passed: list[dict[Any, Any] | None] = []
    unchecked: list[dict[Any, Any] | None] = []
    with mutated(mutant):
        switch_off_prove()
        for results, change in ((passed, lambda: None), (unchecked, switch_off_checker)):
            change()
            for case in cases:
                try:
                    results.append(run(case))
                except MutantError:
                    raise
                except Exception:  # a refusal, or the mutant falls over by itself: nothing would move
                    results.append(None)
    wrong = [
        found is not None and not case.is_right(found) for case, found in zip(cases, unchecked, strict=True)
    ]
    missed = [
        found is not None and not case.is_right(found) for case, found in zip(cases, passed, strict=True)
    ]
    stopped = [is_wrong and found is None for is_wrong, found in zip(wrong, passed, strict=True)]
    return Outcome(sum(wrong), unchecked.count(None), sum(stopped), sum(missed))


def main(names: Sequence[str]) -> int:
    cases = make_cases()
    failed = 0
    for mutant in MUTANTS:
        if names and not any(name in mutant.name for name in names):
            continue
        result = outcome(mutant, cases)
        is_good = result.missed == 0 and result.wrong + result.crashed > 0
        failed += not is_good
        print(f"{'ok  ' if is_good else 'FAIL'} {result}  {mutant.name}", flush=True)
    print(f"{len(MUTANTS)} mutants, {len(cases)} cases, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
