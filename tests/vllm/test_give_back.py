"""A ticket that the decoding engine does not need is given back at once: the source's blocks are free again.

Leases last 30 s here, so that nothing but giving back frees a block in time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from kvferry.runtime.figures import Figures
from tests.vllm.conftest import Docks
from tests.vllm.engine import Answer, Engine, Params, Setup, drive
from tests.vllm.pairs import Pair, with_policy

Prompt = Callable[[int], list[int]]
Way = Callable[[Pair, Prompt], None]
SETUP = replace(Setup(), options=(("listen", "tcp://127.0.0.1:*"), ("lease_seconds", 30.0)))
GIVE_BACK_SECONDS = 1.0
LENGTH = 300


def reject(engine: Engine, params: Params) -> None:
    """What vLLM's HTTP front end does with a request that it rejects, or whose load has failed."""

    async def add(request: EngineCoreRequest) -> None:
        engine._answers[request.request_id] = Answer(request.request_id)
        engine.core.add_request(*engine.core.preprocess_add_request(request))

    front_end = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add))
    asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(front_end, "rejected", params))


def busy(pair: Pair, prompt: Prompt) -> Answer:
    """A request that leaves no room for another in a pool of 34 blocks."""
    answer = pair.dst.ask(prompt(800), 200)
    pair.dst.step()
    return answer


def is_in_the_prefix_cache(pair: Pair, prompt: Prompt) -> None:
    words = prompt(LENGTH)
    pair.dst.finish(pair.dst.ask(words, 1))
    params = pair.prefill(words[:288])
    pair.assert_right(pair.decode(words, params), words)


def is_computed_for_its_log_probabilities(pair: Pair, prompt: Prompt) -> None:
    words = prompt(LENGTH)
    answer = pair.dst.ask(words, params=pair.prefill(words), prompt_logprobs=1)
    pair.drive(answer)
    pair.assert_right(answer, words)


def is_rejected_by_the_front_end(pair: Pair, prompt: Prompt) -> None:
    reject(pair.dst, pair.prefill(prompt(LENGTH)))


def is_rejected_where_it_was_made(pair: Pair, prompt: Prompt) -> None:
    reject(pair.src, pair.prefill(prompt(LENGTH)))


def is_aborted_at_once(pair: Pair, prompt: Prompt) -> None:
    words = prompt(LENGTH)
    pair.dst.abort(pair.dst.ask(words, params=pair.prefill(words)).request_id)


def is_aborted_while_it_waits(pair: Pair, prompt: Prompt) -> None:
    answer, words = busy(pair, prompt), prompt(LENGTH)
    waiting = pair.dst.ask(words, params=pair.prefill(words))
    for _ in range(10):
        pair.dst.step()
        time.sleep(0.01)
    pair.dst.abort(waiting.request_id)
    pair.dst.abort(answer.request_id)


def is_aborted_during_the_load(pair: Pair, prompt: Prompt) -> None:
    words = prompt(LENGTH)
    asked = pair.dst.ask(words, params=pair.prefill(words))
    pair.dst.step()
    pair.dst.abort(asked.request_id)


WAYS = [
    is_in_the_prefix_cache,
    is_computed_for_its_log_probabilities,
    is_rejected_by_the_front_end,
    is_rejected_where_it_was_made,
    is_aborted_at_once,
    is_aborted_while_it_waits,
    is_aborted_during_the_load,
]


def counted(engine: Engine) -> Figures:
    """What the engine has counted of tickets and loads that no worker has seen."""
    figures = engine.core.scheduler.connector._side.incoming.figures
    return {name: number for name, number in figures.items() if number}


@contextmanager
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """To our own warnings and errors: with vLLM they do not reach the root of all loggers."""
    ours = logging.getLogger("kvferry")
    ours.addHandler(caplog.handler)
    caplog.handler.setLevel(logging.WARNING)
    caplog.clear()
    yield
    ours.removeHandler(caplog.handler)


def assert_given_back(pair: Pair, *, seconds: float = GIVE_BACK_SECONDS) -> None:
    started = time.monotonic()
    drive([pair.src, pair.dst], lambda: pair.src.is_whole, seconds)
    print(f"given back after {time.monotonic() - started:.3f} s")


@pytest.mark.parametrize("shape", [{}, {"tp": 2}], ids=["tp 1", "tp 2"])
@pytest.mark.parametrize("way", WAYS)
def test_a_ticket_that_is_not_needed(
    docks: Docks, prompt: Prompt, way: Way, shape: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    """No reader of the ticket is left, and nothing has failed: neither log nor metrics say so."""
    pair = Pair(docks.shared("src", SETUP), docks.shared("dst", replace(SETUP, blocks=34, **shape)))
    with listening(caplog):
        way(pair, prompt)
        assert_given_back(pair)
    drive([pair.src, pair.dst], lambda: pair.dst.is_whole, GIVE_BACK_SECONDS)
    assert caplog.messages == []
    assert counted(pair.dst) == {}
    words = prompt(LENGTH)
    pair.assert_loaded(pair.ferry(words), words)


# -- loads that fail before anything is read


def fails_at_the_meeting(docks: Docks, policy: str) -> Pair:
    """Two engines that do not fit: the load fails, and the ticket is still good for another engine."""
    return Pair(docks.shared("src", SETUP), docks.own(with_policy(replace(SETUP, family="gemma3"), policy)))


def test_a_failed_load_that_is_computed_instead(docks: Docks, prompt: Prompt):
    pair, words = fails_at_the_meeting(docks, "recompute"), prompt(LENGTH)
    params = pair.prefill(words)
    answer = pair.dst.ask(words, params=params)
    drive([pair.dst], lambda: answer.is_done)
    pair.assert_right(answer, words)
    assert_given_back(pair)


def test_another_prompt_that_is_computed_instead(docks: Docks, prompt: Prompt):
    pair, words = Pair(docks.shared("src", SETUP), docks.own(with_policy(SETUP, "recompute"))), prompt(LENGTH)
    params = pair.prefill(prompt(LENGTH))
    pair.assert_right(pair.decode(words, params), words)
    assert_given_back(pair)


def test_a_failed_load_that_is_reported_leaves_its_ticket_to_another_engine(docks: Docks, prompt: Prompt):
    pair, words = fails_at_the_meeting(docks, "fail"), prompt(LENGTH)
    params = pair.prefill(words)
    pair.assert_refused(pair.decode(words, params), words)
    other = Pair(pair.src, docks.shared("dst", replace(SETUP, blocks=34)))
    other.assert_loaded(other.decode(words, params), words)
    assert_given_back(other)


def test_a_failed_load_is_given_back_by_the_front_end(docks: Docks, prompt: Prompt):
    """It counts as the one failed load that it is, and not as a ticket for another prompt, too."""
    pair, words = fails_at_the_meeting(docks, "fail"), prompt(LENGTH)
    params = pair.prefill(words)
    pair.assert_refused(pair.decode(words, params), words)
    reject(pair.dst, params)
    assert_given_back(pair)
    assert counted(pair.dst) == {}


def test_a_rejected_copy_does_not_take_a_ticket_from_its_request(docks: Docks, prompt: Prompt):
    pair, words = Pair(docks.shared("src", SETUP), docks.own(SETUP)), prompt(LENGTH)
    params = pair.prefill(words)
    asked = pair.dst.ask(words, params=params)
    reject(pair.dst, params)
    pair.drive(asked)
    pair.assert_loaded(asked, words)
    assert_given_back(pair)
