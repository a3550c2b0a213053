"""What a decode server offers of one turn reaches the prefill of the next one, and nobody else."""

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from aiohttp import web

from kvferry.proxy import conversations
from kvferry.proxy.bodies import fields_in
from kvferry.proxy.metrics import ProxyMetrics
from kvferry.proxy.settings import Role
from tests.proxy.conftest import Behaviour, World, answering, complete, give_ticket, play, streaming

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"do_remote_decode": True, "do_remote_prefill": False}
SYSTEM = {"role": "system", "content": "You know all rivers. " * 100}


def soft(number: int) -> dict[str, Any]:
    """What a decode server's answer number so and so offers."""
    return {**ASK, "remote_block_ids": [[number]], "kvferry_ticket": f"soft-{number}"}


def offering() -> Behaviour:
    """Answers A1, A2, …, each with its offer."""
    numbers: Iterator[int] = count(1)

    async def behave(request: web.Request) -> web.Response:
        number = next(numbers)
        text = f"A{number} " * 400
        chat = {"message": {"role": "assistant", "content": text, "tool_calls": []}}
        choice = chat if "chat" in request.path else {"text": text, "token_ids": [number] * 600}
        return web.json_response({"choices": [choice], "kv_transfer_params": soft(number)})

    return behave


def offers(world: World) -> list[str | None]:
    """What each prefill was told of an earlier turn."""
    return [
        body["kv_transfer_params"].get("kvferry_ticket") for server in world.prefill for body in server.bodies
    ]


class Talk:
    """A client's conversation."""

    def __init__(self, world: World, form: str, **more: Any) -> None:
        self.world, self.form, self.more = world, form, more
        self.messages: list[Any] = [SYSTEM]
        self.prompt: Any = [3] * 2000 if form == "token ids" else "text " * 500

    async def turn(self, question: str, **more: Any) -> dict[str, Any]:
        more = {**self.more, **more}
        if self.form == "chat":
            self.messages.append({"content": question, "role": "user"})
            status, answer = await self.world.ask(CHAT, prompt=None, messages=self.messages, **more)
            self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        else:
            self.prompt += list(question.encode()) if self.form == "token ids" else question
            status, answer = await self.world.ask(TEXT, prompt=self.prompt, **more)
            self.prompt += answer["choices"][0]["token_ids" if self.form == "token ids" else "text"]
        assert status == 200
        return answer


@pytest.mark.parametrize("form", ["chat", "text", "token ids"])
def test_the_next_turn_is_prefilled_with_the_last_ones_offer(form):
    """Also where two conversations begin alike."""

    async def test(world: World) -> None:
        one, other = Talk(world, form), Talk(world, form)
        for talk in (one, other, one, other, one):
            answer = await talk.turn("And how deep?" if talk is one else "And how wide?")
            assert "kv_transfer_params" not in answer
        asked = [body["kv_transfer_params"] for body in world.prefill[0].bodies]
        assert asked[2:] == [soft(1), soft(2), soft(3)]
        assert asked[0] == ASK
        assert asked[1] in (ASK, soft(1)), "what both prompts begin with may be found"

    play(test, decode=[offering()])


def test_any_prefill_server_gets_what_any_decode_server_offers():
    async def test(world: World) -> None:
        talk = Talk(world, "chat")
        for _ in range(4):
            await talk.turn("And then?")
        first, second = ([body["kv_transfer_params"] for body in server.bodies] for server in world.prefill)
        tickets = [
            transfer.get("kvferry_ticket") for pair in zip(first, second, strict=True) for transfer in pair
        ]
        assert tickets == [None, "soft-1", "soft-2", "soft-3"]
        assert [len(server.bodies) for server in world.decode] == [2, 2]
        assert world.sample("turns_total", result="hit") == 3
        assert world.sample("turns_total", result="miss") == 1
        assert world.sample("offers") == 8, (
            "each with its answer, and without: a client may change the answer"
        )

    play(test, prefill=[give_ticket] * 2, decode=[offering()] * 2)


def test_an_answer_that_comes_back_changed_is_still_a_turn():
    """Without its reasoning, say. And however it is written."""

    async def test(world: World) -> None:
        talk = Talk(world, "chat")
        await talk.turn("How déep?")
        talk.messages[-1]["content"] = "shorter"
        talk.messages[-2] = {"role": "user", "name": "Aeneas", "content": talk.messages[-2]["content"]}
        text = json.dumps(
            {"messages": [*talk.messages, {"role": "user", "content": "?"}]}, ensure_ascii=False
        )
        async with world.client.post(world.url + CHAT, data=text.encode()) as answer:
            assert answer.status == 200
        assert offers(world) == [None, "soft-1"]

    play(test, decode=[offering()])


@pytest.mark.parametrize("more", [{"cache_salt": "mine"}, {"model": "other"}], ids=str)
def test_requests_of_another_salt_or_model_share_nothing(more):
    async def test(world: World) -> None:
        talk = Talk(world, "chat")
        await talk.turn("How deep?")
        await talk.turn("How wide?", **more)
        await talk.turn("How long?", **more)
        assert offers(world) == [None, None, "soft-2"]

    play(test, decode=[offering()])


def test_what_a_server_offered_is_forgotten_when_it_is_lost():
    async def test(world: World) -> None:
        await world.get("/health")
        talk = Talk(world, "chat")
        await talk.turn("How deep?")
        world.proxy._pools[Role.DECODE].mark(world.server("decode"), is_ready=False)
        world.proxy._pools[Role.DECODE].mark(world.server("decode"), is_ready=True)
        await talk.turn("How wide?")
        await talk.turn("How long?")
        assert offers(world) == [None, None, "soft-2"]
        assert world.sample("offers") == 4, "they are forgotten once they are found"

    play(test, decode=[offering()])


def test_the_oldest_offers_make_room(monkeypatch):
    monkeypatch.setattr(conversations, "MAX_OFFERS_BYTES", 3000)

    async def test(world: World) -> None:
        talks = [Talk(world, "chat") for _ in range(3)]
        for number, talk in enumerate(talks):
            await talk.turn(f"Which is river number {number}?")
        assert world.sample("offers") == 4
        for talk in talks[::-1]:
            await talk.turn("Sure?")
        assert offers(world) == [None, None, None, "soft-3", None, None]
        assert world.proxy._conversations._num_bytes <= 3000

    play(test, decode=[offering()])


def test_it_can_be_switched_off():
    async def test(world: World) -> None:
        talk = Talk(world, "chat")
        for _ in range(2):
            assert "kv_transfer_params" not in await talk.turn("And then?")
        assert offers(world) == [None, None]
        assert world.sample("offers") == world.sample("turns_total", result="miss") == 0

    play(test, decode=[offering()], has_conversations=False)


def events(*parts: Any) -> list[bytes]:
    lines = [f"data: {json.dumps(part, separators=(',', ':'))}" for part in parts]
    whole = "\n\n".join([*lines, "data: [DONE]", ""]).encode()
    return [whole[:100], whole[100:]]


def test_a_stream_without_an_offer_is_prefilled_with_one():
    """vLLM 0.32's streams have none."""

    async def test(world: World) -> None:
        talk = Talk(world, "chat")
        await talk.turn("How deep?")
        world.decode[0].behave = streaming(sent := events({"choices": [{"delta": {"content": "A"}}]}))
        more = [*talk.messages, {"role": "user", "content": "?"}]
        async with world.post(CHAT, prompt=None, messages=more, stream=True) as answer:
            assert await answer.read() == b"".join(sent)
        assert offers(world) == [None, "soft-1"]
        assert world.sample("offers") == 2

    play(test, decode=[offering()])


@pytest.mark.parametrize("form", ["chat", "text"])
def test_a_stream_offers_the_next_turn_and_its_client_sees_nothing_of_it(form):
    """As vLLM 0.33 writes it: null in every part but the last one."""
    texts = ["long " * 200, "\n\n", '"kv_transfer_params":{', "é", ""]
    parts: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in texts]
    if form == "chat":
        first = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        parts = [first, *({"choices": [{"delta": {"content": text}}]} for text in texts)]
    usage = {"choices": [], "usage": {"total_tokens": 9}}
    nulls = [{**part, "kv_transfer_params": None} for part in parts[:-1]]
    sent = events(*nulls, {**parts[-1], "kv_transfer_params": soft(7)}, usage)

    async def test(world: World) -> None:
        talk = Talk(world, form)
        messages, prompt = [*talk.messages, {"role": "user", "content": "?"}], talk.prompt
        asked = {"prompt": None, "messages": messages} if form == "chat" else {"prompt": prompt}
        async with world.post(CHAT if form == "chat" else TEXT, stream=True, **asked) as answer:
            assert await answer.read() == b"".join(events(*parts, usage))
        world.decode[0].behave = complete
        for said in ("".join(texts), "something else" * 100):
            more = [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
            asked = (
                {"prompt": None, "messages": [*messages, *more]}
                if form == "chat"
                else {"prompt": prompt + said}
            )
            await world.ask(CHAT if form == "chat" else TEXT, **asked)
        assert offers(world) == [None, "soft-7", "soft-7"]
        assert world.sample("offers") == 2

    play(test, decode=[streaming(sent)])


@pytest.mark.parametrize("part", [{"delta": {"tool_calls": [{"id": "a"}]}}, {"delta": 7}], ids=str)
def test_a_stream_with_more_than_text_is_known_by_its_prompt(part):
    async def test(world: World) -> None:
        async with world.post(CHAT, prompt=None, messages=[SYSTEM], stream=True) as answer:
            assert b"kv_transfer" not in await answer.read()
        assert world.sample("offers") == 1

    play(test, decode=[streaming(events({"choices": [part], "kv_transfer_params": soft(1)}))])


def test_a_stream_that_breaks_off_offers_nothing():
    async def test(world: World) -> None:
        async with world.post(CHAT, prompt=None, messages=[SYSTEM], stream=True) as answer:
            assert b"error" in await answer.read()
        assert world.sample("offers") == 0

    play(test, decode=[streaming(events({"choices": [], "kv_transfer_params": soft(1)})[:1], then="break")])


@pytest.mark.parametrize(
    "transfer",
    [None, "what?", {}, {"do_remote_decode": False, "kvferry_ticket": "no offer"}, {**ASK, "a": "x" * 2**21}],
)
def test_what_is_no_offer_is_not_kept_and_not_passed_on(transfer):
    async def test(world: World) -> None:
        status, answer = await world.ask(CHAT, prompt=None, messages=[SYSTEM])
        assert (status, list(answer)) == (200, ["choices"])
        assert world.sample("offers") == 0

    play(test, decode=[answering(200, {"choices": [{"message": SYSTEM}], "kv_transfer_params": transfer})])


@pytest.mark.parametrize(
    "answer", [[], "kv_transfer_params", {"choices": [], "kv_transfer_params": ASK}], ids=str
)
def test_an_answer_of_another_form_is_passed_on(answer):
    async def test(world: World) -> None:
        status, said = await world.ask(CHAT, prompt=None, messages=[SYSTEM])
        assert (status, said) == (200, {"choices": []} if isinstance(answer, dict) else answer)

    play(test, decode=[answering(200, answer)])


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "what?"},
        {"messages": [1]},
        {"messages": [{"role": 7}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {}]},
        {"prompt": {"a": 1}},
        {"prompt": []},
        {},
    ],
    ids=ascii,
)
def test_prompts_of_another_form_are_for_the_servers_to_judge(body):
    async def test(world: World) -> None:
        for _ in range(2):
            async with world.client.post(world.url + CHAT, data=json.dumps(body).encode()) as answer:
                assert answer.status == 200
        assert {key: value for key, value in world.decode[0].bodies[1].items() if key in body} == body

    play(test, decode=[offering()])


SLOW_PROMPTS = {
    "objects": b'{"messages": [' + b"{}," * ((1 << 16) - 1) + b"{}]}",
    "more objects": b'{"messages": [' + b"{}," * (1 << 20) + b"{}]}",
    "inner objects": b'{"messages": [{"content": [' + b"{}," * 50_000 + b"{}]}]}",
    "text": b'{"prompt": "' + b"x" * (1 << 22) + b'"}',
    "more text": b'{"prompt": "' + b"x" * (1 << 24) + b'"}',
    "escapes": b'{"prompt": "' + rb"\u00a7" * 690_000 + b'"}',
    "token ids": b'{"prompt": [' + b"7," * 2_000_000 + b"7]}",
}


@pytest.mark.parametrize("name", SLOW_PROMPTS)
def test_no_prompt_takes_long(name):
    body, seconds = fields_in(SLOW_PROMPTS[name]), []
    for _ in range(3):
        began = time.process_time()
        conversations.Conversations(ProxyMetrics(), is_on=True).begin(body)
        seconds.append(time.process_time() - began)
    print(f"{name}: {min(seconds) * 1000:.0f} ms")
    assert min(seconds) < 0.2
