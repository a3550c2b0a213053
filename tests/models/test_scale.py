"""A description costs what its views cost, and nothing that grows with layers times ranks."""

from time import process_time

import pytest

from kvferry.models import Topology, describe, model_from_config

LLAMA = {"model_type": "llama", "hidden_size": 16384, "num_attention_heads": 128, "torch_dtype": "bfloat16"}


@pytest.mark.timed
def test_a_thousand_layers_on_224_ranks_are_described_in_seconds():
    """Both sides of TP 128 -> 96, before anybody waits for them: 3 s of a core where this was written.

    The bound is loose, so that only a change of kind fails it."""
    model = model_from_config({**LLAMA, "num_hidden_layers": 1000, "num_key_value_heads": 128})
    start = process_time()
    sides = [describe(model, Topology(tp=tp)) for tp in (128, 96)]
    assert process_time() - start < 15
    assert [len(rank.views) for side in sides for rank in side.ranks] == [2000] * (128 + 96)


def test_layers_that_are_laid_out_alike_share_their_maps():
    model = model_from_config({**LLAMA, "num_hidden_layers": 50})
    (rank,) = describe(model, Topology()).ranks
    assert len({id(view.axes) for view in rank.views}) == 2  # K and V
