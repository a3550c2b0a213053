"""What clients get: answers of servers as they are, and errors the way OpenAI's clients read them."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import NoReturn

import aiohttp
from aiohttp import web

from kvferry.proxy.account import RequestOutcome
from kvferry.proxy.servers import ModelServer, ServerFailed, failures_of

NAME_HEADER = "X-Request-Id"
RETRY_HEADER = "Retry-After"
MAX_ANSWER_BYTES, MAX_REFUSAL_BYTES = 64 * 2**20, 2**20
"""How long an answer may be that is not a stream, and a server's own error."""

EVENT_END, LAST_EVENT = b"\n\n", b"data: [DONE]"
MAX_EVENT_BYTES = 2**20
"""A longer event goes out in parts."""


class ErrorAnswer(Exception):
    """A request ends early, with this answer."""

    def __init__(self, response: web.Response, outcome: RequestOutcome) -> None:
        super().__init__(response.status)
        self.response, self.outcome = response, outcome


def error_body(status: int, message: str) -> dict[str, object]:
    """An error, the way OpenAI's clients read it."""
    return {"error": {"message": message, "type": "proxy_error", "code": int(status)}}


def error_response(status: int, message: str, *, retry_after: str = "") -> web.Response:
    """An error that the proxy itself reports."""
    headers = {RETRY_HEADER: retry_after} if retry_after else {}
    return web.json_response(error_body(status, message), status=status, headers=headers)


def refuse(status: int, message: str) -> NoReturn:
    """The request is wrong."""
    raise ErrorAnswer(error_response(status, message), RequestOutcome.REFUSED)


def refuse_busy(message: str) -> NoReturn:
    """There is no room for the request."""
    response = error_response(HTTPStatus.SERVICE_UNAVAILABLE, f"{message}: try again later", retry_after="1")
    raise ErrorAnswer(response, RequestOutcome.BUSY)


def passed_on(answer: aiohttp.ClientResponse, payload: bytes) -> web.Response:
    """A server's answer, whole."""
    headers = {RETRY_HEADER: answer.headers[RETRY_HEADER]} if RETRY_HEADER in answer.headers else {}
    return web.Response(body=payload, status=answer.status, content_type=answer.content_type, headers=headers)


async def payload_of(
    answer: aiohttp.ClientResponse, server: ModelServer, max_bytes: int = MAX_ANSWER_BYTES
) -> bytes:
    """The whole of a server's answer."""
    payload = bytearray()
    with failures_of(server):
        while part := await answer.content.readany():
            payload += part
            if len(payload) > max_bytes:
                why = f"answered {answer.status} with more than {max_bytes} bytes"
                raise ServerFailed(server, why, status=HTTPStatus.BAD_GATEWAY)
    return bytes(payload)


async def check_status(answer: aiohttp.ClientResponse, server: ModelServer) -> None:
    """Raise if a server failed, or if it refuses the request, which is about the request alone."""
    if answer.status == HTTPStatus.OK:
        return
    # Full queues are told by 429: about the server, where it prefills and another one may have room.
    if 400 <= answer.status < 500 and answer.status != HTTPStatus.TOO_MANY_REQUESTS:
        payload = await payload_of(answer, server, MAX_REFUSAL_BYTES)
        raise ErrorAnswer(passed_on(answer, payload), RequestOutcome.REFUSED)
    is_full = answer.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    status = HTTPStatus.SERVICE_UNAVAILABLE if is_full else HTTPStatus.BAD_GATEWAY
    raise ServerFailed(server, f"answered {answer.status}", status=status)


class EventStream:
    """A server's stream, cut between events. If it breaks off, the last event says so, after whole ones."""

    def __init__(self, answer: aiohttp.ClientResponse, server: ModelServer, name: str) -> None:
        self._answer, self._server, self._name = answer, server, name
        self._held, self._last, self._has_ended = b"", b"", False
        self.failure: ServerFailed | None = None

    async def next(self) -> bytes:
        """One or more whole events; nothing once there are no more."""
        try:
            while not self._has_ended:
                with failures_of(self._server):
                    chunk = await self._answer.content.readany()
                self._has_ended = not chunk
                if whole := self._cut(chunk):
                    return whole
            if not self._last.rstrip().endswith(LAST_EVENT) and not self.failure:
                why = "broke off: its stream has no end"
                raise ServerFailed(self._server, why, status=HTTPStatus.BAD_GATEWAY)
        except ServerFailed as failure:
            self.failure, self._has_ended = failure, True
            body = error_body(failure.status, failure.for_client(self._name))
            return b"data: %b\n\n" % json.dumps(body).encode()
        return b""

    def _cut(self, chunk: bytes) -> bytes:
        held = self._held + chunk
        cut = held.rfind(EVENT_END) + len(EVENT_END) if EVENT_END in held else 0
        if held.strip() == LAST_EVENT or len(held) - cut > MAX_EVENT_BYTES:
            cut = len(held)
        whole, self._held = held[:cut], held[cut:]
        self._last = (self._last + whole)[-2 * len(LAST_EVENT) :]
        return whole
