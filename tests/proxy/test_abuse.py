"""What one client can do to the others, and what it can find out."""

import asyncio
import gc
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec import Raw

from kvferry.proxy.bodies import MAX_STRUCTURE, STRUCTURE
from tests.proxy.conftest import TICKET, World, answering, complete, give_ticket, hang, play, streaming
from tests.proxy.test_failures import break_off
from tests.proxy.test_overlap import CAN

MIB = 2**20
HALF_A_REQUEST = b"GET /live HTTP/1.1\r\nHost: x\r\n"


@asynccontextmanager
async def connection(world: World, sent: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
    writer.write(sent)
    try:
        yield reader
    finally:
        writer.transport.abort()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Within the time that a test has."""
    try:
        return not await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def server_of(world: World) -> web.Server:
    assert world.runner.server is not None
    return world.runner.server


def post(body: bytes, length: int | None = None) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


# ------------------------------------------------------------------------------------------ large bodies


class LongestPause:
    """The longest time in which the event loop, which server and client share, did nothing else.

    Measured in CPU time of this process, so that other processes do not count.
    """

    seconds = 0.0

    async def __aenter__(self) -> "LongestPause":
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.01)  # a pause that has just ended counts, too
        self._task.cancel()

    async def _measure(self) -> None:
        last = time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.process_time()
            self.seconds, last = max(self.seconds, now - last), now


def filled(start: bytes, item: bytes, end: bytes) -> bytes:
    """As much as may be decoded, and rejected at the very end: no server has to read it."""
    num_structure = len(item) - len(item.translate(None, STRUCTURE))
    num_items = min(15 * MIB // len(item), (MAX_STRUCTURE - 100) // num_structure)
    return start + item * num_items + end + b" oops"


SLOW_BODIES = {
    "numbers": filled(b'{"prompt": [', b"1,", b"1]}"),
    "lists": filled(b'{"prompt": [', b"[],", b"1]}"),
    "objects": filled(b'{"prompt": [', b'{"a":{}},', b"1]}"),
    "deep lists": filled(b'{"prompt": [', b"[" * 300 + b"]" * 300 + b",", b"1]}"),
    "too many numbers": b'{"prompt": [' + b"1," * (7 * MIB) + b"1]} oops",
    "escapes": filled(b'{"prompt": "', rb"\u00a7", b'"}'),
    "one name": filled(b"{", b'"a":0,', b'"a":0}'),
    "known name": filled(b"{", b'"kv_transfer_params":0,', b'"a":0}'),
    "names": b"{" + b",".join(b'"%x":0' % number for number in range(MIB)) + b"}",
    "inner names": b'{"vllm_xargs":{' + b",".join(b'"%x":0' % number for number in range(MIB)) + b"}}",
}


@pytest.mark.parametrize("name", SLOW_BODIES)
def test_no_body_stops_other_requests(name):
    """Decoding takes 50 ms at most."""

    async def test(world: World) -> None:
        async with LongestPause() as pause:
            data = io.BytesIO(SLOW_BODIES[name])
            async with world.client.post(f"{world.url}/v1/completions", data=data) as answer:
                assert answer.status in (400, 413)
        assert pause.seconds < 0.2, pause.seconds

    play(test)


def test_a_body_is_refused_before_it_comes():
    async def test(world: World) -> None:
        async with connection(world, post(b"{", 63 * MIB)) as reader:
            assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)

    play(test)


def test_all_bodies_together_are_bounded():
    """What has been received counts, not what was announced; it is free again when its client has gone."""

    async def test(world: World) -> None:
        readers = [connection(world, post(b" " * 90_000, 99_999)) for _ in range(36)]
        for each in readers:
            await each.__aenter__()
        while not world.sample("requests_total", path="/v1/completions", outcome="busy"):
            await asyncio.sleep(0.01)
        assert world.proxy._body_bytes <= 33 * 100_000
        for each in readers:
            await each.__aexit__(None, None, None)
        while world.sample("requests_under_way"):
            await asyncio.sleep(0.01)
        assert (await world.ask())[0] == 200
        assert world.proxy._body_bytes == 0

    play(test, max_body_bytes=100_000)


def test_a_body_is_not_kept_while_its_answer_goes_out():
    async def test(world: World) -> None:
        async with world.post(stream=True, prompt="x" * 90_000) as answer:
            await answer.content.readany()
            assert world.proxy._body_bytes == 0

    play(test, decode=[streaming([b"data: {}\n\n"], then="hang")])


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": NaN}',
        b'{"prompt": -Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xe2\x82',
        b'{"\xff": 1}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"kv_transfer_params": {}}'.encode("utf-16"),
        b'{"prompt": "a"}{"kv_transfer_params": {}}',
    ],
    ids=ascii,
)
def test_what_parsers_disagree_on_reaches_no_server(body):
    async def test(world: World) -> None:
        async with world.client.post(f"{world.url}/v1/completions", data=body) as answer:
            assert answer.status == 400
        assert world.prefill[0].bodies == world.decode[0].bodies == []

    play(test)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        (rb'"kv\u005ftransfer_params": {"a": 1}', {}),
        (rb'"\u006bv_transfer_params": 1, "kv_transfer_params": 2, "\u006bv_transfer_params": 3', {}),
        (rb'"vllm_xargs": {"kv\u005ftransfer_params": 1, "b": 2}', {"vllm_xargs": {"b": 2}}),
        (b'"vllm_xargs": 1, "vllm_xargs": {"kv_transfer_params": 1}', {"vllm_xargs": {}}),
        (b'"vllm_xargs": {"kv_transfer_params": 1}, "vllm_xargs": null', {"vllm_xargs": None}),
    ],
)
def test_no_spelling_brings_a_transfer_to_a_server(fields, kept):
    """Neither escapes nor names that are given twice: what servers get is written anew."""
    seen: list[Any] = []

    async def keep_pairs(request: web.Request) -> web.StreamResponse:
        seen.append(json.loads(await request.read(), object_pairs_hook=list))
        return await complete(request)

    async def test(world: World) -> None:
        body = b'{"prompt": "x", ' + fields + b"}"
        async with world.client.post(f"{world.url}/v1/completions", data=body) as answer:
            assert answer.status == 200
        assert world.decode[0].bodies == [{"prompt": "x", **kept, "kv_transfer_params": TICKET}]
        names = [name for name, _ in seen[0]]
        assert len(names) == len(set(names))

    play(test, decode=[keep_pairs])


# ----------------------------------------------------------------------------------------- connections


@pytest.mark.parametrize("sent", [b"", HALF_A_REQUEST], ids=["nothing", "half"])
def test_a_connection_without_a_request_is_closed(sent):
    async def test(world: World) -> None:
        async with connection(world, sent) as reader:
            assert await is_closed(reader)
        assert world.sample("aborted_connections_total", reason="no-request") == 1

    play(test, client_seconds=0.5)


def test_a_client_that_pauses_between_requests_keeps_its_connection():
    async def test(world: World) -> None:
        async with connection(world, HALF_A_REQUEST + b"\r\n") as reader:
            assert b" 200 " in await reader.readline()
            await asyncio.sleep(1)
            assert not reader.at_eof()
        assert not world.sample("aborted_connections_total", reason="no-request")

    play(test, client_seconds=0.3)


def test_a_new_connection_takes_the_place_of_the_oldest_silent_one():
    """Those with a request under way keep theirs."""

    async def test(world: World) -> None:
        async with (
            connection(world, post(b'{"prompt": "x"}')) as busy,
            connection(world, HALF_A_REQUEST) as oldest,
            connection(world, HALF_A_REQUEST) as other,
            connection(world, HALF_A_REQUEST),
        ):
            while not world.decode[0].bodies:
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(world.get("/live"), 10) == (200, '{"alive": true}')
            assert await is_closed(oldest)
            assert world.sample("aborted_connections_total", reason="too-many") == 1
            assert not other.at_eof()
            assert not busy.at_eof()

    play(test, decode=[hang], max_requests=2)


def test_hundreds_of_half_requests_do_not_keep_others_out():
    async def test(world: World) -> None:
        silent = [connection(world, HALF_A_REQUEST) for _ in range(300)]
        for each in silent:
            await each.__aenter__()
        assert (await asyncio.wait_for(world.ask(), 10))[0] == 200
        assert server_of(world).connections
        assert len(server_of(world).connections) <= 64
        assert world.sample("aborted_connections_total", reason="too-many") >= 300 - 64
        for each in silent:
            await each.__aexit__(None, None, None)

    play(test, max_requests=32)


def test_a_client_that_does_not_take_a_whole_answer_is_cut_off():
    async def long(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "x" * 30_000_000}]})

    async def test(world: World) -> None:
        async with connection(world, post(b'{"prompt": "x"}')) as reader:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(10):
                while not world.decode[0].bodies or server_of(world).connections:
                    await asyncio.sleep(0.01)
        assert world.sample("aborted_connections_total", reason="answer-not-taken") == 1

    play(test, decode=[long], client_seconds=0.5)


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it():
    length = 40_000_000

    async def long(_: web.Request) -> web.Response:
        return web.json_response({"choices": [{"text": "x" * length}]})

    async def test(world: World) -> None:
        num_bytes, began = 0, time.monotonic()
        async with connection(world, post(b'{"prompt": "x"}')) as reader:
            while num_bytes < length:
                async with asyncio.timeout(10):
                    num_bytes += len(await reader.read(2**16))
                if num_bytes < length // 2:
                    await asyncio.sleep(0.005)
        assert time.monotonic() - began > 1, "longer than it has for a part"
        assert not world.sample("aborted_connections_total", reason="answer-not-taken")

    play(test, decode=[long], client_seconds=0.5)


def test_a_stream_without_chunks_ends_with_its_connection():
    """HTTP/1.0 has none, whatever its client says of the connection."""

    async def test(world: World) -> None:
        body = b'{"prompt": "x", "stream": true}'
        head = (
            f"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        async with connection(world, head.encode() + body) as reader, asyncio.timeout(10):
            assert (await reader.read()).endswith(b"data: {}\n\ndata: [DONE]\n\n")

    play(test, decode=[streaming([b"data: {}\n\n", b"data: [DONE]\n\n"])])


ENDS = {
    "the client goes": (hang, hang),
    "the prefill fails": (answering(500), hang),
    "the decode fails": (answering(200, {"choices": [], "kv_transfer_params": CAN}), answering(500)),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_request_that_ends_early_leaves_no_body_in_memory(end):
    """Not even until the garbage collector runs: a task and its error refer to each other."""

    async def test(world: World) -> None:
        assert (await world.ask())[0] == 200  # from now on both legs are sent at once
        world.prefill[0].behave, world.decode[0].behave = ENDS[end]
        gc.collect()
        gc.disable()
        for number in range(1, 4):
            async with connection(world, post(b'{"prompt": "' + b"x" * MIB + b'"}')) as reader:
                if end != "the client goes":
                    assert b" 502 " in await asyncio.wait_for(reader.readline(), 10)
                while len(world.decode[0].bodies) <= number and len(world.prefill[0].bodies) <= number:
                    await asyncio.sleep(0.01)
            while world.sample("requests_under_way"):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        objects = gc.get_objects()
        files = [each for each in objects if isinstance(each, io.BytesIO) and not each.closed]
        prompts = [each.get("prompt") for each in objects if type(each) is dict]
        assert max((each.getbuffer().nbytes for each in files), default=0) < MIB
        assert max((len(memoryview(each)) for each in prompts if isinstance(each, Raw)), default=0) < MIB

    try:
        play(test, prefill=[answering(200, {"choices": [], "kv_transfer_params": CAN})])
    finally:
        gc.enable()


def test_a_chunked_body_that_trickles_is_refused():
    async def test(world: World) -> None:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
        writer.write(head)

        async def trickle() -> None:
            while True:
                writer.write(b"1\r\n \r\n")
                await asyncio.sleep(0.05)

        trickling = asyncio.create_task(trickle())
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        trickling.cancel()
        writer.transport.abort()

    play(test, client_seconds=0.5)


SMUGGLED = {
    "two framings": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 4\r\n\r\n{}{}",
    "not quite chunked": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "space before colon": b"Content-Length : 2\r\n\r\n{}",
    "many headers": b"".join(b"X-%d: 1\r\n" % number for number in range(300)) + b"\r\n",
    "long header": b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_headers_that_are_ambiguous_or_too_long_are_refused(name):
    async def test(world: World) -> None:
        sent = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + SMUGGLED[name]
        async with connection(world, sent + HALF_A_REQUEST + b"\r\n") as reader:
            said = await asyncio.wait_for(reader.read(), 10)
        assert said.startswith(b"HTTP/1.0 400 ")
        assert said.count(b"HTTP/1.") == 1, "the connection is closed, and nothing after it is read"
        assert world.prefill[0].bodies == world.decode[0].bodies == []

    play(test)


# ---------------------------------------------------------------------------------------- what is told

QUOTING = {"error": {"message": "cannot reach http://10.1.2.3:9999 from inner-host"}}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "behave",
    [
        None,
        break_off,
        hang,
        answering(500, QUOTING),
        answering(429, QUOTING),
        answering(307, headers={"Location": "http://inner-host/"}),
        answering(200, ["what?"]),
    ],
    ids=["unreachable", "breaks off", "hangs", "error", "full", "redirect", "no completion"],
)
def test_errors_name_no_server_to_clients(role, behave, caplog):
    """The log does, under the name that the client gets."""

    async def test(world: World) -> None:
        server = (world.prefill if role == "prefill" else world.decode)[0]
        async with world.post() as answer:
            seen = f"{answer.headers} {await answer.text()}"
            name = answer.headers["X-Request-Id"]
        for inner in ("127.0.0.1", server.url.rpartition(":")[2], "10.1.2.3", "inner-host"):
            assert inner not in seen.replace(name, "")
        if answer.status != 200:
            assert f"request {name}" in seen
            assert f"request {name}: {role} server {server.url}" in caplog.text

    fleets = {"prefill": [give_ticket], "decode": [complete], role: [behave]}
    play(test, fleets["prefill"], fleets["decode"], prefill_seconds=0.5, decode_seconds=0.5)


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
def test_other_paths_name_no_server_either(path, caplog):
    async def test(world: World) -> None:
        async with world.client.get(world.url + path) as answer:
            seen = f"{answer.headers} {await answer.text()}"
        assert answer.status >= 500
        assert world.decode[0].url.rpartition(":")[2] not in seen
        assert "127.0.0.1" not in seen
        assert f"decode server {world.decode[0].url} is not ready" in caplog.text
        if path == "/v1/models":
            assert answer.headers["X-Request-Id"] in caplog.text

    play(test, decode=[None])


def test_a_broken_stream_names_no_server(caplog):
    async def test(world: World) -> None:
        async with world.post(stream=True) as answer:
            text = await answer.text()
        assert f"the decode server closed the connection; request {answer.headers['X-Request-Id']}" in text
        assert "127.0.0.1" not in text
        assert world.decode[0].url in caplog.text

    play(test, decode=[streaming([b"data: {}\n\n"], then="break")])


async def endless(request: web.Request, status: int) -> web.StreamResponse:
    out = web.StreamResponse(status=status)
    await out.prepare(request)
    while True:
        await out.write(b"x" * 100_000)
        await asyncio.sleep(0)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_an_answer_that_never_ends_is_given_up(status):
    async def test(world: World) -> None:
        async with asyncio.timeout(30):
            assert (await world.ask())[0] == 502
            await world.decode[0].ended.wait()

    play(test, decode=[lambda request: endless(request, status)], prefill=[give_ticket])
