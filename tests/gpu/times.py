"""What a load costs, and what it costs others: kvferry beside vLLM's own connector, in turns in one run.

Nothing here passes or fails by a time: a number is kept with what it was measured on, and the report sets it
beside the goal. A case fails if a load does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from statistics import median
from typing import Any

from tests.e2e.harness import KVFERRY, STOCK, Engine, EngineError, prefill
from tests.gpu.cases import LatencyCase, Setting, TimeCase
from tests.gpu.engines import WARM_UP, Engines, cause, close_all, warm_up
from tests.gpu.pairs import Wrong

TURNS, WARM_UPS = 9, 3
OURS, OWN = "kvferry", "vllm"
UNCHECKED = {**KVFERRY, "kv_connector_extra_config": {"identity": "unchecked"}}
"""Weights that vLLM makes up have no identity."""
CONNECTORS: Mapping[str, Mapping[str, Any]] = {OURS: UNCHECKED, OWN: STOCK}
CACHE_BYTES = 8 << 30
"""Of each engine: a few requests of 16,384 tokens of 128 KiB."""
CPU_LENGTHS = (64, 256)
"""What becomes of the lengths where nobody measures."""
NUM_STEPS, ROUNDS = 600, 3
"""Tokens of each decode whose times are taken, in so many rounds of all windows."""
SECONDS = 120.0
FIRST_SECONDS = 30.0
"""For a first load by vLLM's own connector: where it refuses a pair it may as well never answer."""
_salts = count()


def prompt_of(length: int) -> list[int]:
    """A prompt that was not there before."""
    salt = next(_salts)
    return [(7 * i + 13 * salt + i * i % 11 + salt * salt % 97) % 500 + 3 for i in range(length)]


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer: after how many seconds each of its tokens came."""

    seconds: list[float]
    finish_reason: str | None
    params: Any = None
    """For the next engine."""
    tokens: Sequence[int] = ()


def timed(engine: Engine, prompt: Sequence[int], num_tokens: int, params: Any = None) -> Future[Timed]:
    """Ask, and time in the engine's own process."""
    return engine.submit(
        "timed", engine.new_id(), list(prompt), num_tokens, params, read=lambda values: Timed(*values)
    )


@dataclass(frozen=True, slots=True)
class Sized:
    """Engines of a model with a true cache: of requests of so many tokens, so many at a time."""

    model: str
    src: Setting
    dst: Setting
    max_tokens: int
    max_num_seqs: int
    src_args: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments on a GPU."""
    dst_args: Mapping[str, Any] = field(default_factory=dict)
    connectors: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: CONNECTORS)


@contextmanager
def sized_pairs(
    engines: Engines, sized: Sized
) -> Iterator[tuple[dict[str, tuple[Engine, Engine]], dict[str, str]]]:
    """A pair per connector, all at once; and why one of them has none. Ours must start."""
    model, max_tokens = sized.model, max(sized.max_tokens, 2 * len(WARM_UP))
    folder, is_cpu = engines.sized(model, max_tokens), engines.device.name == "cpu"
    more: dict[str, Any] = {"max_model_len": max_tokens, "max_num_seqs": sized.max_num_seqs}
    if not is_cpu:
        more |= {"max_num_batched_tokens": max_tokens, "kv_cache_memory_bytes": CACHE_BYTES}
    # What a source has prefilled once it offers again without computing it: turns are short.
    keeps = {"enable_prefix_caching": model != "hybrid"}
    settings = {"src": (sized.src, {**keeps, **({} if is_cpu else sized.src_args)})}
    settings |= {"dst": (sized.dst, {} if is_cpu else dict(sized.dst_args))}
    pairs: dict[str, tuple[Engine, Engine]] = {}
    refused: dict[str, str] = {}
    with ExitStack() as ends:
        begun, all_engines = {}, list[Engine]()
        ends.callback(close_all, all_engines)
        for name, connector in sized.connectors.items():
            started = [
                engines.begin_sized(folder, setting.on(engines.device, model), connector, **{**more, **extra})
                for setting, extra in settings.values()
            ]
            all_engines.extend(started)
            begun[name] = started[0], started[1]
        for name, both in begun.items():
            seconds = SECONDS if name == OURS else FIRST_SECONDS
            try:
                for engine, (setting, _) in zip(both, settings.values(), strict=True):
                    fitted = setting.on(engines.device, model)
                    engines.wait(engine, partial(engines.begin_sized, folder, fitted, None, **more), warm_up)
                for _ in range(WARM_UPS):
                    load(*both, prompt_of(64), seconds)
                pairs[name] = both
            except (EngineError, Wrong, TimeoutError) as problem:
                if name == OURS:
                    raise
                why = cause("".join(engine.log.read_text(errors="replace") for engine in both))
                is_late = isinstance(problem, TimeoutError)
                refused[name] = f"no answer within {seconds:g} s: {why}" if is_late else why
                for engine in both:
                    engine.kill()  # nobody is to compute beside what is measured
        yield pairs, refused


def load(src: Engine, dst: Engine, prompt: Sequence[int], seconds: float = SECONDS) -> float:
    """One request: prefilled there, one token decoded here; the seconds of the second."""
    answer = timed(dst, prompt, 1, prefill(src, prompt)).result(seconds)
    if answer.finish_reason != "length" or not answer.seconds:
        raise Wrong(f"a load of {len(prompt)} tokens failed ({answer.finish_reason}): {dst.tail(3)}")
    return answer.seconds[0]


def run_time(engines: Engines, case: TimeCase, found: dict[str, Any]) -> None:
    """Milliseconds by connector and length, as measured and without what a two-token request takes."""
    lengths = case.lengths if engines.device.name != "cpu" else CPU_LENGTHS
    sized = Sized(case.model, case.src, case.dst, max(lengths) + 64, 8)
    with sized_pairs(engines, sized) as (pairs, refused):
        took: dict[str, dict[int, Beside]] = {name: {n: Beside([], []) for n in lengths} for name in pairs}
        # The same prompt again and again: a source with prefix caching offers what it has.
        prompts = {length: prompt_of(length) for length in (2, *lengths)}
        for prompt in prompts.values():
            for src, dst in pairs.values():
                load(src, dst, prompt)
        before = {name: dst.sources().external for name, (_, dst) in pairs.items()}
        found["refused"] = refused
        for length in lengths:
            for turn in range(TURNS):
                for name in sorted(pairs, reverse=bool(turn % 2)):
                    beside = took[name][length]
                    beside.two_tokens.append(load(*pairs[name], prompts[2]))
                    beside.seconds.append(load(*pairs[name], prompts[length]))
            # As far as it has come: what is measured stays if a longer load fails.
            found["load_ms"] = {name: _milliseconds(each) for name, each in took.items()}
        external = {name: dst.sources().external - before[name] for name, (_, dst) in pairs.items()}
    for name, num_tokens in external.items():
        if num_tokens < TURNS * (sum(lengths) - 2 * len(lengths)):
            raise Wrong(f"{name}: {num_tokens} tokens came by loads; the rest was computed")


@dataclass(frozen=True, slots=True)
class Beside:
    """Loads of one length, each behind a two-token request: an engine's steps swing from minute to minute."""

    seconds: list[float]
    two_tokens: list[float]


def _milliseconds(took: Mapping[int, Beside]) -> dict[str, dict[str, Any]]:
    return {
        str(length): {
            "median_ms": 1e3 * median(beside.seconds),
            "less_two_tokens_ms": 1e3 * (median(beside.seconds) - median(beside.two_tokens)),
            "all_ms": [round(1e3 * one, 3) for one in beside.seconds],
            "two_tokens_ms": [round(1e3 * one, 3) for one in beside.two_tokens],
        }
        for length, beside in took.items()
        if beside.seconds
    }


# -- what others notice ------------------------------------------------------------------------------------


def run_latency(engines: Engines, case: LatencyCase, found: dict[str, Any]) -> None:
    """The time between two tokens of running decodes: alone, while a source offers, while loads arrive."""
    is_cpu = engines.device.name == "cpu"
    if is_cpu:
        case = replace(case, num_decodes=2, num_tokens=CPU_LENGTHS[-1], loads_per_second=2.0)
    num_steps = 30 if is_cpu else NUM_STEPS
    room = case.num_decodes + 16
    max_tokens = max(case.num_tokens, num_steps + 128) + 64
    sized = Sized(case.model, case.setting, case.setting, max_tokens, room)
    with sized_pairs(engines, sized) as (pairs, refused):
        found |= {"refused": refused, "latency": {}}
        for name, (src, dst) in pairs.items():
            prompts = [prompt_of(case.num_tokens) for _ in range(4)]
            for prompt in prompts:
                load(src, dst, prompt)
            busy: dict[str, Callable[[Sequence[int]], Any]] = {
                "alone": len,
                "requests": partial(_short_request, dst),
                "offers": partial(prefill, src),
                "loads": partial(load, src, dst),
            }
            if name != OURS:  # what it costs that a source computes beside it is the GPU's, whoever loads
                del busy["offers"]
            gaps: dict[str, list[float]] = {meanwhile: [] for meanwhile in busy}
            events = dict.fromkeys(busy, 0)
            for _ in range(ROUNDS):  # an engine's steps swing from minute to minute: each window in turn
                for meanwhile, work in busy.items():
                    some, number = window(dst, case, num_steps // ROUNDS, work, prompts)
                    gaps[meanwhile] += some
                    events[meanwhile] += number
            found["latency"][name] = {one: percentiles(gaps[one], events[one]) for one in busy}


def _short_request(dst: Engine, prompt: Sequence[int]) -> None:
    """What a request costs the others that loads nothing: it joins the batch, and leaves it again."""
    timed(dst, prompt_of(2), 1).result(SECONDS)


def window(
    dst: Engine,
    case: LatencyCase,
    num_steps: int,
    work: Callable[[Sequence[int]], Any],
    prompts: Sequence[Sequence[int]],
) -> tuple[list[float], int]:
    """Milliseconds between two tokens, all decodes together, while something is done at a rate; how often."""
    decodes = [timed(dst, prompt_of(128), num_steps) for _ in range(case.num_decodes)]
    threads: list[threading.Thread] = []
    problems: list[Exception] = []

    def try_work(prompt: Sequence[int]) -> None:
        try:
            work(prompt)
        except Exception as problem:
            problems.append(problem)

    next_at, number = time.monotonic(), 0
    while not all(one.done() for one in decodes):
        threads.append(threading.Thread(target=try_work, args=(prompts[number % len(prompts)],), daemon=True))
        threads[-1].start()
        number, next_at = number + 1, next_at + 1 / case.loads_per_second
        time.sleep(max(0.0, next_at - time.monotonic()))
    for thread in threads:
        thread.join(SECONDS)
    if problems:
        raise Wrong(f"{len(problems)} of {number} failed, the first: {problems[0]!r}")
    gaps = [
        1e3 * (later - earlier)
        for one in decodes
        for earlier, later in pairwise(one.result().seconds[num_steps // 10 :])
    ]
    return gaps, number


def percentiles(gaps: list[float], events: int) -> dict[str, float]:
    gaps.sort()
    at = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
    return {"events": events, "gaps": len(gaps), **{k: gaps[int(q * (len(gaps) - 1))] for k, q in at.items()}}
