"""Whatever goes wrong: an error, or (policy recompute) the right tokens. Never wrong ones, no dead engine.

vLLM's own connector answers nine of these wrongly, with HTTP 200.
"""

import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

import msgspec
import pytest
import zmq

from kvferry.wire.ticket import from_text, to_text
from tests.e2e.harness import (
    KVFERRY,
    NUM_TOKENS,
    Engine,
    EngineError,
    Nursery,
    Params,
    free_port,
    prefill,
    until,
)
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

LEASE = 4.0
FAILED = "failed"
TICKET = "kvferry_ticket"
_seeds = count(100)


def connector(policy: str, **extra) -> dict:
    """Short leases, so that tests are."""
    extra = {"lease_seconds": LEASE, **extra}
    return {**KVFERRY, "kv_load_failure_policy": policy, "kv_connector_extra_config": extra}


def in_time() -> float:
    """How long after a lease its blocks are back: two seconds, on a machine that has time for them."""
    is_busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    return 20 if is_busy else 2


class Yard:
    """A prefill engine, a decode engine, another of those, and one that works alone."""

    def __init__(self, nursery: Nursery, family: str, policy: str) -> None:
        self.nursery, self.policy = nursery, policy
        self.model = nursery.make(family)
        self.blocks = {} if family == "nemotron_h" else {"block_size": 32}
        self.src = self.begin(listen=f"tcp://127.0.0.1:{free_port()}")
        self.dst, self.other = self.begin(), self.begin()
        self.alone = nursery.begin(self.model)
        for engine in (self.src, self.dst, self.other, self.alone):
            engine.wait_ready()
        self.free = {engine: engine.num_free_blocks() for engine in (self.src, self.dst, self.other)}

    def begin(self, *, env: dict | None = None, tp: int = 1, **extra) -> Engine:
        args = {"tensor_parallel_size": tp, **self.blocks}
        return self.nursery.begin(self.model, connector(self.policy, **extra), env=env, **args)

    def decode(self, prompt: list[int], params: Params, engine: Engine | None = None) -> list[int] | str:
        """The tokens, or that it failed; an engine that is gone is neither."""
        engine = engine or self.dst
        try:
            answer = engine.ask(prompt, NUM_TOKENS, params)
        except EngineError:
            assert engine.is_alive, engine.tail()
            return FAILED
        return FAILED if answer.finish_reason == "error" else answer.tokens

    def fails(self, prompt: list[int], params: Params, engine: Engine | None = None) -> None:
        """As the policy says: an error, or right tokens by recomputing."""
        outcome = self.decode(prompt, params, engine)
        assert outcome == (FAILED if self.policy == "fail" else self.expected(prompt))

    def is_right(self, prompt: list[int], params: Params, engine: Engine | None = None) -> None:
        assert self.decode(prompt, params, engine) == self.expected(prompt)

    def expected(self, prompt: list[int]) -> list[int]:
        return self.alone.ask(prompt).tokens

    def serves(self) -> None:
        """A request between the two goes well, and after a lease nothing is pinned or held."""
        prompt = fresh()
        self.is_right(prompt, prefill(self.src, prompt))
        until(
            lambda: {engine: engine.num_free_blocks() for engine in self.free} == self.free,
            f"{list(self.free.values())} blocks are free",
            seconds=LEASE + in_time(),
        )


@pytest.fixture(scope="module", params=["fail", "recompute"])
def policy(request):
    return request.param


@pytest.fixture(scope="module", params=["llama", "gemma3", "nemotron_h"])
def yard(request, policy, tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("logs")) as nursery:
        yield Yard(nursery, request.param, policy)


def fresh(length: int = 140) -> list[int]:
    """A prompt that was not there before."""
    rng = random.Random(next(_seeds))
    return [rng.randrange(256) for _ in range(length)]


# -- what a router, or a client behind it, may do to the parameters --------------------------------


def shuffle(params: Params, other: Params) -> Params:
    ids = [list(reversed(group)) for group in params["remote_block_ids"]]
    return {**params, "remote_block_ids": ids}


def swap(params: Params, other: Params) -> Params:
    return {**params, "remote_block_ids": other["remote_block_ids"]}


def one_fewer(params: Params, other: Params) -> Params:
    return {**params, "remote_block_ids": [group[:-1] for group in params["remote_block_ids"]]}


def one_more(params: Params, other: Params) -> Params:
    return {**params, "remote_block_ids": [[*group, 7] for group in params["remote_block_ids"]]}


def no_ids(params: Params, other: Params) -> Params:
    return {**params, "remote_block_ids": []}


def another_engine(params: Params, other: Params) -> Params:
    return {**params, "remote_engine_id": "somebody", "remote_port": 1, "tp_size": 8}


@pytest.mark.parametrize("tamper", [shuffle, swap, one_fewer, one_more, no_ids, another_engine])
def test_only_the_ticket_counts(yard, tamper: Callable[[Params, Params], Params]):
    """vLLM's own keys are for routers; where the bytes are, a signed ticket says."""
    prompt = fresh()
    other = prefill(yard.src, fresh())
    yard.is_right(prompt, tamper(prefill(yard.src, prompt), other))
    yard.serves()


def forgeries(ticket) -> list:
    """The ticket with each of its fields another."""
    shuffled = {
        name: msgspec.structs.replace(table, block_ids=tuple(reversed(table.block_ids)))
        for name, table in ticket.tables.items()
    }
    changes = {
        "engine": "somebody",
        "generation": ticket.generation + 1,
        "ticket_id": ticket.ticket_id + 1,
        "request_id": "another",
        "num_tokens": ticket.num_tokens - 1,
        "tables": shuffled,
        "lease_ms": 10**9,
        "mac": bytes(len(ticket.mac)),
    }
    return [msgspec.structs.replace(ticket, **{name: value}) for name, value in changes.items()]


def test_forged_tickets(yard):
    prompt = fresh()
    params = prefill(yard.src, prompt)
    for forged in forgeries(from_text(params[TICKET])):
        yard.fails(prompt, {**params, TICKET: to_text(forged)})
    yard.serves()


@pytest.mark.parametrize("text", ["", "junk", "AAAA", 7, None])
def test_junk_for_a_ticket(yard, text):
    prompt = fresh()
    yard.fails(prompt, {**prefill(yard.src, prompt), TICKET: text})
    yard.serves()


def test_no_ticket_at_all(yard):
    yard.fails(fresh(), {"do_remote_prefill": True, "do_remote_decode": False})
    yard.serves()


# -- tickets at the wrong time or place ------------------------------------------------------------


def test_another_prompt(yard):
    params = prefill(yard.src, fresh())
    yard.fails(fresh(), params)
    yard.serves()


def test_a_shorter_prompt(yard):
    prompt = fresh()
    yard.fails(prompt[:-20], prefill(yard.src, prompt))
    yard.serves()


def test_a_longer_prompt(yard):
    """What the ticket does not bring is computed."""
    prompt = fresh()
    yard.is_right(prompt + fresh(50), prefill(yard.src, prompt))
    yard.serves()


def test_a_ticket_is_good_for_one_reading(yard):
    prompt = fresh()
    params = prefill(yard.src, prompt)
    yard.is_right(prompt, dict(params))
    yard.fails(prompt, dict(params))
    yard.fails(prompt, dict(params), yard.other)
    for _ in range(3):
        yard.src.ask(fresh())
    yard.fails(prompt, dict(params), yard.other)
    yard.serves()


def test_two_readers_at_once(yard):
    """At most one of them gets it; neither gets anything wrong."""
    prompt = fresh()
    params = prefill(yard.src, prompt)
    begun = [
        engine.begin(engine.new_id(), prompt, NUM_TOKENS, dict(params)) for engine in (yard.dst, yard.other)
    ]
    expected, num_right = yard.expected(prompt), 0
    for future in begun:
        with suppress(EngineError):
            answer = future.result(60)
            if answer.finish_reason != "error":
                assert answer.tokens == expected
                num_right += 1
    assert num_right == (1 if yard.policy == "fail" else 2)
    yard.serves()


def test_after_its_lease_and_with_its_blocks_reused(yard):
    prompt = fresh()
    params = prefill(yard.src, prompt)
    until(
        lambda: yard.src.num_free_blocks() == yard.free[yard.src],
        "the lease is over",
        seconds=LEASE + in_time(),
    )
    for _ in range(3):
        yard.src.ask(fresh(400))
    yard.fails(prompt, params)
    yard.serves()


# -- the network -----------------------------------------------------------------------------------


def test_junk_on_the_control_port(yard):
    params = prefill(yard.src, fresh())
    host, port = params["remote_host"], params["remote_port"]
    for junk in (
        b"\x00" * 10,
        random.Random(1).randbytes(5000),
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection((host, port)) as plug:
            plug.sendall(junk)
    with zmq.Context() as context, context.socket(zmq.DEALER) as caller:
        caller.setsockopt(zmq.LINGER, 1000)
        caller.connect(f"tcp://{host}:{port}")
        for junk in (
            b"",
            b"\xc1",
            b"\x93\x01\x02\x03",
            bytes(1 << 20),
            msgspec.msgpack.encode({"type": "Hello"}),
        ):
            caller.send(junk)
        caller.send_multipart([b"a", b"b", b"c"])
    yard.serves()


# -- engines that die ------------------------------------------------------------------------------


def test_the_prefill_engine_dies_before_the_read_and_starts_again(yard):
    """RB-6: its tickets of before are refused, its new ones are served."""
    prompt = fresh()
    params = prefill(yard.src, prompt)
    yard.is_right(prompt, params)
    params = prefill(yard.src, prompt)
    port = params["remote_port"]
    yard.src.kill()
    yard.fails(prompt, dict(params))
    del yard.free[yard.src]
    yard.src = yard.begin(listen=f"tcp://127.0.0.1:{port}")
    yard.src.wait_ready()
    yard.free[yard.src] = yard.src.num_free_blocks()
    yard.fails(prompt, dict(params))
    yard.serves()


def test_the_prefill_engine_dies_after_the_read(yard):
    """The answer is not finished yet: nothing of it is needed any more."""
    src = yard.begin()
    src.wait_ready()
    prompt = fresh()
    expected = yard.alone.ask(prompt, 300).tokens
    request = yard.dst.begin(yard.dst.new_id(), prompt, 300, prefill(src, prompt))
    until(lambda: yard.dst.num_free_blocks() < yard.free[yard.dst], "it is loading")
    time.sleep(1)
    src.kill()
    assert request.result(60).tokens == expected
    yard.serves()


@pytest.fixture
def slow_pair(yard):
    """A prefill engine of two ranks, whose workers can be stopped alone; and a decode engine."""
    src, dst = yard.begin(tp=2), yard.begin()
    for engine in (src, dst):
        engine.wait_ready()
    prompt = fresh()
    assert yard.decode(prompt, prefill(src, prompt), dst) == yard.expected(prompt)
    yield src, dst
    src.close()
    dst.close()


def test_the_prefill_engine_dies_during_the_read(yard, slow_pair):
    src, dst = slow_pair
    free, prompt = dst.num_free_blocks(), fresh(400)
    params = prefill(src, prompt)
    src.stop_workers()
    begun = dst.begin(dst.new_id(), prompt, NUM_TOKENS, params)
    until(lambda: dst.num_reads() > 0, "it is reading")
    src.kill()
    outcome = FAILED
    with suppress(EngineError):
        answer = begun.result(50)
        outcome = FAILED if answer.finish_reason == "error" else answer.tokens
    assert outcome == (FAILED if yard.policy == "fail" else yard.expected(prompt))
    until(lambda: dst.num_free_blocks() == free, "its blocks are back", seconds=LEASE + in_time())
    assert dst.ask(prompt).tokens == yard.expected(prompt)


def test_the_prefill_engine_sleeps_for_longer_than_its_lease(yard, slow_pair):
    """Its read fails in seconds, and nothing lands when it wakes."""
    src, dst = slow_pair
    free, prompt = dst.num_free_blocks(), fresh(400)
    params = prefill(src, prompt)
    src.stop_workers()
    begun = dst.begin(dst.new_id(), prompt, NUM_TOKENS, params)
    until(lambda: dst.num_reads() > 0, "it is reading")
    src.stop()
    other = fresh()
    assert dst.ask(other).tokens == yard.expected(other), "others are not delayed"
    outcome = FAILED
    with suppress(EngineError):
        answer = begun.result(50)
        outcome = FAILED if answer.finish_reason == "error" else answer.tokens
    assert outcome == (FAILED if yard.policy == "fail" else yard.expected(prompt))
    time.sleep(2 * LEASE)
    src.resume()
    until(lambda: dst.num_free_blocks() == free, "its blocks are back", seconds=LEASE + in_time())
    prompt = fresh()
    assert yard.decode(prompt, prefill(src, prompt), dst) == yard.expected(prompt)


def test_the_prefill_engine_sleeps_before_the_read(yard):
    """Nobody answers: an error in time, and all is well when it wakes."""
    prompt = fresh()
    params = prefill(yard.src, prompt)
    yard.src.stop()
    yard.fails(prompt, params)
    yard.src.resume()
    yard.serves()
