"""Which prompt tokens of a conversation are computed, and which are transferred, turn by turn.

    .venv-vllm/bin/python -m benchmarks.vllm_conversations [turns] [conversations]     needs `make vllm-env`

Real vLLM engines on a CPU, tiny models: kvferry with and without read-back, and vLLM's own NixlConnector
with it. All conversations take a turn at the same time; then the prefill engine's prefix cache is emptied,
as if other users had filled it. Counts are vLLM's own (`vllm:prompt_tokens_by_source`). Every answer is
compared with that of one engine without a connector; the last column counts wrong ones.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.conversations import Reference, Step, Way
from tests.e2e.docks import Docks, Side
from tests.e2e.harness import KVFERRY, PREFILL, STOCK, Engine, Nursery, Params, Sources

FIRST, NEW, ANSWER = 200, 30, 20
"""Tokens of the first prompt, of each further message, and of each answer."""
READ_BACK = {"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}
CONNECTORS: dict[str, Mapping[str, Any]] = {
    "kvferry": {**KVFERRY, "kv_load_failure_policy": "recompute", **READ_BACK},
    "kvferry, no read-back": KVFERRY,
    "NixlConnector": {**STOCK, "kv_load_failure_policy": "recompute", **READ_BACK},
}
CASES = {
    "llama": (Side(block=32), Side(block=32)),
    "llama, blocks 32 and 64": (Side(block=32), Side(block=64)),
    "llama, TP 2 and 1": (Side(2, 32), Side(1, 32)),
    "llama, TP 1 and 2": (Side(1, 32), Side(2, 32)),
    "gemma3": (Side(block=32), Side(block=32)),
    "gemma3, blocks 32 and 64": (Side(block=32), Side(block=64)),
    "deepseek_v3": (Side(), Side()),
}


@dataclass
class Conversation:
    text: tuple[int, ...]
    offer: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """Prompt tokens of all conversations."""

    num_tokens: int
    prefill: Sources
    decode: Sources


@dataclass
class Talks:
    docks: Docks
    family: str
    sides: tuple[Side, Side]
    connector: Mapping[str, Any]
    num_wrong: int = 0

    def run(self, num_turns: int, num_talks: int) -> list[Turn]:
        engines = self.docks.pair(self.family, *self.sides, self.connector)
        reference, draw = Reference(partial(self.docks.alone, self.family)), Random(1)
        self.docks.alone(self.family)
        talks = [Conversation(tuple(draw.choices(range(256), k=FIRST))) for _ in range(num_talks)]
        turns = []
        for _ in range(num_turns):
            more = [tuple(draw.choices(range(256), k=NEW)) for _ in talks]
            before, num_tokens = (
                [engine.sources() for engine in engines],
                sum(len(each.text) for each in talks),
            )
            with ThreadPoolExecutor() as pool:
                list(pool.map(partial(self.take, *engines, reference), talks, more))
            after = [engine.sources() for engine in engines]
            turns.append(Turn(num_tokens, *map(less, after, before)))
            engines[0].forget()
        return turns

    def take(
        self, src: Engine, dst: Engine, reference: Reference, talk: Conversation, more: tuple[int, ...]
    ) -> None:
        params = src.ask(talk.text, 1, {**PREFILL, **talk.offer}).params
        answer = dst.ask(talk.text, ANSWER, params, has_logprobs=True)
        self.num_wrong += not reference.judge(Step(talk.text, Way.LOADED, ANSWER), answer).is_right
        talk.text, talk.offer = (*talk.text, *answer.tokens, *more), offered(answer.params)


def offered(params: Params | None) -> Params:
    """The parameters of an answer, for the prefill of the next turn."""
    return {**(params or {}), "do_remote_decode": True, "do_remote_prefill": False}


def less(after: Sources, before: Sources) -> Sources:
    return Sources(
        after.computed - before.computed, after.cached - before.cached, after.external - before.external
    )


def main() -> None:
    num_turns, num_talks = (int(word) for word in (sys.argv[1:] + ["10", "8"][len(sys.argv) - 1 :]))
    print("| | turn | prompt tokens | prefill: new | read back | decode: loaded | new | cached | wrong |")
    print("| --- " * 9 + "|")
    with tempfile.TemporaryDirectory() as logs, Nursery(Path(logs)) as nursery:
        docks = Docks(nursery)
        for (case, sides), name in product(CASES.items(), CONNECTORS):
            if name == "NixlConnector" and sides[0].block != sides[1].block:
                continue  # it rejects them
            src, dst = (replace(side, prefixes="dense") for side in sides)
            talks = Talks(docks, case.split(",", maxsplit=1)[0], (src, dst), CONNECTORS[name])
            for number, turn in enumerate(talks.run(num_turns, num_talks), 1):
                if number in (1, 2, 3, num_turns):
                    row = [f"{case}: {name}", number, turn.num_tokens, turn.prefill.computed]
                    row += [turn.prefill.external, turn.decode.external, turn.decode.computed]
                    print(
                        "|",
                        " | ".join(map(str, [*row, turn.decode.cached, talks.num_wrong])),
                        "|",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
