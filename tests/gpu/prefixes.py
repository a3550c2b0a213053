"""What loads leave in the decode engine's prefix cache: every later answer must be right, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tests.e2e.conversations import (
    FIRST_TOKENS,
    NUM_REUSES,
    TOLERANCE,
    Batch,
    Reference,
    Step,
    Tally,
    Way,
    conversation_steps,
    play,
    reuse_steps,
)
from tests.e2e.harness import Engine, until
from tests.gpu.cases import ConversationCase, ReuseCase
from tests.gpu.engines import Engines
from tests.gpu.pairs import MAX_COMPUTED, Wrong

ON_A_GPU = {"float32": 0.02, "bfloat16": 0.25}
"""In nats, by the model's dtype: the difference that rounding explains. Rounding each layer's output of these
models to bf16 changes the likeliest token's log probability by 0.13 at most (1,200 tokens of each). In fp32,
Triton's products round to 10 bits."""
CONTROL = tuple(range(200))
NUM_EVIDENCE = 6
LEASE_SECONDS = 40.0
"""A ticket that was not read is released by then."""


def run_reuse(engines: Engines, case: ReuseCase, found: dict[str, Any]) -> None:
    """Writes down what it finds; raises Wrong, NotHere, or whatever the engines do."""
    with _engines(engines, case) as (src, dst, reference):
        _converse(reuse_steps(reference.tokens), src, dst, reference, found)
        if found["dst_tokens_loaded"] < NUM_REUSES * (FIRST_TOKENS - MAX_COMPUTED):
            raise Wrong(f"{found['dst_tokens_loaded']} tokens were loaded, the rest was computed again")
        _control(dst, reference)


def run_conversation(engines: Engines, case: ConversationCase, found: dict[str, Any]) -> None:
    """The same, of random steps; both pools are whole afterwards."""
    with _engines(engines, case) as (src, dst, reference):
        free = src.num_free_blocks(), dst.num_free_blocks()
        _converse(conversation_steps(0, case.num_steps, reference.tokens), src, dst, reference, found)
        until(
            lambda: (src.num_free_blocks(), dst.num_free_blocks()) == free,
            f"both pools have {free} free blocks again",
            seconds=LEASE_SECONDS,
        )


@contextmanager
def _engines(
    engines: Engines, case: ReuseCase | ConversationCase
) -> Iterator[tuple[Engine, Engine, Reference]]:
    """The pair, and an engine like the decode engine without a connector and without prefix caching."""
    bare = replace(case.dst, features=())
    tolerance = TOLERANCE if engines.device.name == "cpu" else ON_A_GPU[case.dst.dtype]
    with (
        engines.pair(case.family, case.src, case.dst) as (src, dst),
        engines.started(case.family, {"alone": bare}, None) as others,
    ):
        yield src, dst, Reference(lambda: others["alone"], tolerance)


def _converse(
    batches: Iterable[Batch], src: Engine, dst: Engine, reference: Reference, found: dict[str, Any]
) -> None:
    tally = Tally(src, dst)
    for taken in play(batches, src, dst, reference):
        tally.add(taken)
    found |= tally.summary()
    found["evidence"] = [taken.evidence() for taken in tally.wrong[:NUM_EVIDENCE]]
    if tally.wrong:
        raise Wrong(f"{found['wrong']} of {found['steps']} answers are wrong")
    if not found["dst_tokens_cached"]:
        raise Wrong("the decode engine's prefix cache was never hit: this proves nothing")


def _control(dst: Engine, reference: Reference) -> None:
    """An answer from a prefix cache of zeros must be found wrong, or the checks are blind."""
    dst.ask(CONTROL)
    dst.spoil()
    step = Step(CONTROL, Way.AT_DST)
    taken = reference.judge(step, dst.ask(step.prompt, step.num_tokens, has_logprobs=True))
    if not taken.answer.sources.cached:
        raise Wrong("control: the same prompt, asked twice, does not hit the prefix cache")
    if taken.is_right:
        raise Wrong(f"control: a prefix cache of zeros passes, with a difference of {taken.difference:.2f}")
