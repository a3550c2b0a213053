"""The pool of a fleet's engine: what is taken is out once, and what comes back is free once."""

import pytest

from kvferry import SpecError
from kvferry.models import Topology, describe
from kvferry.testing.small import small
from tests.support.fleet import BlockPool

MANIFEST = describe(small("gqa"), Topology.parse("block=8,blocks=12"), "engine")


def take(pool, num_tokens):
    """Blocks, which the pool must have."""
    tables = pool.take(num_tokens)
    assert tables is not None
    return tables


def ids(tables):
    return [block_id for table in tables.values() for block_id in table.block_ids.tolist()]


def test_no_block_is_out_twice_and_a_full_pool_says_so():
    pool = BlockPool(MANIFEST)
    taken = [take(pool, 30) for _ in range(3)]
    out = [block_id for tables in taken for block_id in ids(tables)]
    assert len(set(out)) == len(out) == pool.num_missing == 12
    assert pool.take(1) is None
    for tables in taken:
        pool.give_back(tables)
    assert pool.num_missing == 0


def test_blocks_given_back_twice_are_refused():
    pool = BlockPool(MANIFEST)
    tables = take(pool, 30)
    pool.give_back(tables)
    with pytest.raises(SpecError, match="returned twice"):
        pool.give_back(tables)


def test_what_is_taken_does_not_depend_on_the_order_in_which_blocks_came_back():
    taken = []
    for order in (1, -1):
        pool = BlockPool(MANIFEST)
        for tables in [take(pool, 20), take(pool, 10)][::order]:
            pool.give_back(tables)
        taken.append(ids(take(pool, 60)))
    assert taken[0] == taken[1]
