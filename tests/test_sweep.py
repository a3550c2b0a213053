"""Head maps: every engine-legal pair of unequal tensor-parallel sizes, every rank, byte for byte."""

from __future__ import annotations

from functools import cache

import pytest

from kvferry import Manifest, lower, plan, prove, select
from kvferry.core.sample import sample_request
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.model import attention
from kvferry.testing import oracle

HEADS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
TPS = (1, 2, 3, 4, 6, 8, 12, 16, 24)

LEGAL = {heads: [tp for tp in TPS if heads % tp == 0 or tp % heads == 0] for heads in HEADS}
PAIRS = [(heads, a, b) for heads in HEADS for a in LEGAL[heads] for b in LEGAL[heads] if a != b]


def test_the_sweep_has_all_368_legal_unequal_pairs() -> None:
    assert len(PAIRS) == 368


@cache
def engine(heads: int, tp: int, block: int) -> Manifest:
    model = Model("one layer", (Layer("layers.0", (attention(heads, 2, "fp8_e4m3"),)),))
    return describe(model, Topology(tp=tp, block=block, blocks=4), f"tp{tp}")


@pytest.mark.parametrize("heads", HEADS)
def test_every_head_map_is_exact(heads: int) -> None:
    """R003-7, R002-5, RB-4: any TP ratio, non-integer ones and replicated heads included."""
    for _, src_tp, dst_tp in (pair for pair in PAIRS if pair[0] == heads):
        src, dst = engine(heads, src_tp, 2), engine(heads, dst_tp, 3)
        request = sample_request(src, dst, 4)
        for dst_rank in range(dst_tp):
            planned = plan(src, dst, dst_rank)
            selection = select(lower(prove(planned)), request)
            problems = oracle.check(planned, request, selection)
            assert problems == [], f"{heads} heads, TP {src_tp} -> {dst_tp}, rank {dst_rank}"
