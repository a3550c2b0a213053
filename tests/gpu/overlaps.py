"""Both legs of a request at once: the decode engine reads what the prefill engine has computed so far."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from statistics import median
from typing import Any

from tests.e2e.conversations import Reference, Step, Way
from tests.e2e.harness import KVFERRY, PREFILL, SECONDS, Answer, Engine, Params, until
from tests.gpu.cases import LatencyCase, OverlapCase, OverlapTimeCase
from tests.gpu.engines import Engines
from tests.gpu.pairs import MAX_COMPUTED, Wrong
from tests.gpu.times import (
    CPU_LENGTHS,
    OURS,
    Sized,
    load,
    percentiles,
    prompt_of,
    sized_pairs,
    timed,
    window,
)
from tests.gpu.turns import reference_of

CHUNK, NUM_TOKENS = 64, 12
"""Tokens of a step, and of an answer."""
LENGTHS = (900, 700, 470)
"""Tokens of the prompts: up to 15 chunks."""
LEASE_SECONDS = 40.0
TURNS, TIMED_CHUNK, NUM_STEPS, ROUNDS, NUM_PER_SECOND = 7, 2048, 150, 3, 1.0


def place_of(src: Engine) -> Params:
    """Where a router finds an engine, from the answer to a short prefill."""
    params = src.ask([1, 2, 3, 4] * 10, 1, PREFILL).params or {}
    if not params.get("kvferry_overlap"):
        raise Wrong(f"{src.name} cannot be read while it computes")
    return {key: params[key] for key in ("remote_host", "remote_port")}


def names(place: Params) -> tuple[Params, Params]:
    """The parameters of both legs, under a new name."""
    name = {"kvferry_transfer": secrets.token_hex(16)}
    return {**PREFILL, **name}, {"do_remote_prefill": True, "do_remote_decode": False, **place, **name}


def legs(src: Engine, dst: Engine, place: Params, prompt: tuple[int, ...]) -> Answer:
    """The answer to a prompt whose legs are sent at once."""
    to_src, to_dst = names(place)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(dst.ask, prompt, NUM_TOKENS, to_dst, has_logprobs=True)
        pool.submit(src.ask, prompt, 1, to_src).result()
        return answer.result()


def run_overlap(engines: Engines, case: OverlapCase, found: dict[str, Any]) -> None:
    """Every answer is right, all of the prompts came by loads, and all blocks are back."""
    with (
        reference_of(engines, case.family, case.dst) as reference,
        engines.pair(case.family, case.src, case.dst, KVFERRY) as (src, dst),
    ):
        free = src.num_free_blocks(), dst.num_free_blocks()
        draw, place, before = Random(1), place_of(src), dst.sources()
        prompts = [tuple(draw.choices(range(256), k=length)) for length in LENGTHS]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(partial(legs, src, dst, place), prompts))
        found["differences"] = [_judge(reference, *each) for each in zip(prompts, answers, strict=True)]
        found["loaded_tokens"] = dst.sources().external - before.external
        found |= {
            f"{what}bytes": sum(dst.totals(f"vllm:kvferry_loaded_{what}bytes").values())
            for what in ("", "early_")
        }
        if found["loaded_tokens"] < sum(LENGTHS) - MAX_COMPUTED * len(LENGTHS):
            raise Wrong(f"{found['loaded_tokens']} tokens were loaded, the rest was computed again")
        until(
            lambda: (src.num_free_blocks(), dst.num_free_blocks()) == free,
            f"both pools have {free} free blocks",
            seconds=LEASE_SECONDS,
        )


def _judge(reference: Reference, prompt: tuple[int, ...], answer: Answer) -> float:
    taken = reference.judge(Step(prompt, Way.LOADED, NUM_TOKENS), answer)
    if not taken.is_right:
        raise Wrong(f"the answer to {len(prompt)} tokens is wrong: {taken.evidence()}")
    return taken.difference


def run_overlap_time(engines: Engines, case: OverlapTimeCase, found: dict[str, Any]) -> None:
    """Time to first token, both legs at once and one after the other; and what running decodes notice."""
    is_cpu = engines.device.name == "cpu"
    lengths = CPU_LENGTHS if is_cpu else case.lengths
    chunked = {"enable_prefix_caching": False, "max_num_batched_tokens": TIMED_CHUNK}
    sized = Sized(case.model, case.src, case.dst, max(*lengths, 700) + 64, 8, src_args=chunked)
    found |= {"overlap_ms": {}, "chunk": TIMED_CHUNK}
    with sized_pairs(engines, sized) as (pairs, refused):
        found["refused"] = refused
        for length in lengths:
            taken: dict[str, list[float]] = {name: [] for name in (*pairs, f"{OURS}-at-once")}
            place = place_of(pairs[OURS][0])
            for turn in range(TURNS + 1):
                for name in sorted(taken, reverse=bool(turn % 2)):
                    both = pairs[name.removesuffix("-at-once")]
                    at_once = place if name not in pairs else None
                    seconds = _first_token(*both, prompt_of(length), at_once)
                    if turn:
                        taken[name].append(seconds)
            found["overlap_ms"][str(length)] = {name: _summary(each) for name, each in taken.items()}
        found["latency"] = {OURS: _gaps(case, *pairs[OURS], min(lengths), is_cpu=is_cpu)}


def _gaps(case: OverlapTimeCase, src: Engine, dst: Engine, length: int, *, is_cpu: bool) -> dict[str, Any]:
    """Milliseconds between two tokens of running decodes, while prompts are prefilled and loaded."""
    place, decodes = place_of(src), LatencyCase(case.model, case.dst, 4, length, NUM_PER_SECOND)
    work: dict[str, Callable[[Sequence[int]], Any]] = {
        "alone": len,
        "loads": lambda _: _first_token(src, dst, prompt_of(length), None),
        "loads-at-once": lambda _: _first_token(src, dst, prompt_of(length), place),
    }
    gaps: dict[str, list[float]] = {name: [] for name in work}
    events = dict.fromkeys(work, 0)
    for _ in range(1 if is_cpu else ROUNDS):
        for name, each in work.items():
            some, number = window(dst, decodes, 30 if is_cpu else NUM_STEPS, each, [[0]])
            gaps[name] += some
            events[name] += number
    return {name: percentiles(gaps[name], events[name]) for name in work}


def _first_token(src: Engine, dst: Engine, prompt: list[int], place: Params | None) -> float:
    """``place``: where the prefill engine is, if both legs are sent at once."""
    started = time.perf_counter()
    if place is None:
        load(src, dst, prompt)
        return time.perf_counter() - started
    to_src, to_dst = names(place)
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(src.ask, prompt, 1, to_src)
        answer = timed(dst, prompt, 1, to_dst).result(SECONDS)
        seconds = time.perf_counter() - started
        prefilled.result()
    if answer.finish_reason != "length":
        raise Wrong(f"a load of {len(prompt)} tokens failed ({answer.finish_reason}): {dst.tail(3)}")
    return seconds


def _summary(seconds: list[float]) -> Mapping[str, Any]:
    return {"median_ms": 1e3 * median(seconds), "all_ms": [round(1e3 * each, 1) for each in sorted(seconds)]}
