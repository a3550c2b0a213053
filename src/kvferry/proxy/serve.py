"""Run the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal

from aiohttp import web

from kvferry.errors import SpecError
from kvferry.proxy.account import log
from kvferry.proxy.application import Proxy
from kvferry.proxy.connections import BoundedRunner, raise_file_limit
from kvferry.proxy.settings import ProxySettings

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_proxy(settings: ProxySettings) -> None:
    """Serve until SIGINT or SIGTERM, then let requests that are under way end; a second signal ends them."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s kvferry proxy: %(message)s")
    raise_file_limit()
    asyncio.run(_serve(settings))


async def _serve(settings: ProxySettings) -> None:
    proxy, loop = Proxy(settings), asyncio.get_running_loop()
    told, told_again = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (told_again if told.is_set() else told).set()

    runner = await start(proxy, settings)
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    await told.wait()
    proxy.is_stopping = True
    log.info("stopping: requests under way have %g s to end", settings.limits.drain_seconds)
    waits = [asyncio.create_task(runner.cleanup()), asyncio.create_task(told_again.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopped")


async def start(proxy: Proxy, settings: ProxySettings) -> web.AppRunner:
    """Listen; whoever calls this cleans the runner up."""
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
