"""Layout rules with one mistake each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from kvferry.core.manifest import Region
from kvferry.core.view import AxisMap, Digit, View
from kvferry.integrations.vllm.worker.described_layer import DescribedLayer, regions_of
from kvferry.integrations.vllm.worker.layouts import Contents
from kvferry.layout.order import Fork, Order


def sabotaged(layer: DescribedLayer) -> Iterator[tuple[str, DescribedLayer]]:
    """The layer with two steps of its order swapped, or the two digits of an axis: all that differ."""
    regions = regions_of({"": layer.cache.tensor})
    right = list(layer.views(regions))
    for what, order in _mistakes(layer.page.order or ()):
        page = replace(layer.page, order=order)
        wrong = replace(layer, contents=Contents(page, layer.contents.outer))
        if list(wrong.views(regions)) != right:
            yield what, wrong
    for view in right:
        for axis, places in view.axes:
            if places.size % 2 == 0 and places.size > 2 and len(places.digits) == 1:
                yield f"digits of {axis} of {view.state} swapped", Turned.of(layer, view.state, axis)


@dataclass(frozen=True)
class Turned(DescribedLayer):
    """A layer of whose axis every other coordinate is expected behind all the others."""

    state: str = ""
    axis: str = ""

    @classmethod
    def of(cls, layer: DescribedLayer, state: str, axis: str) -> Turned:
        return cls(layer.cache, layer.contents, layer.group, layer.tp_rank, layer.aliases, state, axis)

    def views(self, regions: Mapping[int, Region]) -> Iterator[View]:
        for view in super().views(regions):
            turns = self.axis if view.state == self.state else ""
            axes = tuple((name, _turned(places) if name == turns else places) for name, places in view.axes)
            yield replace(view, axes=axes)


def _turned(places: AxisMap) -> AxisMap:
    (digit,) = places.digits
    half = digit.size // 2
    return replace(places, digits=(Digit(half, digit.stride), Digit(2, half * digit.stride)))


def _mistakes(order: Order) -> Iterator[tuple[str, Order]]:
    for i, step in enumerate(order):
        before, behind = order[:i], order[i + 1 :]
        if behind and isinstance(step, str) and isinstance(behind[0], str):
            yield f"{step} and {behind[0]} swapped", (*before, behind[0], step, *behind[1:])
        if isinstance(step, Fork):
            yield from _in_fork(step, before, behind)


def _in_fork(fork: Fork, before: Order, behind: Order) -> Iterator[tuple[str, Order]]:
    names, orders = zip(*fork.branches, strict=True)
    yield "branches swapped", (*before, Fork(tuple(zip(names, orders[::-1], strict=True))), *behind)
    yield "branches in another order", (*before, Fork(fork.branches[::-1]), *behind)
    for i, order in enumerate(orders):
        for what, wrong in _mistakes(order):
            changed = (*orders[:i], wrong, *orders[i + 1 :])
            yield f"{what} in {names[i]}", (*before, Fork(tuple(zip(names, changed, strict=True))), *behind)
