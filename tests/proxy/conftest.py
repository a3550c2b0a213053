"""A proxy between small servers that speak HTTP and do what the test says: all real, in one process."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from socket import create_server
from typing import Any
from unittest.mock import patch

import aiohttp
from aiohttp import web

from kvferry.proxy import application
from kvferry.proxy.application import Proxy
from kvferry.proxy.serve import start
from kvferry.proxy.servers import ModelServer
from kvferry.proxy.settings import ProxyLimits, ProxySettings, Role

TICKET: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "kvferry_ticket": "sealed-paper",
}
PROMPT = "the secret of the Styx"
Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FakeServer:
    """A server that keeps what it is asked."""

    behave: Behaviour | None
    """None: it does not run, and nobody listens at its address."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request was cancelled: its connection was closed under it."""
    health: int = 200
    """0: it never answers."""
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers.copy())
        self.bodies.append(await request.json())
        assert self.behave is not None
        try:
            return await self.behave(request)
        except asyncio.CancelledError:
            self.ended.set()
            raise

    async def say_health(self, _: web.Request) -> web.Response:
        if not self.health:
            await asyncio.Event().wait()
        return web.Response(status=self.health, headers={"Location": "/v1/models"})

    async def models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.copy())
        return web.json_response({"data": [{"id": "tiny"}]})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if self.behave is None:
            with create_server(("127.0.0.1", 0)) as probe:
                self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
            yield
            return
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/{kind:.*}", self.handle)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.say_health)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


async def give_ticket(_: web.Request) -> web.Response:
    return web.json_response({"choices": [{"text": "a"}], "kv_transfer_params": TICKET})


async def complete(_: web.Request) -> web.Response:
    return web.json_response({"choices": [{"text": "answer"}]})


def answering(status: int, body: Any = None, **more: Any) -> Behaviour:
    async def behave(_: web.Request) -> web.Response:
        return web.json_response(body, status=status, **more)

    return behave


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


def streaming(chunks: Iterable[bytes], *, then: str = "end") -> Behaviour:
    """Send these; then end, hang, or break the connection."""

    async def behave(request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for chunk in chunks:
            await out.write(chunk)
        if then == "hang":
            await asyncio.Event().wait()
        if then == "break":
            await asyncio.sleep(0.05)  # what was written goes out first
            assert request.transport is not None
            request.transport.abort()
        return out

    return behave


@dataclass
class World:
    """A running proxy, and a client."""

    url: str
    client: Any
    proxy: Proxy
    runner: web.AppRunner
    prefill: list[FakeServer]
    decode: list[FakeServer]

    async def ask(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        async with self.post(path, **body) as answer:
            return answer.status, await answer.json()

    def post(self, path: str = "/v1/completions", headers: Any = None, **body: Any) -> Any:
        data = io.BytesIO(json.dumps({"prompt": PROMPT, **body}).encode())
        return self.client.post(self.url + path, data=data, headers=headers)

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.url + path) as answer:
            return answer.status, await answer.text()

    def server(self, role: str) -> ModelServer:
        """What the proxy thinks of the first server of a kind."""
        return self.proxy._pools[Role(role)].servers[0]

    def sample(self, name: str, **labels: str) -> float:
        return self.proxy.metrics.registry.get_sample_value(f"kvferry_proxy_{name}", labels) or 0.0


def play(
    test: Callable[[World], Awaitable[None]],
    prefill: Iterable[Behaviour | None] = (give_ticket,),
    decode: Iterable[Behaviour | None] = (complete,),
    *,
    is_falling_back: bool = True,
    has_conversations: bool = True,
    is_overlapping: bool = True,
    health_seconds: float = 60,
    **limits: Any,
) -> None:
    """Run a test in a world of its own. There ``/health`` waits for all servers, also on a slow machine."""

    async def run() -> None:
        fleets = [[FakeServer(behave) for behave in behaviours] for behaviours in (prefill, decode)]
        async with AsyncExitStack() as stack:
            stack.enter_context(patch.object(application, "HEALTH_SECONDS", health_seconds))
            for server in (*fleets[0], *fleets[1]):
                await stack.enter_async_context(server.running())
            prefill_urls, decode_urls = (tuple(server.url for server in fleet) for fleet in fleets)
            bounds = replace(ProxyLimits(drain_seconds=5), **limits)
            settings = ProxySettings(
                "127.0.0.1",
                0,
                prefill_urls,
                decode_urls,
                bounds,
                is_falling_back=is_falling_back,
                has_conversations=has_conversations,
                is_overlapping=is_overlapping,
            )
            proxy = Proxy(settings)
            runner = await start(proxy, settings)
            stack.push_async_callback(runner.cleanup)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await test(World(url, client, proxy, runner, *fleets))

    asyncio.run(asyncio.wait_for(run(), 120))
