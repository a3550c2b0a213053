"""A pair of engines: the decode engine says what it says alone, and every cell was moved as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvferry.core.manifest import Manifest
from tests.e2e.harness import NUM_TOKENS, PROMPTS, Answer, Engine, prefill, until
from tests.gpu.cases import SHORT, PairCase
from tests.gpu.engines import Engines
from tests.gpu.moved import Moved, Watched

MAX_COMPUTED = 2
"""Prompt tokens that a decode engine may compute itself: the last one, and one before it for a draft."""


AT_ONCE = 0
"""Tokens of a step: the whole prompt."""


class Wrong(Exception):
    """A case did not end as it must; says how."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: what was said after a load, and what engines say without any connector."""

    num_prompt: int
    num_external: int
    """Prompt tokens that came by the load."""
    ferried: Sequence[int]
    alone: Sequence[int]
    """The decode engine by itself, its last prompt token in a step of its own, as after a load."""
    alone_at_once: Sequence[int]
    """The decode engine by itself, the whole prompt in one step."""
    alone_again: Sequence[int]
    """As ``alone``, once more, in other blocks."""
    alone_at_src: Sequence[int]
    """The prefill engine by itself, its last prompt token in a step of its own."""
    moved: Moved

    @property
    def is_equal(self) -> bool:
        return self.ferried in (self.alone, self.alone_again, self.alone_at_once)

    @property
    def num_equal(self) -> int:
        """Tokens until the first that differs."""
        return num_common(self.ferried, self.alone)

    @property
    def num_equal_without(self) -> int:
        """How far engines agree without a connector: two, or one asked twice, or cut otherwise."""
        others = (self.alone_at_src, self.alone_at_once, self.alone_again)
        return min(num_common(other, self.alone) for other in others)

    def check_moved(self) -> None:
        """Raise Wrong unless all of the prompt came by the load, and every cell is the source's."""
        of = f"{self.num_prompt} tokens of prompt"
        if self.num_external < self.num_prompt - MAX_COMPUTED:
            raise Wrong(f"{of}: {self.num_external} came by the load, the rest was computed again")
        if self.moved.differing:
            raise Wrong(f"{of}: other bytes than the source's in {', '.join(self.moved.differing)}")

    def summary(self) -> dict[str, Any]:
        summary = {
            "prompt_tokens": self.num_prompt,
            "external_tokens": self.num_external,
            "is_equal": self.is_equal,
            "num_tokens": len(self.ferried),
            "num_equal": self.num_equal,
            "num_equal_without_connector": self.num_equal_without,
            "num_repeated": num_common(self.alone_again, self.alone),
            "states": self.moved.num_states,
            "cells": self.moved.num_cells,
        }
        return summary if self.is_equal and not self.moved.differing else summary | self.evidence()

    def evidence(self) -> dict[str, Any]:
        """What somebody needs to find the cause, without another run."""
        answers = {
            "ferried": self.ferried,
            "alone": self.alone,
            "alone_again": self.alone_again,
            "alone_at_once": self.alone_at_once,
            "alone_at_src": self.alone_at_src,
        }
        return {
            "answers": {name: list(tokens) for name, tokens in answers.items()},
            "differing": {state: list(digests) for state, digests in self.moved.differing.items()},
        }


def check_pair(rows: Sequence[Row], control: Callable[[], None]) -> None:
    """Raise Wrong unless cells, control and tokens are right, in this order: tokens say least."""
    for row in rows:
        row.check_moved()
    control()
    check_tokens(rows)


def check_tokens(rows: Sequence[Row]) -> None:
    """Raise Wrong unless the tokens of a pair are right; of rows whose cells are all the source's.

    A moved cache was rounded by one engine and is read by another: no engine alone has it. So other tokens
    are no proof of a fault, if engines without a connector disagree on some prompt of the pair as well.
    Where they all agree, a token that differs has another cause than rounding.
    """
    parted = [row for row in rows if not row.is_equal]
    if parted and all(row.num_equal_without == len(row.alone) for row in rows):
        raise Wrong(
            f"{parted[0].num_prompt} tokens of prompt: the first {parted[0].num_equal} tokens are right, and"
            " engines without a connector agree on all tokens of all prompts"
        )


def num_common(these: Sequence[int], those: Sequence[int]) -> int:
    """How many tokens are the same from the beginning.

    >>> num_common([1, 2, 3], [1, 2, 4])
    2
    """
    pairs = zip(these, those, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(these), len(those)))


def run_pair(engines: Engines, case: PairCase, found: dict[str, Any]) -> None:
    """Writes down what it finds; raises Wrong, NotHere, or whatever the engines do."""
    with engines.pair(case.family, case.src, case.dst) as (src, dst):
        watched = Watched(src, dst)
        free = src.num_free_blocks(), dst.num_free_blocks()
        found |= _made("src", src, watched.manifests[0]) | _made("dst", dst, watched.manifests[1])
        found["dtype"] = SHORT[case.dst.on(engines.device, case.family).dtype]
        found["prompts"], rows = [], []
        for prompt in PROMPTS:
            rows.append(_row(watched, prompt))
            found["prompts"].append(rows[-1].summary())
        found["control"] = {}
        check_pair(rows, partial(_control, watched, rows[-1], found["control"]))
        until(
            lambda: (src.num_free_blocks(), dst.num_free_blocks()) == free,
            f"both pools have {free} free blocks again",
            seconds=120,
        )
        found["blocks_back"] = True


def _row(watched: Watched, prompt: Sequence[int]) -> Row:
    src, dst = watched.src, watched.dst
    params = prefill(src, prompt)
    watched.keep()
    answer = dst.ask(prompt, NUM_TOKENS, params)
    _check_good(answer, dst)
    moved = watched.moved()
    alone, at_once = (in_steps(dst, prompt, num_tokens) for num_tokens in (len(prompt) - 1, AT_ONCE))
    dst.core("mix_free_blocks")
    return Row(
        num_prompt=len(prompt),
        num_external=answer.sources.external,
        ferried=answer.tokens,
        moved=moved,
        alone=alone,
        alone_at_once=at_once,
        alone_again=in_steps(dst, prompt, len(prompt) - 1),
        alone_at_src=in_steps(src, prompt, len(prompt) - 1),
    )


def in_steps(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What an engine says alone if it computes so many tokens of a prompt at a time; 0: all of them.

    Where vLLM cuts no prompts, in one step; the result says so (``cuts_prompts``).
    """
    if not engine.core("cuts_prompts"):
        num_tokens = AT_ONCE
    engine.forget()
    engine.core("step_lengths", num_tokens)
    try:
        tokens = engine.ask(prompt).tokens
        check_steps(len(prompt), num_tokens, engine.core("longest_step"))
    finally:
        engine.core("step_lengths", AT_ONCE)
    return tokens


def check_steps(num_prompt: int, num_tokens: int, longest: int) -> None:
    """Raise Wrong unless the prompt was cut as asked: a reference that is cut otherwise rounds otherwise."""
    if longest != (num_tokens or num_prompt):
        raise Wrong(
            f"{num_prompt} tokens of prompt: the reference should compute"
            f" {num_tokens or num_prompt} tokens in its longest step, and computed {longest}"
        )


def _control(watched: Watched, row: Row, found: dict[str, Any]) -> None:
    """A cache that is zeroed before it is read gives other cells and tokens, or the checks are blind."""
    prompt = PROMPTS[-1]
    watched.dst.core("forget")
    params = prefill(watched.src, prompt)
    watched.keep()
    watched.src.spoil()
    answer = watched.dst.ask(prompt, NUM_TOKENS, params)
    _check_good(answer, watched.dst)
    moved = watched.moved()
    found |= {"states_seen": len(moved.differing), "num_equal": num_common(answer.tokens, row.alone)}
    if len(moved.differing) != moved.num_states:
        raise Wrong(
            f"control: of {moved.num_states} zeroed states, {len(moved.differing)} were seen to differ"
        )
    if answer.tokens in (row.ferried, row.alone, row.alone_at_once):
        raise Wrong("control: a cache of zeros gives the same tokens; they prove nothing")


def _check_good(answer: Answer, dst: Engine) -> None:
    if answer.finish_reason != "length":
        raise Wrong(f"the load failed ({answer.finish_reason}); the log ends with\n{dst.tail(5)}")


def _made(name: str, engine: Engine, manifest: Manifest) -> dict[str, Any]:
    """What vLLM made of the settings."""
    return {
        f"{name}_blocks": sorted({group.block_size for group in engine.groups()}),
        f"{name}_kernels": sorted(engine.kernels()),
        f"{name}_states": len(manifest.states),
        f"{name}_cuts_prompts": engine.core("cuts_prompts"),
    }
