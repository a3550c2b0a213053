"""What a source rank hands out for a ticket: all that a proved plan reads, no byte of another block."""

from functools import reduce

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry import BlockTable, lower, plan, prove, select
from kvferry.core.owned import MAX_PLACE, BlockBytes, Intervals
from kvferry.core.runs import place
from kvferry.core.view import NOT_HELD
from kvferry.models import Topology, describe
from kvferry.testing.small import small
from kvferry.testing.strategies import cases, engines, requests

QUIET = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def reads(data):
    """A source engine, a request's block tables there, and what is read of each rank, as terms."""
    case = data.draw(cases())
    src, dst = engines(case)
    request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
    route = lower(prove(plan(src, dst, case.dst_rank)), max_runs_per_block=1 << 20)
    products = select(route, request, slack=case.slack).products
    return src, request.src, {rank: [side(term) for term in p.terms] for rank, p in products.items()}


def side(term):
    return term.pattern.src, term.pattern.num_bytes, term.steps[0]


def owned_places(manifest, rank, tables):
    """Every byte of these blocks, cell by cell."""
    held: set[int] = set()
    for view in rank.views:
        item_bytes = manifest.state_by_name[view.state].item_bytes
        axes = [axis.offsets() for _, axis in view.axes]
        cells = reduce(np.add.outer, [axis[axis != NOT_HELD] for axis in axes], np.zeros(1, np.int64)).ravel()
        for block in tables[view.group].block_ids.tolist() if view.group in tables else ():
            start = place(rank.region_index[view.region], view.offset + block * view.block_stride)
            for cell in (cells + start).tolist() if block >= 0 else ():
                held.update(range(cell, cell + item_bytes))
    return held


def named(places, num_bytes, steps):
    return {
        byte
        for start, length in zip(places.tolist(), num_bytes.tolist(), strict=True)
        for step in steps.tolist()
        for byte in range(start + step, start + step + length)
    }


@QUIET
@given(data=st.data())
def test_whatever_a_plan_reads_is_handed_out_and_to_nobody_without_its_blocks(data):
    src, tables, by_rank = reads(data)
    for src_rank, terms in by_rank.items():
        blocks = BlockBytes(src, src.rank(src_rank))
        nothing = blocks.of_blocks({name: BlockTable.of([]) for name in tables})
        for term in terms:
            assert blocks.of_blocks(tables).refusal(*term) == ""
            assert nothing.refusal(*term) == "it names blocks of another request"


@QUIET
@given(data=st.data())
def test_whatever_is_handed_out_is_of_the_tickets_blocks(data):
    """Terms that a reader has changed: if they are let through, each of their bytes is the ticket's own."""
    src, tables, by_rank = reads(data)
    for src_rank, terms in by_rank.items():
        owned = BlockBytes(src, src.rank(src_rank)).of_blocks(tables)
        everything = owned_places(src, src.rank(src_rank), tables)
        for places, num_bytes, steps in terms[:3]:
            stride = data.draw(st.sampled_from([1, int(num_bytes[0]), *np.unique(np.diff(np.sort(steps)))]))
            shift = data.draw(st.sampled_from([-1, 1])) * int(stride)
            for changed in (
                (places + shift, num_bytes, steps),
                (places, num_bytes + abs(shift), steps),
                (places, num_bytes, steps + shift),
                (np.flip(places), num_bytes, steps),
            ):
                if owned.refusal(*changed) == "":
                    assert named(*changed) <= everything


@pytest.mark.parametrize(
    ("places", "num_bytes", "steps", "why"),
    [
        ([], [], [0], "no bytes"),
        ([0], [8], [], "no bytes"),
        ([0], [0], [0], "no bytes"),
        ([0], [-8], [0], "no bytes"),
        ([-1], [8], [0], "invalid regions"),
        ([0], [8], [-1], "invalid regions"),
        ([MAX_PLACE + 1], [8], [0], "invalid regions"),
        ([0], [2**63 - 1], [0], "invalid regions"),
    ],
)
def test_senseless_numbers_are_refused(places, num_bytes, steps, why):
    manifest = describe(small("gqa"), Topology(block=8, blocks=5))
    owned = BlockBytes(manifest, manifest.ranks[0]).of_blocks({"full": BlockTable.of([1])})
    assert why in owned.refusal(*(np.array(column, np.int64) for column in (places, num_bytes, steps)))


def test_intervals_by_the_slow_way():
    rng = np.random.default_rng(1)
    for _ in range(50):
        starts = rng.integers(0, 60, 8)
        stops = starts + rng.integers(1, 9, 8)
        held = np.zeros(80, bool)
        for start, stop in zip(starts, stops, strict=True):
            held[start:stop] = True
        some = Intervals.of(starts, stops)
        for start in range(70):
            for length in range(1, 10):
                expected = bool(held[start : start + length].all())
                assert some.contain(np.array([start]), np.array([length])) == expected


def test_the_largest_numbers_do_not_wrap_around():
    """2^62 bytes from place 2^62 on: their sum is negative in 64 bits, and lay inside of everything."""
    manifest = describe(small("gqa"), Topology(block=8, blocks=20), "prefill")
    owned = BlockBytes(manifest, manifest.ranks[0]).of_blocks({"full": BlockTable.of([0])})
    edge = np.array([MAX_PLACE])
    assert owned.refusal(edge, edge, np.array([0])) == "it names invalid regions or offsets"
    assert owned.refusal(edge - 1, edge - 1, np.array([0])) == "it leaves its block"
