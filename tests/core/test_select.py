"""Block tables and token intervals in, byte runs out; every move is checked against the slow oracle."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from kvferry import (
    HOLE,
    Addressing,
    BlockTable,
    Code,
    Group,
    Kind,
    Refused,
    Region,
    Request,
    RequestError,
    Selection,
    Slack,
    Span,
    SpecError,
    Tail,
    lower,
    need_of,
    plan,
    prove,
    select,
)
from kvferry.core import lower as lower_module
from kvferry.core.manifest import MAX_REGIONS
from kvferry.testing.oracle import check

CELL = 8 * 4
"""Bytes of one token of one state: heads × channels."""


def table(*block_ids, first_token=0):
    return BlockTable.of(block_ids, first_token)


def moved(src, dst, request, *, dst_rank=0, slack=Slack.CLEAR):
    """What a request moves, once the oracle has found nothing wrong with it."""
    made = plan(src, dst, dst_rank)
    selection = select(lower(prove(made)), request, slack=slack)
    assert check(made, request, selection, cleared=slack is Slack.CLEAR) == []
    return selection


def failing(src, dst, request):
    """(code, group) of the request's error; the route must live on."""
    made = lower(prove(plan(src, dst, 0)))
    with pytest.raises(RequestError) as error:
        select(made, request)
    good = {"full": table(0)}
    assert select(made, Request(good, good, {"full": (Span(0, 4),)})).total_bytes == 4 * CELL
    return error.value.code, error.value.group


def full(src, dst, *need, kept=()):
    return Request({"full": src}, {"full": dst}, {"full": need}, {"full": kept})


def ring(cells=8, name="full"):
    return Group(name, num_blocks=4, tokens_per_block=cells, addressing=Addressing.RING)


# ------------------------------------------------------------------------------- what is moved


def test_neighbouring_blocks_become_one_run(engine):
    selection = moved(engine(), engine(), full(table(2, 3, 4), table(5, 6, 7), Span(0, 12)))
    assert list(selection.reads[0]) == [(0, 2 * 4 * CELL, 0, 5 * 4 * CELL, 12 * CELL)]


def test_the_order_of_a_table_is_kept_where_blocks_do_not_follow_one_another(engine):
    selection = moved(engine(), engine(), full(table(3, 2), table(5, 6), Span(0, 8)))
    assert [run[1] // (4 * CELL) for run in selection.reads[0]] == [3, 2]


@pytest.mark.parametrize(("src_block", "dst_block"), [(4, 16), (16, 4), (4, 6), (6, 4), (12, 8)])
# R001-5
def test_unequal_block_sizes_meet_at_both_sides_edges(engine, src_block, dst_block):
    src, dst = (engine(group=Group("full", 16, size)) for size in (src_block, dst_block))
    tables = [table(*range(9, 9 - -(-22 // size), -1)) for size in (src_block, dst_block)]
    selection = moved(src, dst, full(*tables, Span(0, 22)), slack=Slack.LEAVE)
    assert selection.total_bytes == 22 * CELL


# R002-7
def test_pools_of_unequal_size_do_not_disturb_one_another(engine):
    src = engine(group=Group("full", 100, 4))
    selection = moved(src, engine(), full(table(99, 0), table(0, 7), Span(0, 8)))
    assert selection.total_bytes == 8 * CELL


# R002-12
def test_a_prefix_hit_reads_the_missing_tail_only(engine):
    request = full(table(1, 2, 3), table(1, 2, 3), Span(8, 12), kept=(Span(0, 8),))
    assert moved(engine(), engine(), request).total_bytes == 4 * CELL


def test_a_prefix_hit_inside_a_block_leaves_the_kept_cells_alone(engine):
    request = full(table(1), table(6), Span(2, 3), kept=(Span(0, 2),))
    selection = moved(engine(), engine(), request)
    written = sum(size for *_, size in (*selection.reads[0], *selection.zeros))
    assert written == 2 * CELL


# R002-12
def test_recurrent_state_is_never_trimmed_by_a_prefix_hit(engine):
    slots = Group("full", 4, 1, Addressing.SLOT)
    states = engine(kind=Kind.RECURRENT, group=slots)
    for need in ({}, {"full": need_of(slots, 200, num_kept=100)}):
        request = Request({"full": table(3)}, {"full": table(1)}, need)
        assert list(moved(states, states, request).reads[0]) == [(0, 3 * CELL, 0, CELL, CELL)]


def test_a_need_of_nothing_moves_nothing(engine):
    selection = moved(engine(), engine(), full(table(1), table(1)))
    assert (selection.num_runs, len(selection.zeros)) == (0, 0)


def test_spans_may_come_unsorted_and_touching(engine):
    request = full(table(1, 2), table(3, 4), Span(4, 8), Span(0, 2), Span(2, 4))
    assert moved(engine(), engine(), request).num_runs == 1


# R003-6
def test_a_window_reads_past_holes_and_a_sink_before_them(engine):
    group = Group("full", 16, 4, window=6, sinks=2)
    windowed = engine(group=group)
    need = need_of(group, 19)
    assert need == (Span(0, 2), Span(13, 19))
    tables = table(5, HOLE, HOLE, 7, 9), table(1, HOLE, HOLE, 2, 3)
    assert moved(windowed, windowed, full(*tables, *need), slack=Slack.LEAVE).total_bytes == 8 * CELL


def test_a_table_may_start_late_on_either_side(engine):
    request = full(table(3, 4, first_token=8), table(0, 1, 2, 6), Span(9, 16), kept=(Span(0, 9),))
    assert moved(engine(), engine(), request).total_bytes == 7 * CELL


@pytest.mark.parametrize(
    ("num_tokens", "num_kept"), [(0, 0), (3, 0), (100, 0), (100, 97), (100, 1), (100, 100)]
)
def test_what_a_window_needs_is_recent_or_a_sink_and_not_kept(num_tokens, num_kept):
    group = Group("w", 9, 4, window=10, sinks=4)
    needed = {t for span in need_of(group, num_tokens, num_kept) for t in range(span.start, span.stop)}
    read = {t for t in range(num_tokens) if t < 4 or t >= num_tokens - 10}
    assert needed == {t for t in read if t >= num_kept}


# ---------------------------------------------------------------------------------------- slack


def test_slack_is_copied_along_where_that_makes_fewer_runs(engine):
    """In a head-major block three of four tokens are a run per head; all four are one run."""
    headed = engine(order="head token channel")
    selection = moved(headed, headed, full(table(1), table(2), Span(0, 3)))
    assert (selection.num_runs, len(selection.zeros)) == (1, 0)


def test_slack_is_zeroed_where_copying_it_would_not_help(engine):
    selection = moved(engine(), engine(), full(table(1), table(2), Span(0, 3)))
    assert list(selection.reads[0]) == [(0, 4 * CELL, 0, 8 * CELL, 3 * CELL)]
    assert [run[2:] for run in selection.zeros] == [(0, 11 * CELL, CELL)]


def test_slack_is_left_alone_if_the_engine_clears_its_blocks(engine):
    selection = moved(engine(), engine(), full(table(1), table(2), Span(0, 3)), slack=Slack.LEAVE)
    assert (selection.total_bytes, len(selection.zeros)) == (3 * CELL, 0)


@pytest.mark.parametrize("dst_rank", [0, 1])
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_slack_is_cleared_under_context_parallelism_too(engine, dst_rank, num_tokens):
    turning = engine(holds=[(0, 8)] * 2, turns=(2, 1), group=Group("full", 8, 8))
    request = full(table(1, 2), table(2), Span(0, num_tokens))
    selection = moved(engine(), turning, request, dst_rank=dst_rank)
    written = selection.total_bytes + selection.zeros.total_bytes
    assert written == 4 * CELL


@pytest.mark.parametrize("per_turn", [1 << 14, 1 << 15, 1 << 16])
def test_turns_may_be_as_long_as_a_block(engine, per_turn):
    """Two ranks take turns every 32,768 tokens and more: each holds one long part of a block."""
    group = Group("full", 2, 2 * per_turn)
    turning, plain = engine(holds=[(0, 8)] * 2, turns=(2, per_turn), group=group), engine(group=group)
    request = full(table(1), table(0), Span(0, 2 * per_turn))
    selection = select(lower(prove(plan(turning, plain, 0))), request)
    size = per_turn * CELL
    assert {rank: list(runs) for rank, runs in selection.reads.items()} == {
        0: [(0, size, 0, 0, size)],
        1: [(0, size, 0, size, size)],
    }


def test_turns_with_a_long_common_period_take_no_memory_for_it(engine):
    """Turns within 4096 × 64 tokens and within 4095 × 64 repeat after 2^30 cells."""
    src = engine(holds=[(0, 8)] * 2, turns=(2, 4096 * 32), group=Group("full", 2, 4096 * 64))
    dst = engine(holds=[(0, 8)] * 2, turns=(2, 4095 * 32), group=Group("full", 2, 4095 * 64))
    made = lower(prove(plan(src, dst, 0)))
    tracemalloc.start()
    assert select(made, full(table(1), table(0), Span(0, 1000))).total_bytes == 1000 * CELL
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_only_bytes_of_the_requests_own_blocks_are_written(engine):
    selection = moved(engine(), engine(order="head token channel"), full(table(1), table(2), Span(1, 3)))
    written = {at // (4 * CELL) for _, _, _, at, _ in (*selection.reads[0], *selection.zeros)}
    assert written == {2}


# ---------------------------------------------------------------------------------------- cells


@pytest.mark.parametrize(("tail", "cells"), [(Tail.COMPLETE, 2), (Tail.PARTIAL, 3)])
def test_a_cell_of_several_tokens_moves_when_it_is_there(engine, tail, cells):
    compressed = engine(tokens_per_cell=4, tail=tail, group=Group("full", 8, 16))
    request = full(table(1), table(2), Span(0, 11))
    assert moved(compressed, compressed, request, slack=Slack.LEAVE).total_bytes == cells * CELL


# R002-15
def test_a_prompt_shorter_than_one_cell_moves_nothing(engine):
    compressed = engine(tokens_per_cell=4, group=Group("full", 8, 16))
    assert moved(compressed, compressed, full(table(1), table(2), Span(0, 3))).num_runs == 0


def test_an_opaque_block_moves_whole_from_its_first_token_on(engine):
    opaque = engine(tokens_per_cell=4, tail=Tail.PARTIAL, item_bytes=7)
    assert moved(opaque, opaque, full(table(1), table(2), Span(0, 1))).total_bytes == 7 * CELL


def test_a_complete_cell_belongs_to_its_last_token(engine):
    """Cell 1 has the tokens 4 to 7. Kept up to 6, it was not there yet: it moves. Kept up to 8, it stays."""
    compressed = engine(tokens_per_cell=4, group=Group("full", 8, 16))
    cut = full(table(1), table(2), Span(6, 16), kept=(Span(0, 6),))
    assert moved(compressed, compressed, cut).total_bytes == 3 * CELL
    whole = full(table(1), table(2), Span(8, 16), kept=(Span(5, 8),))
    assert moved(compressed, compressed, whole, slack=Slack.LEAVE).total_bytes == 2 * CELL


def test_a_partial_cell_is_needed_whole_or_kept_whole(engine):
    opaque = engine(tokens_per_cell=4, tail=Tail.PARTIAL, group=Group("full", 8, 16))
    cut = full(table(1), table(2), Span(6, 16), kept=(Span(0, 6),))
    with pytest.raises(RequestError, match="need-kept: group full: cells"):
        moved(opaque, opaque, cut)
    assert moved(opaque, opaque, full(table(1), table(2), Span(8, 16), kept=(Span(0, 8),)))


def test_an_empty_interval_needs_no_cell_and_keeps_none(engine):
    opaque = engine(tokens_per_cell=4, tail=Tail.PARTIAL)
    assert moved(opaque, opaque, full(table(1), table(2), Span(2, 2))).num_runs == 0
    assert moved(opaque, opaque, full(table(1), table(2), Span(0, 3), kept=(Span(2, 2),))).num_runs == 1


# ---------------------------------------------------------------------------------------- rings


@pytest.mark.parametrize("start", range(0, 17, 3))
def test_a_ring_is_read_around_its_end(engine, start):
    src, dst = engine(group=ring(8)), engine(group=Group("full", 12, 4))
    request = full(table(1), table(*range(6)), Span(start, start + 7))
    assert moved(src, dst, request, slack=Slack.LEAVE).total_bytes == 7 * CELL


@pytest.mark.parametrize("start", range(0, 17, 3))
def test_a_ring_is_filled_around_its_end_and_cleared(engine, start):
    src, dst = engine(group=Group("full", 12, 4)), engine(group=ring(8))
    request = full(table(*range(6)), table(2, first_token=4), Span(start, start + 5))
    selection = moved(src, dst, request)
    assert selection.total_bytes + selection.zeros.total_bytes == 8 * CELL


def test_rings_of_unequal_size_meet(engine):
    request = full(table(0), table(3), Span(9, 14))
    assert moved(engine(group=ring(6)), engine(group=ring(8)), request, slack=Slack.LEAVE)


def test_kept_tokens_of_a_ring_are_not_cleared_as_slack(engine):
    """Token 6 sits where token 14 would: in a ring of eight, clearing 'cell 14' would clear token 6."""
    request = full(table(*range(3)), table(0), Span(8, 11), kept=(Span(6, 8),))
    selection = moved(engine(), engine(group=ring(8)), request)
    written = {
        at // CELL + i
        for _, _, _, at, size in (*selection.reads[0], *selection.zeros)
        for i in range(size // CELL)
    }
    assert written == {0, 1, 2, 3, 4, 5}


# --------------------------------------------------------------------- requests that do not fit


@pytest.mark.parametrize(
    ("src", "dst", "need", "code"),
    [
        (table(1), table(1, 2), Span(0, 5), "src-table-short"),
        (table(1, 2), table(1), Span(0, 5), "dst-table-short"),
        (table(1, first_token=4), table(1), Span(0, 4), "src-table-short"),
        (table(1), table(1, first_token=4), Span(0, 4), "dst-table-short"),
        (table(), table(1), Span(0, 1), "src-table-short"),
        (table(HOLE), table(1), Span(0, 1), "src-hole"),
        (table(1), table(HOLE), Span(0, 1), "dst-hole"),
        (table(8), table(1), Span(0, 1), "src-block-range"),
        (table(1), table(8), Span(0, 1), "dst-block-range"),
        (table(1, 1), table(1, 2), Span(0, 8), "src-block-twice"),
        (table(1, 2), table(1, 1), Span(0, 8), "dst-block-twice"),
    ],
)
# R002-3
def test_a_table_that_does_not_serve_the_need_fails_the_request_alone(engine, src, dst, need, code):
    assert failing(engine(), engine(), full(src, dst, need)) == (code, "full")


def test_a_need_far_past_the_table_fails_without_counting_up_to_it(engine):
    assert failing(engine(), engine(), full(table(1), table(1), Span(0, 1 << 45)))[0].endswith("-table-short")


def test_a_block_id_below_zero_never_becomes_an_address(engine):
    with pytest.raises((SpecError, RequestError)):
        select(
            lower(prove(plan(engine(), engine(), 0))),
            full(table(1), BlockTable(np.array([-3])), Span(0, 4)),
        )


@pytest.mark.parametrize("block_ids", [[1.5], [1 << 63], ["1"], [[1]], [-2], [None]])
def test_a_table_of_anything_but_block_ids_is_refused(block_ids):
    with pytest.raises(SpecError):
        BlockTable.of(block_ids)


def test_narrow_integers_do_not_wrap_around(engine):
    """70,000 blocks of 128 KiB lie past 2^32 bytes."""
    large = engine(group=Group("full", 70_000, 4), item_bytes=1024)
    request = full(BlockTable(np.array([69_999], np.int32)), table(0), Span(0, 4))
    selection = select(lower(prove(plan(large, large, 0))), request)
    assert list(selection.reads[0]) == [(0, 69_999 * 4 * CELL * 1024, 0, 0, 4 * CELL * 1024)]


def test_the_last_of_32768_regions_is_read_and_written(engine):
    """As many regions as a place has room for, and as the page of manifests promises."""
    plain = engine()
    (rank,) = plain.ranks
    regions = tuple(Region(f"r{i}", 64) for i in range(MAX_REGIONS - 1))
    many = replace(plain, ranks=(replace(rank, regions=(*regions, *rank.regions)),))
    assert len(many.ranks[0].regions) == MAX_REGIONS == 32_768
    selection = select(lower(prove(plan(many, many, 0))), full(table(7), table(6), Span(0, 4)))
    last = MAX_REGIONS - 1
    assert list(selection.reads[0]) == [(last, 28 * CELL, last, 24 * CELL, 4 * CELL)]
    with pytest.raises(SpecError, match="32769 regions, at most 32768"):
        replace(plain, ranks=(replace(rank, regions=(*regions, *rank.regions, Region("more", 64))),))


def test_runs_are_counted_before_they_are_made(engine):
    """Head-major to token-major: a run for each token and head, of a million tokens."""
    num_blocks = 250_000
    pool = Group("full", num_blocks, 4)
    made = lower(prove(plan(engine(order="head token channel", group=pool), engine(group=pool), 0)))
    src, dst = BlockTable.of(np.arange(num_blocks)), BlockTable.of(np.arange(num_blocks)[::-1])
    request = full(src, dst, Span(0, 4 * num_blocks))
    tracemalloc.start()
    with pytest.raises(RequestError, match="group full: the request needs 8,000,000 runs") as caught:
        select(made, request, max_runs=7_999_999)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    assert caught.value.code == Code.TOO_MANY_RUNS
    assert select(made, full(src, dst, Span(0, 400)), max_runs=3200).num_runs == 3200


def test_the_runs_of_all_states_together_are_counted_before_they_are_made(engine, monkeypatch):
    two = engine(states=("k", "v"), order="head token channel"), engine(states=("k", "v"))
    monkeypatch.setattr(lower_module, "MAX_PATTERN", 40)
    with pytest.raises(Refused, match="64 runs per block for all states"):
        lower(prove(plan(*two, 0)))


def test_a_request_whose_blocks_shatter_says_its_code_once(engine, monkeypatch):
    made = lower(prove(plan(engine(order="head token channel"), engine(), 0)))
    monkeypatch.setattr(lower_module, "MAX_PATTERN", 4)
    with pytest.raises(RequestError) as caught:
        select(made, full(table(1), table(1), Span(0, 3)))
    assert str(caught.value).count("too-many-runs") == 1


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_missing_table_is_named(engine, side):
    request = replace(full(table(1), table(1), Span(0, 4)), **{side: {}})
    assert failing(engine(), engine(), request) == (f"{side}-table-missing", "full")


@pytest.mark.parametrize("side", ["src", "dst"])
def test_an_unknown_group_is_named(engine, side):
    tables = {"full": table(1), "other": table(2)}
    request = replace(full(table(1), table(1), Span(0, 4)), **{side: tables})
    assert failing(engine(), engine(), request) == (f"{side}-group-unknown", "other")


@pytest.mark.parametrize("what", ["need", "kept"])
def test_tokens_of_an_unknown_group_are_refused(engine, what):
    """A misspelled name under ``kept`` would have its tokens overwritten as slack."""
    good = full(table(1), table(1), Span(2, 4), kept=(Span(0, 2),))
    request = replace(good, **{what: getattr(good, what) | {"ful": (Span(0, 2),)}})
    assert failing(engine(), engine(), request) == (f"{what}-group-unknown", "ful")


def test_a_group_without_a_need_is_an_error_not_a_need_of_nothing(engine):
    request = replace(full(table(1), table(1)), need={})
    assert failing(engine(), engine(), request) == ("need-missing", "full")


def test_a_slot_keeps_no_tokens(engine):
    slots = engine(kind=Kind.RECURRENT, group=Group("state", 8, addressing=Addressing.SLOT))
    made = lower(prove(plan(slots, slots, 0)))
    tables = {"state": table(1)}
    with pytest.raises(RequestError, match="kept-slot: group state"):
        select(made, Request(tables, tables, {}, {"state": (Span(0, 1),)}))
    assert select(made, Request(tables, tables, {}, {"state": ()})).total_bytes == CELL
    assert select(made, Request(tables, tables, {"state": ()})).total_bytes == 0


@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_plain_list_is_no_table(side):
    tables = {"src": {"full": table(1)}, "dst": {"full": table(1)}} | {side: {"full": [1]}}
    with pytest.raises(SpecError, match=f"{side} table of group full: expected a BlockTable"):
        Request(**tables, need={"full": (Span(0, 4),)})


def test_a_token_cannot_be_needed_and_kept(engine):
    request = full(table(1, 2), table(1, 2), Span(3, 8), kept=(Span(0, 4),))
    assert failing(engine(), engine(), request) == ("need-kept", "full")


def test_a_table_that_starts_inside_a_cell_is_refused(engine):
    compressed = engine(tokens_per_cell=4, group=Group("full", 8, 16))
    request = full(table(1, first_token=2), table(1), Span(4, 8))
    made = lower(prove(plan(compressed, compressed, 0)))
    with pytest.raises(RequestError, match="src-table-start"):
        select(made, request)


def test_a_table_must_start_at_a_multiple_of_its_own_turns_only(engine):
    src = engine(holds=[(0, 8)] * 2, turns=(2, 1))
    dst = engine(holds=[(0, 8)] * 3, turns=(3, 1), group=Group("full", 8, 6))
    request = full(table(1, 2, first_token=4), table(1, 2), Span(6, 12))
    assert moved(src, dst, request, slack=Slack.LEAVE).total_bytes == 2 * CELL
    with pytest.raises(RequestError, match="src-table-start"):
        moved(src, dst, full(table(1, 2, first_token=3), table(1, 2), Span(6, 11)))


def test_a_need_longer_than_a_ring_is_refused(engine):
    made = lower(prove(plan(engine(), engine(group=ring(8)), 0)))
    with pytest.raises(RequestError, match="dst-ring-short"):
        select(made, full(table(0, 1, 2), table(0), Span(0, 9)))


@pytest.mark.parametrize("need", [Span(0, 4), Span(3, 8)])
def test_a_source_ring_has_nothing_before_its_first_token(engine, need):
    made = lower(prove(plan(engine(group=ring(8)), engine(), 0)))
    with pytest.raises(RequestError, match="src-ring-short"):
        select(made, full(table(0, first_token=4), table(0, 1), need))
    assert select(made, full(table(0, first_token=4), table(0, 1, 2), Span(4, 12))).total_bytes == 8 * CELL


@pytest.mark.parametrize("ids", [(), (0, 1)])
def test_a_ring_has_one_block(engine, ids):
    made = lower(prove(plan(engine(), engine(group=ring(8)), 0)))
    with pytest.raises(RequestError, match="dst-table-length"):
        select(made, full(table(0, 1, 2), table(*ids), Span(0, 4)))


def test_two_groups_of_one_pool_never_share_a_block(engine):
    groups = [Group(name, 8, 4, pool="one") for name in ("full", "window")]
    manifest = engine(group=groups[0])
    both = replace(manifest, groups=tuple(groups))
    tables = {"full": table(1), "window": table(1)}
    request = Request(tables, {"full": table(2)}, {"full": (Span(0, 4),)})
    made = lower(prove(plan(both, engine(), 0)))
    with pytest.raises(RequestError, match="src-block-twice: group one: block 1"):
        select(made, request)
    apart = replace(request, src=tables | {"window": table(0)})
    assert select(made, apart).total_bytes == 4 * CELL


# ------------------------------------------------------------------------- the oracle itself


@pytest.mark.parametrize(
    "spoil",
    [
        lambda src, dst, n: (src[1:], dst[1:], n[1:]),
        lambda src, dst, n: (src + 1, dst, n),
        lambda src, dst, n: (src, dst + 1, n),
        lambda src, dst, n: (src, dst, n - 1),
        lambda src, dst, n: (src[::-1], dst, n),
        lambda src, dst, n: (np.repeat(src, 2), np.repeat(dst, 2), np.repeat(n, 2)),
    ],
    ids=["run dropped", "source shifted", "destination shifted", "run cut short", "sources swapped", "twice"],
)
def test_the_oracle_goes_red_for_every_spoiled_run(engine, spoil):
    request = full(table(3, 1), table(2, 5), Span(0, 8))
    made = plan(engine(), engine(), 0)
    selection = select(lower(prove(made)), request)
    assert check(made, request, selection) == []
    runs = selection.reads[0]
    spoiled = replace(
        runs, **dict(zip(("src", "dst", "num_bytes"), spoil(runs.src, runs.dst, runs.num_bytes), strict=True))
    )
    assert check(made, request, Selection.of({0: spoiled}, selection.zeros))


def test_the_oracle_knows_a_ring_beside_a_group_with_an_older_need(engine):
    """The ring holds the window of its own group, not of the oldest need of the request."""

    def two(window):
        whole, part = engine(states=("k",), group=Group("full", 8, 4)), engine(states=("v",), group=window)
        rank = replace(
            whole.ranks[0],
            regions=whole.ranks[0].regions + part.ranks[0].regions,
            views=whole.ranks[0].views + part.ranks[0].views,
        )
        return replace(
            whole, states=whole.states + part.states, groups=whole.groups + part.groups, ranks=(rank,)
        )

    src, dst = two(ring(8, "window")), two(Group("window", 8, 4))
    tables = table(0, 1, 2, 3)
    request = Request(
        {"full": tables, "window": table(1)},
        {"full": tables, "window": tables},
        {"full": (Span(0, 16),), "window": (Span(10, 16),)},
    )
    assert moved(src, dst, request, slack=Slack.LEAVE).total_bytes == 22 * CELL
