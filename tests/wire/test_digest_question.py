"""The question for a digest, as it travels."""

from kvferry import plan
from kvferry.core.digest import digest_parts
from kvferry.core.sample import sample_request
from kvferry.models import Topology, describe, model_named
from kvferry.wire.rank_asks import question_from_msgpack, question_to_msgpack


def test_equal_boxes_and_cells_arrive_as_one_object() -> None:
    """Layers take turns in a hybrid; a digest makes keys for each object, a million for a recurrent state."""
    engine = describe(model_named("qwen3-next-80b"), Topology(), "engine")
    (parts,) = digest_parts(plan(engine, engine, 0), sample_request(engine, engine, 100)).values()
    seed, arrived = question_from_msgpack(question_to_msgpack(7, parts))
    assert (seed, arrived) == (7, list(parts))
    for of in ([part.box for part in arrived], [part.cells for part in arrived]):
        assert len({id(each) for each in of}) == len({*of}) < 5
