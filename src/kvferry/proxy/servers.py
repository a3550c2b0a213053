"""The servers of each kind: their choice, their health, and their failures."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NoReturn

import aiohttp
from aiohttp import web

from kvferry.proxy.answers import EVENT_DATA, EVENT_END
from kvferry.proxy.bodies import Fields
from kvferry.proxy.metrics import ProxyMetrics, RequestOutcome, log
from kvferry.proxy.settings import Role

CHECK_SECONDS = 5.0
"""Interval of health checks, and their timeout."""
FRESH_SECONDS = 0.5
"""Health checks are not repeated within this time, so that clients cannot make the proxy flood servers."""


class ServerFailed(Exception):
    """A server is unreachable, failed, or timed out."""

    def __init__(
        self, server: ModelServer, why: str, *, detail: str = "", status: int, was_asked: bool = True
    ) -> None:
        """``detail``: for the log only, as it may name addresses. ``status``: for the client.
        ``was_asked``: whether the server may have seen the request.
        """
        super().__init__(f"{server} {why}: {detail}" if detail else f"{server} {why}")
        self.server, self.why, self.detail, self.status = server, why, detail, status
        self.was_asked = was_asked

    def for_client(self, name: str) -> str:
        """Without the server's address, which the log has under the request's name."""
        return f"the {self.server.role} server {self.why}; request {name}"


@dataclass(slots=True, eq=False)
class ModelServer:
    role: Role
    url: str
    is_ready: bool = True
    """The result of the last check or connection."""
    num_requests: int = 0
    last_turn: int = 0
    meeting: Fields = field(default_factory=dict)
    """Of a prefill server: where decode servers query the progress of a prefill."""
    num_losses: int = 0
    """How often it was not ready: it may have restarted, and lost its caches."""

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


class ServerPool:
    def __init__(self, role: Role, urls: Sequence[str], metrics: ProxyMetrics) -> None:
        self.servers = [ModelServer(role, url) for url in urls]
        self._metrics, self._turns = metrics, itertools.count(1)
        self._checked = -FRESH_SECONDS

    def pick(self, tried: Collection[ModelServer] = ()) -> ModelServer | None:
        """The ready server with the fewest requests; equals take turns. None: all have been tried.

        Without a ready one, any other: it may be back.
        """
        left = [server for server in self.servers if server not in tried]
        if not left:
            return None
        picked = min(left, key=lambda server: (not server.is_ready, server.num_requests, server.last_turn))
        picked.last_turn = next(self._turns)
        return picked

    @property
    def is_ready(self) -> bool:
        return any(server.is_ready for server in self.servers)

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Query the health of all servers. Not reentrant."""
        if time.monotonic() - self._checked >= FRESH_SECONDS:
            await asyncio.gather(*(self._check(session, server) for server in self.servers))
            self._checked = time.monotonic()

    async def _check(self, session: aiohttp.ClientSession, server: ModelServer) -> None:
        limit = aiohttp.ClientTimeout(total=CHECK_SECONDS)
        try:
            with failures_of(server):
                health = session.get(f"{server.url}/health", timeout=limit, allow_redirects=False)
                async with health as answer:
                    is_ready, why = answer.status == HTTPStatus.OK, f"/health answered {answer.status}"
        except ServerFailed as failure:
            is_ready, why = False, f"{failure.why}: {failure.detail}" if failure.detail else failure.why
        except ErrorAnswer:
            return  # this process lacks what a check needs
        self.mark(server, is_ready=is_ready, why=why)

    def mark(self, server: ModelServer, *, is_ready: bool, why: str = "") -> None:
        if server.is_ready != is_ready:
            level = logging.INFO if is_ready else logging.WARNING
            log.log(level, "%s is %s: %s", server, "ready" if is_ready else "not ready", why)
        server.is_ready = is_ready
        if not is_ready:
            server.num_losses, server.meeting = server.num_losses + 1, {}
        self._metrics.ready.labels(server.role, server.url).set(is_ready)


@contextmanager
def failures_of(server: ModelServer) -> Iterator[None]:
    """Translate errors of a conversation with a server: here only."""
    bad, late = HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        if isinstance(error, aiohttp.ClientConnectorError) and error.errno in (errno.EMFILE, errno.ENFILE):
            refuse_busy("the proxy has no file descriptor left")
        detail = error.os_error.strerror if isinstance(error, aiohttp.ClientConnectorError) else ""
        detail = detail or "the connection timed out"
        raise ServerFailed(server, "cannot be reached", detail=detail, status=bad, was_asked=False) from error
    except TimeoutError as error:
        raise ServerFailed(server, "did not answer in time", status=late) from error
    except aiohttp.ClientError as error:
        detail = type(error).__name__
        raise ServerFailed(server, "closed the connection", detail=detail, status=bad) from error


NAME_HEADER = "X-Request-Id"
RETRY_HEADER = "Retry-After"
MAX_ANSWER_BYTES, MAX_REFUSAL_BYTES = 64 * 2**20, 2**20
"""Limits of an answer without streaming, and of a server's error."""

LAST_EVENT = b"data: [DONE]"
ERROR_EVENT, NO_TEXT = b'data: {"error"', b'"content":""'
MAX_EVENT_BYTES = 16 * 2**20
"""A stream with a longer event fails."""


class ErrorAnswer(Exception):
    """Ends a request early, with this answer."""

    def __init__(self, response: web.Response, outcome: RequestOutcome) -> None:
        super().__init__(response.status)
        self.response, self.outcome = response, outcome


def error_body(status: int, message: str) -> dict[str, object]:
    """In the form of OpenAI's API."""
    return {"error": {"message": message, "type": "proxy_error", "code": int(status)}}


def error_response(status: int, message: str, *, retry_after: str = "") -> web.Response:
    headers = {RETRY_HEADER: retry_after} if retry_after else {}
    return web.json_response(error_body(status, message), status=status, headers=headers)


def refuse(status: int, message: str) -> NoReturn:
    raise ErrorAnswer(error_response(status, message), RequestOutcome.REFUSED)


def refuse_busy(message: str) -> NoReturn:
    response = error_response(HTTPStatus.SERVICE_UNAVAILABLE, f"{message}: try again later", retry_after="1")
    raise ErrorAnswer(response, RequestOutcome.BUSY)


def passed_on(answer: aiohttp.ClientResponse, payload: bytes) -> web.Response:
    headers = {RETRY_HEADER: answer.headers[RETRY_HEADER]} if RETRY_HEADER in answer.headers else {}
    return web.Response(body=payload, status=answer.status, content_type=answer.content_type, headers=headers)


async def payload_of(
    answer: aiohttp.ClientResponse, server: ModelServer, max_bytes: int = MAX_ANSWER_BYTES
) -> bytes:
    payload = bytearray()
    with failures_of(server):
        while part := await answer.content.readany():
            payload += part
            if len(payload) > max_bytes:
                why = f"answered {answer.status} with more than {max_bytes} bytes"
                raise ServerFailed(server, why, status=HTTPStatus.BAD_GATEWAY)
    return bytes(payload)


async def check_status(answer: aiohttp.ClientResponse, server: ModelServer) -> None:
    """Raise ServerFailed, or ErrorAnswer if the server rejects this request."""
    if answer.status == HTTPStatus.OK:
        return
    # 429 is about the server, not the request: its queue is full, and another one may have room.
    if 400 <= answer.status < 500 and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
        payload = await payload_of(answer, server, MAX_REFUSAL_BYTES)
        raise ErrorAnswer(passed_on(answer, payload), RequestOutcome.REFUSED)
    is_full = answer.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    status = HTTPStatus.SERVICE_UNAVAILABLE if is_full else HTTPStatus.BAD_GATEWAY
    raise ServerFailed(server, f"answered {answer.status}", status=status)


class EventStream:
    """A server's stream, cut between events. If it breaks off, the last event is an error."""

    def __init__(self, answer: aiohttp.ClientResponse, server: ModelServer, name: str) -> None:
        self._answer, self._server, self._name = answer, server, name
        self._held, self._last, self._has_ended, self._first = bytearray(), b"", False, b""
        self.failure: ServerFailed | None = None

    async def begin(self) -> None:
        """Wait for the beginning, and keep it for ``next``. Raises ServerFailed if it is an error.

        vLLM begins the stream of a chat with an event without text, even if the request fails.
        """
        first = b""
        while first.count(EVENT_END) < 2 and (not first or NO_TEXT in first) and not self._has_ended:
            first += await self.next()
        if self.failure:
            raise self.failure
        if ERROR_EVENT in first:
            raise ServerFailed(self._server, "answered with an error", status=HTTPStatus.BAD_GATEWAY)
        self._first = first

    async def next(self) -> bytes:
        """One or more whole events; empty at the end."""
        if first := self._first:
            self._first = b""
            return first
        try:
            while not self._has_ended:
                with failures_of(self._server):
                    chunk = await self._answer.content.readany()
                self._has_ended = not chunk
                if whole := self._cut(chunk):
                    return whole
            if not self._last.rstrip().endswith(LAST_EVENT) and not self.failure:
                why = "ended the stream early"
                raise ServerFailed(self._server, why, status=HTTPStatus.BAD_GATEWAY)
        except ServerFailed as failure:
            self.failure, self._has_ended = failure, True
            body = error_body(failure.status, failure.for_client(self._name))
            return EVENT_DATA + json.dumps(body).encode() + EVENT_END
        return b""

    def _cut(self, chunk: bytes) -> bytes:
        """The whole events that have come; the rest is held until its end."""
        held = self._held
        if held.endswith(b"\r") and chunk:
            chunk = bytes((held.pop(),)) + chunk
        num_seen = max(0, len(held) - 1)
        held += chunk.replace(b"\r\n", b"\n")
        end = held.rfind(EVENT_END, num_seen)
        cut = end + len(EVENT_END) if end >= 0 else 0
        rest = held.strip() if len(held) < 2 * len(LAST_EVENT) else held
        if rest == LAST_EVENT or not (rest or chunk):
            cut = len(held)
        if len(held) - cut > MAX_EVENT_BYTES:
            why = f"sent an event of more than {MAX_EVENT_BYTES} bytes"
            raise ServerFailed(self._server, why, status=HTTPStatus.BAD_GATEWAY)
        whole = bytes(held[:cut])
        del held[:cut]
        self._last = (self._last + whole)[-2 * len(LAST_EVENT) :]
        return whole
