"""Whatever happens to the prefill engine: the decode engine lives, and never says a wrong token."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from tests.e2e.harness import (
    KVFERRY,
    NUM_TOKENS,
    Engine,
    EngineError,
    Params,
    ferry,
    lasting_port,
    prefill,
    until,
)
from tests.gpu.cases import LOOK_AT_MEMORY, Fault, FaultCase
from tests.gpu.engines import Engines, close_all, warm_up
from tests.gpu.pairs import Wrong

LEASE = 30.0
SHORT_LEASE = 4.0
"""Where its end is what is tried."""
FAILED = "failed"
NUM_PROMPTS, NUM_EACH = 6, 4
"""Loads under way when the prefill engine is killed: so many prompts, each prefilled so many times."""
NUM_LONG = 200
"""Tokens of an answer that goes on after the prefill engine is gone."""
LONG_PROMPT = 1000
NULL_BLOCK = 0
"""vLLM's stand-in for blocks that nobody needs; it is everybody's."""
PATIENCE = 120.0
"""For what comes back after a lease, on a busy machine."""
AGAIN_SECONDS, TRY_SECONDS = 60.0, 0.2
"""Within which loads from an engine that begins, or goes on, are good; and between two tries."""
SRC_CACHE_BYTES, NEW_BYTES = 1 << 30, 384 << 20
"""Of the GPU's memory: the cache of a prefill engine, which must not stay mapped when that is gone; and what
the decode engine may take for itself meanwhile."""
ONE_AT_A_TIME = {"max_num_seqs": 1}
"""Requests in a step of the decode engine: in bf16, other requests beside it change what a GPU says. Loads
wait for no step, and are under way together."""


def _connector(port: int, lease: float) -> dict[str, Any]:
    seconds = {"lease_seconds": lease}
    listen = {"listen": f"tcp://127.0.0.1:{port}"} if port else {}
    return {**KVFERRY, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {**seconds, **listen}}


@dataclass
class Yard:
    """A prefill engine that things are done to, and a decode engine that must not mind."""

    start_src: Callable[[], Engine]
    src: Engine
    dst: Engine
    src_free: int
    """Blocks, as is ``dst_free``."""
    dst_free: int
    device_free: int
    """Bytes of the GPU before the prefill engine came; -1 on a CPU."""
    found: dict[str, Any]
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def fresh(self, length: int = 140) -> list[int]:
        """A prompt that was not there before."""
        return [self._random.randrange(256) for _ in range(length)]

    def decode(self, prompt: list[int], params: Params, num_tokens: int = NUM_TOKENS) -> list[int] | str:
        return self.outcome(lambda: self.dst.ask(prompt, num_tokens, params))

    def outcome(self, ask: Callable[[], Any]) -> list[int] | str:
        """The tokens, or that it failed; an engine that is gone is neither."""
        try:
            answer = ask()
        except EngineError as error:
            if not self.dst.is_alive:
                raise Wrong(f"the decode engine is gone: {error}") from None
            return FAILED
        return FAILED if answer.finish_reason == "error" else list(answer.tokens)

    def must_fail(self, prompt: list[int], params: Params) -> None:
        if (outcome := self.decode(prompt, params)) != FAILED:
            raise Wrong(f"a load that cannot be good was answered with {outcome}")

    def must_be(self, prompt: list[int], params: Params, right: list[int]) -> None:
        if (outcome := self.decode(prompt, params)) != right:
            raise Wrong(f"{outcome} was answered, and {right} is right")

    def right(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """What the pair says when nothing is wrong: the reference that rounds in the same way."""
        answer = ferry(self.src, self.dst, prompt, num_tokens)
        if answer.finish_reason != "length":
            raise Wrong(f"with nothing wrong a load failed ({answer.finish_reason}): {self.dst.tail(5)}")
        return answer.tokens

    def all_back(self) -> None:
        """The decode engine's blocks; and with the prefill engine gone, the device's memory."""
        until(lambda: self.dst.num_free_blocks() == self.dst_free, "all blocks are free again", PATIENCE)
        if not self.src.is_alive and self.device_free >= 0:
            try:
                until(lambda: self._bytes_missing() <= NEW_BYTES, "memory is back", PATIENCE)
            finally:
                self.found["device_bytes_missing"] = self._bytes_missing()

    def serves(self) -> None:
        """A request between the two goes well."""
        if not self.src.is_alive:
            self.src = self.start_src()
            self.meet()
        prompt = self.fresh()
        self.must_be(prompt, prefill(self.src, prompt), self.right(prompt))

    def meet(self) -> None:
        """The first load: on a busy machine engines may need several tries to meet."""
        prompt = self.fresh()
        _, refused = self.until_good(prompt)
        if refused:
            self.found["refused_at_first"] = refused

    def until_good(self, prompt: list[int]) -> tuple[list[int], int]:
        """What is said when a load goes well, and how many were refused before."""
        started, num_refused = time.monotonic(), 0
        while isinstance(outcome := self.decode(prompt, prefill(self.src, prompt)), str):
            num_refused += 1
            if time.monotonic() - started > AGAIN_SECONDS:
                raise Wrong(f"loads still fail after {AGAIN_SECONDS:g} s and {num_refused} tries")
            time.sleep(TRY_SECONDS)
        return outcome, num_refused

    def _bytes_missing(self) -> int:
        return self.device_free - int(self.dst.workers("device_bytes_free")[0])


def run_fault(engines: Engines, case: FaultCase, found: dict[str, Any]) -> None:
    """Writes down what it finds; raises Wrong, NotHere, or whatever the engines do."""
    with _yard(engines, case, found) as yard:
        yard.meet()
        _FAULTS[case.fault](yard)
        yard.all_back()
        yard.serves()
        yard.all_back()


@contextmanager
def _yard(engines: Engines, case: FaultCase, found: dict[str, Any]) -> Iterator[Yard]:
    port, later = lasting_port(), list[Engine]()
    lease = SHORT_LEASE if case.fault is Fault.EXPIRED else LEASE
    is_large = case.fault in LOOK_AT_MEMORY and engines.device.name != "cpu"
    cache = {"kv_cache_memory_bytes": SRC_CACHE_BYTES} if is_large else {}
    fitted, model = case.setting.on(engines.device, case.family), engines.tiny(case.family)
    reader = replace(case.setting, more={**case.setting.more, **ONE_AT_A_TIME})
    with engines.started(case.family, {"dst": reader}, _connector(0, lease)) as started:
        dst = started["dst"]
        device_free = int(dst.workers("device_bytes_free")[0])

        def start_src() -> Engine:
            later.append(engines.begin(model, fitted, _connector(port, lease), **cache))
            warm_up(later[-1])
            return later[-1]

        try:
            src = start_src()
            free = src.num_free_blocks(), dst.num_free_blocks()
            yield Yard(start_src, src, dst, *free, device_free, found)
        finally:
            close_all(later)


def _killed_before(yard: Yard) -> None:
    prompt = yard.fresh()
    params = prefill(yard.src, prompt)
    yard.src.kill()
    yard.must_fail(prompt, params)


def _killed_during(yard: Yard) -> None:
    """Some loads are over, some under way, some have not begun: each is right or an error."""
    different = [yard.fresh(400) for _ in range(NUM_PROMPTS)]
    right = [yard.right(prompt, 1) for prompt in different] * NUM_EACH
    prompts = different * NUM_EACH
    tickets = [prefill(yard.src, prompt) for prompt in prompts]
    begun = [
        yard.dst.begin(yard.dst.new_id(), prompt, 1, params)
        for prompt, params in zip(prompts, tickets, strict=True)
    ]
    wait(begun, PATIENCE, FIRST_COMPLETED)
    yard.src.kill()
    outcomes = [yard.outcome(partial(one.result, PATIENCE)) for one in begun]
    wrong = [outcome for outcome, good in zip(outcomes, right, strict=True) if outcome not in (FAILED, good)]
    if wrong:
        raise Wrong(f"{len(wrong)} of {len(begun)} loads were neither right nor an error: {wrong}")
    yard.found["right"] = sum(outcome != FAILED for outcome in outcomes)
    yard.found["failed"] = sum(outcome == FAILED for outcome in outcomes)


def _killed_after(yard: Yard) -> None:
    """The answer is not finished yet: nothing of the prefill engine is needed any more."""
    prompt = yard.fresh()
    right = yard.right(prompt, NUM_LONG)
    num_loads = yard.dst.sources().external
    begun = yard.dst.begin(yard.dst.new_id(), prompt, NUM_LONG, prefill(yard.src, prompt))
    until(lambda: begun.done() or yard.dst.sources().external > num_loads, "the load is over", PATIENCE)
    yard.found["was_over_before"] = begun.done()
    yard.src.kill()
    if (outcome := yard.outcome(partial(begun.result, PATIENCE))) != right:
        raise Wrong(f"{outcome} was answered, and {right} is right")


def _stopped(yard: Yard) -> None:
    prompt, other = yard.fresh(), yard.fresh()
    alone, right = yard.dst.ask(other).tokens, yard.right(prompt)
    params = prefill(yard.src, prompt)
    yard.src.stop()
    begun, started = yard.dst.begin(yard.dst.new_id(), prompt, NUM_TOKENS, params), time.monotonic()
    if yard.dst.ask(other).tokens != alone:
        raise Wrong("another request of the decode engine was answered otherwise meanwhile")
    yard.found["seconds_of_another"] = time.monotonic() - started
    outcome = yard.outcome(partial(begun.result, PATIENCE))
    yard.src.resume()
    if outcome != FAILED:
        raise Wrong(f"nobody was there to read from, and {outcome} was answered")
    goes_well_again(yard, prompt, right)


def goes_well_again(yard: Yard, prompt: list[int], right: list[int]) -> None:
    """An engine that was thought dead and goes on is refused for some seconds yet; nothing wrong is said."""
    started = time.monotonic()
    outcome, num_refused = yard.until_good(prompt)
    if outcome != right:
        raise Wrong(f"{outcome} was answered, and {right} is right")
    yard.found |= {"refused_after": num_refused, "seconds_until_good": time.monotonic() - started}


def _restarted(yard: Yard) -> None:
    prompt = yard.fresh()
    right, params = yard.right(prompt), prefill(yard.src, prompt)
    yard.src.kill()
    yard.src = yard.start_src()
    yard.must_fail(prompt, params)
    renewed = prefill(yard.src, prompt)
    if renewed["remote_port"] != params["remote_port"]:
        raise Wrong("the new engine listens at another port: this says nothing of one that comes back")
    goes_well_again(yard, prompt, right)


def _used_twice(yard: Yard) -> None:
    prompt = yard.fresh()
    right, params = yard.right(prompt), prefill(yard.src, prompt)
    yard.must_be(prompt, dict(params), right)
    yard.must_fail(prompt, dict(params))


def _expired(yard: Yard) -> None:
    """The source is asked until one of the ticket's blocks is granted to another request."""
    prompt = yard.fresh()
    params = prefill(yard.src, prompt)
    until(lambda: yard.src.num_free_blocks() == yard.src_free, "the lease is over", PATIENCE)
    blocks, started, num_requests = _blocks_of(params), time.monotonic(), 1
    while blocks.isdisjoint(_blocks_of(prefill(yard.src, yard.fresh(LONG_PROMPT)))):
        num_requests += 1
        if time.monotonic() - started > PATIENCE:
            raise Wrong(f"after {num_requests} requests no block of the ticket was granted again")
    yard.found["requests_until_reuse"] = num_requests
    yard.must_fail(prompt, params)


def _blocks_of(params: Params) -> set[int]:
    return set(chain.from_iterable(params["remote_block_ids"])) - {NULL_BLOCK}


_FAULTS: dict[Fault, Callable[[Yard], None]] = {
    Fault.KILLED_BEFORE: _killed_before,
    Fault.KILLED_DURING: _killed_during,
    Fault.KILLED_AFTER: _killed_after,
    Fault.STOPPED: _stopped,
    Fault.RESTARTED: _restarted,
    Fault.USED_TWICE: _used_twice,
    Fault.EXPIRED: _expired,
}
