"""Every family between every pair of engines, each rank a process, over NIXL: all cells exact on all ranks.

The suite takes each family at one pair, and every pair at some families; ``make families`` takes them all.
"""

import time

import pytest

import kvferry
from kvferry.core.request import need_of
from kvferry.core.span import Span
from kvferry.core.state import Addressing
from kvferry.models import Topology, describe
from kvferry.runtime import Released, Timing
from kvferry.testing.small import FAMILIES, small
from tests.support.fleet import BlockPool, DestinationFleet, ProcessPool, SourceFleet, call_all

pytest.importorskip("nixl", exc_type=ImportError)

PAIRS = ((1, 1), (2, 1), (1, 2), (4, 2), (2, 3), (3, 2))
SETUPS = (
    ("block=8", "block=12,layout=NHD"),
    ("block=12,layout=NHD", "block=8,conv=DS"),
    ("block=4,layout=HND-halves", "block=16,layout=cross-layer"),
    ("block=16,layout=cross-layer", "block=6,layout=NHD-apart,conv=DS,alloc=separate"),
)
COARSE = {"compressed": ("block=128", "block=256,layout=cross-layer")}
"""A block has whole cells: where one cell stands for 128 tokens, blocks are that long."""
LENGTHS = (29, 75, 60)
"""Tokens of the requests that are under way together; the destination has a prefix of the last one."""
KEPT = 48
TIMING = Timing(lease=10, meet=20, read=30, retry=0.2)
NUM_PROCESSES = 1 + max(src_tp + dst_tp for src_tp, dst_tp in PAIRS)


def cases():
    for index, family in enumerate(FAMILIES):
        for number, pair in enumerate(PAIRS):
            marks = () if number == index % len(PAIRS) else (pytest.mark.slow,)
            setup = COARSE.get(family, SETUPS[(index + number) % len(SETUPS)])
            yield pytest.param(family, pair, setup, id=f"{family}-{pair[0]}-{pair[1]}", marks=marks)


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(NUM_PROCESSES) as pool:
        yield pool
        assert pool.num_idle == NUM_PROCESSES


@pytest.mark.parametrize(("family", "pair", "setup"), list(cases()))
def test_a_family_between_processes(pool, family, pair, setup):
    model = small(family)
    src, dst = (
        describe(model, Topology.parse(f"tp={tp},blocks=200,{text}"), name)
        for tp, text, name in zip(pair, setup, ("prefill", "decode"), strict=True)
    )
    source = SourceFleet(src, timing=TIMING, start=pool.start)
    destination = DestinationFleet(dst, timing=TIMING, start=pool.start)
    try:
        source.wait_whole()
        destination.wait_ready()
        move(source, destination)
    finally:
        destination.close()
        source.close()


def move(source, destination):
    """Three requests at once; every cell is checked, and everything comes back."""
    src, dst = source.manifest, destination.manifest
    src_pool, dst_pool = BlockPool(src), BlockPool(dst, seed=1)
    under_way = []
    for number, num_tokens in enumerate(LENGTHS):
        salt, num_kept = f"request-{number}", KEPT if number == 2 else 0
        tables, into = src_pool.take(num_tokens), dst_pool.take(num_tokens)
        assert tables is not None, "the source's pool is too small"
        assert into is not None, "the destination's pool is too small"
        need = {group.name: need_of(group, num_tokens, num_kept) for group in dst.groups}
        kept = kept_of(dst, num_kept)
        call_all(destination.ranks, "fill", into, kept, "kept")
        ticket = source.prefill(salt, tables, num_tokens)
        handles = destination.fetch(ticket, into, need, kept=kept)
        under_way.append((salt, tables, into, need, kept, handles))
    plan = kvferry.plan(src, dst, dst.ranks[0].rank)
    names = {state.name: plan.src_name(state.name) for state in dst.states}
    for salt, tables, into, need, kept, handles in under_way:
        assert [report.failure for report in destination.wait(handles)] == [None] * len(dst.ranks)
        for checked in destination.check(into, need, names, salt):
            assert checked.num_cells > 0
            assert checked.first is None, f"{salt}: {checked.first}"
        for checked in destination.check(into, kept, {name: name for name in names}, "kept"):
            assert checked.first is None, f"{salt}, kept: {checked.first}"
        dst_pool.give_back(into)
        src_pool.give_back(tables)
    assert_nothing_is_left(source, destination)
    assert src_pool.num_missing == dst_pool.num_missing == 0


def kept_of(manifest, num_kept):
    tables = [group for group in manifest.groups if group.addressing is Addressing.TABLE]
    return {group.name: (Span(0, num_kept),) for group in tables if num_kept}


def assert_nothing_is_left(source, destination):
    """No lease, no read in flight; and the engine and all its ranks heard of every release."""
    released: list[Released] = []
    heard: list[list[Released]] = [[] for _ in source.ranks]
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not all(len(each) >= len(LENGTHS) for each in (released, *heard)):
        released += source.poll()
        for index, more in enumerate(call_all(source.ranks, "poll")):
            heard[index] += more
        time.sleep(0.01)
    expected = [(f"request-{number}", "read") for number in range(len(LENGTHS))]
    for each in (released, *heard):
        assert sorted((one.request_id, one.reason) for one in each) == expected
    status = source.authority.call("status")
    assert (status["offered"], status["being_read"]) == (0, 0)
    for status in call_all(destination.ranks, "status"):
        assert (status["fetches"], status["in_flight"], status["quarantined"]) == ({}, 0, 0)
