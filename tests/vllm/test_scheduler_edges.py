"""Requests, tickets and steps in an odd order, or of an odd kind: each was a bug, found by a reviewer."""

from __future__ import annotations

import time
from dataclasses import replace
from inspect import getsource
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.renderers import base as renderer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvferry.integrations.vllm.scheduler.tables import is_identified
from kvferry.integrations.vllm.shared.step import StepMetadata
from kvferry.wire.ticket import from_text, to_text
from tests.vllm.engine import PREFILL, Answer, Engine, drive
from tests.vllm.pairs import FAMILIES, Pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.conftest import Docks

    Prompt = Callable[[int], list[int]]

TICKET = "kvferry_ticket"


def own(docks: Docks, family: str, **changes: Any) -> Pair:
    """No lease ends here, however slow the machine is: each ticket is read or given back."""
    setup = FAMILIES[family]
    options = dict(setup.options) | {"lease_seconds": 60.0}
    setup = replace(setup, options=tuple(options.items()))
    return Pair(docks.own(setup), docks.own(replace(setup, **changes)))


def ask(engine: Engine, prompt: list[int], num_tokens: int, params: Any, name: str, **fields: Any) -> Answer:
    """As ``Engine.ask``, but the engine gets the caller's own list, as in a process that they share."""
    sampling = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        extra_args={"kv_transfer_params": params} if params is not None else None,
    )
    sampling.update_from_generation_config({}, 257)
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        **fields,
    )
    answer = engine._answers[name] = Answer(name)
    engine.core.add_request(*engine.core.preprocess_add_request(request))
    return answer


# -- the prompt that is cut


def test_the_callers_own_list_is_not_cut(docks: Docks, prompt: Prompt):
    pair, words = own(docks, "gemma3"), prompt(100)
    before = list(words)
    prefilled = ask(pair.src, words, 1, dict(PREFILL), "a")
    pair.drive(prefilled)
    assert words == before
    decoded = ask(pair.dst, words, 6, prefilled.params, "b")
    pair.drive(decoded)
    assert decoded.tokens == pair.dst.right(before)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_that_goes_on_later_is_not_cut(docks: Docks, prompt: Prompt, family: str):
    pair, first, second = own(docks, family), prompt(100), prompt(50)
    answer = ask(pair.src, list(first), 1, dict(PREFILL), "s", resumable=True)
    pair.src.run(lambda: answer.tokens)
    ask(pair.src, list(second), 1, None, "s", resumable=True)
    answer = pair.src._answers["s"]
    pair.src.run(lambda: answer.tokens)
    assert answer.tokens == pair.src.right([*first, *second], 1)


def test_a_prompt_of_tokens_and_vectors_is_not_cut(docks: Docks, prompt: Prompt):
    pair = own(docks, "gemma3")
    vectors = {"prompt_embeds": torch.zeros(100, 64), "prompt_is_token_ids": [True] * 99 + [False]}
    ask(pair.src, prompt(100), 1, dict(PREFILL), "e", **vectors)
    request = pair.src.core.scheduler.requests["e"]
    assert len(request.prompt_token_ids) == len(request.prompt_embeds)
    pair.src.abort("e")


def test_two_prefills_of_one_request(docks: Docks, prompt: Prompt):
    """As n=2 makes them: they share list and parameters."""
    pair, words, params = own(docks, "gemma3"), prompt(100), dict(PREFILL)
    answers = [ask(pair.src, words, 5, params, name) for name in "ab"]
    pair.drive(*answers)
    for answer in answers:
        pair.assert_right(pair.decode(words, answer.params), words)


# -- tickets that come again


def test_the_first_of_two_with_one_ticket_is_aborted(docks: Docks, prompt: Prompt):
    """The second computes its prompt, as it would have anyway; the ticket is gone for a third."""
    pair, words = own(docks, "gemma3"), prompt(100)
    params = pair.prefill(words)
    first, second = (pair.dst.ask(words, params=params) for _ in range(2))
    pair.dst.abort(first.request_id)
    third = pair.dst.ask(words, params=params)
    pair.drive(second, third)
    pair.assert_right(second, words)
    pair.assert_refused(third, words)
    pair.assert_whole()


def test_a_request_is_aborted_and_asked_again_before_the_next_step(docks: Docks, prompt: Prompt):
    """An abort gives the ticket back: who asks again needs another prefill."""
    pair, words = own(docks, "llama"), prompt(100)
    params = pair.prefill(words)
    pair.dst.abort(pair.dst.ask(words, params=params).request_id)
    pair.assert_refused(pair.decode(words, params), words)
    pair.assert_whole()


def test_a_request_that_waits_is_aborted_and_asked_again(docks: Docks, prompt: Prompt):
    pair = own(docks, "llama", blocks=34, longest=1024)
    busy = pair.dst.ask(prompt(800), 100)
    pair.dst.step()
    words, others = prompt(300), prompt(300)
    params, other_params = pair.prefill(words), pair.prefill(others)
    waiting = pair.dst.ask(words, params=params, request_id="x")
    for _ in range(5):
        pair.dst.step()
        time.sleep(0.01)
    pair.dst.abort(waiting.request_id)
    again = pair.dst.ask(others, params=other_params, request_id="x")  # the name, with another ticket
    retried = pair.dst.ask(words, params=params)  # the ticket, with another name
    pair.drive(again, retried, busy)
    pair.assert_right(again, others)
    pair.assert_refused(retried, words)
    pair.assert_whole()


def test_another_name_of_the_address_does_not_keep_the_true_one_out(docks: Docks, prompt: Prompt):
    pair, words = own(docks, "llama"), prompt(100)
    params = pair.prefill(words)
    ticket = from_text(params[TICKET])
    forged = msgspec.structs.replace(ticket, authority=ticket.authority.replace("127.0.0.1", "localhost"))
    pair.assert_refused(pair.decode(words, params | {TICKET: to_text(forged)}), words)
    time.sleep(1)  # its engine is met all the same
    words = prompt(100)
    pair.assert_loaded(pair.ferry(words), words)


def test_an_engines_own_ticket_pins_nothing(docks: Docks, prompt: Prompt):
    engine, words = own(docks, "llama").src, prompt(100)
    alone = Pair(engine, engine)
    alone.assert_right(alone.ferry(words), words)
    outgoing = engine.core.scheduler.connector._side.outgoing
    drive([engine], lambda: outgoing.num_leases == 0, seconds=10)  # a lease is of 60 s


def test_more_prefills_than_can_be_on_offer(docks: Docks, prompt: Prompt):
    pair = own(docks, "llama")
    pair.src.core.scheduler.connector._side.outgoing._source._offers.MAX_OPEN = 1
    prompts = [prompt(40) for _ in range(2)]
    answers = [pair.src.ask(words, 1, dict(PREFILL)) for words in prompts]
    pair.drive(*answers)
    assert sum(TICKET in (answer.params or {}) for answer in answers) == 1
    for words, answer in zip(prompts, answers, strict=True):
        pair.assert_right(pair.decode(words, answer.params), words)


def test_a_step_that_computes_for_another_engine_says_so(docks: Docks, prompt: Prompt) -> None:
    """Workers with a draft model wait for it in such a step, and in no other: a ticket may follow."""
    pair = own(docks, "llama")
    connector, steps = pair.src.core.scheduler.connector, []
    build = connector.build_connector_meta

    def recorded(output: Any) -> Any:
        step = build(output)
        steps.append((sorted(output.num_scheduled_tokens), step.is_for_others))
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connector, "build_connector_meta", recorded)
        for params in (PREFILL, None):
            answer = pair.src.ask(prompt(40), 1, params)
            pair.src.finish(answer)
    computed = [is_for_others for request_ids, is_for_others in steps if request_ids]
    idle = [is_for_others for request_ids, is_for_others in steps if not request_ids]
    assert computed == [True, False]
    assert not any(idle)


def test_a_worker_waits_for_its_draft_model_where_others_read(docks: Docks) -> None:
    side = own(docks, "llama").src.workers[0].connector._side
    waits: list[bool] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        patch.setattr(side, "_device", torch.device("cuda"))
        for speculative_config in (None, "eagle"):
            patch.setattr(side, "_vllm_config", SimpleNamespace(speculative_config=speculative_config))
            for is_for_others in (False, True):
                side.mark(StepMetadata(is_for_others=is_for_others))
                side.finish_step()
    assert len(waits) == 1


# -- what only vLLM's caches, a client or the hub can bring


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek-V4.1's windows: vLLM computes them again instead of caching them."""
    if not hasattr(SlidingWindowSpec, "prefix_replay_tokens"):
        pytest.skip("this vLLM has no windows outside of the prefix cache")
    monkeypatch.setattr(SlidingWindowSpec, "prefix_cacheable", property(lambda spec: False))
    monkeypatch.setattr(SlidingWindowSpec, "prefix_replay_tokens", property(lambda spec: spec.sliding_window))


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("num_new", [30, 90, 94, 95, 120])
def test_windows_that_are_not_cached_are_loaded_behind_a_prefix_hit(
    docks: Docks, prompt: Prompt, num_new: int
):
    """The window is 96 tokens. The toy cannot compute a window again, so the source caches nothing."""
    setup = FAMILIES["gemma3"]
    pair = Pair(docks.own(replace(setup, prefix_caching=False)), docks.own(setup))
    head = prompt(257)
    first, second = [*head, *prompt(30)], [*head, *prompt(num_new)]
    pair.assert_loaded(pair.ferry(first), first)
    answer = pair.ferry(second)
    pair.assert_right(answer, second)
    assert min(answer.num_local, answer.num_external) > 0


@pytest.mark.parametrize("params", ["x", 1, [1]])
def test_params_that_are_no_object_are_ignored(docks: Docks, prompt: Prompt, params: object):
    """A client may write vllm_xargs: {"kv_transfer_params": "x"}."""
    engine, words = docks.own(FAMILIES["llama"]), prompt(40)
    answer = ask(engine, words, 6, params, "a")
    engine.finish(answer)
    assert answer.tokens == engine.right(words)


@pytest.mark.parametrize("path", ["someone/some-adapter", "~nobody-here/adapter", "no/such/name"])
def test_an_adapter_that_is_not_on_this_host_is_not_offered(docks: Docks, prompt: Prompt, path: str):
    """Nothing is downloaded, and nothing that the hub's client raises ends the engine core."""
    pair = own(docks, "llama")
    answer = pair.src.ask(prompt(40), 1, dict(PREFILL), lora=LoRARequest("sql", 1, path))
    pair.drive(answer)
    assert answer.finish_reason == "length"
    assert not answer.params or TICKET not in answer.params


def test_images_named_by_a_counter_identify_no_prompt():
    """Two servers count alike by chance only. A client's own names and hashes of contents do."""

    def is_known(*names: str) -> bool:
        features = [SimpleNamespace(identifier=name) for name in names]
        return is_identified(SimpleNamespace(prompt_token_ids=[1], prompt_embeds=None, mm_features=features))

    assert is_known()
    assert is_known("0a" * 32, "my image")
    assert not is_known("0a" * 32, "renderer0-mm-17-image-0")
    assert not is_known("sql:renderer12-mm-1-video-3")
    assert 'f"renderer{self.api_process_rank}-mm-{' in getsource(renderer), "vLLM has other names now"


@pytest.mark.parametrize("family", ["llama", "gemma3", "nemotron_h"])
def test_after_a_reset_nothing_older_is_loaded(docks: Docks, prompt: Prompt, family: str):
    """Weights may have changed: requests that wait are computed, and their tickets go back."""
    pair, words = own(docks, family), prompt(100)
    answer = pair.dst.ask(words, params=pair.prefill(words))
    assert pair.dst.core.scheduler.reset_prefix_cache(reset_connector=True)
    pair.drive(answer)
    pair.assert_right(answer, words)
    assert not answer.num_external
    pair.assert_whole()
    pair.assert_loaded(pair.ferry(other := prompt(100)), other)
