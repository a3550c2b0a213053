"""What ``time`` cases keep when something goes wrong, without engines."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.harness import STOCK
from tests.gpu import times
from tests.gpu.cases import Setting, TimeCase
from tests.gpu.pairs import Wrong
from tests.gpu.times import OURS, OWN

GPU: Any = SimpleNamespace(name="cuda")
CASE = TimeCase("8b", Setting(16), Setting(64), (128, 4096))


class FakeEngine:
    """Counts nothing, and says how it ended."""

    def __init__(self, log: Path, connector: Any) -> None:
        self.log, self.connector, self.ends = log, connector, list[str]()

    def sources(self) -> Any:
        return SimpleNamespace(external=0)

    def kill(self) -> None:
        self.ends.append("killed")

    def close(self) -> None:
        self.ends.append("closed")


@pytest.fixture
def engines(tmp_path: Path) -> Any:
    log, made = tmp_path / "log", list[FakeEngine]()
    log.write_text("ValueError: unequal blocks\n")

    def begin(folder: Path, setting: Setting, connector: Any, **more: Any) -> FakeEngine:
        made.append(FakeEngine(log, connector))
        return made[-1]

    return SimpleNamespace(
        device=GPU,
        made=made,
        begin_sized=begin,
        sized=lambda model, max_tokens: tmp_path,
        wait=lambda engine, begin_bare, until: None,
    )


def test_a_connector_that_never_answers_is_refused_and_gone(engines, monkeypatch):
    """vLLM's own may wait forever for a pair that it refuses: ours is measured all the same."""
    waited = []

    def load(src: Any, dst: Any, prompt: Sequence[int], seconds: float) -> float:
        waited.append(seconds)
        if src.connector is STOCK:
            raise TimeoutError
        return 0.01

    monkeypatch.setattr(times, "load", load)
    monkeypatch.setattr(times, "close_all", lambda some: [engine.close() for engine in some])
    with times.sized_pairs(engines, times.Sized("8b", CASE.src, CASE.dst, 4096, 8)) as (pairs, refused):
        assert list(pairs) == [OURS]
        assert refused == {OWN: "no answer within 30 s: ValueError: unequal blocks"}
        assert [engine.ends for engine in engines.made] == [[], [], ["killed"], ["killed"]]
    assert waited[-1] == times.FIRST_SECONDS
    assert [engine.ends[-1] for engine in engines.made] == ["closed"] * 4


def test_what_was_measured_stays_if_a_longer_load_fails(engines, monkeypatch):
    both, num_loads = (FakeEngine(Path(), None), FakeEngine(Path(), None)), 0

    def load(src: Any, dst: Any, prompt: Sequence[int]) -> float:
        nonlocal num_loads
        num_loads += 1
        if len(prompt) == 4096 and num_loads > 2 * times.TURNS:
            raise Wrong("a load of 4096 tokens failed")
        return len(prompt) / 1e3

    monkeypatch.setattr(times, "load", load)
    monkeypatch.setattr(times, "sized_pairs", lambda *_: nullcontext(({OURS: both}, {OWN: "refused"})))
    found: dict[str, Any] = {}
    with pytest.raises(Wrong, match="4096"):
        times.run_time(engines, CASE, found)
    assert found["refused"] == {OWN: "refused"}
    assert set(found["load_ms"][OURS]) == {"128"}
    assert found["load_ms"][OURS]["128"]["less_two_tokens_ms"] == pytest.approx(126)
