"""Two vLLM engines whose workers hide their caches: loads are exact, and no card opens a cache."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvferry.transport.cards import staging_in, unpack_card
from kvferry.transport.expose import Expose
from kvferry.transport.staging import Staging
from tests.transport.listening import listening
from tests.vllm.conftest import Docks
from tests.vllm.engine import Engine, Setup
from tests.vllm.pairs import FAMILIES, Pair, assert_whole
from tests.vllm.test_packed_option import LEASE, SECONDS, Prompt, gathered, side, ways

__all__ = ["ways"]


def hidden(setup: Setup, expose: Expose, *more: tuple[str, Any]) -> Setup:
    return replace(setup, options=(*setup.options, LEASE, ("expose", expose.value), *more))


def staging_of(engine: Engine) -> Staging:
    join = side(engine).join
    assert join is not None
    return Staging.from_bytes(staging_in(join.description.card))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("expose", [Expose.STAGING, Expose.NOTHING], ids=lambda expose: expose.value)
def test_loads_are_exact_and_nothing_but_what_is_gathered_is_open(
    docks: Docks, prompt: Prompt, ways: list[tuple[str, str]], family: str, expose: Expose
) -> None:
    setup = FAMILIES[family]
    src = docks.own(hidden(replace(setup, block=64), expose))
    dst = docks.own(hidden(replace(setup, block=32), expose, ("digest", "full")))
    told = staging_of(src)
    assert told.expose is expose
    assert bool(told.place) == bool(told.ring_address) == (expose is Expose.STAGING)
    if expose is Expose.NOTHING:
        join = side(src).join
        assert join is not None
        assert unpack_card(join.description.card) == ("", b"")
    pair = Pair(src, dst)
    for num_tokens in (5, 300):
        words = prompt(num_tokens)
        pair.assert_loaded(pair.ferry(words), words)
    assert_whole(src, dst, seconds=SECONDS)
    assert ways == [("packed", "equal")] * 2
    assert all(gathered(src))


def test_a_reader_that_has_nobody_gather_is_told_what_to_set(docks: Docks, prompt: Prompt, caplog) -> None:
    src = docks.own(hidden(FAMILIES["llama"], Expose.STAGING))
    pair = Pair(src, docks.own(replace(FAMILIES["llama"], options=(*FAMILIES["llama"].options, LEASE))))
    pair.ferry(prompt(64))
    assert "hidden-pool" in caplog.text


def test_an_engine_without_a_secret_can_be_called_from_its_own_host_only(docks: Docks) -> None:
    """Also at the ports that UCX opens by itself: whoever reached one could read and write any memory."""
    before = listening()
    docks.own(FAMILIES["llama"])
    opened = listening() - before
    assert opened
    assert [address for address, _ in opened if not ip_address(address).is_loopback] == []
