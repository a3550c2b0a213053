"""A small router: one OpenAI-compatible address for vLLM servers that prefill and vLLM servers that decode.

    python proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Both options may be given several times; servers of a kind take turns. A request goes to a prefill server
first, for one token and a ticket (``kv_transfer_params``), then with the ticket to a decode server, whose
answer is passed on as it comes. A client that hangs up ends both: its handler is cancelled, which closes the
connection that the handler waits on, and vLLM aborts a request whose connection closes.
"""

import argparse
import asyncio
import itertools
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
from aiohttp import web

log = logging.getLogger("proxy")
Body = dict[str, Any]

ASK_FOR_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}
ABOUT_THE_ANSWER = {"stream_options", "max_completion_tokens", "min_tokens", "n", "best_of"}
"""What a prefill is not asked: it answers once, with one token."""
NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=10)
HEALTH_LIMIT = aiohttp.ClientTimeout(total=5)
MAX_BODY_BYTES = 64 * 2**20


class ServerError(Exception):
    """A server cannot be reached, or failed."""


class Proxy:
    """Sends requests to two kinds of servers, each kind in turn."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._servers = {"prefill": prefill, "decode": decode}
        self._turns = {role: itertools.cycle(urls) for role, urls in self._servers.items()}

    def app(self) -> web.Application:
        """The web application; it holds connections only while it runs."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.cleanup_ctx.append(self._connect)
        return app

    async def _connect(self, _: web.Application) -> AsyncIterator[None]:
        # A connection per request: one that is closed under a request is always that request's own.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=NO_LIMIT) as self._session:
            yield

    # -- what clients ask

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion of either kind: prefill, then decode."""
        try:
            body = await request.json()
        except ValueError as problem:
            return error(400, f"the body is not JSON: {problem}")
        if not isinstance(body, dict):
            return error(400, "the body is not a JSON object")
        headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        try:
            if fits_a_ticket(body):
                async with self._ask("prefill", request.path, headers, prefill_of(body)) as answer:
                    if answer.status != 200:
                        return await pass_on(answer)
                    ticket = (await answer.json()).get("kv_transfer_params")
                if not ticket:
                    log.warning("no ticket from %s: the decode server prefills itself", answer.url)
                body["kv_transfer_params"] = ticket
            async with self._ask("decode", request.path, headers, body) as answer:
                if answer.content_type == "text/event-stream":
                    return await stream_on(answer, request)
                return await pass_on(answer)
        except ServerError as problem:
            log.error("%s: %s", headers["X-Request-Id"], problem)
            return error(502, str(problem))

    async def models(self, request: web.Request) -> web.Response:
        """What a decode server says of its models."""
        headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
        try:
            async with self._ask("decode", request.path, headers) as answer:
                return await pass_on(answer)
        except ServerError as problem:
            return error(502, str(problem))

    async def health(self, _: web.Request) -> web.Response:
        """Each server's health; the whole is healthy while one of each kind is."""
        report = {
            role: dict(zip(urls, await asyncio.gather(*map(self._is_healthy, urls)), strict=True))
            for role, urls in self._servers.items()
        }
        is_healthy = all(any(servers.values()) for servers in report.values())
        return web.json_response(report, status=200 if is_healthy else 503)

    # -- what servers are asked

    @asynccontextmanager
    async def _ask(
        self, role: str, path: str, headers: Mapping[str, str], body: Body | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the server whose turn it is. Refusals are answers; anything worse is an error that names it."""
        url = next(self._turns[role])
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(method, url + path, headers=headers, json=body) as answer:
                if answer.status >= 500:
                    raise ServerError(f"{role} server {url}: {answer.status} {await answer.text()}")
                yield answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            raise ServerError(f"{role} server {url}: {problem!r}") from problem

    async def _is_healthy(self, url: str) -> bool:
        try:
            async with self._session.get(f"{url}/health", timeout=HEALTH_LIMIT) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def fits_a_ticket(body: Body) -> bool:
    """Whether the decode server will make one request of it, and need nothing of the prompt but its cache.

    What does not fit is for the decode server alone: slower there, and right.
    """
    prompt = body.get("prompt")
    is_many = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    is_many = is_many or any(body.get(key) not in (None, 1) for key in ("n", "best_of"))
    asks_of_prompt = body.get("echo") or body.get("prompt_logprobs") is not None
    return not (is_many or asks_of_prompt or body.get("use_beam_search"))


def prefill_of(body: Body) -> Body:
    """The request that a prefill server gets."""
    kept = {key: value for key, value in body.items() if key not in ABOUT_THE_ANSWER}
    return {**kept, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_TICKET}


async def pass_on(answer: aiohttp.ClientResponse) -> web.Response:
    """An answer that is whole before the first byte of it goes out."""
    return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)


async def stream_on(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    """An answer that goes out as it comes."""
    out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with suppress(ConnectionResetError):  # the client is gone
        await out.prepare(request)
        async for chunk in chunks(answer):
            await out.write(chunk)
        await out.write_eof()
    return out


async def chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """A stream as it comes. If it breaks off, the last event says so."""
    try:
        async for chunk in answer.content.iter_any():
            yield chunk
    except aiohttp.ClientError as problem:
        message = f"decode server {answer.url} broke off: {problem!r}"
        log.error(message)
        yield f"data: {json.dumps(reason(502, message))}\n\n".encode()


def reason(status: int, message: str) -> Body:
    """An error, the way OpenAI's clients read it."""
    return {"error": {"message": message, "type": "proxy_error", "code": status}}


def error(status: int, message: str) -> web.Response:
    return web.json_response(reason(status, message), status=status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    app = Proxy(args.prefill, args.decode).app()
    web.run_app(app, host=args.host, port=args.port, handler_cancellation=True, shutdown_timeout=5)


if __name__ == "__main__":
    main()
