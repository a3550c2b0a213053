"""CPU attention's packings, written as views, against the formulas of its kernels."""

from __future__ import annotations

from itertools import product

import pytest

from kvferry import lower, plan, prove, select
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.model import attention
from kvferry.testing import oracle

HEADS, DIM = 2, 32


def engine(packing: str, dtype: str, block: int):
    model = Model("one layer", (Layer("layers.0", (attention(HEADS, DIM, dtype),)),))
    return describe(model, Topology(block=block, blocks=5, layout=packing), packing)


def vec(n: int, t: int, c: int) -> tuple[int, int]:
    """Element offsets of K[t, c] and V[t, c] inside a (block, head) of n tokens, vector units."""
    return c * n + t, n * DIM + t * DIM + c


def amx(n: int, t: int, c: int) -> tuple[int, int]:
    """The same for AMX tiles."""
    k = (t // 16) * 16 * DIM + (c // 2) * 32 + (t % 16) * 2 + c % 2
    v = n * DIM + (c // 16) * 16 * n + (t // 2) * 32 + (c % 16) * 2 + t % 2
    return k, v


def neon(n: int, t: int, c: int) -> tuple[int, int]:
    """The same for bf16 on Arm."""
    k = (t // 8) * 8 * DIM + (c // 4) * 32 + (t % 8) * 4 + c % 4
    v = n * DIM + (c // 8) * 8 * n + (t // 4) * 32 + (c % 8) * 4 + t % 4
    return k, v


@pytest.mark.parametrize(
    ("packing", "dtype", "formula"),
    [("cpu-vec", "fp32", vec), ("cpu-amx", "bf16", amx), ("cpu-neon-bf16", "bf16", neon)],
)
@pytest.mark.parametrize("block", [32, 64, 96])
def test_the_views_are_the_kernels_formulas(packing: str, dtype: str, formula, block: int) -> None:
    manifest = engine(packing, dtype, block)
    item = manifest.states[0].item_bytes
    per_head = 2 * block * DIM * item
    for role, view in enumerate(manifest.ranks[0].views):
        for head, t, c in product(range(HEADS), range(block), range(DIM)):
            offset = view.offset + view.axis("head").offsets()[head]
            offset += view.axis("token").offsets()[t] + view.axis("channel").offsets()[c]
            assert offset == head * per_head + formula(block, t, c)[role] * item


@pytest.mark.parametrize(("packing", "dtype"), [("cpu-vec", "fp32"), ("cpu-amx", "bf16")])
@pytest.mark.parametrize("blocks", [(32, 64), (64, 32), (64, 96), (96, 64), (32, 96), (96, 32), (64, 64)])
def test_blocks_of_other_sizes_are_exact(packing: str, dtype: str, blocks: tuple[int, int]) -> None:
    """RB-4: a transposed or tiled interior moves between unequal blocks, tail and all."""
    src, dst = engine(packing, dtype, blocks[0]), engine(packing, dtype, blocks[1])
    request = sample_request(src, dst, 107, placement=Placement.SCATTERED)
    planned = plan(src, dst, 0)
    selection = select(lower(prove(planned)), request)
    assert oracle.check(planned, request, selection) == []


def test_equal_blocks_move_whole_with_their_tail() -> None:
    """Slack is copied along where that makes fewer runs: one run per block and head, the tail included."""
    src, dst = engine("cpu-vec", "fp32", 32), engine("cpu-vec", "fp32", 32)
    request = sample_request(src, dst, 107, placement=Placement.SCATTERED)
    selection = select(lower(prove(plan(src, dst, 0))), request)
    assert (selection.num_runs, len(selection.zeros)) == (4, 0)


def test_run_lengths_between_unequal_blocks() -> None:
    """32 -> 64 in fp32: K moves a block's tokens per channel, V a token's channels at a time."""
    src, dst = engine("cpu-vec", "fp32", 32), engine("cpu-vec", "fp32", 64)
    request = sample_request(src, dst, 64, placement=Placement.CONSECUTIVE)
    selection = select(lower(prove(plan(src, dst, 0))), request)
    # Per head: K is cut at both source blocks in each of its channels; V is one run of 64 tokens,
    # broken only between the two source blocks (their K lies between).
    assert selection.num_runs == HEADS * (2 * DIM + 2)
