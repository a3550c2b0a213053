"""Turn 2 of a conversation is read back from the engine that decoded turn 1, and every answer stays right."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvferry.integrations.vllm.scheduler import soft
from kvferry.integrations.vllm.scheduler.tables import Adapters, digest_parts_of
from kvferry.wire.ticket import part_at
from tests.vllm.conftest import Docks
from tests.vllm.engine import PREFILL, Answer, Engine, Params, Setup, drive
from tests.vllm.pairs import assert_whole
from tests.vllm.registered import Registered

BOTH = Setup(policy="recompute", options=(*Setup.options, ("bidirectional_kv_xfer", True)))
SMALL = replace(BOTH, longest=512, blocks=18)
LONG_LEASE = replace(BOTH, options=(*BOTH.options, ("lease_seconds", 300.0)))
"""What is pinned for nothing stays pinned: a test that ends with ``assert_whole`` sees it."""
Prompts = Callable[[int], list[int]]


class Router:
    """Prefills on one engine and decodes on another; hands what an answer offers to the next prefill."""

    def __init__(self, src: Engine, dst: Engine) -> None:
        self.src, self.dst = src, dst

    def turn(
        self, prompt: Sequence[int], offer: Params | None, num_tokens: int = 40
    ) -> tuple[Answer, Answer]:
        """(prefill, answer); ``offer``: the params of the last turn's answer."""
        prefill = self.src.ask(prompt, 1, {**(offer or {}), **PREFILL})
        self.drive(prefill)
        answer = self.dst.ask(prompt, num_tokens, prefill.params)
        self.drive(answer)
        assert answer.finish_reason == "length"
        assert answer.tokens == self.dst.right(prompt, num_tokens)
        return prefill, answer

    def drive(self, *answers: Answer) -> None:
        drive([self.src, self.dst], lambda: all(answer.is_done for answer in answers))

    def forget(self) -> None:
        """The prefill engine has lost what it computed."""
        drive([self.src, self.dst], lambda: self.src.is_whole)
        assert self.src.core.reset_prefix_cache()


def counts(engine: Engine, metric: str) -> dict[str, float]:
    """By label; of a metric without labels by the empty text."""
    side = engine.core.scheduler.connector._side
    figures = {**side.outgoing.figures, **side.incoming.figures}
    return {"".join(key[1:]): number for key, number in figures.items() if key[0] == f"kvferry_{metric}"}


def router(docks: Docks, src: Setup = BOTH, dst: Setup = BOTH) -> Router:
    return Router(docks.own(src), docks.own(dst))


PAIRS = {
    "llama, 32-64": (BOTH, replace(BOTH, block=64)),
    "llama, tp 2-1": (replace(BOTH, tp=2), BOTH),
    "llama, tp 1-2, 64-32": (replace(BOTH, block=64), replace(BOTH, tp=2)),
    "llama, pp 2-1": (replace(BOTH, pp=2), BOTH),
    "llama, pp 1-2": (BOTH, replace(BOTH, pp=2)),
    "llama, async, chunked": (replace(BOTH, is_async=True, chunk=96), replace(BOTH, is_async=True, chunk=96)),
    "gemma3, 32-64": (replace(BOTH, family="gemma3"), replace(BOTH, family="gemma3", block=64)),
    "deepseek_v3": (replace(BOTH, family="deepseek_v3", block=None),) * 2,
    "deepseek_v3, tp 2-1": (
        replace(BOTH, family="deepseek_v3", block=None, tp=2),
        replace(BOTH, family="deepseek_v3", block=None),
    ),
    "nemotron_h": (replace(BOTH, family="nemotron_h", block=None),) * 2,
}


@pytest.mark.parametrize("name", PAIRS)
def test_turns_of_conversations(docks: Docks, prompt: Prompts, name: str):
    """Two conversations at once, of six turns; whatever another request can hit is right as well."""
    talk = router(docks, *PAIRS[name])
    registered = [Registered(engine) for engine in (talk.src, talk.dst)]
    texts = [prompt(150), prompt(200)]
    offers: list[Params | None] = [None, None]
    num_read_back = 0
    for _ in range(6):
        for at in range(2):
            prefill, answer = talk.turn(texts[at], offers[at])
            num_read_back += prefill.num_external
            texts[at], offers[at] = [*texts[at], *answer.tokens, *prompt(30)], answer.params
        talk.forget()
    assert [wrong for each in registered for wrong in each.wrong()] == []
    print(f"\n{name}: {num_read_back} tokens, {counts(talk.dst, 'claims')}, {counts(talk.src, 'read_backs')}")
    if "nemotron" not in name:
        assert num_read_back > 1500
        assert counts(talk.src, "read_back_tokens") == {"": num_read_back}
    assert_whole(talk.src, talk.dst)


def test_without_it_nothing_is_offered_and_nothing_read(docks: Docks, prompt: Prompts):
    off = replace(BOTH, options=Setup.options)
    talk = router(docks, off, off)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    assert answer.params is None


def test_an_engine_that_fails_requests_claims_nothing(docks: Docks, prompt: Prompts):
    """What need not be read must not fail a request."""
    talk = router(docks, replace(BOTH, policy="fail"))
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    prefill, _ = talk.turn([*text, *answer.tokens, *prompt(5)], answer.params)
    assert prefill.num_external == 0


def test_a_prompt_that_parts_is_read_up_to_there(docks: Docks, prompt: Prompts):
    talk = router(docks)
    text = prompt(500)
    _, answer = talk.turn(text, None)
    talk.forget()
    prefill, _ = talk.turn([*text[:450], *prompt(60)], answer.params)
    assert prefill.num_external == 448
    talk.forget()
    prefill, _ = talk.turn(prompt(400), answer.params)
    assert prefill.num_external == 0
    assert counts(talk.src, "read_backs") == {"claimed": 1, "diverged": 1}


def test_prompts_with_different_salts_share_nothing(docks: Docks, prompt: Prompts):
    """As in vLLM's own prefix cache."""
    talk = router(docks)
    text = prompt(300)
    prefill = talk.src.ask(text, 1, dict(PREFILL), cache_salt="ours")
    talk.drive(prefill)
    answer = talk.dst.ask(text, 40, prefill.params, cache_salt="ours")
    talk.drive(answer)
    assert answer.num_external == 300
    talk.forget()
    for salt, num_read_back in (("ours", 320), ("theirs", 0), (None, 0)):
        following = [*text, *answer.tokens, *prompt(5)]
        prefill = talk.src.ask(following, 1, {**(answer.params or {}), **PREFILL}, cache_salt=salt)
        talk.drive(prefill)
        assert prefill.num_external == num_read_back, salt
    assert counts(talk.src, "read_backs") == {"claimed": 1, "diverged": 2}


LATE = replace(BOTH, is_async=True, is_late=True, chunk=96)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_claim_of_blocks_that_are_being_written_waits_for_the_device(
    docks: Docks, prompt: Prompts, pp: int
):
    """vLLM registers blocks when it schedules the step that fills them; what is granted may be read before
    the device begins another step.
    """
    talk = router(docks, dst=replace(LATE, pp=pp))
    executor = talk.dst.core.model_executor
    run = executor._run

    def slow(scheduled):
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            talk.src.step()
        return run(scheduled)

    num_read_back = 0
    for num_steps in (3, 5, 7):
        text = prompt(600)
        _, answer = talk.turn(text, None, 2)
        talk.forget()
        drive([talk.dst], lambda: talk.dst.is_whole)
        assert talk.dst.core.reset_prefix_cache()
        for worker in talk.dst.workers:
            for cache in worker.caches.values():
                cache.fill_(7)  # what was there before is not there by chance
        again = talk.dst.ask(text, 1)
        for _ in range(num_steps):
            talk.dst.step()
        executor._run = slow
        following = [*text, *prompt(9)]
        prefill = talk.src.ask(following, 1, {**(answer.params or {}), **PREFILL})
        talk.drive(prefill, again)
        executor._run = run
        assert prefill.tokens == talk.src.right(following, 1)
        num_read_back += prefill.num_external
    assert num_read_back
    assert_whole(talk.src, talk.dst)


def test_steps_while_a_claim_waits_end_with_their_draft_models(docks: Docks, prompt: Prompts):
    """A step without work tells nothing of the one before, whose draft model may still run."""
    talk = router(docks)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    side = talk.dst.core.scheduler.connector._side
    take, seen = side.step, []

    def step(output):
        metadata = take(output)
        seen.append((bool(side.outgoing.soft._pinned), metadata.is_for_others))
        return metadata

    side.step = step
    prefill, _ = talk.turn([*text, *answer.tokens], answer.params)
    assert prefill.num_external
    assert any(is_pinned for is_pinned, _ in seen)
    assert all(is_for_others for is_pinned, is_for_others in seen if is_pinned)
    assert not all(is_for_others for _, is_for_others in seen)


def test_what_is_here_is_not_claimed(docks: Docks, prompt: Prompts):
    talk = router(docks)
    text = prompt(320)
    _, answer = talk.turn(text, None, 2)
    prefill, _ = talk.turn([*text, *answer.tokens, *prompt(5)], answer.params)
    assert (prefill.num_local, prefill.num_external) == (320, 0)
    assert counts(talk.src, "read_backs") == {"cached": 1}


@pytest.mark.parametrize(
    ("found", "granted"), [([128], 128), ([144, 128], 128), ([144, 112], 0), ([48, 0], 0)]
)
def test_a_claim_is_granted_up_to_the_last_whole_block(found: list[int], granted: int):
    """vLLM also finds what it has registered of a block in part, and goes on to write into that block."""
    asked = []

    def find(block_hashes: Sequence[str], most: int):
        asked.append(most)
        num_tokens = found[len(asked) - 1]
        return ([f"blocks of {num_tokens} tokens"],), num_tokens, 0

    sizes = [SimpleNamespace(block_size=size) for size in (32, 64)]
    coordinator = SimpleNamespace(single_type_managers=sizes, find_longest_cache_hit=find)
    finished = soft._Finished(-1, ("hash",), b"")
    blocks, num_tokens = soft._whole_hit(SimpleNamespace(coordinator=coordinator), finished, 150)
    assert num_tokens == granted
    assert not granted or blocks == ([f"blocks of {granted} tokens"],)
    assert asked == [150, found[0] // 64 * 64][: len(found)]


def test_what_was_evicted_is_computed(docks: Docks, prompt: Prompts):
    talk = router(docks, dst=SMALL)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    talk.turn(prompt(400), None)  # the pool of 19 blocks has room for little else
    prefill, _ = talk.turn([*text, *answer.tokens, *prompt(5)], answer.params)
    assert prefill.num_external <= 5 * 32
    talk.forget()
    assert talk.dst.core.reset_prefix_cache()
    prefill, _ = talk.turn([*text, *answer.tokens, *prompt(5)], answer.params)
    assert prefill.num_external == 0
    assert counts(talk.src, "read_backs")["denied"] >= 1


def test_an_engine_that_takes_no_steps_is_not_waited_for(docks: Docks, prompt: Prompts):
    talk = router(docks)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    following = [*text, *answer.tokens, *prompt(5)]
    prefill = talk.src.ask(following, 1, {**(answer.params or {}), **PREFILL})
    talk.src.finish(prefill)
    assert prefill.num_external == 0
    talk.dst.run(lambda: talk.dst.core.scheduler.connector._side.outgoing.soft._step > 3)
    assert counts(talk.src, "read_backs") == {"denied": 1}
    assert_whole(talk.src, talk.dst)


def test_an_engine_that_died_is_not_waited_for(docks: Docks, prompt: Prompts):
    talk = router(docks)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    talk.dst.close()
    prefill = talk.src.ask([*text, *answer.tokens], 1, {**(answer.params or {}), **PREFILL})
    talk.src.finish(prefill)
    assert prefill.tokens == talk.src.right([*text, *answer.tokens], 1)
    docks._own.remove(talk.dst)


@pytest.mark.parametrize("num_steps", range(6))
def test_a_request_that_ends_early_leaves_nothing_pinned(docks: Docks, prompt: Prompts, num_steps: int):
    talk = router(docks, dst=LONG_LEASE)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    prefill = talk.src.ask([*text, *answer.tokens], 1, {**(answer.params or {}), **PREFILL})
    for _ in range(num_steps):
        talk.src.step()
        talk.dst.step()
    talk.src.abort(prefill.request_id)
    assert_whole(talk.src, talk.dst)


@pytest.mark.parametrize("lie", ["other tokens", "more tokens"])
def test_a_grant_of_what_was_not_asked_for_is_not_used(docks: Docks, prompt: Prompts, lie: str):
    """And what it pins is given back."""
    talk = router(docks, dst=LONG_LEASE)
    text = prompt(500)
    _, answer = talk.turn(text, None)
    talk.forget()
    offers = talk.dst.core.scheduler.connector._side.outgoing.soft
    pin, grant, asked = offers._pin, offers._grant, []

    def pin_more(source, wanted):
        asked.append(part_at(offers._history.find(wanted.ticket).parts, wanted.num_tokens))
        more = wanted.ticket.num_tokens if lie == "more tokens" else wanted.num_tokens
        pin(source, replace(wanted, num_tokens=more))

    def grant_lie(source, pinned):
        digest = asked[0] if lie == "more tokens" else bytes(16)
        grant(source, replace(pinned, digest=digest))

    offers._pin, offers._grant = pin_more, grant_lie
    prefill, _ = talk.turn([*text[:450], *prompt(90)], answer.params)
    assert prefill.num_external == 0
    assert counts(talk.src, "read_backs") == {"unused": 1}
    assert_whole(talk.src, talk.dst)


@pytest.mark.timed  # a claim that is not answered within a second is denied
def test_engines_that_claim_from_each_other_both_go_on(docks: Docks, prompt: Prompts):
    """Each request needs nearly all blocks of its engine, and the other's claim pins a quarter of them."""
    short = replace(SMALL, options=(*BOTH.options, ("lease_seconds", 1.0)))
    talk = router(docks, short, short)
    back = Router(talk.dst, talk.src)
    texts = [prompt(100), prompt(100)]
    answers = [
        each.dst.ask(text, 30, {"do_remote_prefill": False})
        for each, text in zip((talk, back), texts, strict=True)
    ]
    talk.drive(*answers)
    following = [[*text, *answer.tokens, *prompt(350)] for text, answer in zip(texts, answers, strict=True)]
    prefills = [
        each.src.ask(wanted, 1, {**(answer.params or {}), **PREFILL})
        for each, wanted, answer in zip((talk, back), following, answers, strict=True)
    ]
    talk.drive(*prefills)
    assert [counts(each, "read_backs") for each in (talk.src, talk.dst)] == [{"claimed": 1}] * 2
    for each, wanted, prefill in zip((talk, back), following, prefills, strict=True):
        assert prefill.tokens == each.src.right(wanted, 1)


def test_features_that_begin_at_one_token_all_count():
    """Such as the frames and the sound of a video."""

    def parts(*names: str) -> bytes:
        features = [
            MultiModalFeatureSpec(None, "video", name, PlaceholderRange(offset=8, length=16))
            for name in names
        ]
        request = SimpleNamespace(
            all_token_ids=range(128), mm_features=features, lora_request=None, cache_salt=None
        )
        return digest_parts_of(request, 128, Adapters())

    assert len({parts("a", "b"), parts("c", "b"), parts("a", "c"), parts("ab"), parts()}) == 5


def test_two_claims_of_the_same_blocks(docks: Docks, prompt: Prompts):
    talk = router(docks)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    following = [[*text, *answer.tokens, *prompt(40)] for _ in range(3)]
    prefills = [talk.src.ask(each, 1, {**(answer.params or {}), **PREFILL}) for each in following]
    talk.drive(*prefills)
    assert all(prefill.num_external >= 256 for prefill in prefills)
    for each, prefill in zip(following, prefills, strict=True):
        found = talk.dst.ask(each, params=prefill.params)
        talk.drive(found)
        assert found.tokens == talk.dst.right(each)
    assert_whole(talk.src, talk.dst)


def test_claimed_blocks_are_freed_when_every_worker_has_let_go(docks: Docks, prompt: Prompts):
    """A worker that still sends some of a claim keeps its blocks."""
    talk = router(docks, dst=replace(BOTH, tp=2))
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    slow = talk.dst.workers[1].connector._side
    held: list = []
    slow._end = lambda released, generation, ended: held.append((released, ended))
    prefill = talk.src.ask([*text, *answer.tokens], 1, {**(answer.params or {}), **PREFILL})
    drive([talk.src, talk.dst], lambda: held)
    for _ in range(50):
        talk.dst.step()
    assert talk.dst.num_free < talk.dst.num_free_at_start
    released, ended = held[0]
    ended.append(released.request_id)
    del slow._end
    drive([talk.dst], lambda: talk.dst.num_free == talk.dst.num_free_at_start)
    talk.drive(prefill)


def test_an_engine_short_of_blocks_is_not_held_up(docks: Docks, prompt: Prompts):
    """Soft offers pin nothing: a prompt that needs every block of the pool runs at once."""
    talk = router(docks, dst=SMALL)
    for _ in range(3):
        talk.turn(prompt(300), None)
    assert talk.dst.num_free == talk.dst.num_free_at_start
    talk.turn(prompt(512 - 41), None)
    assert_whole(talk.src, talk.dst)


def test_its_own_offer_is_not_claimed(docks: Docks, prompt: Prompts):
    talk = router(docks)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    prefill = talk.dst.ask([*text, *answer.tokens], 1, {**(answer.params or {}), **PREFILL})
    talk.drive(prefill)
    assert prefill.num_local >= 256


def test_what_cannot_be_offered_hurts_no_engine(docks: Docks, prompt: Prompts):
    """vLLM lets clients name their requests, at any length."""
    talk = router(docks)
    text = prompt(300)
    prefill = talk.src.ask(text, 1, dict(PREFILL))
    talk.drive(prefill)
    answer = talk.dst.ask(text, params=prefill.params, request_id="x" * 1100)
    talk.drive(answer)
    assert answer.tokens == talk.dst.right(text)
    assert answer.params is None
    short = talk.dst.ask(prompt(20), params={"do_remote_prefill": False})
    talk.drive(short)
    assert short.params is None


def test_claims_pin_a_quarter_of_the_blocks_at_most(docks: Docks, prompt: Prompts):
    talk = router(docks, dst=replace(BOTH, longest=512, blocks=40))
    texts = [prompt(200), prompt(200)]
    offers = [talk.turn(text, None)[1].params for text in texts]
    talk.forget()
    prefills = [
        talk.src.ask([*text, *prompt(9)], 1, {**(offer or {}), **PREFILL})
        for text, offer in zip(texts, offers, strict=True)
    ]
    fewest = talk.dst.num_free_at_start

    def are_done():
        nonlocal fewest
        fewest = min(fewest, talk.dst.num_free)
        return all(prefill.is_done for prefill in prefills)

    drive([talk.src, talk.dst], are_done)
    assert talk.dst.num_free_at_start - fewest <= 40 // 4
    assert sorted(prefill.num_external for prefill in prefills) == [0, 192]
    assert counts(talk.src, "read_backs") == {"claimed": 1, "denied": 1}


def test_the_holes_of_windows_count_for_no_block(docks: Docks, prompt: Prompts):
    """What a window has left behind is vLLM's null block, however often it is in a table."""
    setup = replace(BOTH, family="gemma3")
    talk = router(docks, setup, replace(setup, blocks=200))
    text = prompt(900)
    _, answer = talk.turn(text, None)
    talk.forget()
    prefill, _ = talk.turn([*text, *prompt(9)], answer.params)
    assert prefill.num_external == 896
    assert counts(talk.src, "read_backs") == {"claimed": 1}


def test_a_claim_leaves_running_requests_their_blocks(docks: Docks, prompt: Prompts):
    """It pins a quarter of the blocks that no request uses: 4 of 19, and it needs 6."""
    talk = router(docks, dst=replace(BOTH, longest=512, blocks=40))
    text = prompt(200)
    _, answer = talk.turn(text, None)
    talk.forget()
    running = [talk.dst.ask(prompt(300), 100) for _ in range(2)]
    for _ in range(3):
        talk.dst.step()
    prefill = talk.src.ask([*text, *prompt(9)], 1, {**(answer.params or {}), **PREFILL})
    talk.drive(prefill, *running)
    assert prefill.num_external == 0
    assert counts(talk.src, "read_backs") == {"denied": 1}


def test_a_history_is_bounded_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soft, "MAX_HASHES", 100)
    history = soft._History()
    for number in range(50):
        history.add(f"r{number}", soft._Finished(number, (), b""))
    assert len(history._finished) == 100 // soft.ENTRY_HASHES


def test_blocks_that_vllm_has_registered_anew_are_not_granted(docks: Docks, prompt: Prompts):
    """A partial tail of a recurrent state may move on while a claim waits."""
    talk = router(docks)
    text = prompt(300)
    _, answer = talk.turn(text, None)
    talk.forget()
    offers = talk.dst.core.scheduler.connector._side.outgoing.soft
    grant = offers._grant

    def changed(source, pinned):
        grant(source, replace(pinned, block_hashes=[*pinned.block_hashes[:-1], None]))

    offers._grant = changed
    prefill, _ = talk.turn([*text, *answer.tokens], answer.params)
    assert prefill.num_external == 0
    assert_whole(talk.src, talk.dst)
