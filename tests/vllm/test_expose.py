"""Two vLLM engines: what of a worker its readers can reach, and where an engine listens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.cli.processes import FABRICS
from kvferry.host.listening import listeners
from kvferry.transport.cards import Card
from kvferry.transport.settings import Expose
from tests.vllm.conftest import Docks
from tests.vllm.engine import Setup
from tests.vllm.pairs import FAMILIES, Pair, assert_whole
from tests.vllm.test_packed_option import LEASE, SECONDS, Prompt, gathered, side, ways

__all__ = ["ways"]

HOST = "127.0.0.2"
"""This machine, as others would call it."""


def exposing(setup: Setup, expose: Expose) -> Setup:
    return replace(setup, options=(*setup.options, LEASE, ("expose", expose.value), ("digest", "full")))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("expose", Expose, ids=lambda expose: expose.value)
def test_loads_are_exact_whatever_is_exposed(
    docks: Docks,
    prompt: Prompt,
    ways: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    expose: Expose,
) -> None:
    if expose is Expose.FABRIC:
        pytest.importorskip("nixl", reason="NIXL is not installed")
        monkeypatch.setenv("UCX_TLS", FABRICS["cma"]["UCX_TLS"])
    setup = exposing(FAMILIES[family], expose)
    src, dst = docks.own(replace(setup, block=64)), docks.own(replace(setup, block=32))
    join = side(src).join
    assert join is not None
    assert bool(Card.from_bytes(join.description.card).agent) == (expose is Expose.FABRIC)
    pair = Pair(src, dst)
    for num_tokens in (5, 300):
        words = prompt(num_tokens)
        pair.assert_loaded(pair.ferry(words), words)
    assert_whole(src, dst, seconds=SECONDS)
    assert ways == [("direct" if expose is Expose.FABRIC else "packed", "equal")] * 2
    assert all(gathered(src)) == (expose is not Expose.FABRIC)


@pytest.mark.parametrize("has_secret", [False, True])
def test_an_engine_listens_where_it_says_and_nowhere_else(
    docks: Docks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_secret: bool
) -> None:
    """UCX once opened ports by itself, through which anybody could read and write any memory."""
    host = HOST if has_secret else "127.0.0.1"
    if has_secret:
        path = tmp_path / "secret"
        path.write_text("0123456789abcdef" * 2)
        path.chmod(0o600)
        monkeypatch.setenv("KVFERRY_SECRET_FILE", str(path))
    before = listeners()
    llama = FAMILIES["llama"]
    engine = docks.own(replace(llama, options=(*llama.options, ("listen", f"tcp://{host}:*"))))
    opened = [each for each in listeners() - before if each.kind == "tcp"]
    gathering = side(engine)._gathering
    assert gathering is not None
    assert len(opened) == 3, "the authority, the rank, and its streams"
    assert {each.host for each in opened} == {host}
