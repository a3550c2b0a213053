"""The law of the house, over everything at once.

Any family, between any two engines: the plan is proved, every needed cell arrives from the cell that means
the same, nothing else is written, and no two runs are left that could be one.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry import Slack, lower, plan, prove, select
from kvferry.models import Topology
from kvferry.testing import oracle
from kvferry.testing.strategies import (
    PACKINGS,
    SEPARATE_LAYOUTS,
    WINDOWED,
    Case,
    cases,
    engines,
    ratio,
    requests,
)

NUM_EXAMPLES = int(os.environ.get("KVFERRY_LAW_EXAMPLES", "1000"))
LEAST_SHARE = 0.01

seen: dict[str, Counter[str]] = defaultdict(Counter)


def labels(case: Case) -> dict[str, str]:
    """The value of every dimension that the law runs over."""
    src, dst = case.src, case.dst
    src_tokens, dst_tokens = src.block * src.cp, dst.block * dst.cp
    return {
        "family": case.family,
        "opaque": str(src.layout == "opaque"),
        "window": str(case.family in WINDOWED),
        "tp": ratio(src.tp, dst.tp),
        "block": ratio(src_tokens, dst_tokens),
        "src pp": stage_kind(src),
        "dst pp": stage_kind(dst),
        "cp": sides(src.cp > 1, dst.cp > 1),
        "layouts": "same" if src.layout == dst.layout else "different",
        "src layout": layout_kind(src.layout),
        "dst layout": layout_kind(dst.layout),
        "packing": sides(src.layout in PACKINGS, dst.layout in PACKINGS),
        "kernel": sides(src.kernel > 0, dst.kernel > 0),
        "prefix": "none" if not case.num_kept else "inside" if case.num_kept % dst_tokens else "blocks",
        "tail": "partial" if case.num_tokens % dst_tokens else "full",
        "slack": case.slack.value,
    }


def stage_kind(topology: Topology) -> str:
    return "uneven" if not isinstance(topology.pp, int) else "one" if topology.pp == 1 else "two"


def layout_kind(name: str) -> str:
    return "packed" if name in PACKINGS else "apart" if name in SEPARATE_LAYOUTS else name


def sides(has_src: bool, has_dst: bool) -> str:
    return f"{'src' * has_src}{'dst' * has_dst}" or "none"


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def check_everything(data: st.DataObject) -> None:
    case = data.draw(cases())
    src, dst = engines(case)
    request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
    planned = plan(src, dst, case.dst_rank)
    route = lower(prove(planned), max_runs_per_block=1 << 20)
    selection = select(route, request, slack=case.slack)
    assert oracle.check(planned, request, selection, cleared=case.slack is Slack.CLEAR) == []
    for runs in selection.reads.values():
        ends = {(s + n, d + n) for s, d, n in zip(runs.src, runs.dst, runs.num_bytes, strict=True)}
        assert not ends & set(zip(runs.src, runs.dst, strict=True)), "two runs touch on both sides"
    for dimension, value in labels(case).items():
        seen[dimension][value] += 1


def test_everything_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """R002-1, R002-7, RB-1, RB-4: whatever the two engines are, one rule moves every cell exactly once."""
    seen.clear()
    check_everything()
    total = sum(seen["family"].values())
    with capsys.disabled():
        print(f"\n{total} examples; how many hit each value of each dimension:")
        for dimension, values in seen.items():
            print(f"  {dimension:<10}", ", ".join(f"{v} {n}" for v, n in sorted(values.items())))
    rare = [
        f"{dimension}={value}: {number} of {total}"
        for dimension, values in seen.items()
        for value, number in values.items()
        if number < LEAST_SHARE * total
    ]
    assert not rare, f"under {LEAST_SHARE:.0%} of the examples: {rare}"
    assert total >= NUM_EXAMPLES
    for dimension, number in {
        "family": 17,
        "tp": 4,
        "block": 4,
        "src pp": 3,
        "dst pp": 3,
        "cp": 4,
        "prefix": 3,
    }.items():
        assert len(seen[dimension]) >= number, f"{dimension}: only {sorted(seen[dimension])} were tried"
