"""Conversations without engines: which steps there are, and which answers are right."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.e2e.conversations import (
    EDGE,
    MAX_TOKENS,
    Prompt,
    Step,
    Taken,
    Way,
    conversation_steps,
    reuse_steps,
)
from tests.e2e.harness import Answer, Sources
from tests.gpu.pairs import num_common

RIGHT = [1, 2, 3, 4, 5, 6]
STEP = Step((7, 8, 9), Way.LOADED)
TAKEN = Taken(STEP, Answer(RIGHT, "length", None, Sources(1, 0, 2)), RIGHT, 0.0, 0.5)


def answered(tokens: list[int], difference: float = 0.0, way: Way = Way.LOADED) -> Taken:
    return replace(
        TAKEN,
        step=replace(STEP, way=way),
        answer=replace(TAKEN.answer, tokens=tokens),
        difference=difference,
    )


@pytest.mark.parametrize(
    ("taken", "is_right"),
    [
        (TAKEN, True),
        (answered([1, 2, 3, 9, 9, 9], 0.4), True),
        (answered([1, 2, 3, 9, 9, 9], 0.6), False),
        (answered([1, 2, 3]), False),
        (answered([]), False),
        (answered([1, 2, 3], way=Way.ABORTED), True),
        (answered([], way=Way.ABORTED), True),
        (answered([1, 9], 0.6, way=Way.ABORTED), False),
    ],
)
def test_which_answers_are_right(taken, is_right):
    """An answer that ends early is a failed load, unless it was aborted."""
    assert taken.is_right == is_right


def right(prompt: Prompt, num_tokens: int) -> list[int]:
    draw = random.Random(hash(prompt))
    return [draw.randrange(256) for _ in range(num_tokens)]


def test_a_seed_gives_the_same_steps():
    first, again, other = (list(conversation_steps(seed, 50, right)) for seed in (1, 1, 2))
    assert first == again != other


def test_conversations_share_heads_and_part_inside_blocks():
    batches = list(conversation_steps(0, 500, right))
    steps = [step for batch in batches for step in batch]
    assert len(steps) == 500
    assert set(Counter(step.way for step in steps)) == set(Way)
    assert max(len(step.prompt) for step in steps) <= MAX_TOKENS
    assert any(len(batch) > 1 for batch in batches)
    shared = [
        max(num_common(step.prompt, other.prompt) for other in steps[max(0, at - 24) : at])
        for at, step in enumerate(steps)
        if at
    ]
    assert sum(num > 0 for num in shared) > 400
    assert {num % EDGE for num in shared} == set(range(EDGE))


def test_a_reuse_shares_what_was_loaded_and_no_more():
    first, other, turn = [batch[0] for batch in reuse_steps(right)][3:6]
    assert (first.way, other.way, turn.way) == (Way.LOADED, Way.AT_DST, Way.AT_DST)
    assert num_common(first.prompt, other.prompt) == len(other.prompt) - 1 == 280
    assert turn.prompt[: len(first.prompt)] == first.prompt
