"""An engine in parts: nothing of it gets lost, equal parts are equal bytes, and nonsense is refused."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import Refused, SpecError, plan
from kvferry.core.manifest import Outline
from kvferry.models import Topology, describe, model_named
from kvferry.testing.small import small
from kvferry.testing.strategies import cases, engines
from kvferry.wire.messages import RankDescription
from kvferry.wire.outline import (
    describe_rank,
    join_of,
    manifest_of_joins,
    outline_from_msgpack,
    outline_to_msgpack,
    regions_at,
    with_ranks,
)


def engine(text="tp=4,pp=2", model="gqa", name="prefill"):
    return describe(small(model), Topology.parse(f"{text},block=8,blocks=9"), name)


def placed(manifest, first=1 << 20):
    """The same engine with memory of its own."""
    ranks = []
    for rank in manifest.ranks:
        regions = []
        for region in rank.regions:
            regions.append(replace(region, address=first, device="cuda:1"))
            first += region.num_bytes
        ranks.append(replace(rank, regions=tuple(regions)))
    return replace(manifest, ranks=tuple(ranks))


def joins_of(manifest):
    ranks = (replace(manifest, ranks=(rank,)) for rank in manifest.ranks)
    return {rank.ranks[0].rank: join_of(rank, "memory", b"card") for rank in ranks}


def outline_of(manifest):
    return outline_to_msgpack(Outline.of(manifest))


def pieces(src, dst, rank, **kwargs):
    try:
        return plan(src, dst, rank, **kwargs).pieces
    except Refused as refused:
        return str(refused)


@settings(deadline=None, max_examples=40)
@given(cases())
def test_a_plan_made_of_an_outline_is_the_plan_made_of_the_whole(case):
    """Who holds what is all that a plan needs; whatever is refused is refused in the same words."""
    src, dst = engines(case)
    outline = outline_from_msgpack(outline_of(src), src.engine)
    for rank in dst.ranks:
        planned = pieces(outline.common, dst, rank.rank, holders=outline.holders)
        assert planned == pieces(src, dst, rank.rank)


@pytest.mark.parametrize("model", ["gqa", "mla", "mamba2"])
def test_an_engine_is_put_together_again_whole(model):
    whole = placed(engine("tp=2,pp=2", model))
    assert manifest_of_joins(joins_of(whole)) == whole
    outline = outline_from_msgpack(outline_of(whole), "prefill")
    assert outline.ranks == (0, 1, 2, 3)
    described = {rank.rank: describe_rank(rank, b"card") for rank in whole.ranks}
    assert with_ranks(outline.common, described) == whole
    assert with_ranks(outline.common, {2: described[2]}) == replace(whole, ranks=(whole.rank(2),))


def test_engines_of_equal_geometry_are_equal_bytes_whatever_their_names_and_memory():
    one, other = placed(engine(name="one")), placed(engine(name="other"), 1 << 40)
    assert outline_of(one) == outline_of(other)
    for number in range(8):
        mine, theirs = describe_rank(one.rank(number), b"a"), describe_rank(other.rank(number), b"b")
        assert mine.layout == theirs.layout
        assert mine.memory != theirs.memory
    assert outline_of(one) != outline_of(engine("tp=4,pp=2,layout=NHD,cp=2"))


def test_the_order_in_which_ranks_joined_does_not_show():
    """Pipeline stages know states of their own: whoever comes first must not decide their order."""
    whole = engine("pp=2")
    stages = [replace(whole, ranks=(rank,)) for rank in whole.ranks]
    own = [
        join_of(replace(s, states=tuple(t for t in s.states if t.name in s.ranks[0].by_state)), "memory", b"")
        for s in stages
    ]
    orders = [{0: own[0], 1: own[1]}, {1: own[1], 0: own[0]}]
    assert len({outline_of(manifest_of_joins(order)) for order in orders}) == 1


def test_an_outline_grows_with_what_differs_and_not_with_the_number_of_ranks():
    """1,024 ranks that hold the same are some kilobytes."""
    model = model_named("deepseek-v3")
    sizes = [len(outline_of(describe(model, Topology(tp=tp)))) for tp in (1, 1024)]
    assert sizes[1] - sizes[0] < 6 * 1024


def spoiled(change):
    doc = msgspec.msgpack.decode(outline_of(engine("tp=2,pp=1")))
    change(doc)
    return msgspec.msgpack.encode(doc)


def head(doc):
    """The first box that is cut by heads."""
    return next(box["axes"]["head"] for box in doc["boxes"] if "head" in box["axes"])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda doc: doc.update(version=99), "version"),
        (
            lambda doc: doc["common"].update(ranks=[{"rank": 0, "regions": [], "views": []}]),
            "ranks are not allowed",
        ),
        (lambda doc: doc["holders"].append(doc["holders"][0]), "given twice"),
        (lambda doc: doc["holders"][0].update(states=[999]), "state must be an integer from 0 to"),
        (lambda doc: doc["holders"][0].update(states=[-1]), "state must be an integer from 0 to"),
        (lambda doc: doc["holders"][0].update(boxes=[[0, 999]]), "box must be an integer from 0 to"),
        (lambda doc: doc["holders"][0].update(boxes=[[-1, 0]]), "rank must be an integer from 0 to"),
        (lambda doc: doc["holders"][0].update(boxes=[[1, 0], [0, 0]]), "sorted by rank, each rank once"),
        (lambda doc: doc["holders"][0].update(boxes=[[1, 0], [1, 0]]), "sorted by rank, each rank once"),
        (lambda doc: head(doc).append([0, 1]), "sorted, apart, and none empty"),
        (lambda doc: head(doc).clear(), "sorted, apart, and none empty"),
        (lambda doc: head(doc)[0].__setitem__(1, 999), "axis head reaches 999"),
        (lambda doc: doc["boxes"][0]["axes"].update(nose=[[0, 1]]), "the box has axes"),
        (lambda doc: doc["boxes"][0].update(period=0), "period must be an integer from 1"),
        (lambda doc: doc["boxes"][0]["axes"].update(token=[[0, 2]]), "axis token reaches 2"),
        (lambda doc: head(doc).extend([2 * i, 2 * i + 1] for i in range(5000)), "parts of an axis"),
        (lambda doc: head(doc).extend([[0, 1]] * (1 << 18)), "spans of boxes"),
        (lambda doc: doc["holders"][0].update(boxes=[[i, 0] for i in range(750_000)]), "states times ranks"),
    ],
)
def test_an_outline_that_makes_no_sense_is_refused_by_the_rule(change, rule):
    with pytest.raises(SpecError, match=rule):
        outline_from_msgpack(spoiled(change), "prefill")


@settings(deadline=None)
@given(st.data())
def test_a_spoiled_outline_or_layout_is_a_spec_error_or_another_one(data):
    whole = engine("tp=2")
    common = replace(whole, ranks=())
    good = outline_of(whole), describe_rank(whole.rank(0), b"").layout
    memory = describe_rank(whole.rank(0), b"").memory
    for number, text in enumerate(good):
        bad = bytearray(text)
        for _ in range(data.draw(st.integers(1, 3))):
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
        try:
            if number:
                with_ranks(common, {0: RankDescription(bytes(bad), memory, b"")})
            else:
                outline_from_msgpack(bytes(bad), "prefill")
        except SpecError:
            continue


def test_a_rank_that_does_not_fit_its_engine_is_named():
    whole = engine("tp=2")
    described = {rank.rank: describe_rank(rank, b"") for rank in whole.ranks}
    other = replace(whole, ranks=(), groups=(replace(whole.groups[0], name="another"),))
    with pytest.raises(SpecError, match=r"rank 0: view of .* unknown group"):
        with_ranks(other, described)
    junk = RankDescription(b"junk", (), b"")
    with pytest.raises(SpecError, match="rank 1: "):
        with_ranks(replace(whole, ranks=()), {1: junk})


def test_regions_that_overlap_in_memory_are_refused():
    """The soundness of views is proved region by region: two that share bytes would be no two."""
    rank = engine("tp=1").ranks[0]
    with pytest.raises(SpecError, match="overlap in memory"):
        regions_at(rank.regions, [(4096, "cpu")] * len(rank.regions))
