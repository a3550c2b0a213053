"""What becomes of a request when a server fails, a client goes, or the proxy is told to stop."""

import asyncio
import errno
import json
import os
import socket
import time

import pytest
from aiohttp import ClientPayloadError, web

from kvferry.proxy import application, servers
from kvferry.proxy.settings import Role
from tests.proxy.conftest import (
    PROMPT,
    TICKET,
    World,
    answering,
    complete,
    give_ticket,
    hang,
    play,
    streaming,
)
from tests.proxy.test_requests import DONE, until_ended


async def break_off(request):
    assert request.transport is not None
    request.transport.abort()
    return await complete(request)


FAILING_PREFILLS = {
    "unreachable": None,
    "error": answering(500, {"error": {"message": "out of memory"}}),
    "full": answering(429, {"error": {"message": "queue full"}}),
    "breaks-off": break_off,
    "no-completion": answering(200, ["what?"]),
    "senseless-ticket": answering(200, {"kv_transfer_params": "what?"}),
    "redirect": answering(307, headers={"Location": "http://127.0.0.1:9/v1/completions"}),
}


@pytest.mark.parametrize("name", FAILING_PREFILLS)
def test_a_failed_prefill_is_tried_on_another_server(name):
    """Its client has seen nothing of it."""

    async def test(world: World) -> None:
        num_asked = 0
        while not world.sample("retries_total", role="prefill"):
            world.server("prefill").is_ready = True  # whatever a check has found out
            assert (await world.ask())[0] == 200
            num_asked += 1
        assert len(world.prefill[1].bodies) == len(world.decode[0].bodies) == num_asked
        result = "unreachable" if name == "unreachable" else "failed"
        asked = world.sample(
            "server_requests_total", role="prefill", server=world.prefill[0].url, result=result
        )
        assert asked == world.sample("retries_total", role="prefill")

    play(test, prefill=[FAILING_PREFILLS[name], give_ticket])


def test_a_prefill_that_takes_too_long_is_tried_elsewhere_and_ended_here():
    async def test(world: World) -> None:
        assert (await world.ask())[0] == 200
        await world.prefill[0].ended.wait()

    play(test, prefill=[hang, give_ticket], prefill_seconds=1)


def test_a_prompt_that_kills_servers_reaches_two_of_them():
    async def test(world: World) -> None:
        status, body = await world.ask()
        assert status == 502
        assert "the prefill server closed the connection; request " in body["error"]["message"]
        assert sorted(len(server.bodies) for server in world.prefill) == [0, 0, 1, 1]
        assert world.decode[0].bodies == []
        assert world.sample("requests_total", path="/v1/completions", outcome="prefill-failed") == 1

    play(test, prefill=[break_off] * 4)


def test_a_full_server_is_told_as_503():
    async def test(world: World) -> None:
        async with world.post() as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")

    play(test, prefill=[answering(429)])


def test_a_refusal_is_passed_on_and_not_tried_again():
    async def test(world: World) -> None:
        refusal = {"error": {"message": "The model `mouse` does not exist."}}
        assert await world.ask() == (404, refusal)
        assert world.prefill[1].bodies == world.decode[0].bodies == []

    refused = answering(404, {"error": {"message": "The model `mouse` does not exist."}})
    play(test, prefill=[refused, give_ticket])


def test_a_failed_decode_is_told_with_its_cause_and_not_repeated():
    async def test(world: World) -> None:
        async with world.post() as answer:
            name, body = answer.headers["X-Request-Id"], await answer.json()
        assert (answer.status, body["error"]["code"]) == (502, 502)
        assert body["error"]["message"] == f"the decode server answered 500; request {name}"
        assert world.decode[1].bodies == []
        assert world.sample("requests_total", path="/v1/completions", outcome="decode-failed") == 1

    play(test, decode=[answering(500, {"error": {"message": "Internal server error"}}), complete])


def test_a_decode_server_that_breaks_off_is_not_replaced():
    """It may have read the cache, and used the ticket."""

    async def test(world: World) -> None:
        status, body = await world.ask()
        assert status == 502
        assert "closed the connection" in body["error"]["message"]
        assert world.decode[1].bodies == []

    play(test, decode=[break_off, complete])


def test_a_decode_server_that_cannot_be_reached_is_replaced():
    """It has never seen the request: the ticket is unused."""

    async def test(world: World) -> None:
        for _ in range(4):
            assert (await world.ask())[0] == 200
        assert len(world.decode[1].bodies) == 4
        assert len(world.prefill[0].bodies) == 4, "the prompt is not prefilled again"

    play(test, decode=[None, complete])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_servers_that_cannot_be_reached_do_not_use_up_the_tries(role):
    """They have not seen the prompt, so it is not to blame."""
    absent = {"prefill": (), "decode": (), role: (None, None)}

    async def test(world: World) -> None:
        await world.get("/health")  # the first check has ended
        for number, server in enumerate(world.proxy._pools[Role(role)].servers):
            server.is_ready, server.last_turn = True, number
        assert (await world.ask())[0] == 200
        assert world.decode[-1].bodies[0]["kv_transfer_params"] == TICKET
        assert world.sample("retries_total", role=role) == 2

    play(test, prefill=(*absent["prefill"], give_ticket), decode=(*absent["decode"], complete))


def test_a_server_that_takes_no_connections_is_replaced(monkeypatch):
    """Also if the time for an answer is not longer than the time to connect."""
    monkeypatch.setattr(application, "CHECK_SECONDS", 0.5)

    async def test(world: World) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            others = [socket.socket() for _ in range(4)]
            for other in others:
                other.setblocking(False)
                other.connect_ex(full.getsockname())
            await asyncio.sleep(0.1)
            world.server("decode").url = f"http://127.0.0.1:{full.getsockname()[1]}"
            assert (await world.get("/v1/models"))[0] == 200
            assert len(world.decode[1].headers) == 1
            for other in others:
                other.close()

    play(test, decode=[complete, complete], connect_seconds=0.5)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_that_does_not_read_is_given_up(role, monkeypatch):
    """Neither its client waits for ever, nor does the connection stay."""
    monkeypatch.setattr(application, "UNREAD_SECONDS", 4.0)

    async def test(world: World) -> None:
        left: list[asyncio.StreamWriter] = []

        async def stuck(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            left.append(writer)

        await world.get("/health")  # no check is under way
        async with await asyncio.start_server(stuck, "127.0.0.1", 0) as listener:
            world.server(role).url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
            before = len(os.listdir("/proc/self/fd"))
            async with asyncio.timeout(20):
                status, body = await world.ask(prompt="x" * 12_000_000)
                assert (status, "did not answer in time" in body["error"]["message"]) == (504, True)
                while len(os.listdir("/proc/self/fd")) > before + len(left):
                    await asyncio.sleep(0.05)
            assert left
            for writer in left:
                writer.transport.abort()

    play(test, prefill_seconds=1.0, decode_seconds=1.0, connect_seconds=1.0)


def test_without_a_free_file_descriptor_servers_are_not_to_blame(monkeypatch):
    def exhausted(_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(application, "server_socket", exhausted)

    async def test(world: World) -> None:
        status, body = await world.ask()
        assert (status, "no file descriptor left" in body["error"]["message"]) == (503, True)
        assert (await world.get("/health"))[0] == 200
        assert world.server("prefill").is_ready

    play(test)


def test_a_server_that_is_not_there_is_named_in_the_log(caplog):
    async def test(world: World) -> None:
        status, body = await world.ask()
        assert status == 502
        assert "the prefill server cannot be reached; request " in body["error"]["message"]
        name = body["error"]["message"].rpartition(" ")[2]
        assert f"request {name}: prefill server {world.prefill[0].url} cannot be reached: " in caplog.text
        assert "is not ready: cannot be reached: " in caplog.text

    play(test, prefill=[None], is_falling_back=False)


@pytest.mark.parametrize("is_known", [False, True], ids=["not known yet", "known"])
def test_without_a_prefill_server_decode_servers_compute_the_prompt(is_known, caplog):
    async def test(world: World) -> None:
        await world.get("/health")  # the first check has ended
        world.server("prefill").is_ready = not is_known
        assert (await world.ask())[0] == 200
        assert world.decode[0].bodies == [{"prompt": PROMPT}]
        assert world.sample("without_ticket_total", reason="no-prefill-server") == 1
        assert (await world.get("/health"))[0] == 200
        num_asked = world.sample(
            "server_requests_total", role="prefill", server=world.prefill[0].url, result="unreachable"
        )
        assert num_asked == (not is_known), "a server that is known to be away costs no time"

    play(test, prefill=[None])
    assert "the decode server computes the prompt" in caplog.text


def test_a_prompt_that_a_prefill_server_failed_at_goes_to_no_decode_server():
    """Not even if the other prefill server cannot be reached."""

    async def test(world: World) -> None:
        await world.get("/health")  # the first check has ended
        for server in world.proxy._pools[Role.PREFILL].servers:
            server.is_ready = True
        assert (await world.ask())[0] == 502
        assert len(world.prefill[0].bodies) == 1
        assert world.decode[0].bodies == []

    play(test, prefill=[break_off, None])


def test_a_silent_decode_server_is_given_up():
    async def test(world: World) -> None:
        status, body = await world.ask()
        assert status == 504
        assert "did not answer in time" in body["error"]["message"]
        await world.decode[0].ended.wait()

    play(test, decode=[hang], decode_seconds=1)


def test_a_stream_that_falls_silent_is_given_up():
    async def test(world: World) -> None:
        async with world.post(stream=True) as answer:
            text = await answer.text()
        assert "did not answer in time" in text
        await world.decode[0].ended.wait()

    play(test, decode=[streaming([b"data: {}\n\n"], then="hang")], decode_seconds=1)


# ---------------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
def test_a_client_that_hangs_up_ends_its_request_at_the_server(where):
    async def test(world: World) -> None:
        server = (world.prefill if where == "prefill" else world.decode)[0]
        asking = asyncio.create_task(read(world))
        while not server.bodies:
            await asyncio.sleep(0.01)
        asking.cancel()
        await server.ended.wait()
        await until_ended(world)
        assert world.sample("requests_total", path="/v1/completions", outcome="client-gone") == 1
        assert len(world.decode[0].bodies) == (where != "prefill")
        assert [each.num_requests for pool in world.proxy._pools.values() for each in pool.servers] == [0, 0]

    stream = streaming([b"data: {}\n\n"], then="hang")
    play(
        test,
        prefill=[hang if where == "prefill" else give_ticket],
        decode=[stream if where == "stream" else hang],
    )


async def read(world: World) -> None:
    async with world.post(stream=True) as answer:
        await answer.read()


def test_a_client_that_takes_nothing_is_cut_off():
    """It would hold blocks of the decode server for as long as it likes."""
    flood = (b"data: " + b"x" * 100_000 + b"\n\n" for _ in range(1000))

    async def test(world: World) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head.encode() + body)
        while not world.sample("requests_total", path="/v1/completions", outcome="client-gone"):
            await asyncio.sleep(0.05)
        writer.transport.abort()

    play(test, decode=[streaming(flood, then="hang")], client_seconds=1)


def test_a_client_that_does_not_take_the_end_of_a_stream_is_cut_off(monkeypatch):
    """The end waits until the client has taken what the system could not buffer."""

    async def wait(_: web.StreamResponse, data: bytes = b"") -> None:
        await asyncio.Event().wait()

    async def test(world: World) -> None:
        with pytest.raises(ClientPayloadError):
            await read(world)
        await until_ended(world)
        assert world.sample("requests_total", path="/v1/completions", outcome="client-gone") == 1
        assert world.server("decode").num_requests == 0

    async def stream(request: web.Request) -> web.StreamResponse:
        out = await streaming([b"data: {}\n\n", DONE])(request)
        monkeypatch.setattr(web.StreamResponse, "write_eof", wait)
        await end(out)
        return out

    end = web.StreamResponse.write_eof
    play(test, decode=[stream], client_seconds=0.5)


def test_a_body_that_never_ends_is_refused():
    async def test(world: World) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.transport.abort()

    play(test, client_seconds=0.5)


def test_more_requests_than_allowed_are_told_to_come_later():
    async def test(world: World) -> None:
        first = asyncio.create_task(world.ask())
        while not world.decode[0].bodies:
            await asyncio.sleep(0.01)
        async with world.post() as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert "the proxy is at its limit of 1 concurrent requests: try again later" in (
                await answer.text()
            )
        assert world.sample("requests_total", path="/v1/completions", outcome="busy") == 1
        first.cancel()

    play(test, decode=[hang], max_requests=1)


# ----------------------------------------------------------------------------------------------- health


def test_health_is_that_of_every_server():
    async def test(world: World) -> None:
        status, text = await world.get("/health")
        report = {"prefill": {"ready": 1, "servers": 2}, "decode": {"ready": 1, "servers": 1}}
        assert (status, json.loads(text)) == (200, report)
        assert world.sample("server_ready", role="prefill", server=world.prefill[1].url) == 0
        world.decode[0].health = 503
        while (await world.get("/health"))[0] == 200:
            await asyncio.sleep(0.05)  # an answer is good for half a second
        assert world.sample("server_ready", role="decode", server=world.decode[0].url) == 0
        assert await world.get("/live") == (200, '{"alive": true}')

    play(test, prefill=[give_ticket, None])


def test_a_server_that_hangs_does_not_delay_health(monkeypatch):
    """Probes of Kubernetes wait for one second."""
    assert application.HEALTH_SECONDS < 1
    monkeypatch.setattr(servers, "CHECK_SECONDS", 600.0)
    report = {"prefill": {"ready": 2, "servers": 2}, "decode": {"ready": 0, "servers": 1}}

    async def test(world: World) -> None:
        await world.get("/health")  # the first checks have ended
        world.prefill[0].health, world.decode[0].health = 0, 503
        async with asyncio.timeout(30):
            while (await world.get("/health")) != (503, json.dumps(report)):
                await asyncio.sleep(0.05)

    play(test, prefill=[give_ticket, give_ticket], health_seconds=0.1)


def test_a_server_that_redirects_its_health_check_is_not_ready():
    """Requests that it redirects are not sent on either."""

    async def test(world: World) -> None:
        world.decode[0].health = 307
        while (await world.get("/health"))[0] == 200:
            await asyncio.sleep(0.05)

    play(test)


@pytest.mark.parametrize("is_falling_back", [False, True])
def test_health_without_a_prefill_server_depends_on_the_fallback(is_falling_back):
    async def test(world: World) -> None:
        assert (await world.get("/health"))[0] == (200 if is_falling_back else 503)

    play(test, prefill=[None], is_falling_back=is_falling_back)


def test_a_server_that_is_not_ready_gets_no_request_while_another_is():
    async def test(world: World) -> None:
        world.decode[0].health = 503
        while world.server("decode").is_ready:
            await world.get("/health")
        for _ in range(4):
            await world.ask()
        assert [len(server.bodies) for server in world.decode] == [0, 4]

    play(test, decode=[complete, complete])


def test_servers_take_turns_and_the_busy_one_waits():
    async def test(world: World) -> None:
        for _ in range(4):
            await world.ask()
        assert [len(server.bodies) for server in world.decode] == [2, 2]
        world.decode[0].behave = hang
        waiting = asyncio.create_task(world.ask())
        while len(world.decode[0].bodies) < 3:
            await asyncio.sleep(0.01)
        for _ in range(3):
            await world.ask()
        assert [len(server.bodies) for server in world.decode] == [3, 5]
        waiting.cancel()

    play(test, decode=[complete, complete])


# ------------------------------------------------------------------------------------------------ stop


def test_what_is_under_way_may_end_when_the_proxy_stops():
    go_on = asyncio.Event()

    async def wait_then_complete(request):
        await go_on.wait()
        return await complete(request)

    async def test(world: World) -> None:
        under_way = asyncio.create_task(world.ask())
        while not world.decode[0].bodies:
            await asyncio.sleep(0.01)
        world.proxy.is_stopping = True
        stopping = asyncio.create_task(world.runner.cleanup())
        while True:  # until nobody listens any more
            try:
                await world.get("/live")
            except OSError:
                break
            await asyncio.sleep(0.01)
        go_on.set()
        assert (await under_way)[0] == 200
        await stopping

    play(test, decode=[wait_then_complete], drain_seconds=60)


def test_what_takes_too_long_is_cut_when_the_proxy_stops():
    """And is not mistaken for a whole answer."""

    async def test(world: World) -> None:
        under_way = asyncio.create_task(read(world))
        while not world.decode[0].bodies:
            await asyncio.sleep(0.01)
        world.proxy.is_stopping = True
        began = time.monotonic()
        await world.runner.cleanup()
        assert time.monotonic() - began >= 0.4
        with pytest.raises(ClientPayloadError):
            await under_way
        assert world.sample("requests_total", path="/v1/completions", outcome="cut-short") == 1

    play(test, decode=[streaming([b"data: {}\n\n"], then="hang")], drain_seconds=0.5)
