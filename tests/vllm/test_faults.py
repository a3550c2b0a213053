"""What goes wrong between two engines ends in an error or in right tokens, in vLLM's own scheduler.

Never in wrong tokens; never in an exception out of a step, which would be a dead engine core; and all blocks
of both engines are free again within a lease and two seconds.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from kvferry.wire.ticket import TableDoc, Ticket, from_text, to_text
from tests.support.faults import Fail, Faults, FaultyHub, Move, Step
from tests.vllm.conftest import Docks
from tests.vllm.engine import PREFILL, Params, drive
from tests.vllm.pairs import FAMILIES, Pair, assert_whole, case, with_policy

Prompt = Callable[[int], list[int]]
TICKET = "kvferry_ticket"
POLICIES = ("fail", "recompute")
LENGTH = 300
"""Of a prompt: some blocks, longer than a window."""


@pytest.fixture(scope="module", autouse=True)
def _whole_again(all_docks: Docks):
    """Tickets that nobody read pin a source's blocks: tests do not wait for each lease, but for all."""
    yield
    assert_whole(*all_docks.all_shared)


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture(params=POLICIES)
def policy(request) -> str:
    return request.param


@pytest.fixture
def pair(docks: Docks, family: str, policy: str):
    """Two engines that other tests use too."""
    setup = FAMILIES[family]
    pair = Pair(docks.shared("src", setup), docks.shared("dst", with_policy(setup, policy)))
    yield pair
    assert_whole(pair.dst)


@pytest.fixture
def own_pair(docks: Docks, family: str, policy: str) -> Pair:
    """Two engines to break."""
    setup = FAMILIES[family]
    return Pair(docks.own(setup), docks.own(with_policy(setup, policy)))


def ticket_of(params: Params) -> Ticket:
    return from_text(params[TICKET])


def with_ticket(params: Params, **changes: Any) -> Params:
    """The params with a ticket of which some fields are others; its proof stays as it was."""
    return {**params, TICKET: to_text(msgspec.structs.replace(ticket_of(params), **changes))}


# -- block ids beside the ticket: they are for routers, and have no effect


def permuted(ids: list[list[int]]) -> list[list[int]]:
    return [list(reversed(of_group)) for of_group in ids]


def one_fewer(ids: list[list[int]]) -> list[list[int]]:
    return [of_group[:-1] for of_group in ids]


def one_more(ids: list[list[int]]) -> list[list[int]]:
    return [[*of_group, 7] for of_group in ids]


def none_at_all(ids: list[list[int]]) -> list[list[int]]:
    return []


def out_of_range(ids: list[list[int]]) -> list[list[int]]:
    return [[10**9] * len(of_group) for of_group in ids]


def test_other_block_ids(pair: Pair, prompt: Prompt):
    for change in (permuted, one_fewer, one_more, none_at_all, out_of_range):
        with case(change.__name__):
            words = prompt(LENGTH)
            params = pair.prefill(words)
            params["remote_block_ids"] = change(params["remote_block_ids"])
            pair.assert_loaded(pair.decode(words, params), words)


def test_block_ids_of_another_request(pair: Pair, prompt: Prompt):
    words, others = prompt(LENGTH), prompt(LENGTH)
    params, other = pair.prefill(words), pair.prefill(others)
    swapped = {**params, "remote_block_ids": other["remote_block_ids"]}
    pair.assert_loaded(pair.decode(words, swapped), words)


def test_other_params(pair: Pair, prompt: Prompt):
    for changes in (
        {"remote_engine_id": "somebody"},
        {"remote_request_id": "something"},
        {"remote_host": "192.0.2.1", "remote_port": 1},
        {"remote_num_tokens": 1},
        {"remote_num_tokens": 10**9},
        {"tp_size": 8, "pp_size": 4},
        {"surprise": {"a": [1, 2, 3]}},
    ):
        with case(str(changes)):
            words = prompt(LENGTH)
            pair.assert_loaded(pair.decode(words, {**pair.prefill(words), **changes}), words)


# -- tickets that are not what the source handed out

FORGERIES: dict[str, Callable[[Ticket], dict[str, Any]]] = {
    "engine": lambda t: {"engine": t.engine + "x"},
    "generation": lambda t: {"generation": t.generation ^ 1},
    "ticket_id": lambda t: {"ticket_id": t.ticket_id + 1},
    "request_id": lambda t: {"request_id": t.request_id + "0"},
    "fewer tokens": lambda t: {"num_tokens": t.num_tokens - 1},
    "more tokens": lambda t: {"num_tokens": t.num_tokens + 1},
    "tokens without end": lambda t: {"num_tokens": 2**60},
    "tables permuted": lambda t: {"tables": _tables(t, lambda ids: tuple(reversed(ids)))},
    "tables short": lambda t: {"tables": _tables(t, lambda ids: ids[:-1])},
    "tables long": lambda t: {"tables": _tables(t, lambda ids: (*ids, 5))},
    "tables empty": lambda t: {"tables": _tables(t, lambda ids: ())},
    "tables of others": lambda t: {"tables": _tables(t, lambda ids: tuple(i + 1 for i in ids))},
    "tables out of range": lambda t: {"tables": _tables(t, lambda ids: tuple(10**9 for _ in ids))},
    "tables of no group": lambda t: {"tables": {"elsewhere": TableDoc((1,))}},
    "no tables": lambda t: {"tables": {}},
    "lease": lambda t: {"lease_ms": t.lease_ms * 1000},
    "digest": lambda t: {"digest": bytes(len(t.digest))},
    "no digest": lambda t: {"digest": b""},
    "proof": lambda t: {"mac": bytes(len(t.mac))},
    "no proof": lambda t: {"mac": b""},
}


def _tables(ticket: Ticket, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> dict[str, TableDoc]:
    return {
        name: TableDoc(change(table.block_ids), table.first_token) for name, table in ticket.tables.items()
    }


def test_forged(pair: Pair, prompt: Prompt):
    """All at once, so that those for which nobody answers are waited for together."""
    asked = {}
    for name, forgery in FORGERIES.items():
        words = prompt(LENGTH)
        params = pair.prefill(words)
        forged = with_ticket(params, **forgery(ticket_of(params)))
        assert forged != params
        asked[name] = words, pair.dst.ask(words, params=forged)
    pair.drive(*(answer for _, answer in asked.values()))
    for name, (words, answer) in asked.items():
        with case(name):
            pair.assert_refused(answer, words)


@pytest.mark.parametrize("authority", ["tcp://127.0.0.1:9", "nowhere", "", "tcp://", "inproc://here"])
def test_a_forged_authority(own_pair: Pair, prompt: Prompt, authority: str):
    """Nobody answers there."""
    words = prompt(LENGTH)
    params = with_ticket(own_pair.prefill(words), authority=authority)
    own_pair.assert_refused(own_pair.decode(words, params), words)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_a_ticket_for_nothing(pair: Pair, prompt: Prompt, num_tokens: int):
    """It brings nothing, so there is nothing to fail: computing all of it is as good as an error."""
    words = prompt(LENGTH)
    answer = pair.decode(words, with_ticket(pair.prefill(words), num_tokens=num_tokens))
    assert answer.num_external == 0
    if answer.finish_reason == "length":
        pair.assert_right(answer, words)
    else:
        pair.assert_refused(answer, words)


def test_garbage_for_a_ticket(pair: Pair, prompt: Prompt):
    garbage: list[Any] = [None, "", "x", "!!!!", "AAAA", 7, [], {"a": 1}, "é", "A" * 100_000]
    for text in garbage:
        with case(repr(text)[:12]):
            words = prompt(LENGTH)
            params = pair.prefill(words) | {TICKET: text}
            pair.assert_refused(pair.decode(words, params), words)


def test_no_ticket(pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    pair.assert_refused(pair.decode(words, {"do_remote_prefill": True, "do_remote_decode": False}), words)


def test_params_that_ask_for_nothing(pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    for params in ({}, {"do_remote_prefill": False}, {"do_remote_prefill": None, TICKET: "x"}):
        pair.assert_right(pair.decode(words, params), words)


def test_a_ticket_cut_short(pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    params = pair.prefill(words)
    for length in (1, 10, len(params[TICKET]) - 4):
        with case(f"{length} letters"):
            answer = pair.decode(words, params | {TICKET: params[TICKET][:length]})
            pair.assert_refused(answer, words)


# -- true tickets in the wrong place


def test_another_prompt(pair: Pair, prompt: Prompt):
    words, others = prompt(LENGTH), prompt(LENGTH)
    pair.assert_refused(pair.decode(others, pair.prefill(words)), others)


def test_another_last_token(pair: Pair, prompt: Prompt):
    """The token that the decoding engine computes itself may be any: it is not part of the ticket."""
    words = prompt(LENGTH)
    others = [*words[:-1], (words[-1] + 1) % 256]
    answer = pair.decode(others, pair.prefill(words))
    if answer.finish_reason == "length":
        pair.assert_right(answer, others)
    else:
        pair.assert_refused(answer, others)


def test_a_longer_prompt(pair: Pair, prompt: Prompt):
    """The rest is computed."""
    words = prompt(LENGTH)
    longer = [*words, *prompt(50)]
    answer = pair.decode(longer, pair.prefill(words))
    pair.assert_right(answer, longer)
    assert answer.num_external in (LENGTH, LENGTH - 1)


def test_a_shorter_prompt(pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    pair.assert_refused(pair.decode(words[:-20], pair.prefill(words)), words[:-20])


def test_the_ticket_of_another_request(pair: Pair, prompt: Prompt):
    words, others = prompt(LENGTH), prompt(LENGTH + 1)
    params, other = pair.prefill(words), pair.prefill(others)
    pair.assert_refused(pair.decode(words, params | {TICKET: other[TICKET]}), words)


def test_the_same_ticket_again(pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    params = pair.prefill(words)
    pair.assert_loaded(pair.decode(words, params), words)
    others = prompt(LENGTH)
    pair.assert_loaded(pair.ferry(others), others)
    forget_prefixes(pair)
    pair.assert_refused(pair.decode(words, params), words)


def test_the_same_ticket_twice_at_once(pair: Pair, prompt: Prompt):
    """One of the two is served."""
    words = prompt(LENGTH)
    params = pair.prefill(words)
    answers = [pair.dst.ask(words, params=params) for _ in range(2)]
    pair.drive(*answers)
    served = [answer for answer in answers if answer.finish_reason == "length"]
    assert served
    for answer in served:
        pair.assert_right(answer, words)
    for answer in answers:
        assert answer in served or answer.finish_reason == "error"


def test_a_second_reader(pair: Pair, prompt: Prompt, docks: Docks):
    second = Pair(pair.src, docks.own(pair.dst.setup))
    words = prompt(LENGTH)
    params = pair.prefill(words)
    pair.assert_loaded(pair.decode(words, params), words)
    second.assert_refused(second.decode(words, params), words)
    second.assert_whole()


def test_two_readers_at_once(pair: Pair, prompt: Prompt, docks: Docks):
    """One of them is served; a failure in one is none in the other."""
    second = Pair(pair.src, docks.own(pair.dst.setup))
    words = prompt(LENGTH)
    params = pair.prefill(words)
    answers = [p.dst.ask(words, params=params) for p in (pair, second)]
    drive([pair.src, pair.dst, second.dst], lambda: all(answer.is_done for answer in answers))
    assert any(answer.finish_reason == "length" for answer in answers)
    for p, answer in zip((pair, second), answers, strict=True):
        if answer.finish_reason == "length":
            p.assert_right(answer, words)
        else:
            p.assert_refused(answer, words)
    second.assert_whole()


def test_after_its_lease(pair: Pair, prompt: Prompt):
    """The source's blocks hold something else by then."""
    words = prompt(LENGTH)
    params = pair.prefill(words)
    pair.assert_whole()
    fill(pair, prompt)
    pair.assert_refused(pair.decode(words, params), words)


def fill(pair: Pair, prompt: Prompt) -> None:
    """Write over every block of the source."""
    num_blocks = 0
    while num_blocks < pair.src.num_free_at_start:
        params = pair.prefill(prompt(300))
        num_blocks += sum(len(ids) for ids in params["remote_block_ids"])
        pair.src.run(lambda: pair.src.num_free > pair.src.num_free_at_start // 2, seconds=5)


def forget_prefixes(pair: Pair) -> None:
    """What the decoding engine remembers must not answer for what it should load."""
    pair.assert_whole()
    assert pair.dst.core.scheduler.reset_prefix_cache()


# -- the source is gone


def test_the_source_is_gone(own_pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    params = own_pair.prefill(words)
    own_pair.src.close()
    answer = own_pair.dst.ask(words, params=params)
    own_pair.dst.finish(answer)
    own_pair.assert_refused(answer, words)
    assert_whole(own_pair.dst)


def test_a_known_source_is_gone(own_pair: Pair, prompt: Prompt, caplog: pytest.LogCaptureFixture):
    """Met before: the memory may still answer, the authority does not. Our log says why."""
    own_pair.ferry(prompt(LENGTH))
    words = prompt(LENGTH)
    params = own_pair.prefill(words)
    own_pair.src.close()
    answer = own_pair.dst.ask(words, params=params)
    own_pair.dst.finish(answer)
    own_pair.assert_refused(answer, words)
    assert_whole(own_pair.dst)
    assert "cannot be loaded: source-gone: " in caplog.text


@pytest.mark.parametrize("is_met", [False, True], ids=["new", "met"])
def test_the_source_has_restarted(docks: Docks, prompt: Prompt, family: str, policy: str, is_met: bool):
    """At the same address: it knows none of its earlier tickets."""
    setup = FAMILIES[family]
    src = replace(setup, options=(*setup.options, ("listen", f"tcp://127.0.0.1:{free_port()}")))
    pair = Pair(docks.own(src), docks.own(with_policy(setup, policy)))
    if is_met:
        pair.ferry(prompt(LENGTH))
    words = prompt(LENGTH)
    params = pair.prefill(words)
    pair.src.close()
    again = Pair(docks.own(src), pair.dst)
    again.assert_refused(again.decode(words, params), words)
    others = prompt(LENGTH)
    again.assert_loaded(again.ferry(others), others)
    again.assert_whole()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


JUNK = {
    "nothing": b"",
    "zeros": bytes(64),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "much": b"\xff" * 9000,
}


def test_junk_on_the_control_port(pair: Pair, prompt: Prompt):
    for name, junk in JUNK.items():
        words = prompt(LENGTH)
        params = pair.prefill(words)
        with case(name), socket.create_connection((params["remote_host"], params["remote_port"]), 5) as line:
            line.sendall(junk)
            pair.assert_loaded(pair.decode(words, params), words)


# -- during the read, in weather that the test makes


class Storm:
    """Two engines whose reads do as they are told."""

    def __init__(self, docks: Docks, family: str, policy: str) -> None:
        self.faults = Faults()
        hub = FaultyHub(self.faults)
        setup = FAMILIES[family]
        self.pair = Pair(docks.own(setup, hub), docks.own(with_policy(setup, policy), hub))


@pytest.fixture
def storm(docks: Docks, family: str, policy: str):
    storm = Storm(docks, family, policy)
    yield storm
    storm.faults.calm()


def test_a_read_fails_half_way(storm: Storm, prompt: Prompt):
    pair, words = storm.pair, prompt(LENGTH)
    storm.faults.fail("cable cut", num_runs=3)
    pair.assert_refused(pair.ferry(words), words)
    storm.faults.calm()
    others = prompt(LENGTH)
    pair.assert_loaded(pair.ferry(others), others)
    pair.assert_whole()


def test_a_failed_load_leaves_nothing_in_the_cache(storm: Storm, prompt: Prompt):
    """The next request with that prompt is computed."""
    pair, words = storm.pair, prompt(LENGTH)
    storm.faults.fail("cable cut", num_runs=3)
    pair.ferry(words)
    storm.faults.calm()
    answer = pair.dst.ask([*words, 1], 20)
    pair.drive(answer)
    pair.assert_right(answer, [*words, 1], 20)
    pair.assert_whole()


class OneRankFails:
    """Weather in which nothing arrives from the source's first rank."""

    def step(self, peer: str, transfer: int) -> Step:
        return Fail("cable cut") if peer.endswith("/0") else Move()


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}], ids=["tp", "pp"])
def test_one_rank_fails(docks: Docks, prompt: Prompt, policy: str, cut: dict[str, Any]):
    """What the other rank has loaded does not count, and vLLM hears of the failure once both have ended."""
    setup = replace(FAMILIES["gemma3"], **cut)
    hub = FaultyHub(OneRankFails())
    pair = Pair(docks.own(setup, hub), docks.own(with_policy(setup, policy), hub))
    words = prompt(LENGTH)
    pair.assert_refused(pair.ferry(words), words)
    pair.assert_whole()


def test_a_slow_read(storm: Storm, prompt: Prompt):
    """Its lease is renewed while it lasts; other requests go on meanwhile."""
    pair, words = storm.pair, prompt(LENGTH)
    params = pair.prefill(words)
    storm.faults.stall()
    answer = pair.dst.ask(words, params=params)
    local = pair.dst.ask(others := prompt(40), 60)
    pair.drive(local)
    pair.assert_right(local, others, 60)
    with pytest.raises(TimeoutError):
        drive([pair.src, pair.dst], lambda: answer.is_done, seconds=1.5)
    storm.faults.resume()
    pair.drive(answer)
    pair.assert_loaded(answer, words)
    pair.assert_whole()


def test_the_source_goes_during_the_read(storm: Storm, prompt: Prompt):
    pair, words = storm.pair, prompt(LENGTH)
    params = pair.prefill(words)
    storm.faults.stall()
    answer = pair.dst.ask(words, params=params)
    drive([pair.src, pair.dst], lambda: storm.faults.num_under_way)
    pair.src.close()
    storm.faults.resume()
    pair.dst.finish(answer)
    pair.assert_refused(answer, words)
    assert_whole(pair.dst)


# -- aborts


def test_abort_before_the_prefill(pair: Pair, prompt: Prompt):
    asked = pair.src.ask(prompt(LENGTH), 1, dict(PREFILL))
    pair.src.abort(asked.request_id)
    words = prompt(LENGTH)
    pair.assert_loaded(pair.ferry(words), words)


def test_abort_during_the_prefill(docks: Docks, prompt: Prompt, family: str):
    setup = FAMILIES[family]
    pair = Pair(docks.own(replace(setup, chunk=40)), docks.shared("dst", with_policy(setup, "fail")))
    asked = pair.src.ask(prompt(LENGTH), 1, dict(PREFILL))
    pair.src.step()
    pair.src.abort(asked.request_id)
    pair.assert_whole()


def test_abort_after_the_prefill(pair: Pair, prompt: Prompt):
    """For vLLM it has ended: the ticket is good."""
    words = prompt(LENGTH)
    params = pair.prefill(words, "to-be-aborted")
    pair.src.abort("to-be-aborted")
    pair.assert_loaded(pair.decode(words, params), words)
    pair.assert_whole()


def test_abort_before_the_load(pair: Pair, prompt: Prompt):
    """The ticket was not read: it does not pin the source's blocks for long."""
    words = prompt(LENGTH)
    asked = pair.dst.ask(words, params=pair.prefill(words))
    pair.dst.abort(asked.request_id)
    pair.assert_whole()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_abort_during_the_load(pair: Pair, prompt: Prompt, num_steps: int):
    words = prompt(LENGTH)
    asked = pair.dst.ask(words, params=pair.prefill(words))
    for _ in range(num_steps):
        pair.dst.step()
    pair.dst.abort(asked.request_id)
    pair.assert_whole()
    others = prompt(LENGTH)
    pair.assert_loaded(pair.ferry(others), others)


def test_abort_during_a_slow_load(storm: Storm, prompt: Prompt):
    """The blocks stay put until the bytes have landed: what takes them next is not written over."""
    pair, words = storm.pair, prompt(LENGTH)
    params = pair.prefill(words)
    storm.faults.stall()
    asked = pair.dst.ask(words, params=params)
    drive([pair.src, pair.dst], lambda: storm.faults.num_under_way)
    num_free = pair.dst.num_free
    assert num_free < pair.dst.num_free_at_start
    pair.dst.abort(asked.request_id)
    local = pair.dst.ask(others := prompt(100), 20)
    pair.drive(local)
    pair.assert_right(local, others, 20)
    assert pair.dst.num_free == num_free
    storm.faults.resume()
    pair.assert_whole()


def test_abort_after_the_load(pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    asked = pair.dst.ask(words, 200, pair.prefill(words))
    drive([pair.src, pair.dst], lambda: len(asked.tokens) > 3)
    pair.dst.abort(asked.request_id)
    assert asked.tokens == pair.dst.right(words, len(asked.tokens))
    pair.assert_whole()


def test_abort_of_a_load_that_failed(pair: Pair, prompt: Prompt):
    words = prompt(LENGTH)
    asked = pair.dst.ask(words, params=pair.prefill(prompt(LENGTH)))
    pair.dst.step()
    pair.dst.abort(asked.request_id)
    pair.assert_whole()


def test_a_request_id_used_again(pair: Pair, prompt: Prompt):
    """On either side, while what was first called so is not forgotten."""
    first, second = prompt(LENGTH), prompt(LENGTH)
    one = pair.prefill(first, "same")
    pair.assert_loaded(pair.decode(first, one), first)
    pair.assert_whole()
    two = pair.prefill(second, "same")
    pair.assert_loaded(pair.decode(second, two), second)
    pair.assert_whole()
