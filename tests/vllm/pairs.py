"""Two engines and what must be true of a request between them, whatever happened to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.vllm.engine import NUM_TOKENS, PREFILL, Answer, Engine, Params, Setup, drive

LEASE_SECONDS = 3.0
"""As ``Setup`` has it."""
FAMILIES = {
    "llama": Setup(),  # one group
    "gemma3": Setup("gemma3"),  # two groups of windows and one of full attention
    "nemotron_h": Setup("nemotron_h", block=None, prefix_caching=False),  # states and full attention
}
STATEFUL = {"nemotron_h"}


@dataclass(frozen=True)
class Pair:
    """A prefilling and a decoding engine."""

    src: Engine
    dst: Engine

    @property
    def family(self) -> str:
        return self.dst.setup.family

    @property
    def has_state(self) -> bool:
        return self.family in STATEFUL

    def prefill(self, prompt: Sequence[int], request_id: str = "") -> Params:
        """The params that the decoding engine should get."""
        found = self.src.ask(prompt, 1, dict(PREFILL), request_id)
        self.drive(found)
        assert found.params is not None, f"no params: {found}"
        return found.params

    def decode(self, prompt: Sequence[int], params: Params | None, num_tokens: int = NUM_TOKENS) -> Answer:
        """The decoding engine's answer to a request with these params."""
        answer = self.dst.ask(prompt, num_tokens, params)
        self.drive(answer)
        return answer

    def ferry(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> Answer:
        """What a router does: prefill here, decode there."""
        return self.decode(prompt, self.prefill(prompt), num_tokens)

    def drive(self, *answers: Answer) -> None:
        """Step both until all of these are done."""
        drive([self.src, self.dst], lambda: all(answer.is_done for answer in answers))

    def assert_loaded(self, answer: Answer, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
        """Right tokens, and the prompt was not computed a second time but for its last token.

        That one vLLM computes in any case, to have something to sample from.
        """
        self.assert_right(answer, prompt, num_tokens)
        assert len(prompt) - answer.num_local - answer.num_external in (0, 1)

    def assert_right(self, answer: Answer, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
        assert answer.finish_reason == "length"
        assert answer.tokens == self.dst.right(prompt, num_tokens)

    def assert_refused(self, answer: Answer, prompt: Sequence[int]) -> None:
        """The load did not count: an error, or right tokens by the decoding engine's own work."""
        if self.dst.setup.policy == "fail":
            assert (answer.finish_reason, answer.tokens) == ("error", [])
        else:
            self.assert_right(answer, prompt)

    def assert_whole(self) -> None:
        """All blocks of both come back, and both schedulers forget their requests."""
        assert_whole(self.src, self.dst)


def assert_whole(*engines: Engine, seconds: float = LEASE_SECONDS + 2) -> None:
    """All blocks come back within a lease and two seconds, and the schedulers forget their requests."""
    drive(engines, lambda: all(engine.is_whole for engine in engines), seconds)


@contextmanager
def case(name: str) -> Iterator[None]:
    """One of several in a test: what fails says which."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case: {name}")
        raise


def with_policy(setup: Setup, policy: str) -> Setup:
    return replace(setup, policy=policy)
