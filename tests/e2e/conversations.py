"""Conversations between two live engines: each answer must be that of an engine that never loads.

A load leaves blocks in the decode engine's prefix cache. A wrong block there does no harm to the request that
loaded it; it harms the next request with the same head, with or without a ticket. So these steps share heads,
and every answer of both engines is compared.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.e2e.harness import SECONDS, Answer, Engine, Score, prefill

Prompt = tuple[int, ...]
Batch = list["Step"]
"""Steps that run at the same time."""

NUM_TOKENS = 6
"""Of an answer."""
TOLERANCE = 1e-3
"""In nats, of models in fp32."""
NUM_BYTES = 256
"""Token ids below this are bytes of text; those above are special."""


class Way(StrEnum):
    """How a step is served."""

    LOADED = "loaded"
    """Prefilled by one engine, decoded by the other from the ticket."""
    AT_DST = "decode-engine-alone"
    AT_SRC = "prefill-engine-alone"
    ABORTED = "aborted"
    """As LOADED, and aborted after a moment: whatever it answers until then must be right."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request."""

    prompt: Prompt
    way: Way
    num_tokens: int = NUM_TOKENS
    abort_seconds: float = 0.0
    """Of ABORTED: how long the decode engine has the request."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A step, its answer, and the reference's."""

    step: Step
    answer: Answer
    right: list[int]
    difference: float
    """In nats, the largest over the answer's tokens: by how much the reference thinks the token more or less
    likely, or another token likelier."""
    tolerance: float
    """The difference that rounding explains."""

    @property
    def is_equal(self) -> bool:
        return self.answer.tokens == self.right[: len(self.answer.tokens)]

    @property
    def is_right(self) -> bool:
        is_whole = len(self.answer.tokens) == self.step.num_tokens or self.step.way is Way.ABORTED
        return is_whole and self.difference <= self.tolerance

    def evidence(self) -> dict[str, Any]:
        """Enough to repeat the step."""
        return {
            "way": self.step.way,
            "prompt": list(self.step.prompt),
            "tokens": self.answer.tokens,
            "right": self.right,
            "difference": self.difference,
            "finish_reason": self.answer.finish_reason,
        }


# -- the reference -----------------------------------------------------------------------------------------


@dataclass
class Reference:
    """An engine without a connector and without prefix caching."""

    engine: Callable[[], Engine]
    tolerance: float = TOLERANCE
    _answers: dict[tuple[Prompt, int], Answer] = field(default_factory=dict)

    def tokens(self, prompt: Prompt, num_tokens: int) -> list[int]:
        return self._answer(prompt, num_tokens).tokens

    def judge(self, step: Step, answer: Answer) -> Taken:
        """Log probabilities are compared, too: a wrong cache need not change the likeliest token."""
        right = self._answer(step.prompt, step.num_tokens)
        scores = [Score(logprob, 0.0) for logprob in right.logprobs[: len(answer.tokens)]]
        if answer.tokens != right.tokens[: len(answer.tokens)]:
            scores = self.engine().scores(step.prompt, answer.tokens)
        differences = [
            max(abs(logprob - score.logprob), score.shortfall)
            for _, logprob, score in zip(answer.tokens, answer.logprobs, scores, strict=True)
        ]
        return Taken(step, answer, right.tokens, max(differences, default=0.0), self.tolerance)

    def _answer(self, prompt: Prompt, num_tokens: int) -> Answer:
        key = prompt, num_tokens
        if key not in self._answers:
            self._answers[key] = self.engine().ask(prompt, num_tokens, has_logprobs=True)
        return self._answers[key]


# -- the play ----------------------------------------------------------------------------------------------


def play(batches: Iterable[Batch], src: Engine, dst: Engine, reference: Reference) -> Iterator[Taken]:
    """Take the steps of each batch at the same time, one batch after another."""

    def take(step: Step) -> Taken:
        return reference.judge(step, _answer(src, dst, step))

    with ThreadPoolExecutor() as pool:
        for batch in batches:
            yield from pool.map(take, batch)


def _answer(src: Engine, dst: Engine, step: Step) -> Answer:
    match step.way:
        case Way.AT_SRC:
            return src.ask(step.prompt, step.num_tokens, has_logprobs=True)
        case Way.AT_DST:
            return dst.ask(step.prompt, step.num_tokens, has_logprobs=True)
        case Way.LOADED:
            params = prefill(src, step.prompt)
            return dst.ask(step.prompt, step.num_tokens, params, has_logprobs=True)
        case Way.ABORTED:
            request_id = dst.new_id()
            params = prefill(src, step.prompt)
            begun = dst.begin(request_id, step.prompt, step.num_tokens, params, has_logprobs=True)
            time.sleep(step.abort_seconds)
            dst.abort(request_id)
            return begun.result(SECONDS)


@dataclass
class Tally:
    """What became of the steps so far."""

    src: Engine
    dst: Engine
    ways: Counter[Way] = field(default_factory=Counter)
    wrong: list[Taken] = field(default_factory=list)
    close: list[Taken] = field(default_factory=list)
    """Right answers with other tokens than the reference's."""
    largest_difference: float = 0.0
    """Of right answers."""

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self._before = self.src.sources(), self.dst.sources()
        self._uncached = self.dst.num_uncached_blocks()

    def add(self, taken: Taken) -> None:
        self.ways[taken.step.way] += 1
        if not taken.is_right:
            self.wrong.append(taken)
            return
        self.largest_difference = max(self.largest_difference, taken.difference)
        if not taken.is_equal:
            self.close.append(taken)

    def summary(self) -> dict[str, Any]:
        """Plain values; tokens are those of prompts."""
        src, dst = self.src.sources(), self.dst.sources()
        src_before, dst_before = self._before
        return {
            "steps": self.ways.total(),
            "wrong": len(self.wrong),
            "close": len(self.close),
            "largest_difference": self.largest_difference,
            "least_wrong_difference": min((taken.difference for taken in self.wrong), default=None),
            "ways": {str(way): num for way, num in sorted(self.ways.items())},
            "dst_tokens_loaded": dst.external - dst_before.external,
            "dst_tokens_cached": dst.cached - dst_before.cached,
            "dst_tokens_computed": dst.computed - dst_before.computed,
            "dst_blocks_kept_out": self.dst.num_uncached_blocks() - self._uncached,
            "src_tokens_cached": src.cached - src_before.cached,
            "src_tokens_computed": src.computed - src_before.computed,
            "seconds": round(time.monotonic() - self._started, 1),
        }


# -- which steps -------------------------------------------------------------------------------------------

FIRST_TOKENS = 287
"""Of a prompt that is loaded: with a window of 96, the load needs tokens from 191 on."""
SHARED_TOKENS = (257, 280)
"""Of the other prompts, in turn. Blocks of 32 and more hit a block with token 191 from either on; blocks of
16 need the second."""
NUM_REUSES = 6
FIRST_ANSWER_TOKENS = 40
"""Long enough for the next turn to hit only blocks that were loaded or decoded whole: with blocks of 64 the
first such hit ends at token 320."""


def reuse_steps(right: Callable[[Prompt, int], list[int]]) -> Iterator[Batch]:
    """Load a prompt; ask the decode engine alone for another with the same head, then for the next turn.

    The other prompt hits a block of which the load needed a part, where that is in the prefix cache. The next
    turn hits blocks of which the load needed all, if the prefix cache keeps every block.
    """
    draw = random.Random(0)
    for number in range(NUM_REUSES):
        first = _tokens(draw, FIRST_TOKENS)
        yield [Step(first, Way.LOADED, FIRST_ANSWER_TOKENS)]
        shared = SHARED_TOKENS[number % len(SHARED_TOKENS)]
        yield [Step(first[:shared] + _tokens(draw, 1), Way.AT_DST)]
        answer = tuple(right(first, FIRST_ANSWER_TOKENS))
        yield [Step(first + answer + _tokens(draw, 5), Way.AT_DST)]


HEAD_LENGTHS = (40, 95, 160, 257)
"""Of the heads that new conversations begin with."""
NUM_RECENT = 24
"""Prompts that a step may take up again."""
MAX_TOKENS = 600
"""Of a prompt."""
EDGE = 32
"""A divisor of most block sizes."""
BATCH_SIZES = (1, 1, 1, 2, 3, 4)
WAYS = (*[Way.LOADED] * 11, *[Way.AT_DST] * 5, *[Way.AT_SRC] * 2, *[Way.ABORTED] * 2)
ABORT_SECONDS = 0.3
"""At most."""


def conversation_steps(
    seed: int, num_steps: int, right: Callable[[Prompt, int], list[int]]
) -> Iterator[Batch]:
    """Random steps: new conversations, next turns, forks (also at the edge of a block), repeats."""
    draw = random.Random(seed)
    heads = [_tokens(draw, length) for length in HEAD_LENGTHS]
    recent = [draw.choice(heads) + _tokens(draw, 30)]
    while num_steps:
        batch = []
        for _ in range(min(draw.choice(BATCH_SIZES), num_steps)):
            prompt = _next_prompt(draw, heads, recent, right)
            recent = [*recent, prompt][-NUM_RECENT:]
            way, abort_seconds = draw.choice(WAYS), draw.uniform(0, ABORT_SECONDS)
            batch.append(Step(prompt, way, abort_seconds=abort_seconds))
        num_steps -= len(batch)
        yield batch


def _next_prompt(
    draw: random.Random,
    heads: Sequence[Prompt],
    recent: Sequence[Prompt],
    right: Callable[[Prompt, int], list[int]],
) -> Prompt:
    past = draw.choice(recent)
    match draw.choice(("new", "turn", "turn", "fork", "edge", "again")):
        case "turn" if len(past) < MAX_TOKENS - 100:
            answer = tuple(right(past, NUM_TOKENS))
            return past + answer + _tokens(draw, draw.randint(1, 80))
        case "fork":
            return past[: draw.randint(len(past) // 2, len(past))] + _tokens(draw, draw.randint(1, 80))
        case "edge" if len(past) > EDGE:
            num_edges = len(past) // EDGE
            at = EDGE * draw.randint(-(-num_edges // 2), num_edges) + draw.choice((-1, 0, 1))
            return past[:at] + _tokens(draw, draw.randint(1, 3))
        case "again":
            return past
        case _:
            return draw.choice(heads) + _tokens(draw, draw.randint(1, 200))


def _tokens(draw: random.Random, num_tokens: int) -> Prompt:
    return tuple(draw.randrange(NUM_BYTES) for _ in range(num_tokens))
