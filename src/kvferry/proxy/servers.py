"""The servers of each kind: whose turn it is, who is ready, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from kvferry.proxy.account import log
from kvferry.proxy.metrics import ProxyMetrics
from kvferry.proxy.settings import Role

CHECK_SECONDS = 5.0
"""How often every server is asked for its health, and how long it may take to answer."""
FRESH_SECONDS = 0.5
"""Who asks again within this time gets the same answer: clients cannot make the proxy flood its servers."""


class ServerFailed(Exception):
    """A server cannot be reached, failed, or did not answer in time."""

    def __init__(
        self, server: ModelServer, why: str, *, detail: str = "", status: int, was_asked: bool = True
    ) -> None:
        """``detail``: for the log alone, since it may name addresses. ``status``: what the client gets.
        ``was_asked``: whether the server may have seen the request.
        """
        super().__init__(f"{server} {why}: {detail}" if detail else f"{server} {why}")
        self.server, self.why, self.status, self.was_asked = server, why, status, was_asked

    def for_client(self, name: str) -> str:
        """The failure without the server's address, which the log has under the request's name."""
        return f"the {self.server.role} server {self.why}; request {name}"


@dataclass(slots=True, eq=False)
class ModelServer:
    """One vLLM server."""

    role: Role
    url: str
    is_ready: bool = True
    """What the last check said, or the last attempt to reach it."""
    num_requests: int = 0
    """How many of our requests it has."""
    last_turn: int = 0

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it has one of our requests."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


class ServerPool:
    """The servers of one kind."""

    def __init__(self, role: Role, urls: Sequence[str], metrics: ProxyMetrics) -> None:
        self.servers = [ModelServer(role, url) for url in urls]
        self._metrics, self._turns = metrics, itertools.count(1)
        self._checked, self._checking = -FRESH_SECONDS, asyncio.Lock()

    def pick(self, tried: Collection[ModelServer] = ()) -> ModelServer | None:
        """The ready server with the fewest requests; equals take turns. None: all have been tried.

        One that is not ready is picked where no other is left: it may have come back since.
        """
        left = [server for server in self.servers if server not in tried]
        if not left:
            return None
        picked = min(left, key=lambda server: (not server.is_ready, server.num_requests, server.last_turn))
        picked.last_turn = next(self._turns)
        return picked

    @property
    def is_ready(self) -> bool:
        """Whether one of them is."""
        return any(server.is_ready for server in self.servers)

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Ask every server for its health."""
        async with self._checking:
            if time.monotonic() - self._checked < FRESH_SECONDS:
                return
            await asyncio.gather(*(self._check(session, server) for server in self.servers))
            self._checked = time.monotonic()

    async def _check(self, session: aiohttp.ClientSession, server: ModelServer) -> None:
        limit = aiohttp.ClientTimeout(total=CHECK_SECONDS)
        try:
            async with session.get(f"{server.url}/health", timeout=limit) as answer:
                self.mark(server, is_ready=answer.status == HTTPStatus.OK)
        except (aiohttp.ClientError, TimeoutError):
            self.mark(server, is_ready=False)

    def mark(self, server: ModelServer, *, is_ready: bool) -> None:
        """A server was found ready, or not."""
        if server.is_ready != is_ready:
            log.warning("%s is %s", server, "ready" if is_ready else "not ready")
        server.is_ready = is_ready
        self._metrics.ready.labels(server.role, server.url).set(is_ready)


@contextmanager
def failures_of(server: ModelServer) -> Iterator[None]:
    """What goes wrong while we talk to a server becomes a ``ServerFailed``: here, and nowhere else."""
    bad, late = HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        detail = error.os_error.strerror if isinstance(error, aiohttp.ClientConnectorError) else ""
        detail = detail or "it does not accept the connection in time"
        raise ServerFailed(server, "cannot be reached", detail=detail, status=bad, was_asked=False) from error
    except TimeoutError as error:
        raise ServerFailed(server, "did not answer in time", status=late) from error
    except aiohttp.ClientError as error:
        detail = type(error).__name__
        raise ServerFailed(server, "broke off the connection", detail=detail, status=bad) from error
