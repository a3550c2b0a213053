"""``vllm serve`` twice behind kvferry's proxy, many clients: kvferry beside vLLM's own connector, in turns.

A case fails if a request does, if prompts were computed again, or if answers are not those they must be.
Times are kept, and never fail it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from tests.e2e.harness import EngineError, free_port
from tests.gpu.cases import ServeCase, Setting
from tests.gpu.clients import MODEL, Reply, Served, ask_all
from tests.gpu.engines import Engines, cause
from tests.gpu.models import vocabulary_of
from tests.gpu.pairs import MAX_COMPUTED, Wrong, num_common
from tests.gpu.servers import Server
from tests.gpu.times import CACHE_BYTES, CONNECTORS, OURS, prompt_of

TURNS = 3
LENGTHS = (256, 512, 1024)
"""Tokens of prompts: 64 requests fit into the cache at a time."""
CPU_LENGTHS = (40, 90, 200)
NUM_SAMPLE, SAMPLE_TOKENS = 16, 32
"""Prompts that are asked once more, and tokens of each answer: one after another, four times."""
LEAST_EQUAL = 0.5
"""Of the sample's tokens. In bf16 answers part by rounding, since one server computes a prompt in other steps
than two: where they do so early, they must be those of the other connector, token by token."""


@dataclass(frozen=True, slots=True)
class Place:
    """Two servers of one connector, and the proxy in front."""

    prefill: Server
    decode: Server
    proxy: Server


def run_serve(engines: Engines, case: ServeCase, found: dict[str, Any]) -> None:
    """Writes down what it finds; raises Wrong, NotHere, or whatever the servers do."""
    is_cpu = engines.device.name == "cpu"
    if is_cpu:
        case = replace(case, num_clients=4, num_requests=12, num_tokens=8)
    lengths = CPU_LENGTHS if is_cpu else LENGTHS
    prompts = [prompt_of(length) for length in islice(cycle(lengths), case.num_requests)]
    with _places(engines, case, max(lengths) + case.num_tokens + 64) as (places, refused):
        found |= {"refused": refused, "serve": {name: {} for name in places}}
        for place in places.values():  # kernels are compiled, and the servers meet
            ask_all(place.proxy.url, [prompt_of(n) for n in lengths], case.num_tokens, case.num_clients)
        served = _in_turns(case, places, prompts, found["serve"])
        sample, num_tokens = prompts[:NUM_SAMPLE], min(case.num_tokens, SAMPLE_TOKENS)
        alone, quiet = (
            {name: ask_all(url(place), sample, num_tokens, 1).replies for name, place in places.items()}
            for url in (lambda place: place.decode.url, lambda place: place.proxy.url)
        )
        for name in places:
            busy = served[name].replies[: len(sample)]
            others = [quiet[other] for other in places if other != name]
            found["serve"][name] |= compared(quiet[name], alone[name], busy, others, num_tokens)
    for name, row in found["serve"].items():
        check(name, row, is_exact=is_cpu)


def _in_turns(
    case: ServeCase, places: Mapping[str, Place], prompts: Sequence[Sequence[int]], found: dict[str, Any]
) -> dict[str, Served]:
    """All requests of each connector, part by part."""
    size = -(-len(prompts) // TURNS)
    parts: dict[str, list[Served]] = {name: [] for name in places}
    loaded = dict.fromkeys(places, 0)
    for turn in range(TURNS):
        some = prompts[turn * size : (turn + 1) * size]
        for name in sorted(places, reverse=bool(turn % 2)):
            before = places[name].decode.num_loaded()
            parts[name].append(ask_all(places[name].proxy.url, some, case.num_tokens, case.num_clients))
            loaded[name] += places[name].decode.num_loaded() - before
    whole = {
        name: Served(tuple(reply for part in some for reply in part.replies), sum(p.elapsed for p in some))
        for name, some in parts.items()
    }
    for name, served in whole.items():
        found[name] |= figures(served)
        found[name] |= {"prompt_tokens": sum(map(len, prompts)), "loaded_tokens": loaded[name]}
    return whole


def compared(
    quiet: Sequence[Reply],
    alone: Sequence[Reply],
    busy: Sequence[Reply],
    others: Sequence[Sequence[Reply]],
    num_tokens: int,
) -> dict[str, Any]:
    """Answers of the proxy, one at a time, of so many tokens each, beside those of the decode server alone,
    of the proxy under load, and of the other connectors."""
    return {
        "sample": len(quiet),
        "sample_tokens": len(quiet) * num_tokens,
        "equal": _num_equal(quiet, alone),
        "equal_tokens": _num_common(quiet, alone),
        "equal_under_load": _num_equal(busy, alone),
        "different_answers": min(len({reply.tokens for reply in replies}) for replies in (alone, quiet)),
        "sample_problems": [reply.problem for reply in (*alone, *quiet) if reply.problem],
        "as_others_tokens": min((_num_common(quiet, other) for other in others), default=0),
    }


def _num_equal(these: Sequence[Reply], those: Sequence[Reply]) -> int:
    """Answers that begin with the other ones."""
    both = zip(these, those, strict=True)
    return sum(bool(b.tokens) and a.tokens[: len(b.tokens)] == b.tokens for a, b in both)


def _num_common(these: Sequence[Reply], those: Sequence[Reply]) -> int:
    """Tokens until each answer parts from the other."""
    return sum(num_common(a.tokens, b.tokens) for a, b in zip(these, those, strict=True))


def figures(served: Served) -> dict[str, Any]:
    """Counts and percentiles; times of requests that went well."""
    good = [reply for reply in served.replies if not reply.problem]
    problems = [reply.problem for reply in served.replies if reply.problem]
    found: dict[str, Any] = {
        "requests": len(served.replies),
        "failed": len(problems),
        "requests_per_second": len(good) / served.elapsed,
    }
    if problems:
        found["problems"] = problems[:3]
    for name, values in (
        ("first_token", sorted(reply.first for reply in good)),
        ("per_token", sorted(reply.per_token for reply in good)),
    ):
        for key, part in (("p50", 0.5), ("p99", 0.99)):
            found[f"{name}_{key}_ms"] = 1e3 * values[int(part * (len(values) - 1))] if values else None
    return found


def check(name: str, row: Mapping[str, Any], *, is_exact: bool) -> None:
    """Raise Wrong unless this is what must be."""
    if row["failed"]:
        raise Wrong(f"{name}: {row['failed']} of {row['requests']} requests failed: {row['problems'][0]}")
    if row["loaded_tokens"] < row["prompt_tokens"] - MAX_COMPUTED * row["requests"]:
        raise Wrong(
            f"{name}: {row['loaded_tokens']} of {row['prompt_tokens']} prompt tokens came by loads;"
            " the rest was computed again"
        )
    if row["sample_problems"]:
        raise Wrong(f"{name}: a request of the sample failed: {row['sample_problems'][0]}")
    if row["different_answers"] < min(row["sample"], 2):
        raise Wrong(f"{name}: all answers are the same; that they are equal proves nothing")
    if is_exact:
        is_right = row["equal_tokens"] == row["sample_tokens"] and row["equal_under_load"] == row["sample"]
    else:
        is_right = (
            row["equal_tokens"] >= LEAST_EQUAL * row["sample_tokens"]
            or row["as_others_tokens"] == row["sample_tokens"]
        )
    if not is_right:
        raise Wrong(
            f"{name}: {row['equal']} of {row['sample']} answers are one server's own,"
            f" {row['equal_tokens']} of {row['sample_tokens']} tokens; under load {row['equal_under_load']};"
            f" {row['as_others_tokens']} tokens are the other connector's"
        )


@contextmanager
def _places(
    engines: Engines, case: ServeCase, max_tokens: int
) -> Iterator[tuple[dict[str, Place], dict[str, str]]]:
    """Servers of each connector, all at once; and why one of them has none. Ours must serve."""
    from tests.support.vllm.tiny import byte_tokenizer

    is_cpu = engines.device.name == "cpu"
    model = engines.sized(case.model, max_tokens)
    byte_tokenizer(vocabulary_of(model)).save_pretrained(model)
    more: dict[str, Any] = {"max_model_len": max_tokens, "max_num_seqs": case.num_clients}
    if not is_cpu:
        more |= {"kv_cache_memory_bytes": CACHE_BYTES}
    places: dict[str, Place] = {}
    refused: dict[str, str] = {}
    with ExitStack() as ends:

        def start(name: str, setting: Setting, connector: Mapping[str, Any]) -> Server:
            fitted = setting.on(engines.device, case.model)
            args = {**engines.device.args, **fitted.args(), **more, **_COMMON}
            env = {**engines.device.env, **fitted.env(), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            server = engines.servers.serve(name, model, {**args, "kv_transfer_config": connector}, env)
            ends.callback(server.end)
            return server

        for name, connector in CONNECTORS.items():
            prefill = start(f"{name}-prefill", case.src, connector)
            decode = start(f"{name}-decode", case.dst, connector)
            places[name] = Place(prefill, decode, engines.servers.proxy(f"{name}-proxy", prefill, decode))
            ends.callback(places[name].proxy.end)
        for name, place in list(places.items()):
            try:
                for server in (place.prefill, place.decode, place.proxy):
                    server.wait_ready()
            except EngineError as problem:
                if name == OURS:
                    raise EngineError(f"{name}: {cause(str(problem))}") from None
                refused[name] = cause(str(problem))
                del places[name]
        yield places, refused


_COMMON = {
    "load_format": "dummy",
    "served_model_name": MODEL,
    "uvicorn_log_level": "warning",
    "worker_extension_cls": "tests.gpu.weights.Wide",
}
