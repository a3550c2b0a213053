"""Random conversations with shared heads between two engines, each the other's source; all are judged.

A turn is a prompt that begins as others did. It is prefilled by one engine and decoded by the other, or asked
of one alone; it may be aborted at any moment, come with a ticket that is no good, or be handed on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.vllm.engine import MODEL_SECONDS, PREFILL, SECONDS, Answer, Engine, Params
from tests.vllm.pairs import LEASE_SECONDS
from tests.vllm.registered import Registered

LONGEST = 400
"""Tokens of a prompt."""
LIVE = 4
"""Turns at a time."""
LOOK_EVERY = 100
"""Turns between two looks at all that is registered; a look takes as long as some turns."""
LATE_SECONDS = LEASE_SECONDS + 1
"""After this long a ticket's lease is over."""


@dataclass
class Turn:
    """One prompt, on its way through the engines."""

    prompt: list[int]
    num_tokens: int
    way: Iterator[Answer]
    """The requests that it is made of, one after the other."""
    answer: Answer
    engine: int = 0
    """Which of the two answers now."""
    may_fail: bool = False
    """Its ticket is no good, or may be none for the engine that gets it."""
    abort_after: int = -1
    """Steps; -1: it is not aborted."""


@dataclass
class Outcome:
    """What a run came to."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Answers and registered blocks that were not right."""

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that the second engine had in its prefix cache, of those that it was asked for."""
        return self.counts["local tokens"] / max(1, self.counts["tokens asked for"])


class Conversations:
    """Drives two engines through turns that a seed decides."""

    def __init__(self, engines: Sequence[Engine], seed: int) -> None:
        self._engines, self._chance = engines, Random(seed)
        self._registered = [Registered(engine) for engine in engines]
        self._texts: list[list[int]] = [self._tokens(LONGEST) for _ in range(6)]
        """What prompts begin with: heads, and conversations so far."""
        self._tickets: list[tuple[float, list[int], Params]] = []
        """Used, or over soon: from when on they are no good, and for which prompt they were."""
        self._live: list[Turn] = []
        self._preempted: set[tuple[int, str]] = set()
        self._has_state = engines[0].setup.family == "nemotron_h"
        # Requests are preempted when answers grow and there is little room.
        self._longest_answer = 90 if engines[1].setup.blocks < 50 else 20
        self.outcome = Outcome()

    def run(self, num_turns: int) -> Outcome:
        for number in range(num_turns):
            self._begin()
            self._until(lambda: len(self._live) < LIVE)
            if number % LOOK_EVERY == LOOK_EVERY - 1 or number == num_turns - 1:
                self._until(lambda: not self._live)  # leases go on while we look
                self._look()
        self.outcome.counts["preempted"] = len(self._preempted)
        return self.outcome

    def _until(self, condition) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"stuck: {[turn.answer for turn in self._live]}"
            have_run = [engine.step() for engine in self._engines]
            if not any(have_run):
                time.sleep(MODEL_SECONDS)
            self._live = [turn for turn in self._live if not self._is_over(turn)]
            for engine in self._engines:
                requests = engine.core.scheduler.requests.values()
                self._preempted |= {(id(engine), r.request_id) for r in requests if r.num_preemptions}

    # -- a turn

    def _begin(self) -> None:
        chance = self._chance
        head = chance.choice(self._texts)
        cut = chance.choice([len(head), chance.randint(1, len(head)), 257])
        prompt = (head[:cut] + self._tokens(chance.choice([1, 2, 30, chance.randint(1, 100)])))[-LONGEST:]
        turn = Turn(prompt, chance.choice([1, 4, 4, self._longest_answer]), iter(()), Answer(""))
        kinds = {"ferried": 12, "alone": 5, "spoilt": 2, "late": 1, "handed on": 0 if self._has_state else 2}
        kind = chance.choices(list(kinds), list(kinds.values()))[0]
        self.outcome.counts[kind] += 1
        turn.way = self._way(turn, kind)
        turn.answer = next(turn.way)
        turn.abort_after = chance.randint(0, 12) if chance.random() < 0.12 else -1
        self._live.append(turn)

    def _way(self, turn: Turn, kind: str) -> Iterator[Answer]:
        src = self._chance.choice([0, 0, 0, 1])
        dst = 1 - src
        if kind == "alone":
            yield self._ask(turn, dst, None)
            return
        prefill = self._engines[src].ask(turn.prompt, 1, dict(PREFILL))
        turn.engine = src
        yield prefill
        params = prefill.params or {}
        if kind == "late":
            self._tickets.append((time.monotonic() + LATE_SECONDS, turn.prompt, params))
        if kind in ("spoilt", "late"):
            params, turn.may_fail = self._no_good(turn, params), True
        if kind == "handed on" and params.get("kvferry_ticket"):
            # The one in the middle leaves out one token more, and reads one that the source may have freed.
            turn.may_fail = True
            yield (middle := self._ask(turn, dst, params | {"do_remote_decode": True}, 1))
            params, dst = middle.params or {}, src
        yield self._ask(turn, dst, params)
        self._tickets.append((time.monotonic(), turn.prompt, params))
        del self._tickets[:-50]

    def _no_good(self, turn: Turn, params: Params) -> Params:
        """Params that must not be used for this prompt; if they are used up or over, the prompt is theirs."""
        ripe = [
            kept for kept in self._tickets if kept[0] < time.monotonic() and kept[2].get("kvferry_ticket")
        ]
        if ripe and self._chance.random() < 0.7:
            _, prompt, old = self._chance.choice(ripe)
            if self._chance.random() < 0.7:
                turn.prompt = prompt
            return {**old, "do_remote_prefill": True}
        text = params.get("kvferry_ticket", "")
        at = self._chance.randrange(len(text)) if text else 0
        return {**params, "kvferry_ticket": text[:at] + "A" + text[at + 1 :]}

    def _ask(self, turn: Turn, engine: int, params: Params | None, num_tokens: int = 0) -> Answer:
        turn.engine = engine
        return self._engines[engine].ask(turn.prompt, num_tokens or turn.num_tokens, params)

    def _is_over(self, turn: Turn) -> bool:
        if turn.abort_after == 0:
            self._engines[turn.engine].abort(turn.answer.request_id)
            self.outcome.counts["aborted"] += 1
            return True
        turn.abort_after -= turn.abort_after > 0
        if not turn.answer.is_done:
            return False
        engine = self._engines[turn.engine]
        if turn.answer.finish_reason == "error":
            self._failed(turn)
            return True
        self._judge(turn, engine)
        following = next(turn.way, None)
        if following is None:
            self._texts[self._chance.randrange(len(self._texts))] = [*turn.prompt, *turn.answer.tokens]
            return True
        turn.answer = following
        return False

    def _judge(self, turn: Turn, engine: Engine) -> None:
        answer, counts = turn.answer, self.outcome.counts
        if engine is self._engines[1]:
            counts["tokens asked for"] += len(turn.prompt)
            counts["local tokens"] += answer.num_local
            counts["loaded tokens"] += answer.num_external
        counts["answers"] += 1
        # A prefill for another engine leaves the last token out where there are windows or states.
        prompts = [turn.prompt, turn.prompt[:-1]] if len(answer.tokens) == 1 else [turn.prompt]
        if all(answer.tokens != engine.right(prompt, len(answer.tokens)) for prompt in prompts):
            self.outcome.wrong.append(f"{answer.request_id} of engine {turn.engine}: {answer}")

    def _failed(self, turn: Turn) -> None:
        """An error is right for a ticket that is no good, and for nothing else."""
        self.outcome.counts["failed"] += 1
        if not turn.may_fail:
            self.outcome.wrong.append(
                f"{turn.answer.request_id} of engine {turn.engine} failed: {turn.answer}"
            )

    def _look(self) -> None:
        for number, registered in enumerate(self._registered):
            self.outcome.wrong += [f"engine {number}: {wrong}" for wrong in registered.wrong()]
            self.outcome.counts["blocks looked at"] = sum(r.num_entries for r in self._registered)

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(256), k=count)
