"""A small engine to order: every test of the core builds its manifests with it."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvferry import Axis, AxisMap, Digit, Group, Kind, Manifest, Rank, Region, Span, State, View

HEADS, CHANNELS = 8, 4


def build(
    name: str = "engine",
    holds: Sequence[tuple[int, int] | None] = ((0, HEADS),),
    *,
    states: Sequence[str] = ("k",),
    order: str = "token head channel",
    packed: bool = False,
    turns: tuple[int, int] = (1, 1),
    group: Group | None = None,
    where: Mapping[str, Sequence[int]] | None = None,
    **fields: Any,
) -> Manifest:
    """An engine whose rank ``r`` holds the heads ``holds[r]`` of each state (with r in ``where``, if given).

    ``order`` is the nesting of a block, the finest axis last; ``turns`` is (ranks that take turns on the
    tokens, tokens per turn). Each state has a region of its own, or (``packed``) a part of one page.
    """
    group = group or Group("full", num_blocks=8, tokens_per_block=4)
    item_bytes = fields.get("item_bytes", 1)
    recurrent = fields.get("kind") is Kind.RECURRENT
    axes = (Axis("head", HEADS), Axis("channel", CHANNELS))
    made = {"item_bytes": item_bytes, "dtype": "u8"} | fields
    ranks = []
    for rank, heads in enumerate(holds):
        here = [s for s in states if heads and (where is None or rank in where[s])]
        start, stop = heads or (0, 0)
        cells = group.tokens_per_block // made.get("tokens_per_cell", 1)
        num_turns, per_turn = turns
        sizes = {"token": cells // num_turns, "head": stop - start, "channel": CHANNELS}
        names = [axis for axis in order.split() if not (recurrent and axis == "token")]
        strides, page = {}, item_bytes
        for axis in reversed(names):
            strides[axis] = page
            page *= sizes[axis]
        maps = {
            "head": AxisMap((Digit(max(1, stop - start), strides.get("head", 1)),), start),
            "channel": AxisMap((Digit(CHANNELS, strides.get("channel", 1)),)),
        }
        if not recurrent:
            step = strides["token"]
            held = Span(rank % num_turns, rank % num_turns + 1) if num_turns > 1 else None
            maps["token"] = AxisMap(
                (
                    Digit(cells // num_turns // per_turn, step * per_turn),
                    Digit(num_turns, 0, held),
                    Digit(per_turn, step),
                )
            )
        stride = page * len(here) if packed else page
        views = tuple(
            View.of(
                state,
                group.name,
                "pool" if packed else state,
                block_stride=stride,
                offset=page * i if packed else 0,
                axes=maps,
            )
            for i, state in enumerate(here)
        )
        names_of_regions = ["pool"] * bool(here) if packed else here
        regions = tuple(Region(region, stride * group.num_blocks) for region in names_of_regions)
        ranks.append(Rank(rank, regions, views))
    return Manifest(name, tuple(State(s, axes, **made) for s in states), (group,), tuple(ranks))


@pytest.fixture
def engine():
    return build
