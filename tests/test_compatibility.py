"""Every model of the catalogue at twenty pairs of topologies: the page is what a run says.

``compatibility.line`` compares bytes and runs of every rank with the oracle's count: it stops if they differ.
"""

from __future__ import annotations

from dataclasses import replace

import compatibility
import pytest
from compatibility import CSV, PAGE, PAIRS
from oracle_count import count_runs, needed_bytes

import kvferry
from kvferry import Slack
from kvferry.core.sample import sample_request
from kvferry.models import Topology, catalogue, describe, model_named

LINES = {(each.model, each.src, each.dst): each for each in compatibility.from_csv(CSV)}

QUICK = {
    "gpt2": (8, 12, 13),
    "gemma-3-4b-it": (3,),
    "falcon-7b": (6,),
    "deepseek-v3.2": (10,),
    "qwen3-next-80b": (4,),
    "jamba-v0.1": (19,),
    "deepseek-v4": (15,),
}
"""Models of different kinds, each at a few of the pairs; the whole is slow."""


def test_the_page_has_every_model_at_twenty_pairs() -> None:
    assert len(PAIRS) == len(set(PAIRS)) == 20
    assert LINES.keys() == {(model, *pair) for model in catalogue() for pair in PAIRS}
    assert PAGE.read_text(encoding="utf-8") == compatibility.page(list(LINES.values()))


@pytest.mark.parametrize(("model", "at"), [(model, at) for model, some in QUICK.items() for at in some])
def test_a_line_of_the_page_is_what_a_run_says(model: str, at: int) -> None:
    src, dst = PAIRS[at]
    assert compatibility.line(model, src, dst) == LINES[model, src, dst]


@pytest.mark.slow
@pytest.mark.parametrize("model", catalogue())
def test_all_lines_of_the_page_are_what_a_run_says(model: str) -> None:
    for each in compatibility.lines_of(model):
        assert each == LINES[each.model, each.src, each.dst]


def test_the_count_sees_what_is_missing_and_what_is_cut() -> None:
    """The oracle's count of a spoiled plan is another one: it is not a copy of what it checks."""
    model = model_named("gpt2")
    src, dst = (describe(model, Topology(tp=tp, block=16), "e") for tp in (2, 3))
    request = sample_request(src, dst, 48)
    plan = kvferry.plan(src, dst, 0)
    selection = kvferry.select(kvferry.lower(kvferry.prove(plan)), request, slack=Slack.LEAVE)
    counted = count_runs(plan, request)
    assert sum(each.num_runs for each in counted.values()) == selection.num_runs
    assert sum(each.num_bytes for each in counted.values()) == needed_bytes(dst, 0, request)
    fewer = count_runs(replace(plan, pieces=plan.pieces[1:]), request)
    assert sum(each.num_bytes for each in fewer.values()) < needed_bytes(dst, 0, request)
    assert sum(each.num_runs for each in fewer.values()) != selection.num_runs
