"""Hypothesis strategies: pairs of compatible engines, and requests between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.core.manifest import Manifest
from kvferry.core.request import HOLE, BlockTable, Request
from kvferry.core.sample import need_and_kept
from kvferry.core.select import Slack
from kvferry.core.state import Addressing, Group
from kvferry.models import Topology, describe
from kvferry.testing.small import FAMILIES, small

PLAIN_LAYOUTS = ("HND", "NHD", "HND-halves", "NHD-halves", "cross-layer", "cross-layer-NHD")
SEPARATE_LAYOUTS = ("HND-apart", "NHD-apart", "LHBNC", "BHLNC", "LBCHNK")
"""Layouts that need a region per layer, or the same heads in all layers of a group."""
PACKINGS = ("cpu-vec", "LBH[NCn2c2|CNc4n2]", "LBH[CNn2|NCc2n2]", "BLH[CN|NC]")

STATELY = frozenset(name for name in FAMILIES if any(w in name for w in ("mamba", "kda", "gdn")))
WINDOWED = frozenset({"window", "unequal-heads", "shared-layers", "compressed"})


@dataclass(frozen=True)
class Case:
    """Two engines, one destination rank, one request."""

    family: str
    src: Topology
    dst: Topology
    dst_rank: int
    num_tokens: int
    num_kept: int
    slack: Slack


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any combination of family, parallelism, block sizes, layouts, packings, prefix hits and slack."""
    family = draw(st.sampled_from(FAMILIES))
    is_opaque = family not in WINDOWED and draw(st.integers(0, 7)) == 0
    legal = _TPS_OPAQUE if is_opaque else _TPS_STATELY if family in STATELY else _TPS
    tps = draw(_pairs(legal, equal=is_opaque))
    blocks = draw(_pairs((128, 256, 384) if family == "compressed" else (4, 6, 8, 12), equal=is_opaque))
    cps = draw(_cps(family, is_opaque))
    sides = []
    for side in range(2):
        layout = "opaque" if is_opaque else draw(_layouts(family))
        sides.append(
            Topology(
                tp=tps[side],
                pp=draw(_stages(family)),
                cp=cps[side],
                interleave=4 if family == "compressed" else draw(st.sampled_from((1, 2))),
                block=blocks[side],
                kernel=draw(_kernels(family, blocks[side], layout, cps[side])),
                layout=layout,
                conv=draw(st.sampled_from(("SD", "DS"))),
                alloc="separate"
                if layout in SEPARATE_LAYOUTS
                else draw(st.sampled_from(("auto", "separate"))),
                blocks=160 if family == "compressed" else 64,
            )
        )
    src, dst = sides
    span = 3 * max(blocks[0] * cps[0], blocks[1] * cps[1])
    num_tokens = draw(st.integers(1, span))
    num_kept = draw(_kept(num_tokens, blocks[1] * cps[1], is_opaque))
    dst_rank = draw(st.integers(0, dst.num_ranks - 1))
    slack = draw(st.sampled_from(list(Slack)))
    return Case(family, src, dst, dst_rank, num_tokens, num_kept, slack)


_TPS = (1, 2, 3, 4, 5, 6, 8, 12, 24)
_TPS_STATELY = (1, 2, 3, 4, 6, 12)
_TPS_OPAQUE = (1, 2, 12)


@st.composite
def _pairs(draw: st.DrawFn, values: Sequence[int], *, equal: bool) -> tuple[int, int]:
    """Two of the values: equal, one a multiple of the other, or neither."""
    first = draw(st.sampled_from(values))
    wanted = "equal" if equal else draw(st.sampled_from(("equal", "multiple", "divisor", "neither")))
    fitting = [value for value in values if ratio(first, value) == wanted]
    return first, draw(st.sampled_from(fitting or [first]))


def ratio(a: int, b: int) -> str:
    if a == b:
        return "equal"
    return "multiple" if b % a == 0 else "divisor" if a % b == 0 else "neither"


def _cps(family: str, is_opaque: bool) -> st.SearchStrategy[tuple[int, int]]:
    if family == "compressed" or is_opaque:
        return st.just((1, 1))
    return st.sampled_from(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 3), (2, 2)))


def _stages(family: str) -> st.SearchStrategy[tuple[int, ...] | int]:
    num_layers = len(small(family).layers)
    uneven = (1, num_layers - 1) if num_layers > 2 else 2
    return st.sampled_from((1, 1, 2, uneven))


def _layouts(family: str) -> st.SearchStrategy[str]:
    if family == "compressed":
        return st.sampled_from(PLAIN_LAYOUTS)
    apart = tuple(
        name for name in SEPARATE_LAYOUTS if family not in ("gqa+mla", "mla+gqa") or name != "BHLNC"
    )
    return st.one_of(st.sampled_from(PLAIN_LAYOUTS), st.sampled_from(apart), st.sampled_from(PACKINGS))


def _kernels(family: str, block: int, layout: str, cp: int) -> st.SearchStrategy[int]:
    if family == "compressed" or layout == "opaque" or block % 4 or cp > 1:
        return st.just(0)
    return st.sampled_from((0, 0, 4))


def _kept(num_tokens: int, block: int, is_opaque: bool) -> st.SearchStrategy[int]:
    """Tokens already present: none, whole blocks, or (if cells can be split) any number."""
    whole = st.integers(0, (num_tokens - 1) // block).map(lambda n: n * block)
    return st.one_of(st.just(0), whole, whole if is_opaque else st.integers(0, num_tokens - 1))


def engines(case: Case) -> tuple[Manifest, Manifest]:
    model = small(case.family)
    return describe(model, case.src, "src"), describe(model, case.dst, "dst")


@st.composite
def requests(draw: st.DrawFn, src: Manifest, dst: Manifest, num_tokens: int, num_kept: int) -> Request:
    """A request with random blocks; tables of windows start late, or have holes."""
    tables = draw(_tables(src, num_tokens)), draw(_tables(dst, num_tokens))
    return Request(*tables, *need_and_kept(dst.groups, num_tokens, num_kept))


@st.composite
def _tables(draw: st.DrawFn, manifest: Manifest, num_tokens: int) -> dict[str, BlockTable]:
    is_shuffled = draw(st.booleans())
    pools: dict[str, list[int]] = {}
    tables = {}
    for group in manifest.groups:
        if group.pool not in pools:
            ids = list(range(group.num_blocks))
            pools[group.pool] = draw(st.permutations(ids)) if is_shuffled else ids
        tables[group.name] = draw(_table(group, num_tokens, pools[group.pool]))
    return tables


@st.composite
def _table(draw: st.DrawFn, group: Group, num_tokens: int, ids: list[int]) -> BlockTable:
    if group.addressing is Addressing.SLOT:
        return BlockTable.of([ids.pop(0)])
    size = group.tokens_per_block
    total = -(-num_tokens // size)
    dead = max(0, num_tokens - group.window) // size if group.window and not group.sinks else 0
    dead = draw(st.integers(max(0, dead - 2), dead)) if dead else 0
    taken = [ids.pop(0) for _ in range(total - dead)]
    if dead and draw(st.booleans()):
        return BlockTable.of([HOLE] * dead + taken)
    return BlockTable.of(taken, first_token=dead * size)
