"""Break one thing on purpose, and see it refused by name or caught by the oracle.

Each case takes engines, a plan, a request or a selection that is good, spoils one thing, and names what must
happen. Run as a script, this file prints what did happen: that is how ``python -O`` is compared.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import kvferry
from kvferry import (
    HOLE,
    Addressing,
    Axis,
    AxisMap,
    BlockTable,
    Code,
    Digit,
    Group,
    Identity,
    Manifest,
    Plan,
    Rank,
    Refused,
    Region,
    Request,
    RequestError,
    Route,
    Runs,
    Selection,
    Span,
    SpecError,
    State,
    View,
    compare,
    lower,
    plan,
    prove,
    select,
)
from kvferry.core.box import Box
from kvferry.core.manifest import VERSION
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe
from kvferry.testing.oracle import check
from kvferry.testing.small import small

ORACLE = "oracle"
"""The outcome of a case that only the oracle can see: the plan was good, the bytes were not."""

Result = Sequence[str] | None


@dataclass(frozen=True)
class Case:
    name: str
    law: str
    expected: tuple[str, ...]
    """Codes that the refusal must have; or (ORACLE, part of the first complaint)."""
    spoil: Callable[[], Result]

    @cached_property
    def outcome(self) -> tuple[str, ...]:
        """What happens: the codes of a refusal, or the oracle's first complaint; nothing is no news."""
        try:
            complaints = self.spoil()
        except Refused as error:
            return error.codes
        except RequestError as error:
            return (error.code,)
        except SpecError as error:
            return ("spec", str(error))
        return (ORACLE, complaints[0]) if complaints else ()


CASES: list[Case] = []


def sabotage(law: str, *expected: str) -> Callable[[Callable[[], Result]], Callable[[], Result]]:
    """Register a case under its function's name."""

    def register(spoil: Callable[[], Result]) -> Callable[[], Result]:
        CASES.append(Case(spoil.__name__.replace("_", "-"), law, expected, spoil))
        return spoil

    return register


# -- good engines, and ways to spoil them --------------------------------------------------------------


def engine(family: str, topology: str = "", *, blocks: int = 12) -> Manifest:
    return describe(small(family), Topology.parse(f"blocks={blocks},{topology}"), "engine")


def with_view(manifest: Manifest, state: str, change: Callable[[View], View], rank: int = -1) -> Manifest:
    """The manifest with one state's view changed, on one rank or (-1) on all."""
    ranks = (
        replace(
            r, views=tuple(change(v) if v.state == state and rank in (-1, r.rank) else v for v in r.views)
        )
        for r in manifest.ranks
    )
    return replace(manifest, ranks=tuple(ranks))


def with_axis(view: View, name: str, *digits: Digit, start: int = 0) -> View:
    return View.of(
        view.state,
        view.group,
        view.region,
        offset=view.offset,
        block_stride=view.block_stride,
        axes=dict(view.axes) | {name: AxisMap(digits, start)},
    )


def with_region(manifest: Manifest, name: str, num_bytes: int) -> Manifest:
    ranks = (
        replace(r, regions=tuple(replace(g, num_bytes=num_bytes) if g.name == name else g for g in r.regions))
        for r in manifest.ranks
    )
    return replace(manifest, ranks=tuple(ranks))


def with_group(manifest: Manifest, name: str, **changes: object) -> Manifest:
    groups = (replace(g, **changes) if g.name == name else g for g in manifest.groups)  # type: ignore[arg-type]
    return replace(manifest, groups=tuple(groups))


def with_state(manifest: Manifest, name: str, **changes: object) -> Manifest:
    states = (replace(s, **changes) if s.name == name else s for s in manifest.states)  # type: ignore[arg-type]
    return replace(manifest, states=tuple(states))


def without_views(manifest: Manifest, state: str) -> Manifest:
    ranks = (replace(r, views=tuple(v for v in r.views if v.state != state)) for r in manifest.ranks)
    return replace(manifest, ranks=tuple(ranks))


def proved(src: Manifest, dst: Manifest, dst_rank: int = 0) -> None:
    prove(plan(src, dst, dst_rank))


def gqa_plan(src_tp: int = 2, dst_tp: int = 1) -> Plan:
    return plan(engine("gqa", f"tp={src_tp}"), engine("gqa", f"tp={dst_tp}"), 0)


K, V = "layers.0.attn/k", "layers.0.attn/v"
LATENT = "layers.0.attn/latent"


# -- tiling: views that are no views -------------------------------------------------------------------


@sabotage("Tiling", Code.CELLS_COLLIDE, Code.VIEWS_OVERLAP)
def channel_stride_too_short():
    def halved(view: View) -> View:
        return with_axis(view, "channel", Digit(4, 1))

    # The channels of K fold onto each other and, shorter than they are, run one byte into V's.
    dst = with_view(engine("gqa"), K, lambda v: replace(halved(v), offset=v.offset + 4))
    proved(engine("gqa"), dst)


@sabotage("Tiling", Code.CELLS_COLLIDE)
def strides_make_cells_collide():
    latent = with_view(engine("mla"), LATENT, lambda v: with_axis(v, "token", Digit(16, 14)))
    proved(engine("mla"), latent)


@sabotage("Tiling", Code.CELLS_COLLIDE)
def strides_make_cells_collide_at_the_source():
    latent = with_view(engine("mla"), LATENT, lambda v: with_axis(v, "token", Digit(16, 14)))
    proved(latent, engine("mla"))


@sabotage("Tiling", Code.CELLS_COLLIDE)
def strides_collide_only_far_apart():
    # 3 rows of 16 bytes in, stride 48 of the high digit meets the low digit's fourth row.
    axis = (Digit(4, 48), Digit(4, 16))
    proved(engine("mla"), with_view(engine("mla"), LATENT, lambda v: with_axis(v, "token", *axis)))


@sabotage("Tiling", Code.CELLS_COLLIDE)
def block_stride_too_short():
    half = with_view(engine("mla"), LATENT, lambda v: replace(v, block_stride=v.block_stride // 2))
    proved(engine("mla"), half)


@sabotage("Tiling", Code.CELLS_COLLIDE)
def strides_too_tangled_for_a_proof():
    axes = {f"a{i}": AxisMap((Digit(7, 1_000_003 + 17 * i),)) for i in range(9)}
    state = State("s", tuple(Axis(name, 7) for name in axes), item_bytes=1, dtype="uint8")
    view = View.of("s", "g", "r", block_stride=1 << 40, axes={"token": AxisMap((Digit(1, 1),)), **axes})
    rank = Rank(0, (Region("r", 1 << 41),), (view,))
    tangled = Manifest("tangled", (state,), (Group("g", 1),), (rank,))
    proved(tangled, tangled)


@sabotage("Ownership", Code.OUT_OF_BOUNDS)
def offset_past_the_region():
    past = with_view(engine("gqa"), K, lambda v: replace(v, offset=v.offset + v.block_stride * 12))
    proved(engine("gqa"), past)


@sabotage("Ownership", Code.OUT_OF_BOUNDS)
def region_one_byte_short():
    dst = engine("mla")
    (size,) = {region.num_bytes for region in dst.ranks[0].regions}
    proved(engine("mla"), with_region(dst, "layers.0.attn", size - 1))


@sabotage("Ownership", Code.OUT_OF_BOUNDS)
def source_region_one_byte_short():
    src = engine("mla")
    (size,) = {region.num_bytes for region in src.ranks[0].regions}
    proved(with_region(src, "layers.0.attn", size - 1), engine("mla"))


@sabotage("Tiling", Code.VIEWS_OVERLAP)
def two_views_of_one_group_on_the_same_bytes():
    proved(engine("gqa"), with_view(engine("gqa"), V, lambda v: replace(v, offset=v.offset - 8)))


@sabotage("Tiling", Code.VIEWS_OVERLAP)
def two_views_that_share_a_single_byte():
    proved(engine("gqa"), with_view(engine("gqa"), V, lambda v: replace(v, offset=v.offset - 1)))


@sabotage("Tiling", Code.VIEWS_OVERLAP)
def two_groups_of_two_pools_on_one_region():
    dst = with_group(engine("window"), "full", pool="a pool of its own")
    proved(engine("window"), dst)


@sabotage("Tiling", Code.VIEWS_OVERLAP)
def wrong_block_stride_in_one_pool():
    # Twice the stride and half the blocks: in bounds and one-to-one, but block 1 is another group's block 2.
    dst = with_group(engine("window"), "full", num_blocks=6)
    name = "layers.1.attn/k"
    doubled = with_view(dst, name, lambda v: replace(v, block_stride=2 * v.block_stride))
    proved(engine("window"), doubled)


@sabotage("Tiling", Code.VIEWS_OVERLAP)
def page_shifted_into_the_next_block_of_its_pool():
    # One stride for all of the pool, but this group's page begins inside its neighbour's.
    dst = with_group(engine("window"), "full", num_blocks=11)
    name = "layers.1.attn/v"
    proved(engine("window"), with_view(dst, name, lambda v: replace(v, offset=v.offset + 64)))


@sabotage("Tiling", Code.VIEWS_OVERLAP)
def page_shifted_the_other_way_round():
    # The same with the groups' parts exchanged: now the earlier group reaches into the later one's block.
    dst = with_group(engine("window"), "window-20", num_blocks=11)
    name = "layers.0.attn/v"
    proved(engine("window"), with_view(dst, name, lambda v: replace(v, offset=v.offset + 64)))


# -- one tensor, two strides ---------------------------------------------------------------------------

MLA_STATE = "layers.2.attn/latent"
KDA_STATE = "layers.0.linear/ssm"


@sabotage("Tiling", Code.CELLS_COLLIDE, Code.OUT_OF_BOUNDS)
def kda_stride_used_for_mla_cells():
    """R001-1: kernel blocks of MLA stepped through with the stride of the KDA page in the same tensor."""

    def misread(view: View) -> View:
        high, low = view.axis("token").digits
        return with_axis(view, "token", Digit(high.size, view.block_stride), low)

    good = engine("kda-mla", "block=16,kernel=4")
    proved(good, with_view(good, MLA_STATE, misread))


@sabotage("Tiling", Code.CELLS_COLLIDE, Code.VIEWS_OVERLAP)
def mla_stride_used_for_kda_pages():
    good = engine("kda-mla", "block=16,kernel=4")
    mla = good.ranks[0].by_state[MLA_STATE]
    stride = mla.axis("token").digits[0].stride
    proved(good, with_view(good, KDA_STATE, lambda v: replace(v, block_stride=stride)))


@sabotage("Tiling", Code.VIEWS_OVERLAP)
def mla_with_its_own_unpadded_stride():
    good = engine("kda-mla")
    page = 16 * 8 * 2
    proved(good, with_view(good, MLA_STATE, lambda v: replace(v, block_stride=page)))


# -- coverage: what is needed and not there ------------------------------------------------------------


@sabotage("Coverage", Code.MISSING_STATE)
def state_missing_on_the_source():
    src = without_views(engine("mla-indexer"), "layers.1.indexer/scales")
    src = replace(src, states=tuple(s for s in src.states if s.name != "layers.1.indexer/scales"))
    proved(src, engine("mla-indexer"))


@sabotage("Coverage", Code.NOT_HELD)
def state_that_no_source_rank_holds():
    proved(without_views(engine("mla-indexer", "tp=2"), "layers.1.indexer/scales"), engine("mla-indexer"))


@sabotage("Coverage", Code.NOT_HELD)
def source_rank_missing_from_the_manifest():
    src = engine("gqa", "tp=2")
    proved(replace(src, ranks=src.ranks[:1]), engine("gqa"))


@sabotage("Coverage", Code.MISSING_STATE)
def narrowed_to_a_state_that_is_not_held():
    plan(engine("gqa"), engine("gqa", "pp=3"), 0, states={K, "layers.2.attn/k"})


@sabotage("Coverage", Code.GAP)
def state_dropped_from_the_pieces():
    good = gqa_plan()
    prove(replace(good, pieces=tuple(p for p in good.pieces if p.state != V)))


@sabotage("Coverage", Code.GAP)
def piece_lost():
    good = gqa_plan()
    prove(replace(good, pieces=good.pieces[:3] + good.pieces[4:]))


@sabotage("Coverage", Code.GAP)
def piece_too_small():
    good = gqa_plan()
    first = good.pieces[0]
    axes = tuple((n, (Span(1, 3),) if n == "head" else spans) for n, spans in first.box.axes)
    prove(replace(good, pieces=(replace(first, box=Box(axes)), *good.pieces[1:])))


@sabotage("Coverage", Code.GAP)
def every_second_token_lost():
    good = gqa_plan()
    first = good.pieces[0]
    axes = tuple((n, (Span(0, 1),) if n == "token" else spans) for n, spans in first.box.axes)
    prove(replace(good, pieces=(replace(first, box=Box(axes, period=2)), *good.pieces[1:])))


@sabotage("Tiling", Code.WRITTEN_TWICE)
def piece_doubled():
    good = gqa_plan()
    prove(replace(good, pieces=(*good.pieces, good.pieces[0])))


@sabotage("Tiling", Code.WRITTEN_TWICE)
def one_piece_doubled_another_lost():
    # As many cells as are wanted, but not the ones that are wanted.
    good = plan(engine("mla", "tp=2"), engine("mla"), 0)
    first = good.pieces[0]
    half = [replace(first, box=Box((("channel", (Span(0, 4),)), first.box.axes[1]))) for _ in range(2)]
    prove(replace(good, pieces=(*half, *good.pieces[1:])))


@sabotage("Tiling", Code.WRONG_SOURCE)
def piece_from_a_rank_that_does_not_hold_it():
    good = gqa_plan()
    other = 1 - good.pieces[0].src_rank
    prove(replace(good, pieces=(replace(good.pieces[0], src_rank=other), *good.pieces[1:])))


@sabotage("Tiling", Code.WRONG_SOURCE)
def piece_from_a_stage_that_lacks_the_layer():
    good = plan(engine("gqa", "pp=3"), engine("gqa"), 0)
    prove(replace(good, pieces=(replace(good.pieces[0], src_rank=2), *good.pieces[1:])))


@sabotage("Ownership", Code.NOT_NEEDED, Code.WRITTEN_TWICE)
def piece_outside_the_need():
    good = gqa_plan(1, 2)
    first = good.pieces[0]
    axes = tuple((n, (Span(2, 6),) if n == "head" else spans) for n, spans in first.box.axes)
    prove(replace(good, pieces=(*good.pieces, replace(first, box=Box(axes)))))


@sabotage("Ownership", Code.NOT_NEEDED)
def piece_of_a_state_that_is_not_needed():
    src, dst = engine("gqa"), engine("gqa")
    narrow = plan(src, dst, 0, states={K})
    prove(replace(narrow, pieces=plan(src, dst, 0, states={K, V}).pieces), states={K})


@sabotage("Ownership", Code.NOT_NEEDED)
def piece_for_another_destination_rank():
    good = gqa_plan(1, 2)
    prove(replace(good, pieces=(replace(good.pieces[0], dst_rank=1), *good.pieces[1:])))


@sabotage("Tiling", Code.NOT_NEEDED)
def piece_without_one_of_the_axes():
    good = gqa_plan()
    first = good.pieces[0]
    prove(replace(good, pieces=(replace(first, box=Box(first.box.axes[1:])), *good.pieces[1:])))


@sabotage("Coverage", Code.MISSING_STATE)
def plan_for_a_state_that_the_rank_does_not_hold():
    good = plan(engine("gqa"), engine("gqa", "pp=3"), 0)
    needed = (*good.states, "layers.2.attn/k")
    prove(replace(good, states=needed), states=needed)


@sabotage("Refusal", Code.UNKNOWN_RANK)
def destination_rank_unknown():
    plan(engine("gqa"), engine("gqa", "tp=2"), 2)


@sabotage("Refusal", Code.UNKNOWN_RANK)
def source_rank_of_a_piece_unknown():
    good = gqa_plan()
    prove(replace(good, pieces=(replace(good.pieces[0], src_rank=7), *good.pieces[1:])))


# -- lengths scaled wrongly by tensor parallelism ------------------------------------------------------


@sabotage("Coverage", Code.NOT_HELD)
def replicated_box_scaled_by_tp():
    """R000-6: each of two ranks claims half of the latent, as if MLA were cut over them."""

    def half(view: View) -> View:
        return with_axis(view, "channel", Digit(4, 2))

    proved(with_view(engine("mla", "tp=2"), LATENT, half), engine("mla"))


@sabotage("Tiling", Code.CELLS_COLLIDE)
def replicated_page_scaled_by_tp():
    """R000-6: the box is whole, the page has half its length."""

    def half(view: View) -> View:
        return replace(with_axis(view, "token", Digit(16, 8)), block_stride=view.block_stride // 2)

    proved(with_view(engine("mla", "tp=2"), LATENT, half), engine("mla"))


@sabotage("Ownership", Code.OUT_OF_BOUNDS)
def replicated_region_scaled_by_tp():
    """R000-6: rows and pages are right, the memory was registered with half its length."""
    src = engine("mla", "tp=2")
    (size,) = {region.num_bytes for region in src.ranks[0].regions}
    proved(with_region(src, "layers.0.attn", size // 2), engine("mla"))


@sabotage("Tiling", Code.CELLS_COLLIDE, Code.OUT_OF_BOUNDS)
def sharded_box_not_scaled():
    """R000-6: each of two ranks claims all heads of K, in pages that hold half of them."""

    def whole(view: View) -> View:
        return with_axis(view, "head", Digit(6, view.axis("head").digits[0].stride))

    proved(with_view(engine("gqa", "tp=2"), K, whole), engine("gqa"))


@sabotage("Ownership", Code.OUT_OF_BOUNDS)
def sharded_page_not_scaled():
    """R000-6: each rank's heads are right, but pages as long as one rank's whole cache run off the end."""
    src = engine("gqa", "tp=2")
    wide = with_view(src, K, lambda v: replace(v, block_stride=2 * v.block_stride))
    proved(with_view(wide, V, lambda v: replace(v, block_stride=2 * v.block_stride)), engine("gqa"))


# -- refusal: two meanings under one name --------------------------------------------------------------

MEANINGS = {
    "dtype": "fp16",
    "item_bytes": 1,
    "encoding": "k scaled by 8",
    "tokens_per_cell": 2,
    "tail": kvferry.Tail.PARTIAL,
    "axes": (Axis("channel", 8), Axis("lane", 1)),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_difference_in_meaning_is_refused_with_both_values(name):
    state = State(LATENT, (Axis("channel", 8),), item_bytes=2, dtype="bf16")
    src = Manifest("src", (state,), (), ())
    dst = with_state(src, LATENT, **{name: MEANINGS[name]})
    (found,) = compare(src, dst)
    place = "axis lane" if name == "axes" else name
    assert (found.code, found.state, found.field) == (Code.STATE_DIFFERS, LATENT, place)
    assert found.src
    assert found.dst
    assert found.src != found.dst


@sabotage("Refusal", Code.STATE_DIFFERS)
def cache_dtype_differs():
    proved(engine("gqa"), engine("gqa", "dtype=fp8"))


@sabotage("Refusal", Code.STATE_DIFFERS)
def number_of_heads_differs():
    proved(engine("gqa"), engine("mqa"), 0)


@sabotage("Refusal", Code.STATE_DIFFERS)
def one_state_here_is_several_there():
    apart = engine("gqa")
    shared = without_views(engine("gqa"), V)
    shared = replace(shared, states=tuple(s for s in shared.states if s.name != V))
    proved(apart, with_state(shared, K, aliases=(V,)))


@sabotage("Refusal", Code.IDENTITY_DIFFERS)
def weights_differ():
    src, dst = (
        replace(engine("gqa"), identity=Identity.of({"weights.content": digest})) for digest in ("1f", "2e")
    )
    proved(src, dst)


@sabotage("Refusal", Code.IDENTITY_UNKNOWN)
def weights_are_unknown_where_they_are_required():
    src = replace(engine("gqa"), identity=Identity.of({}, {"weights": "they were made up"}))
    required = Identity.of({"weights.content": "2e"}, is_required=True)
    proved(src, replace(engine("gqa"), identity=required))


@sabotage("Refusal", Code.STATE_DIFFERS)
def plan_proved_against_another_engine():
    good = gqa_plan()
    prove(replace(good, dst=engine("gqa", "dtype=fp8")))


@sabotage("Refusal", Code.VERSION)
def schema_version_differs():
    proved(replace(engine("gqa"), version=VERSION + 1), engine("gqa"))


@sabotage("Refusal", Code.TURNS_TOO_MANY)
def turns_that_never_seem_to_repeat():
    """Two ranks take turns every token there, every 40,000 tokens here: the pattern repeats after 80,002."""
    state = State("s", (), item_bytes=1, dtype="uint8")

    def turns(period: int) -> Manifest:
        spans = (Span(0, period - 1), Span(period - 1, period))
        ranks = tuple(
            Rank(
                rank,
                (Region("r", period),),
                (View.of("s", "g", "r", block_stride=period, axes={"token": AxisMap((digit,))}),),
            )
            for rank, digit in enumerate(Digit(period, 1, held=span) for span in spans)
        )
        return Manifest(f"turns of {period}", (state,), (Group("g", 1, tokens_per_block=period),), ranks)

    proved(turns(40_001), turns(2))


@sabotage("Refusal", Code.TOO_MANY_RUNS)
def more_runs_than_the_budget():
    crumbs = plan(engine("gqa"), engine("gqa", "layout=NHD"), 0)
    lower(prove(crumbs), max_runs_per_block=16)


# -- refusal: descriptions that contradict themselves --------------------------------------------------


@sabotage("Refusal", "spec", "view of layers.0.attn/k: group 'other' here, 'full' on another rank")
def one_state_in_two_groups():
    good = engine("gqa", "tp=2")
    two = replace(good, groups=(*good.groups, replace(good.groups[0], name="other")))
    with_view(two, K, lambda v: replace(v, group="other"), rank=1)


@sabotage("Refusal", "spec", "state 'layers.0.attn/k' is given twice")
def alias_that_is_another_states_name():
    with_state(engine("gqa"), V, aliases=(K,))


@sabotage("Refusal", "spec", "unknown group 'nobody'")
def view_in_an_unknown_group():
    with_view(engine("gqa"), K, lambda v: replace(v, group="nobody"))


@sabotage("Refusal", "spec", "unknown region 'nowhere'")
def view_in_an_unknown_region():
    with_view(engine("gqa"), K, lambda v: replace(v, region="nowhere"))


@sabotage("Refusal", "spec", "regions 'layers.0.attn' and 'layers.1.attn' overlap in memory")
def regions_that_overlap_in_memory():
    good = engine("gqa")
    (rank,) = good.ranks
    at = {f"layers.{i}.attn": 1000 * (i + 1) for i in range(3)}
    moved = tuple(replace(region, address=at[region.name]) for region in rank.regions)
    replace(good, ranks=(replace(rank, regions=moved),))


@sabotage("Refusal", "spec", "a recurrent state in a group with table addressing")
def recurrent_state_with_a_block_table():
    with_group(engine("mamba2"), "state", addressing=Addressing.TABLE)


@sabotage("Refusal", "spec", "axes ['channel', 'token'], but the state has ['channel', 'head', 'token']")
def view_without_one_of_the_axes():
    def headless(view: View) -> View:
        return replace(view, axes=tuple(axis for axis in view.axes if axis[0] != "head"))

    with_view(engine("gqa"), K, headless)


@sabotage("Refusal", "spec", "axis head reaches 7, but the state has 6")
def view_of_heads_that_are_not_there():
    with_view(engine("gqa"), K, lambda v: with_axis(v, "head", Digit(6, 128), start=1))


@sabotage("Refusal", "spec", "a block of 16 tokens has 16/1 from 0")
def view_of_blocks_of_another_size():
    with_view(engine("mla"), LATENT, lambda v: with_axis(v, "token", Digit(8, 32)))


# -- requests that do not fit: each fails alone --------------------------------------------------------


def window_pair() -> tuple[Route, Request]:
    """A good route and request of a model with window and full layers in one pool."""
    src, dst = engine("window", "tp=2,block=8"), engine("window", "block=4", blocks=48)
    some = {"layers.0.attn/k", "layers.1.attn/k"}  # one of the window, one full: the oracle is slow
    route = lower(prove(plan(src, dst, 0, states=some), states=some))
    return route, sample_request(src, dst, 30, placement=Placement.SCATTERED)


def tables(request: Request, side: str, **changes: BlockTable | None) -> Request:
    """The request with some of one side's tables replaced (None: taken out)."""
    merged = {**getattr(request, side), **{name.replace("_", "-"): t for name, t in changes.items()}}
    return replace(request, **{side: {name: table for name, table in merged.items() if table}})


def ids(request: Request, side: str, group: str) -> list[int]:
    return getattr(request, side)[group].block_ids.tolist()


def forged(side: str, group: str, forge: Callable[[list[int]], list[int]]) -> Result:
    route, request = window_pair()
    select(route, request)  # good as it stands
    table = getattr(request, side)[group]
    forged_table = BlockTable.of(forge(table.block_ids.tolist()), table.first_token)
    select(route, replace(request, **{side: {**getattr(request, side), group: forged_table}}))
    return None


@sabotage("Fail closed", "src-table-short")
def source_table_short():
    return forged("src", "full", lambda table: table[:-1])


@sabotage("Fail closed", "dst-table-short")
def destination_table_short():
    return forged("dst", "full", lambda table: table[:-1])


@sabotage("Fail closed", "src-table-short")
def source_table_empty():
    return forged("src", "full", lambda table: [])


@sabotage("Fail closed", "src-hole")
def hole_in_the_source_table():
    return forged("src", "full", lambda table: [HOLE, *table[1:]])


@sabotage("Fail closed", "dst-hole")
def hole_in_the_destination_table():
    return forged("dst", "full", lambda table: [*table[:-1], HOLE])


@sabotage("Fail closed", "src-block-range")
def source_block_out_of_range():
    return forged("src", "full", lambda table: [12, *table[1:]])


@sabotage("Ownership", "dst-block-range")
def destination_block_out_of_range():
    return forged("dst", "full", lambda table: [*table[:-1], 48])


@sabotage("Tiling", "dst-block-twice")
def destination_block_twice():
    return forged("dst", "full", lambda table: [table[1], *table[1:]])


@sabotage("Fail closed", "src-block-twice")
def source_block_twice():
    return forged("src", "full", lambda table: [table[1], *table[1:]])


@sabotage("Ownership", "dst-block-twice")
def block_of_another_group_in_the_same_pool():
    _, request = window_pair()
    theirs = ids(request, "dst", "window-20")[0]
    return forged("dst", "full", lambda table: [theirs, *table[1:]])


@sabotage("Fail closed", "spec", "a block table is a list of ids")
def negative_block_id():
    return forged("src", "full", lambda table: [-2, *table[1:]])


@sabotage("Fail closed", "src-table-short")
def source_table_starts_too_late():
    route, request = window_pair()
    late = BlockTable.of(ids(request, "src", "full"), first_token=8)
    select(route, tables(request, "src", full=late))


@sabotage("Fail closed", "src-table-missing")
def source_table_missing():
    route, request = window_pair()
    select(route, tables(request, "src", full=None))


@sabotage("Fail closed", "dst-table-missing")
def destination_table_missing():
    route, request = window_pair()
    select(route, tables(request, "dst", full=None))


@sabotage("Fail closed", "src-group-unknown")
def table_of_an_unknown_group():
    route, request = window_pair()
    select(route, tables(request, "src", nobody=BlockTable.of([0])))


@sabotage("Ownership", "kept-group-unknown")
def kept_tokens_of_an_unknown_group():
    route, request = window_pair()
    select(route, replace(request, kept={"ful": (Span(0, 4),)}))


@sabotage("Ownership", "kept-slot")
def kept_tokens_of_a_slot():
    src = engine("mamba2")
    request = sample_request(src, src, 5)
    select(lower(prove(plan(src, src, 0))), replace(request, kept={"state": (Span(0, 4),)}))


@sabotage("Coverage", "need-missing")
def group_whose_need_is_not_stated():
    route, request = window_pair()
    select(route, replace(request, need={"full": request.need["full"]}))


@sabotage("Ownership", "need-kept")
def tokens_both_needed_and_kept():
    route, request = window_pair()
    select(route, replace(request, kept={"full": (Span(0, 4),)}))


@sabotage("Fail closed", "src-table-length")
def two_slots_for_one_state():
    src = engine("mamba2")
    request = sample_request(src, src, 5)
    slots = BlockTable.of([0, 1])
    select(lower(prove(plan(src, src, 0))), replace(request, src={"state": slots}))


@sabotage("Fail closed", "dst-table-start")
def table_that_starts_out_of_turn():
    # Under context parallelism a table that starts one cell late would shift every rank's tokens.
    src, dst = engine("mla", "block=8"), engine("mla", "cp=2,block=8")
    request = sample_request(src, dst, 20)
    late = BlockTable.of(request.dst["full"].block_ids, first_token=1)
    select(
        lower(prove(plan(src, dst, 0))), replace(request, dst={"full": late}, need={"full": (Span(1, 20),)})
    )


@sabotage("Fail closed", "src-table-start")
def table_that_starts_inside_a_cell():
    src = engine("compressed", blocks=40)
    request = sample_request(src, src, 300)
    group = src.ranks[0].by_state["layers.1.attn/values"].group
    late = BlockTable.of(request.src[group].block_ids, first_token=1)
    select(lower(prove(plan(src, src, 0))), replace(request, src={**request.src, group: late}))


@sabotage("Fail closed", "src-ring-short")
def ring_shorter_than_the_need():
    state = State("s", (Axis("channel", 2),), item_bytes=2, dtype="bf16")
    ring = Group("ring", 4, tokens_per_block=8, addressing=Addressing.RING, window=8)
    axes = {"token": AxisMap((Digit(8, 4),)), "channel": AxisMap((Digit(2, 2),))}
    view = View.of("s", "ring", "r", block_stride=32, axes=axes)
    src = Manifest("ring", (state,), (ring,), (Rank(0, (Region("r", 128),), (view,)),))
    request = Request({"ring": BlockTable.of([1])}, {"ring": BlockTable.of([2])}, {"ring": (Span(3, 12),)})
    select(lower(prove(plan(src, src, 0))), request)


# -- bytes that go astray: only the oracle sees them ---------------------------------------------------


def moved() -> tuple[Plan, Request, Selection]:
    """A good selection, with kept tokens and slack that must be cleared."""
    src, dst = engine("gqa", "tp=2,block=8"), engine("gqa", "block=8,layout=NHD")
    the_plan = plan(src, dst, 0)
    request = sample_request(src, dst, 19, num_kept=3, placement=Placement.SCATTERED)
    return the_plan, request, select(lower(prove(the_plan)), request)


def rewritten(change: Callable[[Runs], Runs]) -> list[str]:
    """What the oracle says once the first source rank's runs were changed."""
    the_plan, request, selection = moved()
    assert_good(check(the_plan, request, selection))
    return check(
        the_plan, request, Selection.of({**selection.reads, 0: change(selection.reads[0])}, selection.zeros)
    )


def assert_good(complaints: list[str]) -> None:
    if complaints:
        raise RuntimeError(f"the case was broken before it was spoiled: {complaints[0]}")


def column(runs: Runs, name: str, by: int) -> Runs:
    values = getattr(runs, name).copy()
    values[len(values) // 2] += by
    return replace(runs, **{name: values})


def picked(runs: Runs, at: list[int]) -> Runs:
    return Runs(runs.src[at], runs.dst[at], runs.num_bytes[at])


@sabotage("Tiling", ORACLE, "instead of its own number")
def run_read_one_byte_off():
    return rewritten(lambda runs: column(runs, "src", 1))


@sabotage("Tiling", ORACLE, "instead of its own number")
def run_written_one_byte_off():
    return rewritten(lambda runs: column(runs, "dst", 1))


@sabotage("Tiling", ORACLE, "instead of its own number")
def run_one_byte_short():
    return rewritten(lambda runs: column(runs, "num_bytes", -1))


@sabotage("Coverage", ORACLE, "stale bytes instead of its own number")
def run_dropped():
    return rewritten(lambda runs: picked(runs, list(range(1, len(runs)))))


@sabotage("Tiling", ORACLE, "was written 2 times")
def run_doubled():
    return rewritten(lambda runs: picked(runs, [0, *range(len(runs))]))


@sabotage("Tiling", ORACLE, "instead of its own number")
def two_runs_swapped():
    def swapped(runs: Runs) -> Runs:
        src = runs.src.copy()
        src[[0, 1]] = src[[1, 0]]
        return replace(runs, src=src)

    return rewritten(swapped)


@sabotage("Tiling", ORACLE, "instead of its own number")
def ranks_swapped():
    the_plan, request, selection = moved()
    return check(
        the_plan, request, Selection.of({0: selection.reads[1], 1: selection.reads[0]}, selection.zeros)
    )


@sabotage("Ownership", ORACLE, "was kept, and was written")
def kept_cells_overwritten():
    the_plan, request, _ = moved()
    greedy = replace(request, need={"full": (Span(0, 19),)}, kept={})
    return check(the_plan, request, select(lower(prove(the_plan)), greedy))


@sabotage("Ownership", ORACLE, "is not the request's, and was written")
def block_of_somebody_else_written():
    the_plan, request, selection = moved()
    free = max(set(range(12)) - set(ids(request, "dst", "full")))
    runs = selection.reads[0]
    stride = the_plan.dst.ranks[0].views[0].block_stride
    stray = Runs(runs.src[:1], np.array([free * stride]), runs.num_bytes[:1])
    pairs = zip(vars(runs).values(), vars(stray).values(), strict=True)
    both = Runs(*(np.concatenate(pair) for pair in pairs))
    return check(the_plan, request, Selection.of({**selection.reads, 0: both}, selection.zeros))


@sabotage("Tiling", ORACLE, "stale")
def slack_left_stale():
    the_plan, request, selection = moved()
    assert_good([] if len(selection.zeros) else ["no slack to clear"])
    return check(the_plan, request, Selection.of(selection.reads, picked(selection.zeros, [])))


@sabotage("Coverage", ORACLE, "instead of its own number")
def zeros_written_over_what_is_needed():
    the_plan, request, selection = moved()
    return check(the_plan, request, Selection.of(selection.reads, column(selection.zeros, "dst", -8)))


@sabotage("Tiling", ORACLE, "instead of its own number")
def table_of_one_group_used_for_another():
    """R003-6: the window's layers read through the full layers' blocks."""
    route, request = window_pair()
    full, window = request.src["full"], request.src["window-20"]
    spare = BlockTable.of([i for i in range(12) if i not in full.block_ids][: len(full.block_ids)])
    mixed = BlockTable.of(full.block_ids[window.first_token // 8 :], window.first_token)
    return check(
        route.plan, request, select(route, replace(request, src={"full": spare, "window-20": mixed}))
    )


def mistaken(true_layout: str, claimed_layout: str) -> list[str]:
    """A plan that is right for the claimed layout, judged by the layout that the memory really has."""
    src = engine("gqa", "block=16")
    claimed = engine("gqa", f"block=16,layout={claimed_layout}")
    true = engine("gqa", f"block=16,layout={true_layout}")
    request = sample_request(src, true, 21)
    the_plan = plan(src, claimed, 0, states={K})
    selection = select(lower(prove(the_plan, states={K})), request)
    assert_good(check(the_plan, request, selection))
    return check(plan(src, true, 0, states={K}), request, selection)


@sabotage("Tiling", ORACLE, "instead of its own number")
def transposed_interior_mistaken_for_token_major():
    return mistaken("cpu-vec", "LBHKNC")


@sabotage("Tiling", ORACLE, "instead of its own number")
def head_major_mistaken_for_token_major():
    return mistaken("HND", "NHD")


@sabotage("Tiling", ORACLE, "instead of its own number")
def source_transposed_and_nobody_said_so():
    claimed, true = engine("gqa", "layout=LBHKNC"), engine("gqa", "layout=cpu-vec")
    dst = engine("gqa")
    request = sample_request(true, dst, 21)
    selection = select(lower(prove(plan(claimed, dst, 0, states={K}), states={K})), request)
    return check(plan(true, dst, 0, states={K}), request, selection)


# -- the tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sabotage_is_noticed(case):
    outcome = case.outcome
    if case.expected[0] in (ORACLE, "spec"):
        assert outcome[:1] == case.expected[:1]
        assert case.expected[1] in outcome[1]
    else:
        assert set(case.expected) <= set(outcome)


def test_every_code_was_seen_to_fire():
    """RB-2: a reason that no test can provoke is not a reason."""
    seen = {code for case in CASES for code in case.expected}
    assert seen >= {code.value for code in Code}


def test_every_law_of_the_pure_core_is_broken_at_least_once():
    assert {case.law for case in CASES} == {"Tiling", "Ownership", "Coverage", "Refusal", "Fail closed"}


def test_a_refusal_leaves_nothing_behind():
    src, dst = engine("gqa", "tp=2"), engine("gqa")
    before = plan(src, dst, 0)
    with pytest.raises(Refused):
        prove(replace(before, pieces=before.pieces[1:]))
    assert plan(src, dst, 0) == before
    prove(before)


@pytest.mark.parametrize(
    ("spoil", "place"),
    [
        (piece_lost, "layers.0.attn/v"),
        (offset_past_the_region, "destination rank 0, region layers.0.attn"),
        (source_region_one_byte_short, "source rank 0, region layers.0.attn"),
        (replicated_box_scaled_by_tp, "layers.0.attn/latent: channel [4, 8)"),
        (two_views_that_share_a_single_byte, "layers.0.attn/v uses the same bytes"),
        (piece_from_a_rank_that_does_not_hold_it, "head [3, 6) on rank 1"),
        (more_runs_than_the_budget, "96 runs per block of 16 cells, the budget is 16"),
    ],
)
def test_a_refusal_names_the_place(spoil, place):
    with pytest.raises(Refused) as caught:
        spoil()
    assert place in str(caught.value)


def test_python_without_assertions_changes_nothing():
    """Law Refusal: never an assertion. Every case again, under ``python -O``."""
    path = os.pathsep.join([str(Path(kvferry.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-O", __file__],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    optimised = json.loads(done.stdout)
    assert optimised.pop("assertions run") is False
    assert optimised == {case.name: list(case.outcome) for case in CASES}


if __name__ == "__main__":
    print(json.dumps({"assertions run": __debug__, **{case.name: case.outcome for case in CASES}}))
