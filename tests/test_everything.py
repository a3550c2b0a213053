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
from kvferry.testing import oracle
from kvferry.testing.strategies import Case, cases, engines, requests

NUM_EXAMPLES = int(os.environ.get("KVFERRY_LAW_EXAMPLES", "2000"))
LEAST_SHARE = 0.01

seen: dict[str, Counter[str]] = defaultdict(Counter)


def count(case: Case) -> None:
    for dimension, value in case.labels.items():
        seen[dimension][value] += 1


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
    count(case)


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
