"""The proxy: its handlers, and the way of a request through the servers."""

from __future__ import annotations

import asyncio
import io
import secrets
import socket
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from kvferry.proxy import bodies
from kvferry.proxy.answers import Answer
from kvferry.proxy.conversations import Conversations, ConversationTurn
from kvferry.proxy.metrics import ProxyMetrics, RequestAccount, RequestOutcome, log, request_name
from kvferry.proxy.servers import (
    CHECK_SECONDS,
    NAME_HEADER,
    ErrorAnswer,
    EventStream,
    ModelServer,
    ServerFailed,
    ServerPool,
    check_status,
    error_response,
    failures_of,
    passed_on,
    payload_of,
    refuse,
    refuse_busy,
)
from kvferry.proxy.settings import ProxySettings, Role

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
MODELS, HEALTH, LIVE, METRICS = "/v1/models", "/health", "/live", "/metrics"
FORWARDED_HEADERS = ("Authorization",)
"""The only client headers that servers get: others can change how vLLM answers."""
HEALTH_SECONDS = 0.5
"""How long ``/health`` waits for servers before it reports their last state. Kubernetes' probes wait 1 s."""
NUM_RETRIES = 1
"""Further servers of a kind to ask after one failed: a prompt that crashes servers reaches two at most."""
MAX_BODIES = 32
"""Limit of all bodies in memory together, in multiples of the largest allowed body."""
UNREAD_SECONDS = 60.0
"""How long a server may read nothing of a request."""
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}

T = TypeVar("T")
Headers = Mapping[str, str]


@dataclass
class Completion:
    request: web.Request
    account: RequestAccount
    body: bodies.Fields
    turn: ConversationTurn | None = None
    early: asyncio.Task[web.StreamResponse] | None = None
    """The decode leg, if it was sent together with the prefill leg."""


class Proxy:
    """Sends each request to a server that prefills, then to one that decodes."""

    def __init__(self, settings: ProxySettings) -> None:
        self.limits, self.metrics = settings.limits, ProxyMetrics()
        self._settings = settings
        self._pools = {role: ServerPool(role, settings.urls(role), self.metrics) for role in Role}
        self._conversations = Conversations(self.metrics, is_on=settings.has_conversations)
        self._num_under_way = self._body_bytes = 0
        self._checks: asyncio.Task[None] | None = None
        self.is_stopping = False

    def app(self) -> web.Application:
        """The web application; it holds connections only while it runs."""
        app = web.Application(middlewares=[web.middleware(errors_as_json)])
        for path in COMPLETIONS:
            app.router.add_post(path, self.complete)
        app.router.add_get(MODELS, self.models)
        app.router.add_get(HEALTH, self.health)
        app.router.add_get(LIVE, self.live)
        app.router.add_get(METRICS, self.show_metrics)
        app.cleanup_ctx.append(self._connected)
        return app

    async def _connected(self, _: web.Application) -> AsyncIterator[None]:
        # A connection for each request: one that is closed under a request is always that request's own, and
        # a server that cannot be connected to has surely not seen it. No cookie of a client reaches another.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=server_socket)
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, cookie_jar=jar) as self._session:
            checking = asyncio.create_task(self._keep_checking())
            yield
            checking.cancel()
            await ended(checking, self._checks)

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.wait((self._check(),))
            await asyncio.sleep(CHECK_SECONDS)

    def _check(self) -> asyncio.Task[None]:
        """The running check of all servers, or a new one."""
        if self._checks is None or self._checks.done():
            self._checks = asyncio.create_task(self._check_all())
        return self._checks

    async def _check_all(self) -> None:
        await asyncio.gather(*(pool.check(self._session) for pool in self._pools.values()))

    # -- handlers

    async def complete(self, request: web.Request) -> web.StreamResponse:
        account = RequestAccount(request.path, request_name(request.headers.get(NAME_HEADER, "")))
        with self._accounted(account):
            return await self._response(self._answer(request, account), account)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """Forwarded to a decode server."""
        account = RequestAccount(request.path, request_name(""))

        def ask(server: ModelServer) -> Awaitable[aiohttp.ClientResponse]:
            return self._ask(server, "GET", request.path, headers_of(request, account))

        async def answered() -> web.StreamResponse:
            async with self._served(Role.DECODE, account, ask) as (server, answer), answer:
                return passed_on(answer, await payload_of(answer, server))

        return await self._response(answered(), account)

    async def _response(
        self, answer: Awaitable[web.StreamResponse], account: RequestAccount
    ) -> web.StreamResponse:
        """The answer, or the error that ended the request."""
        try:
            response = await answer
        except ErrorAnswer as end:
            account.outcome, response = end.outcome, end.response
        except ServerFailed as failure:
            response = self._failed(failure, account)
            forget_frames(failure)
        account.status = response.status
        if not response.prepared:
            response.headers[NAME_HEADER] = account.name
        return response

    async def health(self, _: web.Request) -> web.Response:
        """How many servers of each kind are ready, and whether requests can be served."""
        await asyncio.wait((self._check(),), timeout=HEALTH_SECONDS)
        report = {
            role.value: {
                "ready": sum(server.is_ready for server in pool.servers),
                "servers": len(pool.servers),
            }
            for role, pool in self._pools.items()
        }
        needed = (Role.DECODE,) if self._settings.is_falling_back else (Role.PREFILL, Role.DECODE)
        is_ready = all(self._pools[role].is_ready for role in needed) and not self.is_stopping
        return web.json_response(report, status=HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def live(self, _: web.Request) -> web.Response:
        """The proxy runs, whatever the state of its servers."""
        return web.json_response({"alive": True})

    async def show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), content_type="text/plain", charset="utf-8")

    # -- a completion

    async def _answer(self, request: web.Request, account: RequestAccount) -> web.StreamResponse:
        if self._num_under_way > self.limits.max_requests:
            refuse_busy(f"the proxy is at its limit of {self.limits.max_requests} concurrent requests")
        asked = Completion(request, account, await self._body(request, account))
        try:
            return await self._complete(asked)
        finally:
            early, asked.early = asked.early, None
            await ended(early)  # a request whose connection closes is aborted

    async def _complete(self, asked: Completion) -> web.StreamResponse:
        account, transfer = asked.account, bodies.Fields()
        if bodies.fits_a_ticket(asked.body):
            asked.turn = self._conversations.begin(asked.body)
            transfer = await self._prefill_or_fall_back(asked)
        else:
            self.metrics.without_ticket.labels("does-not-fit").inc()
        if asked.early is None:
            return await self._decode(asked, transfer)
        try:
            response = await asked.early
        except ServerFailed as failure:
            if account.first_byte or failure.status == HTTPStatus.GATEWAY_TIMEOUT:
                raise
            self.metrics.overlaps.labels("decode-failed").inc()
            log.warning("request %s: %s; retrying after the prefill", account.name, failure)
            return await self._decode(asked, transfer)
        self.metrics.overlaps.labels("ok").inc()
        return response

    async def _body(self, request: web.Request, account: RequestAccount) -> bodies.Fields:
        """The client's request without internal fields."""
        if "Content-Encoding" in request.headers:
            refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not supported")
        try:
            async with asyncio.timeout(self.limits.client_seconds):
                body = await self._received(request, account)
            kept = bodies.without_internal_fields(body)
        except TimeoutError:
            refuse(
                HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {self.limits.client_seconds:g} s"
            )
        except web.RequestPayloadError as error:
            refuse(HTTPStatus.BAD_REQUEST, f"the body cannot be read: {error}")
        except bodies.BodyRejected as error:
            refuse(error.status, str(error))
        if kept != body:
            self.metrics.stripped.inc()
        return kept

    async def _received(self, request: web.Request, account: RequestAccount) -> bodies.Fields:
        buffer = bodies.BodyBuffer(self.limits.max_body_bytes)
        buffer.expect(request.content_length or 0)
        async for part in request.content.iter_any():
            buffer.add(part)
            account.body_bytes += len(part)
            self._body_bytes += len(part)
            if self._body_bytes > MAX_BODIES * self.limits.max_body_bytes:
                refuse_busy("the bodies of running requests exceed the memory limit")
        return buffer.fields()

    def _release_body(self, account: RequestAccount) -> None:
        self._body_bytes -= account.body_bytes
        account.body_bytes = 0

    async def _prefill_or_fall_back(self, asked: Completion) -> bodies.Fields:
        """A ticket; nothing if no prefill server is reachable: the decode server then computes the prompt.

        If a prefill server failed with the prompt, the request fails: the prompt may be the cause.
        """
        account, cause = asked.account, "no prefill server is ready"
        if self._pools[Role.PREFILL].is_ready or not self._settings.is_falling_back:
            try:
                return await self._prefill(asked)
            except ServerFailed as failure:
                if account.was_seen or not self._settings.is_falling_back:
                    raise
                cause = str(failure)
        self.metrics.without_ticket.labels("no-prefill-server").inc()
        log.warning("request %s: %s; the decode server computes the prompt", account.name, cause)
        return {}

    async def _prefill(self, asked: Completion) -> bodies.Fields:
        """The prefill server's transfer fields: a ticket, as a rule."""
        account = asked.account

        def ask(server: ModelServer) -> Awaitable[bodies.Fields]:
            is_overlapped = self._settings.is_overlapping and server.meeting
            return self._overlapped(asked, server) if is_overlapped else self._prefill_leg(asked, server, {})

        async with self._served(Role.PREFILL, account, ask) as (server, transfer):
            account.prefill, account.prefilled = server.url, time.monotonic()
        if asked.early is None and transfer.get("do_remote_prefill") != bodies.TRUE:
            self.metrics.without_ticket.labels("none-given").inc()
            log.warning(
                "request %s: no ticket from %s: the decode server computes the prompt; check that the"
                " prefill server runs kvferry's connector as kv_producer or kv_both",
                account.name,
                server,
            )
        return transfer

    async def _prefill_leg(
        self, asked: Completion, server: ModelServer, more: bodies.Fields
    ) -> bodies.Fields:
        request, headers = asked.request, headers_of(asked.request, asked.account)
        body = bodies.prefill_body(asked.body, {**(asked.turn.offer if asked.turn else {}), **more})
        limit = self._timeout(total=self.limits.prefill_seconds)
        answer = await self._ask(server, "POST", request.path, headers, body, limit)
        try:
            transfer = bodies.transfer_in(await payload_of(answer, server))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            why = "sent an answer that is not a completion"
            raise ServerFailed(server, why, status=HTTPStatus.BAD_GATEWAY) from None
        finally:
            answer.close()
        server.meeting = bodies.meeting_in(transfer, server.meeting)
        return transfer

    async def _overlapped(self, asked: Completion, server: ModelServer) -> bodies.Fields:
        """The transfer fields of a prefill that a decode server reads while it runs (``asked.early``).

        Empty if the decode leg has ended the request.
        """
        meeting, name = server.meeting, secrets.token_hex(16)
        early: bodies.Fields = {**meeting, **bodies.READ_WHILE_PREFILLED, bodies.TRANSFER_ID: name}
        prefill = asyncio.create_task(self._prefill_leg(asked, server, {bodies.TRANSFER_ID: name}))
        decode = asyncio.create_task(self._decode(asked, early, is_early=True))
        asked.early, transfer = decode, bodies.Fields()
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if decode.done() and not isinstance(decode.exception(), ServerFailed):
                return transfer  # answered, or refused
            transfer = await prefill
            if not asked.account.first_byte and bodies.meeting_in(transfer, meeting) != meeting:
                asked.early = None  # it asks another engine than the one that prefilled
                self.metrics.overlaps.labels("decode-failed").inc()
        except (ServerFailed, ErrorAnswer):
            if not asked.account.first_byte:
                asked.early = None
                self.metrics.overlaps.labels("prefill-failed").inc()
                raise
            server.meeting = {}
        finally:
            await ended(prefill, decode if asked.early is None else None)
        return transfer

    async def _decode(
        self, asked: Completion, transfer: bodies.Fields, *, is_early: bool = False
    ) -> web.StreamResponse:
        """``is_early``: a stream that begins with an error counts as a failure, and is not passed on."""
        request, account, turn = asked.request, asked.account, asked.turn
        headers, limit = headers_of(request, account), self._timeout(sock_read=self.limits.decode_seconds)

        async def ask(server: ModelServer) -> tuple[aiohttp.ClientResponse, EventStream | None]:
            body = bodies.decode_body(asked.body, transfer)
            answer = await self._ask(server, "POST", request.path, headers, body, limit)
            if answer.content_type != "text/event-stream":
                return answer, None
            events = EventStream(answer, server, account.name)
            try:
                if is_early:
                    await events.begin()
            except BaseException:
                answer.close()
                raise
            return answer, events

        async with self._served(Role.DECODE, account, ask) as (server, (answer, events)):
            account.decode, account.first_byte = server.url, time.monotonic()
            asked.body.clear()  # the answer may take minutes
            self._release_body(account)
            response: web.StreamResponse
            said = Answer(is_compared=turn is not None)
            try:
                if events is not None:
                    response = await self._stream(request, events, said, account)
                else:
                    response = passed_on(answer, said.take(await payload_of(answer, server)))
                    account.outcome = RequestOutcome.ANSWERED
            finally:
                answer.close()  # a request whose connection closes is aborted
            if turn is not None and account.outcome is RequestOutcome.ANSWERED:
                self._conversations.end(turn, said, server)
        return response

    async def _stream(
        self, request: web.Request, events: EventStream, said: Answer, account: RequestAccount
    ) -> web.StreamResponse:
        """Stream an answer. If the server breaks off, the last event is an error."""
        out = web.StreamResponse(headers={**STREAM_HEADERS, NAME_HEADER: account.name})
        if request.version < aiohttp.HttpVersion11:
            out.force_close()  # without chunks, only the connection's end is the answer's
        try:
            await out.prepare(request)
            while chunk := await events.next():
                async with asyncio.timeout(self.limits.client_seconds):
                    await out.write(said.take_events(chunk))
            async with asyncio.timeout(self.limits.client_seconds):
                await out.write_eof()
            account.outcome = RequestOutcome.BROKE_OFF if events.failure else RequestOutcome.ANSWERED
        except (ConnectionResetError, TimeoutError):  # the client has gone, or takes nothing
            if request.transport is not None:
                request.transport.abort()
        if events.failure:
            log.error("request %s: %s", account.name, events.failure)
        return out

    # -- requests to servers

    @asynccontextmanager
    async def _served(
        self, role: Role, account: RequestAccount, ask: Callable[[ModelServer], Awaitable[T]]
    ) -> AsyncIterator[tuple[ModelServer, T]]:
        """Ask the next server; after a failure another one, if that is safe.

        A prefill can be repeated: the client has seen nothing of it. A decode can be repeated only if its
        server was unreachable, so that the ticket is unused.
        """
        tried: list[ModelServer] = []
        num_asked = 0
        while (server := self._pools[role].pick(tried)) is not None:
            tried.append(server)
            with server.busy():
                try:
                    result = await ask(server)
                except ErrorAnswer:
                    self.metrics.asked.labels(role, server.url, "refused").inc()
                    raise
                except ServerFailed as failure:
                    num_asked += failure.was_asked
                    is_last = num_asked > NUM_RETRIES or len(tried) == len(self._pools[role].servers)
                    self._go_on_after(failure, account, is_last=is_last)
                else:
                    self.metrics.asked.labels(role, server.url, "ok").inc()
                    yield server, result
                    return

    def _go_on_after(self, failure: ServerFailed, account: RequestAccount, *, is_last: bool) -> None:
        """Raise the failure, unless another server may be asked."""
        role, pool = failure.server.role, self._pools[failure.server.role]
        account.was_seen |= failure.was_asked and role is Role.PREFILL
        result, failure.server.meeting = "failed" if failure.was_asked else "unreachable", {}
        self.metrics.asked.labels(role, failure.server.url, result).inc()
        if not failure.was_asked:
            pool.mark(failure.server, is_ready=False, why=failure.why)
        is_safe = role is Role.PREFILL or not failure.was_asked
        if not is_safe or is_last:
            raise failure
        account.num_retries += 1
        self.metrics.retries.labels(role).inc()
        log.warning("request %s: %s; trying another server", account.name, failure)

    async def _ask(
        self,
        server: ModelServer,
        method: str,
        path: str,
        headers: Headers,
        body: bodies.Fields | None = None,
        limit: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        """The successful answer of one server, from its first byte on; the caller closes it."""
        limit = limit or self._timeout(total=CHECK_SECONDS + self.limits.connect_seconds)
        # aiohttp waits without a limit for a server that does not read the body.
        whole = (limit.total or limit.sock_read or 0) + self.limits.connect_seconds
        with failures_of(server):
            async with asyncio.timeout(whole):
                answer = await self._session.request(
                    method,
                    server.url + path,
                    headers=headers,
                    data=body if body is None else encoded(body),
                    timeout=limit,
                    allow_redirects=False,  # a ticket goes to the servers that were named, and to no other
                )
        try:
            await check_status(answer, server)
        except BaseException:
            answer.close()
            raise
        return answer

    def _timeout(
        self, *, total: float | None = None, sock_read: float | None = None
    ) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=total, sock_read=sock_read, sock_connect=self.limits.connect_seconds
        )

    # -- accounts

    @contextmanager
    def _accounted(self, account: RequestAccount) -> Iterator[None]:
        self._num_under_way += 1
        self.metrics.under_way.set(self._num_under_way)
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._release_body(account)
            self.metrics.under_way.set(self._num_under_way)
            if account.outcome is RequestOutcome.CLIENT_GONE and self.is_stopping:
                account.outcome = RequestOutcome.CUT_SHORT
            self.metrics.count(account)
            log.info("%s", account.line())

    def _failed(self, failure: ServerFailed, account: RequestAccount) -> web.Response:
        """The answer to a client that has seen nothing yet."""
        log.error("request %s: %s", account.name, failure)
        is_prefill = failure.server.role is Role.PREFILL
        account.outcome = RequestOutcome.PREFILL_FAILED if is_prefill else RequestOutcome.DECODE_FAILED
        retry_after = "1" if failure.status == HTTPStatus.SERVICE_UNAVAILABLE else ""
        return error_response(failure.status, failure.for_client(account.name), retry_after=retry_after)


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait for their end."""
    left = [task for task in tasks if task is not None]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def forget_frames(error: BaseException | None) -> None:
    """Free the local variables of all functions that an error ended.

    A task and its error refer to each other: until the garbage collector runs, they would keep whole bodies.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def server_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A connection to a server that reads nothing ends, even if its request was given up."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))
    return made


def headers_of(request: web.Request, account: RequestAccount) -> Headers:
    kept = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
    return {**kept, NAME_HEADER: account.name, "Content-Type": "application/json"}


def encoded(body: bodies.Fields) -> io.BytesIO:
    """As a file: bytes would be written in one piece, while all other requests wait."""
    return io.BytesIO(msgspec.json.encode(body))


async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors outside of handlers, in the same form."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        paths = ", ".join((*COMPLETIONS, MODELS, HEALTH, LIVE, METRICS))
        return error_response(error.status, f"{error.reason}: kvferry proxy serves {paths}")
    except web.HTTPException as error:
        return error_response(error.status, error.reason)
    except Exception:
        log.exception("internal error; please report it with this traceback")
        return error_response(
            HTTPStatus.INTERNAL_SERVER_ERROR, "internal error in kvferry proxy; see its log"
        )
