"""Clients of a server, many at a time: they stream answers, and note when each token came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 600.0
"""No answer takes longer, on a busy machine."""
MODEL = "model"
_DATA, _END = b"data: ", b"[DONE]"


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request became."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    """After how long each token came."""
    problem: str = ""
    """Why there is no whole answer."""

    @property
    def first(self) -> float:
        return self.seconds[0]

    @property
    def per_token(self) -> float:
        """Of those after the first."""
        return (self.seconds[-1] - self.seconds[0]) / max(1, len(self.seconds) - 1)


@dataclass(frozen=True, slots=True)
class Served:
    """What became of all requests, in the order in which they were asked; and how long all of it took."""

    replies: tuple[Reply, ...]
    elapsed: float


def ask_all(url: str, prompts: Sequence[Sequence[int]], num_tokens: int, num_clients: int) -> Served:
    """Each client asks for the next prompt as soon as it has its answer."""
    return asyncio.run(_ask_all(url, prompts, num_tokens, num_clients))


async def _ask_all(url: str, prompts: Sequence[Sequence[int]], num_tokens: int, num_clients: int) -> Served:
    import aiohttp  # not needed to list cases, or to report

    replies: dict[int, Reply] = {}
    waiting = iter(enumerate(prompts))
    # A connection for each request, as of clients that know nothing of each other.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def be_client() -> None:
            for number, prompt in waiting:
                replies[number] = await _ask(session, url, prompt, num_tokens)

        started = time.perf_counter()
        await asyncio.gather(*(be_client() for _ in range(num_clients)))
        elapsed = time.perf_counter() - started
    return Served(tuple(replies[number] for number in range(len(prompts))), elapsed)


async def _ask(session: Any, url: str, prompt: Sequence[int], num_tokens: int) -> Reply:
    import aiohttp

    body = {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    tokens: list[int] = []
    seconds: list[float] = []
    problem, started = "", time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                problem = f"{answer.status}: {(await answer.text())[:300]}"
            async for line in answer.content:
                came = time.perf_counter() - started
                new = list(tokens_in(line))
                tokens += new
                seconds += [came] * len(new)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    if not problem and len(tokens) != num_tokens:
        problem = f"{len(tokens)} of {num_tokens} tokens came"
    return Reply(tuple(tokens), tuple(seconds), problem)


def tokens_in(line: bytes) -> Iterator[int]:
    r"""The tokens of one line of a stream; raises ValueError if it tells of an error.

    >>> list(tokens_in(b'data: {"choices": [{"token_ids": [7, 8]}]}\n')), list(tokens_in(b"data: [DONE]\n"))
    ([7, 8], [])
    """
    text = line.strip().removeprefix(_DATA)
    if not line.startswith(_DATA) or text == _END:
        return
    event: Mapping[str, Any] = json.loads(text)
    if "error" in event:
        raise ValueError(str(event["error"])[:300])
    for choice in event.get("choices", ()):
        yield from choice.get("token_ids") or ()
