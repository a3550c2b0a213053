"""What a slot of recurrent state is made of."""

import pytest

from kvferry.layout.pages import opaque_block, opaque_slot
from kvferry.models import Topology, describe
from kvferry.testing.small import small


@pytest.mark.parametrize("family", ["mamba1-gqa", "mamba2-gqa", "mamba2-one-group", "gdn-gqa", "kda-mla"])
def test_a_convolution_remembers_one_input_less_than_its_width(family):
    """Four inputs make an output, and the fourth is the next token's own."""
    states = describe(small(family), Topology.parse("blocks=4"), family).states
    times = [{axis.name: axis.size for axis in s.axes}["time"] for s in states if "/conv." in s.name]
    assert times
    assert set(times) == {3}


@pytest.mark.parametrize(("num_shards", "axes"), [(1, ()), (2, ("shard",))])
def test_a_block_that_is_whole_on_every_rank_has_no_shards(num_shards, axes):
    """An axis of one shard would be a difference to a peer that describes the same block without it."""
    for page in (opaque_block(64, num_shards, 16, "x"), opaque_slot(64, num_shards, "x")):
        assert tuple(dim.axis for dim in page.parts[0].dims) == axes
