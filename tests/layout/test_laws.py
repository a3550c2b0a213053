"""Laws of the layout room, each against loops or arrays that know nothing of strides."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.state import Kind, Tail
from kvferry.core.view import NOT_HELD, AxisMap, Digit
from kvferry.errors import SpecError
from kvferry.layout.order import (
    NAMED,
    OPAQUE,
    PACKED,
    Fork,
    Leaf,
    Order,
    Spot,
    Tile,
    grow,
    in_kernel_blocks,
    layout,
    num_bytes,
    packed_interior,
    spots,
)
from kvferry.layout.pages import (
    Item,
    Page,
    PagePart,
    RankShare,
    delta_net,
    mamba1,
    mamba2,
    opaque_slot,
    time_major,
    turn,
    with_turns,
)

Cell = tuple[str, str, tuple[tuple[str, int], ...]]
"""Layer, part, and a coordinate on each axis."""

WORDS = {"L": "layer", "B": "block", "H": "head", "N": "token", "K": "part", "C": "channel"}


# -- an order is a nest of loops -------------------------------------------------------------------


def walked(order: Order, leaves: Sequence[Leaf], num_blocks: int, pad: int) -> tuple[dict[Cell, int], int]:
    """The address of every cell, by walking through the loops, and where the walk ends."""
    found: dict[Cell, int] = {}

    def walk(order: Order, leaves: Sequence[Leaf], at: int, place: dict[str, int]) -> int:
        if not order:
            (leaf,) = leaves
            found[leaf.layer, leaf.part, tuple(sorted(place.items()))] = at
            return at + leaf.item_bytes
        step, rest = order[0], order[1:]
        if isinstance(step, Fork):
            for parts, inner in step.branches:
                if some := [leaf for leaf in leaves if leaf.part in parts]:
                    at = walk(inner, some, at, place)
        elif step in ("layer", "part"):
            for key in dict.fromkeys(getattr(leaf, str(step)) for leaf in leaves):
                at = walk(rest, [leaf for leaf in leaves if getattr(leaf, str(step)) == key], at, place)
        elif step == "block":
            for block in range(num_blocks):
                end = walk(rest, leaves, at, {**place, "block": block})
                at = -(-(end - at) // pad) * pad + at
        else:
            axis, count = (step.axis, step.size) if isinstance(step, Tile) else (str(step), 0)
            if not count:
                inside = prod(tile.size for tile in tiles_of(rest, leaves[0].part) if tile.axis == axis)
                count = leaves[0].sizes.get(axis, 0) // inside
                if not count:
                    return walk(rest, leaves, at, place)
            for value in range(count):
                at = walk(rest, leaves, at, {**place, axis: place.get(axis, 0) * count + value})
        return at

    end = walk(order, leaves, 0, {})
    return found, end


def tiles_of(order: Order, part: str) -> Iterator[Tile]:
    for step in order:
        if isinstance(step, Tile):
            yield step
        elif isinstance(step, Fork):
            for parts, inner in step.branches:
                yield from tiles_of(inner, part) if part in parts else ()


def addressed(found: Sequence[Spot]) -> dict[Cell, int]:
    """The address of every cell, by the offset and the strides of each leaf."""
    cells: dict[Cell, int] = {}
    for spot in found:
        maps = {axis: AxisMap(tuple(Digit(*pair) for pair in pairs)) for axis, pairs in spot.digits.items()}
        offsets = {axis: each.offsets() for axis, each in maps.items()}
        for place in np.ndindex(*(len(each) for each in offsets.values())):
            at = spot.offset + sum(int(each[i]) for each, i in zip(offsets.values(), place, strict=True))
            cells[spot.leaf.layer, spot.leaf.part, tuple(sorted(zip(offsets, place, strict=True)))] = at
    return cells


def leaves_of(sizes: dict[str, int], item_bytes: tuple[int, int] = (2, 3)) -> list[Leaf]:
    parts = list(zip("kv", item_bytes, strict=True))
    return [Leaf(layer, part, sizes, n) for layer in ("layers.0", "layers.1") for part, n in parts]


TILES = st.lists(st.tuples(st.sampled_from(["token", "channel"]), st.sampled_from([2, 3])), max_size=2)


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, dict[str, int]]:
    """An order of all letters with tiles, each behind its axis, and sizes that they divide."""
    steps: list[str | Tile] = list(draw(st.permutations([*WORDS.values()])))
    sizes = {"head": draw(st.integers(1, 3))} | {a: draw(st.integers(1, 3)) for a in ("token", "channel")}
    for axis, size in draw(TILES):
        steps.insert(draw(st.integers(steps.index(axis) + 1, len(steps))), Tile(axis, size))
        sizes[axis] *= size
    return tuple(steps), sizes


@given(orders(), st.integers(1, 3), st.sampled_from([1, 64]))
def test_an_order_is_a_nest_of_loops(order_and_sizes, num_blocks, pad):
    order, sizes = order_and_sizes
    leaves = leaves_of(sizes)
    node = grow(order, leaves, num_blocks=num_blocks, page_bytes=lambda n: -(-n // pad) * pad)
    expected, end = walked(order, leaves, num_blocks, pad)
    assert addressed(list(spots(node))) == expected
    assert num_bytes(node) == end


@pytest.mark.parametrize("name", [*NAMED, *PACKED])
def test_a_named_layout_is_a_nest_of_loops(name):
    order, leaves = layout(name).order, leaves_of({"head": 2, "token": 32, "channel": 16}, (2, 2))
    node = grow(order, leaves, num_blocks=2)
    assert addressed(list(spots(node, offset=100))) == {
        cell: 100 + at for cell, at in walked(order, leaves, 2, 1)[0].items()
    }


def test_an_axis_that_no_part_has_is_no_loop():
    leaf = Leaf("layers.0", "latent", {"token": 4, "channel": 8}, 2)
    (spot,) = spots(grow(("block", "head", "token", "channel"), [leaf], num_blocks=3))
    assert spot.digits == {"block": [(3, 64)], "token": [(4, 16)], "channel": [(8, 2)]}


def test_an_order_that_does_not_separate_or_place_its_parts_is_refused():
    k, v = leaves_of({"token": 4})[:2]
    with pytest.raises(SpecError, match=r"does not separate \['k', 'v'\]"):
        grow(("token",), [k, v], num_blocks=1)
    with pytest.raises(SpecError, match=r"omits some of \['k', 'v'\]"):
        grow((Fork.of(k=("token",)),), [k, v], num_blocks=1)
    with pytest.raises(SpecError, match="k: token of 4 cannot be split into tiles of 3"):
        grow(("part", "token", Tile("token", 3)), [k, v], num_blocks=1)
    other = Leaf("layers.0", "v", {"token": 5}, 2)
    with pytest.raises(SpecError, match=r"a loop over token needs one size for all parts, got \[4, 5\]"):
        grow(("token", "part"), [k, other], num_blocks=1)


# -- kernel blocks ---------------------------------------------------------------------------------


@given(st.permutations(["head", "token", "part", "channel"]), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_a_block_of_kernel_blocks_is_the_pages_of_its_kernel_blocks_one_after_another(
    inside, num_tokens, num_kernel_blocks
):
    order, sizes = ("block", *inside), {"head": 2, "channel": 3}
    big = leaves_of({**sizes, "token": num_tokens * num_kernel_blocks})[:2]
    small = leaves_of({**sizes, "token": num_tokens})[:2]
    kernel = walked(order, small, 2 * num_kernel_blocks, 1)[0]
    got = addressed(list(spots(grow(in_kernel_blocks(order, num_tokens), big, num_blocks=2))))
    assert len(got) == len(kernel)
    for (layer, part, place), at in got.items():
        where = dict(place)
        block, token = where["block"], where["token"]
        where["block"] = block * num_kernel_blocks + token // num_tokens
        where["token"] = token % num_tokens
        assert kernel[layer, part, tuple(sorted(where.items()))] == at


def test_kernel_blocks_are_cut_inside_of_forks_too():
    order = ("block", "head", *packed_interior("cpu-amx"))
    assert in_kernel_blocks(order, 32) == (
        *("block", "token", "head"),
        Fork.of(
            k=(Tile("token", 2), "channel", Tile("token", 16), Tile("channel", 2)),
            v=("channel", Tile("token", 16), Tile("channel", 16), Tile("token", 2)),
        ),
    )


# -- layouts by name -------------------------------------------------------------------------------


def test_every_order_of_the_letters_is_a_layout_and_nests_as_they_say():
    for letters in map("".join, permutations("LBHNKC")):
        made = layout(letters)
        assert made.order == tuple(WORDS[letter] for letter in letters)
        assert made.outer == tuple(WORDS[letter] for letter in letters if letter in "LB")
        assert made.across_layers == (made.outer == ("block", "layer"))


def test_where_k_and_v_are_not_named_they_are_packed_per_token():
    for letters in map("".join, permutations("LBHNC")):
        assert layout(letters).order == layout(letters.replace("C", "KC")).order
    assert layout(OPAQUE).order == layout("HND").order


def test_a_packing_nests_as_its_letters_say():
    for letters in map("".join, permutations("LBH")):
        made = layout(f"{letters}[NC|CN]")
        assert made.order[:-1] == tuple(WORDS[letter] for letter in letters)
        assert made.order[-1] == Fork.of(k=("token", "channel"), v=("channel", "token"))
        assert made.across_layers == (letters.index("B") < letters.index("L"))


@pytest.mark.parametrize(
    "interior",
    ["N", "NNC", "NCC", "n4NC", "NCn", "NCn0", "NCn016", "CNn4c2x", "c2NC", "NCn1000000", "nC", "N4C"],
)
def test_an_interior_has_n_and_c_once_each_before_their_tiles(interior):
    for name in (f"LBH[{interior}|NC]", f"LBH[NC|{interior}]"):
        with pytest.raises(SpecError, match=r"must have N and C once each|unknown layout"):
            layout(name)


@pytest.mark.parametrize("name", ["", "LBHN", "LBHNKCC", "LBHNKX", "LLBHNC", "LB[NC|NC]", "LLH[NC|NC]"])
def test_what_is_no_order_of_the_letters_is_no_layout(name):
    with pytest.raises(SpecError, match="unknown layout"):
        layout(name)


# -- ranks that take turns -------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(2, 4),
    st.data(),
)
def test_ranks_take_turns_at_so_many_cells_each(sizes, each, num_ranks, data):
    """Cell c is the rank's whose turn it is, and lies where the next of its own cells lies."""
    num_cells = prod(sizes)
    steps = data.draw(st.permutations([7, 100, 1_000][: len(sizes)]))
    digits = [Digit(size, step) for size, step in zip(sizes, steps, strict=True)]
    plain = AxisMap(tuple(digits)).offsets().tolist()
    rank = data.draw(st.integers(0, num_ranks - 1))
    whole_turns = all(prod(sizes[i:]) % each == 0 or each % prod(sizes[i:]) == 0 for i in range(len(sizes)))
    if each > num_cells or not whole_turns or num_cells % each:
        with pytest.raises(SpecError, match=f"an interleave of {each} cells"):
            with_turns(digits, each, turn(rank, num_ranks))
        return
    got = AxisMap(tuple(with_turns(digits, each, turn(rank, num_ranks)))).offsets().tolist()
    assert len(got) == num_cells * num_ranks
    own = iter(plain)
    for cell, offset in enumerate(got):
        assert offset == (next(own) if cell // each % num_ranks == rank else NOT_HELD)


def test_a_rank_without_turns_holds_every_token():
    page = Page((PagePart("x", (), Item.of("bf16")),))
    ((_, tokens),) = RankShare(0, 1).axes(page, page.parts[0], {"token": [(4, 2)]})
    assert tokens == AxisMap((Digit(4, 2),))


# -- slots of recurrent state ----------------------------------------------------------------------

BF16, FP32 = Item.of("bf16"), Item.of("fp32")
SLOTS = {
    "mamba1": (mamba1(12, 8, 4, BF16, FP32), {"conv.x": 12}, 12 * 8),
    "mamba2": (mamba2(6, 4, 2, 8, 4, BF16, FP32), {"conv.x": 24, "conv.B": 16, "conv.C": 16}, 6 * 4 * 8),
    "gdn": (delta_net(2, 8, 4, 6, 4, BF16, FP32), {"conv.q": 16, "conv.k": 16, "conv.v": 24}, 4 * 6 * 8),
}
"""By kind: the slot, the channels of each part of its convolution (of which 3 inputs are kept), and the
elements of its state."""


@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize("is_time_major", [False, True])
def test_a_slot_is_its_convolution_as_one_array_with_the_state_behind_it(kind, is_time_major):
    """Channels outside and time inside, part by part; or time outside, and all parts in each row."""
    page, widths, num_state = SLOTS[kind]
    assert page.kind is Kind.RECURRENT
    row = [(name, channel) for name, n in widths.items() for channel in range(n)]
    if is_time_major:
        page = time_major(page)
        expected = [(name, channel, time) for time in range(3) for name, channel in row]
    else:
        expected = [(name, channel, time) for name, channel in row for time in range(3)]
    assert page.order is not None
    leaves = [RankShare(0, 1).leaf(page, part, "layers.0", 1) for part in page.parts]
    node = grow(page.order, leaves, num_blocks=1)
    cells = sorted((at, part, dict(place)) for (_, part, place), at in addressed([*spots(node)]).items())
    assert [(name, *numbered(page, name, place)) for _, name, place in cells if name != "ssm"] == expected
    num_conv_bytes = 3 * len(row) * BF16.num_bytes
    assert [at for at, part, _ in cells if part == "ssm"] == list(
        range(num_conv_bytes, num_conv_bytes + num_state * FP32.num_bytes, FP32.num_bytes)
    )
    assert num_bytes(node) == sum(part.num_bytes for part in page.parts)


def numbered(page: Page, name: str, place: dict[str, int]) -> tuple[int, int]:
    """A channel's number within its part, over all heads or groups, and its time."""
    channel = 0
    for dim in page.part(name).dims[:-1]:
        channel = channel * dim.size + place[dim.axis]
    return channel, place["time"]


@pytest.mark.parametrize("kind", SLOTS)
def test_ranks_share_a_slot_evenly(kind):
    page, _, _ = SLOTS[kind]
    halves = [prod(RankShare(r, 2).leaf(page, p, "x", 1).sizes.values()) for p in page.parts for r in (0, 1)]
    assert halves == [prod(dim.size for dim in part.dims) // 2 for part in page.parts for _ in (0, 1)]
    assert all("token" not in RankShare(0, 2).leaf(page, part, "x", 1).sizes for part in page.parts)


def test_an_opaque_slot_is_a_state_and_no_cache_of_tokens():
    page = opaque_slot(64, 2, "x")
    (state,) = page.states("layers.0", ("layers.1",))
    assert (state.kind, state.item_bytes, state.encoding) == (Kind.RECURRENT, 64, "x")
    assert (state.name, state.aliases) == ("layers.0/slot", ("layers.1/slot",))
    assert page.tail is Tail.COMPLETE
    assert not page.is_whole_block
    assert page.part("slot") is page.parts[0]


def test_what_does_not_divide_is_refused_with_the_layer_the_part_and_the_axis():
    page, _, _ = SLOTS["mamba2"]
    with pytest.raises(SpecError, match=r"layers\.3/conv\.x: head of 6 cannot be split over 4 ranks"):
        RankShare(0, 4).held(page.parts[0], "layers.3")
    with pytest.raises(SpecError, match=r"^conv\.x: head of 6"):
        RankShare(0, 4).held(page.parts[0])
