"""What a request goes through: what servers are told of it, what its client gets, and what nobody may see."""

import asyncio
import gzip
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.proxy.metrics import RequestOutcome
from tests.proxy.conftest import (
    PROMPT,
    TICKET,
    World,
    answering,
    complete,
    give_ticket,
    play,
    streaming,
)

DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prefill_for_one_token_and_a_ticket_then_decode_with_it(path):
    async def test(world: World) -> None:
        more = {"max_completion_tokens": 9, "min_tokens": 3, "n": 1, "stream": False, "seed": 7}
        assert await world.ask(path, **more) == (200, {"choices": [{"text": "answer"}]})
        (prefill,), (decode,) = world.prefill[0].bodies, world.decode[0].bodies
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        assert prefill == {
            "prompt": PROMPT,
            "seed": 7,
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": asked,
        }
        assert decode == {"prompt": PROMPT, **more, "kv_transfer_params": TICKET}

    play(test)


def test_what_clients_say_of_transfers_reaches_no_server():
    """Also where vLLM looks besides, and where a request does not fit a ticket."""

    async def test(world: World) -> None:
        forged = {"do_remote_prefill": True, "kvferry_ticket": "forged", "remote_host": "10.6.6.6"}
        sly: dict[str, Any] = {
            "kv_transfer_params": forged,
            "ec_transfer_params": forged,
            "request_id": "somebody-else",
            "vllm_xargs": {"kv_transfer_params": "forged", "ec_transfer_params": "forged", "mine": 1},
        }
        for n in (1, 2):
            assert (await world.ask(n=n, **sly))[0] == 200
        bodies = [*world.prefill[0].bodies, *world.decode[0].bodies]
        assert len(bodies) == 3
        assert "forged" not in json.dumps(bodies)
        assert not any("request_id" in body for body in bodies)
        assert [body["vllm_xargs"] for body in bodies] == [{"mine": 1}] * 3
        assert [body.get("kv_transfer_params") for body in world.decode[0].bodies] == [TICKET, None]
        assert world.sample("stripped_requests_total") == 2
        await world.ask()
        assert world.sample("stripped_requests_total") == 2

    play(test)


def test_a_field_given_twice_is_removed_twice():
    async def test(world: World) -> None:
        twice = b'{"kv_transfer_params": {"a": 1}, "prompt": "x", "kv_transfer_params": {"b": 1}}'
        async with world.client.post(f"{world.url}/v1/completions", data=twice) as answer:
            assert answer.status == 200
        assert world.decode[0].bodies == [{"prompt": "x", "kv_transfer_params": TICKET}]

    play(test)


def test_of_headers_servers_get_authorization_and_a_name():
    async def test(world: World) -> None:
        sent = {
            "Authorization": "Bearer key",
            "X-Request-Id": "order-17",
            "X-data-parallel-rank": "3",
            "Cookie": "a=b",
        }
        async with world.post(headers=sent) as answer:
            name = answer.headers["X-Request-Id"]
        assert name.startswith("order-17-")
        async with world.post(headers={"X-Request-Id": "x" * 999}) as answer:
            other = answer.headers["X-Request-Id"]
        assert len(other) == 16
        for server in (*world.prefill, *world.decode):
            first, second = server.headers
            assert first["Authorization"] == "Bearer key"
            assert (first["X-Request-Id"], second["X-Request-Id"]) == (name, other)
            assert {"X-data-parallel-rank", "Cookie"}.isdisjoint(first)
            assert "Authorization" not in second

    play(test)


def test_no_cookie_of_a_server_reaches_another_client():
    async def set_cookie(request):
        answer = await complete(request)
        answer.set_cookie("session", "one-client's")
        return answer

    async def test(world: World) -> None:
        server = world.server("decode")
        server.url = server.url.replace("127.0.0.1", "localhost")  # no cookies are kept for addresses
        for _ in range(2):
            async with world.post() as answer:
                assert answer.status == 200
                assert "Set-Cookie" not in answer.headers
        assert not any("Cookie" in headers for headers in world.decode[0].headers)

    play(test, decode=[set_cookie])


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 3},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"echo": True},
        {"prompt_logprobs": 0},
        {"use_beam_search": True},
        {"prompt_embeds": "AAAA"},
    ],
    ids=str,
)
def test_what_does_not_fit_a_ticket_is_for_the_decode_server_alone(more):
    async def test(world: World) -> None:
        assert (await world.ask(**more))[0] == 200
        assert world.prefill[0].bodies == []
        assert world.decode[0].bodies == [{"prompt": PROMPT, **more}]
        assert world.sample("without_ticket_total", reason="does-not-fit") == 1

    play(test)


@pytest.mark.parametrize("transfer", [None, {}, {"do_remote_prefill": False}])
def test_a_prefill_without_a_ticket_is_said_and_counted(transfer, caplog):
    async def test(world: World) -> None:
        assert (await world.ask())[0] == 200
        assert (world.decode[0].bodies[0].get("kv_transfer_params") or None) == (transfer or None)
        assert world.sample("without_ticket_total", reason="none-given") == 1

    play(test, prefill=[answering(200, {"choices": [], "kv_transfer_params": transfer})])
    assert "the decode server computes the prompt; check" in caplog.text


def test_a_stream_goes_out_event_by_event_as_it_comes():
    go_on = asyncio.Event()

    async def in_steps(request):
        out = await streaming([b'data: {"text": "a"}\n\nda'])(request)
        await asyncio.wait_for(go_on.wait(), 60)
        await out.write(b'ta: {"text": "b"}\n\n' + DONE)
        return out

    async def test(world: World) -> None:
        async with world.post(stream=True) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readany() == b'data: {"text": "a"}\n\n'
            go_on.set()  # had the proxy waited for the end, the first event would never have come
            assert await answer.content.read() == b'data: {"text": "b"}\n\n' + DONE
        assert world.decode[0].bodies[0]["stream"] is True
        assert world.prefill[0].bodies[0]["stream"] is False
        await until_ended(world)
        assert world.sample("requests_total", path="/v1/completions", outcome="answered") == 1

    play(test, decode=[in_steps])


def test_lines_of_events_may_end_as_in_http():
    async def test(world: World) -> None:
        async with world.post(stream=True) as answer:
            assert await answer.read() == b'data: {"text": "a"}\n\n' + DONE

    parts = [b'data: {"text": "a"}\r', b"\n\r\ndata: [DO", b"NE]\r\n", b"\r", b"\n"]
    play(test, decode=[streaming(parts)])


def test_a_long_event_is_held_until_its_end():
    """What is to be removed from it may be its last field."""
    long = {"choices": [{"text": "x" * 3 * 2**20}]}

    async def test(world: World) -> None:
        async with world.post(stream=True) as answer:
            event, end = (await answer.read()).split(b"\n\n", 1)
        assert (json.loads(event.removeprefix(b"data: ")), end) == (long, DONE)

    sent = json.dumps({**long, "kv_transfer_params": TICKET}).encode()
    play(test, decode=[streaming([b"data: " + sent + b"\n\n" + DONE])])


def test_an_event_without_an_end_breaks_the_stream_off():
    async def test(world: World) -> None:
        async with world.post(stream=True) as answer:
            assert b"the decode server sent an event of more than 16777216 bytes" in await answer.read()

    play(test, decode=[streaming([b"data: "] + [b"x" * 2**20] * 17, then="hang")])


async def until_ended(world: World) -> None:
    while world.sample("requests_under_way"):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("then", ["break", "end"])
def test_a_stream_that_breaks_off_says_so_in_its_last_event(then):
    """Whether the connection broke, or ended without the event that ends a stream. No half event is sent."""

    async def test(world: World) -> None:
        async with world.post(stream=True) as answer:
            events = (await answer.content.read()).decode().split("\n\n")
        assert events[0] == 'data: {"text": "a"}'
        said = [json.loads(event.removeprefix("data: ")) for event in events if "error" in event]
        assert len(said) == 1
        why = {"break": "closed the connection", "end": "ended the stream early"}[then]
        assert f"the decode server {why}" in said[0]["error"]["message"]
        assert not any("half" in event for event in events)
        assert world.sample("requests_total", path="/v1/completions", outcome="broke-off") == 1
        assert len(world.decode[0].bodies) == 1, "what a client has seen is not repeated"

    play(test, decode=[streaming([b'data: {"text": "a"}\n\n', b"data: {half"], then=then), complete])


def test_a_long_prompt_arrives_whole():
    async def test(world: World) -> None:
        prompt = "§" * 2_000_000
        assert (await world.ask(prompt=prompt))[0] == 200
        assert world.prefill[0].bodies[0]["prompt"] == world.decode[0].bodies[0]["prompt"] == prompt

    play(test)


def test_models_come_from_a_decode_server():
    async def test(world: World) -> None:
        status, text = await world.get("/v1/models")
        assert (status, json.loads(text)) == (200, {"data": [{"id": "tiny"}]})

    play(test, decode=[None, complete])


BAD_BODIES = {
    "not-json": (b"{", 400, "the body is not JSON"),
    "no-object": (b"[]", 400, "the body is not a JSON object"),
    "not-text": (b'"\xff\xfe\xff"', 400, "the body is not JSON"),
    "deep": (b'{"prompt": ' + b"[" * 200_000, 400, "nested too deeply"),
    "long": (b'"' + b"x" * 3_000_000 + b'"', 413, "more than 2097152 bytes (--max-body-mib)"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_cannot_be_read_is_refused(name):
    body, status, words = BAD_BODIES[name]

    async def test(world: World) -> None:
        headers = {"Content-Type": "application/json; charset=klingon"}
        sent = io.BytesIO(body)
        async with world.client.post(f"{world.url}/v1/completions", data=sent, headers=headers) as answer:
            assert answer.status == status
            said = (await answer.json())["error"]
        assert said["code"] == status
        assert words in said["message"]
        assert world.prefill[0].bodies == []
        assert world.sample("requests_total", path="/v1/completions", outcome="refused") == 1

    play(test, max_body_bytes=2 * 2**20)


def test_a_compressed_body_is_refused():
    """It would unpack to a thousand times its size."""

    async def test(world: World) -> None:
        packed = gzip.compress(b'{"prompt": "x"}')
        headers = {"Content-Encoding": "gzip"}
        async with world.client.post(f"{world.url}/v1/completions", data=packed, headers=headers) as answer:
            assert answer.status == 415

    play(test)


def test_what_is_not_served_is_named():
    async def test(world: World) -> None:
        for path, status in (("/v1/embeddings", 404), ("/v1/completions", 405)):
            got, text = await world.get(path)
            assert got == status
            assert "kvferry proxy serves /v1/completions, /v1/chat/completions" in text

    play(test)


def test_the_log_and_the_metrics_have_neither_prompts_nor_tickets(caplog):
    """Nor what servers say, who may quote them."""

    async def test(world: World) -> None:
        with caplog.at_level(logging.DEBUG, "kvferry"):
            await world.ask(kv_transfer_params={"kvferry_ticket": "forged"})
            world.decode[0].behave = answering(500, {"error": {"message": f"cannot do: {PROMPT}"}})
            assert (await world.ask())[0] == 502
            await world.client.get(f"{world.url}/v1/models?{PROMPT}")
        _, metrics = await world.get("/metrics")
        for secret in (PROMPT, TICKET["kvferry_ticket"], "forged"):
            assert secret not in caplog.text
            assert secret not in metrics
        line = next(message for message in caplog.messages if "answered" in message)
        assert line.startswith("/v1/completions 200 answered; request ")
        assert f"prefill {world.prefill[0].url} in " in line
        assert f"decode {world.decode[0].url}, first byte after " in line

    play(test)


def test_a_ticket_never_reaches_the_client():
    async def test(world: World) -> None:
        async with world.post() as answer:
            seen = f"{answer.headers} {await answer.text()}"
        assert TICKET["kvferry_ticket"] not in seen

    play(test, prefill=[give_ticket])


def test_every_metric_and_outcome_is_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")

    async def test(world: World) -> None:
        _, text = await world.get("/metrics")
        names = set(
            re.findall(r"^# TYPE (kvferry_proxy_\w+) (?:counter|histogram|gauge)$", text, re.MULTILINE)
        )
        names = {name for name in names if not name.endswith("_created")}
        assert len(names) == 12
        assert [name for name in names if f"`{name}`" not in page] == []

    play(test)
    assert [outcome for outcome in RequestOutcome if f"`{outcome}`" not in page] == []
