"""R001: one tensor, several views, each with strides of its own."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from kvferry import (
    Axis,
    AxisMap,
    BlockTable,
    Code,
    Digit,
    Group,
    Kind,
    Manifest,
    Plan,
    Rank,
    Refused,
    Region,
    Request,
    Span,
    SpecError,
    State,
    View,
    lower,
    plan,
    prove,
    select,
)
from kvferry.core.state import Addressing
from kvferry.testing.oracle import check

LATENT, SSM = "layers.2.attn/latent", "layers.0.linear/ssm"


def with_view(manifest: Manifest, state: str, change) -> Manifest:
    ranks = (
        replace(r, views=tuple(change(v) if v.state == state else v for v in r.views)) for r in manifest.ranks
    )
    return replace(manifest, ranks=tuple(ranks))


def refused(src: Manifest, dst: Manifest) -> Refused:
    with pytest.raises(Refused) as caught:
        prove(plan(src, dst, 0))
    return caught.value


def test_kimi_linear_is_seven_tensors(engine):
    """R001-1: 20 KDA and 7 MLA layers in 7 tensors; each holds an MLA view and KDA views of other strides."""
    manifest = engine("kimi-linear-48b", "tp=4,block=1024,kernel=64")
    rank = manifest.ranks[0]
    layers = {view.state.rpartition("/")[0] for view in rank.views}
    assert Counter(name.rpartition(".")[2] for name in layers) == {"linear": 20, "attn": 7}
    assert len(rank.regions) == 7
    strides: dict[str, dict[Kind, set[int]]] = defaultdict(lambda: defaultdict(set))
    for view in rank.views:
        kind = manifest.state_by_name[view.state].kind
        outermost = view.axis("token").digits[0].stride if kind is Kind.PAGED else view.block_stride
        strides[view.region][kind].add(outermost)
    assert {region: dict(found) for region, found in strides.items()} == {
        f"pool.{i}": {Kind.PAGED: {64 * 1152}, Kind.RECURRENT: {16 * 64 * 1152}} for i in range(7)
    }


def test_the_kda_stride_for_mla_cells_is_refused(engine):
    """R001-1: MLA's kernel blocks at the KDA page's stride would be other requests' blocks."""
    good = engine("kimi-linear-48b", "tp=4,block=1024,kernel=64,blocks=64")
    prove(plan(good, good, 0))
    name = "layers.3.attn/latent"

    def misread(view: View) -> View:
        high, low = view.axis("token").digits
        axes = dict(view.axes) | {"token": AxisMap((Digit(high.size, view.block_stride), low))}
        return View.of(name, view.group, view.region, block_stride=view.block_stride, axes=axes)

    error = refused(good, with_view(good, name, misread))
    assert Code.CELLS_COLLIDE in error.codes
    assert name in {finding.state for finding in error.findings}


def test_the_mla_stride_for_kda_pages_is_refused(engine):
    """R001-1: the other way round."""
    good = engine("kda-mla", "block=16,kernel=4")
    stride = good.ranks[0].by_state[LATENT].axis("token").digits[0].stride
    assert stride < good.ranks[0].by_state[SSM].block_stride
    error = refused(good, with_view(good, SSM, lambda v: replace(v, block_stride=stride)))
    assert Code.CELLS_COLLIDE in error.codes


@pytest.mark.parametrize("block", [16, 512])
def test_a_tensor_is_as_long_as_its_longest_view(engine, block):
    """R001-2: 16 tokens of MLA are smaller than a KDA page, 512 are larger; the region holds both."""
    manifest = engine("kda-mla", f"block={block}")
    rank = manifest.ranks[0]
    ends: dict[str, int] = defaultdict(int)
    for view in rank.views:
        inside = sum(stride * (count - 1) for count, stride in view.steps())
        end = view.offset + 23 * view.block_stride + inside + manifest.state_by_name[view.state].item_bytes
        ends[view.region] = max(ends[view.region], end)
    longest = LATENT if block == 512 else SSM
    view = rank.by_state[longest]
    assert rank.regions[0].num_bytes == ends[view.region] == 24 * view.block_stride


def test_a_tensor_registered_to_its_shorter_view_is_refused(engine):
    """R001-2: cut to where the MLA view ends, the KDA view reaches past it."""
    src = engine("kda-mla", "block=16")
    rank = src.ranks[0]
    short = tuple(replace(region, num_bytes=region.num_bytes - 1) for region in rank.regions)
    error = refused(replace(src, ranks=(replace(rank, regions=short),)), engine("kda-mla", "block=16"))
    assert error.codes == (Code.OUT_OF_BOUNDS,)
    assert {finding.state.rpartition("/")[2] for finding in error.findings} == {"ssm"}


@pytest.mark.parametrize(
    ("state", "stride_of"),
    [(LATENT, lambda v: with_token(v, 8)), (SSM, lambda v: with_state(v, 2))],
    ids=["attention", "recurrent"],
)
def test_state_and_attention_are_validated_each_by_itself(engine, state, stride_of):
    """R001-3: rows that are too short in one kind are found in that kind only."""
    good = engine("kda-mla", "block=16")
    error = refused(good, with_view(good, state, stride_of))
    assert {finding.state for finding in error.findings} == {state}
    assert error.codes == (Code.CELLS_COLLIDE,)


def with_token(view: View, stride: int) -> View:
    return replace(
        view, axes=(*(a for a in view.axes if a[0] != "token"), ("token", AxisMap((Digit(16, stride),))))
    )


def with_state(view: View, stride: int) -> View:
    (digit,) = view.axis("state").digits
    axes = dict(view.axes) | {"state": AxisMap((Digit(digit.size, stride),))}
    return replace(view, axes=tuple(sorted(axes.items())))


def sources(planned: Plan) -> dict[str, set[int]]:
    found = defaultdict(set)
    for piece in planned.pieces:
        found[piece.state].add(piece.src_rank)
    return found


@pytest.mark.parametrize("family", ["kda-mla", "kimi-linear-48b"])
def test_state_scales_with_tp_and_mla_does_not(engine, family):
    """R001-4: TP 4 to TP 2: each state from two ranks, each latent from one."""
    src, dst = engine(family, "tp=4"), engine(family, "tp=2")
    for dst_rank in (0, 1):
        planned = plan(src, dst, dst_rank)
        prove(planned)
        for state, ranks in sources(planned).items():
            recurrent = dst.state_by_name[state].kind is Kind.RECURRENT
            assert ranks == {2 * dst_rank, 2 * dst_rank + 1} if recurrent else len(ranks) == 1
    back = sources(plan(dst, src, 3))
    assert all(back[s.name] == {1} for s in src.states if s.kind is Kind.RECURRENT)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (4, 2), (2, 4), (2, 3), (1, 1)])
def test_kda_and_mla_are_exact_at_unequal_tp(engine, move, src_tp, dst_tp):
    """R001-4: both directions; every source rank is read from, though each of them has all of MLA."""
    src, dst = engine("kda-mla", f"tp={src_tp}"), engine("kda-mla", f"tp={dst_tp}")
    moves = move(src, dst)
    read = set().union(*(moved.selection.reads for moved in moves))
    assert read == {rank.rank for rank in src.ranks}


@pytest.mark.parametrize(
    ("src", "dst"), [("block=16", "block=64"), ("block=64", "block=16"), ("block=24,kernel=8", "block=16")]
)
def test_remote_blocks_may_be_larger_or_smaller(engine, move, src, dst):
    """R001-5: cut at both sides' edges, by arithmetic."""
    move(engine("kda-mla", f"tp=2,{src}"), engine("kda-mla", dst), 75)


@pytest.mark.parametrize("topology", ["block=16,kernel=6", "block=24,cp=2,interleave=5"])
def test_a_division_that_does_not_come_out_even_is_an_error(engine, topology):
    """R001-5: said where the description is made; nothing goes on with a ratio of 1."""
    with pytest.raises(SpecError, match=r"does not divide|cannot be split"):
        engine("kda-mla", topology)


@pytest.mark.parametrize(("src", "dst"), [("tp=2", "tp=1,conv=DS"), ("tp=3", "tp=4"), ("tp=1", "tp=12")])
def test_a_pure_state_model_works(engine, move, src, dst):
    """R001-6: Mamba-2 alone: no attention, no tokens, one slot a request."""
    src, dst = engine("mamba2", src), engine("mamba2", dst)
    assert {state.kind for state in dst.states} == {Kind.RECURRENT}
    for moved in move(src, dst, 1000):
        assert len(moved.selection.zeros) == 0


@pytest.mark.parametrize("family", ["gqa", "mqa", "mla"])
def test_a_pure_attention_model_is_untouched(engine, move, family):
    """R001-6, R001-8: one group, a tensor per layer, no padding, no slot."""
    src, dst = engine(family, "tp=2"), engine(family)
    (group,) = dst.groups
    assert group.addressing is Addressing.TABLE
    whole = sum(state.cell_bytes for state in dst.states) * 16 * 24
    assert sum(region.num_bytes for region in dst.ranks[0].regions) == whole
    move(src, dst)


def crowded(num_views: int, *, one_pool: bool) -> Manifest:
    """One tensor of 9 pages of 64 bytes, and on it as many groups, each with rows of another length."""
    groups, states, views = [], [], []
    for i in range(num_views):
        rows, width = (1, 2, 4, 8, 16)[i % 5], (64, 32, 16, 8, 4)[i % 5]
        states.append(State(f"s{i}", (Axis("channel", width),), item_bytes=1, dtype="uint8"))
        groups.append(Group(f"g{i}", 9, tokens_per_block=rows, pool="pool" if one_pool else ""))
        axes = {"token": AxisMap((Digit(rows, width),)), "channel": AxisMap((Digit(width, 1),))}
        views.append(View.of(f"s{i}", f"g{i}", "tensor", block_stride=64, axes=axes))
    rank = Rank(0, (Region("tensor", 9 * 64),), tuple(views))
    return Manifest("crowded", tuple(states), tuple(groups), (rank,))


@pytest.mark.parametrize("num_views", [2, 3, 5, 9])
def test_any_number_of_views_on_a_tensor(num_views):
    """R001-7: two are no special number."""
    engine = crowded(num_views, one_pool=True)
    planned = plan(engine, engine, 0)
    request = Request(
        src={f"g{i}": BlockTable.of([i]) for i in range(num_views)},
        dst={f"g{i}": BlockTable.of([8 - i]) for i in range(num_views)},
        need={group.name: (Span(0, group.tokens_per_block),) for group in engine.groups},
    )
    selection = select(lower(prove(planned)), request)
    assert check(planned, request, selection) == []
    assert selection.total_bytes == 64 * num_views


def test_views_of_one_tensor_must_share_a_pool():
    """R001-7: the same views with block ids that nobody keeps apart are refused, each by name."""
    engine = crowded(3, one_pool=False)
    error = refused(engine, engine)
    assert error.codes == (Code.VIEWS_OVERLAP,)
    named = {(finding.state, finding.note.split()[0]) for finding in error.findings}
    assert named == {("s0", "s1"), ("s0", "s2")}


def test_kimi_linear_has_four_groups_on_a_tensor(engine):
    """R001-7: three of KDA and one of MLA."""
    rank = engine("kimi-linear-48b").ranks[0]
    groups = defaultdict(set)
    for view in rank.views:
        groups[view.region].add(view.group)
    assert max(len(found) for found in groups.values()) == 4
