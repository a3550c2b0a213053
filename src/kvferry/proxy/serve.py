"""Run the proxy until a signal."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from functools import partial
from typing import Any

from aiohttp import web

from kvferry.errors import SpecError
from kvferry.proxy.application import Proxy
from kvferry.proxy.metrics import ProxyMetrics, log
from kvferry.proxy.settings import ProxyLimits, ProxySettings

SPARE_FILES = 64
"""File descriptors besides connections."""


def max_connections(max_requests: int, max_files: int) -> int:
    """Half of the connections may be idle. A request needs three files: its client, and two servers.

    >>> max_connections(4096, 1 << 20), max_connections(4096, 1024)
    (8192, 320)
    """
    return max(1, min(2 * max_requests, (max_files - SPARE_FILES) // 3))


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


class BoundedRunner(web.AppRunner):
    def __init__(self, app: web.Application, limits: ProxyLimits, metrics: ProxyMetrics, **more: Any) -> None:
        super().__init__(app, **more)
        self._limits, self._metrics = limits, metrics

    async def _make_server(self) -> BoundedServer:
        return BoundedServer(await super()._make_server(), self._limits, self._metrics)


class BoundedServer(web.Server):
    """Closes connections that are idle for too long.

    A client has ``client_seconds`` for the headers of its first request, and to accept a part of an answer.
    A connection beyond the limit replaces the one that has been idle longest.
    """

    def __init__(self, server: web.Server, limits: ProxyLimits, metrics: ProxyMetrics) -> None:
        super().__init__(
            self._handle,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,
        )
        self._handle_request, self._metrics = server.request_handler, metrics
        self._seconds = limits.client_seconds
        self._max_connections = max_connections(limits.max_requests, file_limit())
        self._open: dict[web.RequestHandler, asyncio.Transport] = {}
        self._idle: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Idle connections, the oldest first, with their timeouts."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open[handler] = transport
        if len(self._open) > self._max_connections:
            self._abort(next(iter(self._idle), handler), "too-many")
        if handler in self._open:
            self._idle[handler] = self._loop.call_later(
                self._seconds, partial(self._abort, handler, "no-request")
            )

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open.pop(handler, None)
        self._not_idle(handler)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        self._not_idle(handler)
        try:
            return await self._handle_request(request)
        finally:
            if handler in self._open:
                self._await_reading(handler)

    def _not_idle(self, handler: web.RequestHandler) -> None:
        if timer := self._idle.pop(handler, None):
            timer.cancel()

    def _await_reading(self, handler: web.RequestHandler, last: int | None = None) -> None:
        """Abort a connection whose client takes nothing of an answer; ``last``: what was left before."""
        left = self._open[handler].get_write_buffer_size()
        if left and left == last:
            self._abort(handler, "answer-not-taken")
        elif left or last is None:
            self._idle[handler] = self._loop.call_later(self._seconds, self._await_reading, handler, left)

    def _abort(self, handler: web.RequestHandler, reason: str) -> None:
        self._metrics.aborted.labels(reason).inc()
        self._not_idle(handler)
        self._open.pop(handler).abort()


SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_proxy(settings: ProxySettings) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish; a second signal ends them."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s kvferry proxy: %(message)s")
    raise_file_limit()
    asyncio.run(_serve(settings))


async def _serve(settings: ProxySettings) -> None:
    proxy, loop = Proxy(settings), asyncio.get_running_loop()
    stopped, cut = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (cut if stopped.is_set() else stopped).set()

    runner = await start(proxy, settings)
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    await stopped.wait()
    proxy.is_stopping = True
    log.info("stopping: running requests have %g s to finish", settings.limits.drain_seconds)
    waits = [asyncio.create_task(runner.cleanup()), asyncio.create_task(cut.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopped")


async def start(proxy: Proxy, settings: ProxySettings) -> web.AppRunner:
    """Listen; the caller cleans the runner up."""
    runner = BoundedRunner(
        proxy.app(),
        settings.limits,
        proxy.metrics,
        auto_decompress=False,  # compressed bodies are rejected
        handler_cancellation=True,  # a client that hangs up ends its request at the servers
        access_log=None,  # ours has no query and no header in it
        shutdown_timeout=settings.limits.drain_seconds,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as error:
        await runner.cleanup()
        why = error.strerror or error
        raise SpecError(f"--listen {settings.host}:{settings.port}: {why}") from None
    host, port = runner.addresses[0][:2]
    host = f"[{host}]" if ":" in host else host
    log.info("listening on http://%s:%d/v1", host, port)
    log.info("prefill servers: %s; decode servers: %s", *map(", ".join, (settings.prefill, settings.decode)))
    return runner
