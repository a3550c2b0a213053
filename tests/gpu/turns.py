"""Conversations whose earlier turns the prefill engine reads back from the engine that decoded them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from statistics import median
from typing import Any

from tests.e2e.conversations import TOLERANCE, Prompt, Reference, Step, Way
from tests.e2e.harness import KVFERRY, PREFILL, SECONDS, STOCK, Engine, Params, Sources
from tests.gpu.cases import FullPoolCase, Setting, TurnsCase, TurnTimeCase
from tests.gpu.engines import Engines
from tests.gpu.pairs import Wrong
from tests.gpu.prefixes import ON_A_GPU
from tests.gpu.times import CPU_LENGTHS, OURS, OWN, Sized, prompt_of, sized_pairs, timed

FIRST, NEW, ANSWER = 200, 30, 20
"""Tokens of the first prompt, of each further message, and of each answer."""
NUM_TURNS, NUM_TALKS = 10, 8
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
READING_BACK = {"bidirectional_kv_xfer": True}
CHECKED = {**READING_BACK, "digest": "full"}
UNCHECKED = {**READING_BACK, "identity": "unchecked"}
"""Weights that vLLM makes up have no identity."""


def connectors(ours: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """kvferry with these options, and vLLM's own, both reading back."""
    return {
        OURS: {**KVFERRY, **RECOMPUTE, "kv_connector_extra_config": ours},
        OWN: {**STOCK, **RECOMPUTE, "kv_connector_extra_config": READING_BACK},
    }


WITHOUT = "-no-read-back"


@dataclass
class Talk:
    """One conversation: its text so far, and the offer of its last turn."""

    text: Prompt
    offer: Params = field(default_factory=dict)

    def next_offer(self, params: Params | None) -> None:
        """The parameters of an answer become those of the prefill of the next turn."""
        self.offer = {**(params or {}), "do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class Turn:
    """Prompt tokens of all conversations in one turn, by where they came from."""

    num_tokens: int
    prefill: Sources
    decode: Sources

    def summary(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.num_tokens,
            "prefill_computed": self.prefill.computed,
            "prefill_read_back": self.prefill.external,
            "decode_loaded": self.decode.external,
            "decode_computed": self.decode.computed,
            "decode_cached": self.decode.cached,
        }


@dataclass
class Talks:
    """Conversations that take each turn at the same time; then the prefill engine's prefix cache is emptied,
    as if other users had filled it."""

    src: Engine
    dst: Engine
    reference: Reference
    is_reading_back: bool
    wrong: list[tuple[int, float]] = field(default_factory=list)
    """Tokens of the prompt, and the difference."""
    largest_difference: float = 0.0

    def run(self, num_turns: int, num_talks: int, num_answered: int = ANSWER) -> list[Turn]:
        draw = Random(1)
        talks = [Talk(tuple(draw.choices(range(256), k=FIRST))) for _ in range(num_talks)]
        turns = []
        for _ in range(num_turns):
            more = [tuple(draw.choices(range(256), k=NEW)) for _ in talks]
            before, num_tokens = self._sources(), sum(len(talk.text) for talk in talks)
            with ThreadPoolExecutor(num_talks) as pool:
                list(pool.map(partial(self._take, num_answered), talks, more))
            turns.append(Turn(num_tokens, *map(_less, self._sources(), before)))
            self.src.forget()
        return turns

    def _sources(self) -> tuple[Sources, Sources]:
        return self.src.sources(), self.dst.sources()

    def _take(self, num_answered: int, talk: Talk, more: Prompt) -> None:
        params = self.src.ask(talk.text, 1, {**PREFILL, **talk.offer}).params
        answer = self.dst.ask(talk.text, num_answered, params, has_logprobs=True)
        taken = self.reference.judge(Step(talk.text, Way.LOADED, num_answered), answer)
        if not taken.is_right:
            self.wrong.append((len(talk.text), taken.difference))
        self.largest_difference = max(self.largest_difference, taken.difference)
        talk.text = (*talk.text, *answer.tokens, *more)
        if self.is_reading_back:
            talk.next_offer(answer.params)


def _less(after: Sources, before: Sources) -> Sources:
    return Sources(
        after.computed - before.computed, after.cached - before.cached, after.external - before.external
    )


@contextmanager
def reference_of(engines: Engines, family: str, like: Setting) -> Iterator[Reference]:
    """An engine without a connector and without prefix caching."""
    tolerance = TOLERANCE if engines.device.name == "cpu" else ON_A_GPU[like.dtype]
    bare = replace(like, features=(), tp=1)
    with engines.started(family, {"alone": bare}, None) as others:
        yield Reference(lambda: others["alone"], tolerance)


def run_turns(engines: Engines, case: TurnsCase, found: dict[str, Any]) -> None:
    """Every answer is right, with each connector and without read-back; counts tokens, turn by turn."""
    found |= {"turns": {}, "digests": {}}
    with reference_of(engines, case.family, case.dst) as reference:
        for name, connector in connectors(CHECKED).items():
            if name == OWN and case.src.block != case.dst.block:
                continue  # it rejects unequal blocks
            with engines.pair(case.family, case.src, case.dst, connector) as (src, dst):
                for is_reading_back in (True, False) if name == OURS else (True,):
                    talks = Talks(src, dst, reference, is_reading_back)
                    turns = talks.run(NUM_TURNS, NUM_TALKS)
                    if name == OURS:  # vLLM's own connector pins the last turn's blocks for minutes
                        dst.forget()
                    found["turns"][name if is_reading_back else f"{name}{WITHOUT}"] = {
                        "wrong": len(talks.wrong),
                        "wrong_answers": talks.wrong,
                        "largest_difference": talks.largest_difference,
                        "by_turn": [turn.summary() for turn in turns],
                    }
                if name == OURS:
                    _check_digests(src, dst, found)
    for name, row in found["turns"].items():
        if row["wrong"] and name != OWN:
            raise Wrong(f"{name}: {row['wrong']} of {NUM_TURNS * NUM_TALKS} answers are wrong")
    read_back = sum(turn["prefill_read_back"] for turn in found["turns"][OURS]["by_turn"])
    if not read_back and case.must_read_back:
        raise Wrong("nothing was read back")


def _check_digests(src: Engine, dst: Engine, found: dict[str, Any]) -> None:
    """Each load of both engines was compared with its source, cell by cell."""
    for at, engine in (("prefill", src), ("decode", dst)):
        found["digests"][at] = digests = engine.totals("vllm:kvferry_load_digests", "digest")
        if set(digests) != ({"equal"} if engine.sources().external else set()):
            raise Wrong(f"digests of the {at} engine's loads: {digests}")


# -- a decode engine without room --------------------------------------------------------------------------

FULL_ANSWER, FULL_TURNS = 90, 4
"""An answer grows by almost half of its prompt, so that the pool fills while all of them run."""


def run_full_pool(engines: Engines, case: FullPoolCase, found: dict[str, Any]) -> None:
    """Preemptions and seconds of a decode engine whose blocks are all in use, with offers and without."""
    found["full_pool"] = {OURS: [], f"{OURS}{WITHOUT}": []}
    with (
        reference_of(engines, case.family, replace(case.dst, more={})) as reference,
        engines.pair(case.family, case.src, case.dst, connectors(READING_BACK)[OURS]) as (src, dst),
    ):
        for is_reading_back in (True, False, False, True):
            before, started = dst.num_preemptions(), time.monotonic()
            talks = Talks(src, dst, reference, is_reading_back)
            turns = talks.run(FULL_TURNS, NUM_TALKS, FULL_ANSWER)
            dst.forget()
            name = OURS if is_reading_back else f"{OURS}{WITHOUT}"
            found["full_pool"][name].append(
                {
                    "preemptions": dst.num_preemptions() - before,
                    "seconds": time.monotonic() - started,
                    "read_back": sum(turn.prefill.external for turn in turns),
                    "wrong": len(talks.wrong),
                }
            )
    if num_wrong := sum(run["wrong"] for runs in found["full_pool"].values() for run in runs):
        raise Wrong(f"{num_wrong} answers are wrong")


# -- time to first token -----------------------------------------------------------------------------------

NEW_TOKENS, ANSWER_TOKENS, TIMED_TALKS, TIMED_TURNS = 200, 100, 4, 5
SRC_SHARE, DST_SHARE = 0.4, 2.3
"""Of one mode's conversations, so much fits into the prefill engine's cache, and into the decode engine's."""


def run_turn_times(engines: Engines, case: TurnTimeCase, found: dict[str, Any]) -> None:
    """Seconds from the prefill request to the first decoded token, for turn 2 and later."""
    is_cpu = engines.device.name == "cpu"
    history, num_turns = (CPU_LENGTHS[-1], 3) if is_cpu else (case.history, TIMED_TURNS)
    longest = history + num_turns * (NEW_TOKENS + ANSWER_TOKENS) + 64
    cache_bytes = TIMED_TALKS * longest * case.token_bytes
    sized = Sized(
        case.model,
        case.src,
        case.dst,
        longest,
        max_num_seqs=8,
        src_args={"kv_cache_memory_bytes": int(SRC_SHARE * cache_bytes)},
        dst_args={"kv_cache_memory_bytes": int(DST_SHARE * cache_bytes), "enable_prefix_caching": True},
        connectors=connectors(UNCHECKED),
    )
    with sized_pairs(engines, sized) as (pairs, refused):
        modes = [(name, is_read) for name in pairs for is_read in (True, False)]
        talks = {mode: [Talk(tuple(prompt_of(history))) for _ in range(TIMED_TALKS)] for mode in modes}
        taken: dict[tuple[str, bool], list[float]] = {mode: [] for mode in modes}
        before = {name: src.sources().external for name, (src, _) in pairs.items()}
        for turn in range(num_turns):
            for at in range(TIMED_TALKS):
                for mode in modes if turn % 2 else reversed(modes):
                    talk = talks[mode][at]
                    seconds = _first_token(*pairs[mode[0]], talk, is_reading_back=mode[1])
                    if turn:
                        taken[mode].append(seconds)
        read_back = {name: src.sources().external - before[name] for name, (src, _) in pairs.items()}
    found |= {"refused": refused, "read_back": read_back, "history": history}
    found["turn_seconds"] = {
        name if is_read else f"{name}{WITHOUT}": _spread(seconds)
        for (name, is_read), seconds in taken.items()
    }
    if not is_cpu and not read_back[OURS]:
        raise Wrong("nothing was read back")


def _first_token(src: Engine, dst: Engine, talk: Talk, *, is_reading_back: bool) -> float:
    """One turn, whole; the seconds until its first token."""
    started = time.perf_counter()
    offer = talk.offer if is_reading_back else {}
    params = src.ask(talk.text, 1, {**PREFILL, **offer}).params
    prefilled = time.perf_counter() - started
    answer = timed(dst, talk.text, ANSWER_TOKENS, params).result(SECONDS)
    if answer.finish_reason != "length":
        raise Wrong(f"a request ended with {answer.finish_reason}: {dst.tail(3)}")
    talk.text = (*talk.text, *answer.tokens, *prompt_of(NEW_TOKENS))
    talk.next_offer(answer.params)
    return prefilled + answer.seconds[0]


def _spread(seconds: list[float]) -> dict[str, Any]:
    ordered = sorted(seconds)
    return {
        "median_ms": 1e3 * median(ordered),
        "p99_ms": 1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        "all_ms": [round(1e3 * each, 1) for each in ordered],
    }
