"""What a slot of recurrent state is made of."""

import pytest

from kvferry.models import Topology, describe
from kvferry.testing.small import small


@pytest.mark.parametrize("family", ["mamba1-gqa", "mamba2-gqa", "mamba2-one-group", "gdn-gqa", "kda-mla"])
def test_a_convolution_remembers_one_input_less_than_its_width(family):
    """Four inputs make an output, and the fourth is the next token's own."""
    states = describe(small(family), Topology.parse("blocks=4"), family).states
    times = [{axis.name: axis.size for axis in s.axes}["time"] for s in states if "/conv." in s.name]
    assert times
    assert set(times) == {3}
