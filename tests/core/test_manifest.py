"""What a manifest refuses by itself, and what ``compare`` finds between two."""

from dataclasses import replace
from typing import Any

import pytest

from kvferry import (
    Addressing,
    Axis,
    AxisMap,
    Code,
    Digit,
    Group,
    Identity,
    Kind,
    Manifest,
    Rank,
    Refused,
    Region,
    SpecError,
    State,
    Tail,
    compare,
)
from kvferry.core.manifest import VERSION, merge


def text(name: str) -> Any:
    """What a type checker would not let through."""
    return name


def with_view(manifest, **changes):
    rank = manifest.ranks[0]
    return replace(manifest, ranks=(replace(rank, views=(replace(rank.views[0], **changes),)),))


def with_map(manifest, name, axis):
    axes = dict(manifest.ranks[0].views[0].axes) | {name: axis}
    return with_view(manifest, axes=tuple(sorted(axes.items())))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: with_view(m, state="q"), "rank 0: view of q: unknown state 'q'"),
        (lambda m: with_view(m, group="q"), "view of k: unknown group 'q'"),
        (lambda m: with_view(m, region="q"), "view of k: unknown region 'q'"),
        (lambda m: with_view(m, axes=()), r"axes \[\], but the state has \['channel', 'head', 'token'\]"),
        (lambda m: with_map(m, "head", AxisMap((Digit(8, 1),), start=1)), "axis head reaches 9, .* has 8"),
        (lambda m: with_map(m, "token", AxisMap((Digit(5, 1),))), "axis token counts 5 cells"),
        (
            lambda m: with_map(m, "token", AxisMap((Digit(4, 1),), start=4)),
            "axis token counts 4 cells from 4",
        ),
        (lambda m: replace(m, ranks=m.ranks * 2), "rank '0' is given twice"),
        (lambda m: replace(m, groups=m.groups * 2), "group 'full' is given twice"),
        (lambda m: replace(m, states=(*m.states, replace(m.states[0], name="q", aliases=("k",)))), "'k'"),
        (
            lambda m: replace(m, ranks=(replace(m.ranks[0], views=m.ranks[0].views * 2),)),
            "'k' is given twice",
        ),
        (
            lambda m: replace(
                m, groups=(replace(m.groups[0], addressing=Addressing.SLOT, tokens_per_block=1),)
            ),
            "a paged state in a group with slot addressing",
        ),
    ],
)
def test_a_manifest_that_does_not_resolve_is_refused_with_the_place(engine, change, said):
    with pytest.raises(SpecError, match=said):
        change(engine())


# R002-4
def test_kernel_blocks_that_do_not_fill_a_block_are_refused(engine):
    with pytest.raises(SpecError, match="counts 6 cells from 0, but a block of 4 tokens"):
        with_map(engine(), "token", AxisMap((Digit(2, 96), Digit(3, 32))))


def test_cells_of_several_tokens_must_fill_the_block(engine):
    group = Group("full", num_blocks=8, tokens_per_block=6)
    with pytest.raises(SpecError, match="6/4"):
        engine(group=group, tokens_per_cell=4)


def test_a_state_lives_in_one_group_on_all_ranks(engine):
    manifest = engine(holds=[(0, 4), (4, 8)])
    other = Group("other", num_blocks=8, tokens_per_block=4)
    rank = manifest.ranks[1]
    moved = replace(rank, views=(replace(rank.views[0], group="other"),))
    with pytest.raises(SpecError, match="group 'other' here, 'full' on another rank"):
        replace(manifest, groups=(*manifest.groups, other), ranks=(manifest.ranks[0], moved))


def test_regions_of_one_rank_must_not_overlap_in_memory(engine):
    """Overlap is proved per region, so two regions on the same bytes would escape the proof."""
    manifest = engine(states=("k", "v"))
    k, v = manifest.ranks[0].regions
    k, v = replace(k, address=4096), replace(v, address=4096 + k.num_bytes - 1)
    with pytest.raises((SpecError, Refused)):
        replace(manifest, ranks=(replace(manifest.ranks[0], regions=(k, v)),))


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True, "4", None])
def test_numbers_are_integers_in_range(wrong):
    with pytest.raises(SpecError, match="num_blocks must be an integer"):
        Group("g", num_blocks=wrong)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Axis("token", 4), "other than 'token'"),
        (lambda: State("", (), 1, "u8"), "needs a name"),
        (lambda: State("k", (Axis("a", 1), Axis("a", 2)), 1, "u8"), "axis names must differ"),
        (lambda: State("k", (), 1, "u8", kind=Kind.RECURRENT, tokens_per_cell=2), "no tokens_per_cell"),
        (
            lambda: State("k", (), 1, "u8", kind=text("static")),
            "must be one of paged, recurrent, got 'st",
        ),
        (
            lambda: State("k", (), 1, "u8", tail=text("none")),
            "must be one of complete, partial, got 'no",
        ),
        (
            lambda: Group("g", 4, addressing=text("map")),
            "must be one of table, slot, ring, got 'map'",
        ),
        (lambda: Group("g", 1, 2, Addressing.SLOT), "a slot holds one value"),
        (lambda: Region("r", 0), "region r: num_bytes"),
        (lambda: Region("r", 1, device="cuda:x"), "region r: device must be 'cpu', or .* got 'cuda:x'"),
        (lambda: Region("r", 1, device="CUDA"), "region r: device"),
        (lambda: Region("r", 1, device="cuda:²"), "region r: device"),
        (lambda: Region("r", 1, device="cpu:1"), "region r: device"),
        (lambda: Region("r", 1, device=""), "region r: device"),
    ],
)
def test_nonsense_in_a_part_is_refused_with_its_name(make, said):
    with pytest.raises(SpecError, match=said):
        make()


def test_an_address_has_64_bits():
    assert Region("r", 1, address=(1 << 64) - 1).address == (1 << 64) - 1
    with pytest.raises(SpecError, match="region r: address"):
        Region("r", 1, address=1 << 64)


def test_a_device_spelled_two_ways_is_one_device(engine):
    assert (
        Region("r", 64, device="cuda")
        == Region("r", 64, device="cuda:0")
        == Region("r", 64, device="cuda:00")
    )
    assert Region("r", 64, device="cpu:0") == Region("r", 64)
    assert Region("r", 64, device="cuda:1").device == "cuda:1"
    manifest = engine()
    one, other = Region("one", 64, 4096, "cuda"), Region("other", 64, 4128, "cuda:0")
    with pytest.raises(SpecError, match="regions 'one' and 'other' overlap"):
        replace(manifest, ranks=(replace(manifest.ranks[0], regions=(one, other)),))


# R000-5
def test_equal_engines_have_no_differences_whatever_their_layout(engine):
    assert compare(engine(), engine(holds=[(0, 3), (3, 8)], order="head token channel")) == ()


@pytest.mark.parametrize(
    ("field", "theirs", "ours"),
    [
        ("dtype", "bf16", "fp8"),
        ("item_bytes", 2, 1),
        ("encoding", "plain", "scales inside"),
        ("tokens_per_cell", 2, 1),
        ("tail", Tail.PARTIAL, Tail.COMPLETE),
    ],
)
def test_every_field_that_says_what_a_cell_is_is_compared_by_name(engine, field, theirs, ours):
    found = compare(engine(**{field: theirs}), engine(**{field: ours}))
    assert [(f.code, f.state, f.field, f.src, f.dst) for f in found] == [
        (Code.STATE_DIFFERS, "k", field, str(theirs), str(ours))
    ]


def test_a_kind_that_differs_is_named(engine):
    slots = engine(kind=Kind.RECURRENT, group=Group("s", 4, 1, Addressing.SLOT))
    (found,) = compare(slots, engine())
    assert (found.field, found.src, found.dst) == ("kind", "recurrent", "paged")


def test_axes_are_compared_by_name_and_size(engine):
    dst = engine()
    longer = State("k", (Axis("head", 16), Axis("lane", 4)), item_bytes=1, dtype="u8")
    found = compare(replace(dst, states=(longer,), ranks=()), dst)
    assert [(f.field, f.src, f.dst) for f in found] == [
        ("axis channel", "none", "4"),
        ("axis head", "16", "8"),
        ("axis lane", "4", "none"),
    ]


def test_all_differences_are_listed_not_the_first(engine):
    found = compare(engine(states=("k", "v"), dtype="a"), engine(states=("k", "v", "w"), dtype="b"))
    assert [(f.code, f.state) for f in found] == [
        (Code.STATE_DIFFERS, "k"),
        (Code.STATE_DIFFERS, "v"),
        (Code.MISSING_STATE, "w"),
    ]


def test_states_that_only_the_source_has_do_not_matter(engine):
    assert compare(engine(states=("k", "v")), engine()) == ()


# R002-13
def test_another_version_is_refused_before_anything_else(engine):
    (found,) = compare(replace(engine(dtype="a"), version=VERSION + 1), engine())
    assert (found.code, found.field, found.src, found.dst) == (
        *(Code.VERSION, "version"),
        *map(str, (VERSION + 1, VERSION)),
    )


def test_another_model_is_refused_though_every_state_is_equal(engine):
    """RB-9: cells of equal shape are not cells of equal meaning."""
    theirs, ours = (
        replace(engine(), identity=Identity.of({"architecture": "llama", "weights.content": digest}))
        for digest in ("1f", "2e")
    )
    (found,) = compare(theirs, ours)
    assert (found.code, found.field) == (Code.IDENTITY_DIFFERS, "weights.content")
    assert (found.src, found.dst) == ("1f", "2e")


def test_an_unknown_model_is_refused_where_one_of_the_engines_requires_one(engine):
    ours = replace(engine(), identity=Identity.of({"architecture": "llama"}))
    assert compare(engine(), ours) == ()
    strict = replace(ours, identity=replace(ours.identity, is_required=True))
    (found,) = compare(engine(), strict)
    assert (found.code, found.field) == (Code.IDENTITY_UNKNOWN, "the rest")
    (found,) = compare(strict, engine())
    assert (found.code, found.field) == (Code.IDENTITY_UNKNOWN, "the rest")
    assert "set identity to unchecked on both engines" in found.note


def test_ranks_of_one_engine_run_one_model(engine):
    """RB-9: ranks on several hosts may have read several checkpoints."""
    one, other = (replace(engine(), identity=Identity.of({"weights.content": d})) for d in ("1f", "2e"))
    second = replace(other, ranks=(replace(other.ranks[0], rank=1),))
    with pytest.raises(SpecError, match=r"do not run the same model.*weights\.content: source has 1f"):
        merge([one, second])


# R003-8
def test_a_state_is_found_by_any_of_its_names(engine):
    dst = engine(aliases=("layers.9/k",))
    src = engine(states=("layers.9/k",))
    assert compare(src, dst) == ()
    assert src.find(dst.states[0]) is src.states[0]


def test_caches_that_one_side_shares_and_the_other_does_not_are_refused(engine):
    """The destination keeps one array where the source keeps two: one of them would be lost."""
    assert compare(engine(states=("k", "q")), engine(aliases=("q",)))


def test_an_unknown_rank_is_refused_by_number(engine):
    with pytest.raises(Refused, match="engine has no rank 5"):
        engine().rank(5)


def test_an_engine_without_ranks_is_a_legal_description():
    assert Manifest("e", (), (), (Rank(0, (), ()),)).rank(0).views == ()


def test_choices_may_be_given_by_their_names():
    """As a manifest in JSON says them. Once they were taken, and then refused for what they are."""
    by_name = State("s", (), 1, "u8", kind=text("recurrent"), tail=text("partial"))
    assert by_name == State("s", (), 1, "u8", kind=Kind.RECURRENT, tail=Tail.PARTIAL)
    assert by_name.kind is Kind.RECURRENT
    assert Group("g", 4, addressing=text("slot")).addressing is Addressing.SLOT
