"""The digest between two vLLM engines: what differs does not count, in vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvferry.integrations.vllm.shared.stats import LoadStats
from kvferry.runtime.values import Record
from tests.support.faults import Faults, FaultyHub
from tests.vllm.conftest import Docks
from tests.vllm.engine import Setup
from tests.vllm.pairs import FAMILIES, Pair, with_policy

Prompt = Callable[[int], list[int]]
LENGTH = 300


def with_digest(setup: Setup, digest: Any) -> Setup:
    return replace(setup, options=(*setup.options, ("digest", digest)))


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What came of the digest of each load, as the engine counts it."""
    seen: list[str] = []
    add = LoadStats.add

    def add_and_remember(stats: LoadStats, record: Record) -> None:
        seen.append(record.digest)
        add(stats, record)

    monkeypatch.setattr(LoadStats, "add", add_and_remember)
    return seen


# The toy's states are whole on each rank: between two TP sizes they would mean something else.
@pytest.mark.parametrize(
    ("family", "cut"),
    [("llama", {"tp": 2}), ("gemma3", {"tp": 2}), ("gemma3", {"pp": 2}), ("nemotron_h", {"pp": 2})],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_both_engines_find_the_same_bytes(
    docks: Docks, prompt: Prompt, digests: list[str], family: str, cut: dict[str, Any]
):
    """Over NIXL, between other parallelism: each load is compared, and no alarm is false."""
    setup = FAMILIES[family]
    pair = Pair(docks.own(replace(setup, **cut)), docks.own(with_digest(setup, "full")))
    for num_tokens in (5, 64, LENGTH):
        words = prompt(num_tokens)
        answer = pair.ferry(words)
        pair.assert_loaded(answer, words)
    pair.assert_whole()
    assert digests == ["equal"] * 3


def test_one_in_so_many_loads_is_compared(docks: Docks, prompt: Prompt, digests: list[str]):
    setup = FAMILIES["llama"]
    pair = Pair(docks.own(setup), docks.own(with_digest(setup, 3)))
    for _ in range(6):
        words = prompt(LENGTH)
        pair.assert_loaded(pair.ferry(words), words)
    assert digests == ["", "", "equal", "", "", "equal"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_byte_that_changed_on_its_way_does_not_count(
    docks: Docks,
    prompt: Prompt,
    digests: list[str],
    family: str,
    policy: str,
    caplog: pytest.LogCaptureFixture,
):
    """The fabric says that all went well. The log names state, rank and tokens; the next load is good."""
    setup, faults = FAMILIES[family], Faults()
    hub = FaultyHub(faults)
    pair = Pair(docks.own(setup, hub), docks.own(with_digest(with_policy(setup, policy), "full"), hub))
    faults.spoil()
    words = prompt(LENGTH)
    pair.assert_refused(pair.ferry(words), words)
    faults.calm()
    others = prompt(LENGTH)
    pair.assert_loaded(pair.ferry(others), others)
    pair.assert_whole()
    assert digests == ["differs", "equal"]
    line = next(message for message in caplog.messages if "cannot be loaded: digest-differs: " in message)
    assert "model.layers." in line or "backbone.layers." in line
    assert ", tokens [" in line
    assert "of rank 0 of " in line


def test_without_the_digest_nobody_notices(docks: Docks, prompt: Prompt):
    """What the test above would prove nothing without."""
    faults = Faults()
    hub, setup = FaultyHub(faults), FAMILIES["llama"]
    pair = Pair(docks.own(setup, hub), docks.own(setup, hub))
    faults.spoil()
    words = prompt(LENGTH)
    answer = pair.ferry(words)
    assert answer.finish_reason == "length"
    assert answer.tokens != pair.dst.right(words)
