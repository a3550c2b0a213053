"""Both legs at once: a decode server reads what a prefill server computes, while it does."""

import asyncio
import json
from typing import Any

import pytest

from kvferry.proxy.application import Proxy
from kvferry.proxy.settings import Role
from tests.proxy.conftest import (
    PROMPT,
    TICKET,
    Behaviour,
    World,
    answering,
    complete,
    give_ticket,
    hang,
    play,
    streaming,
)
from tests.proxy.test_failures import break_off
from tests.proxy.test_requests import DONE, until_ended

MEETING = {"remote_host": "10.0.0.7", "remote_port": 5600, "remote_engine_id": "p0"}
CAN = {**TICKET, **MEETING, "kvferry_overlap": True}
NO_TICKET = {"do_remote_prefill": False, "do_remote_decode": False, "remote_engine_id": "p0"}
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
ERROR = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'


def prefilling(transfer: dict[str, Any] | None = CAN) -> Behaviour:
    return answering(200, {"choices": [{"text": "a"}], "kv_transfer_params": transfer})


def transfers(world: World, role: str, server: int = 0) -> list[dict[str, Any]]:
    return [body["kv_transfer_params"] for body in getattr(world, role)[server].bodies]


def is_early(transfer: dict[str, Any]) -> bool:
    return "kvferry_transfer" in transfer


def overlaps(world: World, result: str) -> float:
    return world.sample("overlaps_total", result=result)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def learn(world: World) -> None:
    """One request after which the proxy knows what its prefill servers can."""
    for _ in world.prefill:
        assert (await world.ask())[0] == 200
    for server in (*world.prefill, *world.decode):
        server.bodies.clear()


def test_a_server_that_can_gets_both_legs_at_once():
    """Both have what the engines want, and one name, which no other request has."""
    begun = asyncio.Event()

    async def wait_for_decode(request):
        if is_early((await request.json())["kv_transfer_params"]):
            await begun.wait()  # the decode leg comes meanwhile, or never
        return await prefilling()(request)

    async def note(request):
        begun.set()
        return await complete(request)

    async def test(world: World) -> None:
        await learn(world)
        names = set()
        for _ in range(2):
            begun.clear()
            assert await world.ask(seed=7) == (200, {"choices": [{"text": "answer"}]})
            (prefill,), (decode,) = world.prefill[0].bodies, world.decode[0].bodies
            name = prefill["kv_transfer_params"]["kvferry_transfer"]
            assert len(bytes.fromhex(name)) == 16
            asked = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_transfer": name}
            assert prefill == {
                "prompt": PROMPT,
                "seed": 7,
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": asked,
            }
            transfer = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "kvferry_transfer": name,
                **MEETING,
            }
            assert decode == {"prompt": PROMPT, "seed": 7, "kv_transfer_params": transfer}
            names.add(name)
            world.prefill[0].bodies.clear()
            world.decode[0].bodies.clear()
        assert len(names) == 2
        assert overlaps(world, "ok") == 2
        assert world.sample("requests_total", path="/v1/completions", outcome="answered") == 3
        assert world.proxy._body_bytes == 0

    play(test, prefill=[wait_for_decode], decode=[note])


@pytest.mark.parametrize(
    "transfer",
    [
        TICKET,
        {**CAN, "kvferry_overlap": False},
        {**TICKET, "kvferry_overlap": True},
        {**CAN, "kvferry_overlap": "yes"},
    ],
    ids=str,
)
def test_other_servers_get_the_legs_one_after_the_other(transfer):
    async def test(world: World) -> None:
        for _ in range(3):
            assert (await world.ask())[0] == 200
        assert transfers(world, "decode") == [transfer] * 3
        assert not any(map(is_early, transfers(world, "prefill")))

    play(test, prefill=[prefilling(transfer)])


def test_it_can_be_switched_off():
    async def test(world: World) -> None:
        for _ in range(3):
            assert (await world.ask())[0] == 200
        assert transfers(world, "decode") == [CAN] * 3

    play(test, prefill=[prefilling()], is_overlapping=False)


def test_each_server_for_itself():
    """Servers of a fleet are upgraded one by one."""

    async def test(world: World) -> None:
        await learn(world)
        for _ in range(4):
            assert (await world.ask())[0] == 200
        assert [is_early(transfer) for transfer in transfers(world, "prefill", 0)] == [True, True]
        assert [is_early(transfer) for transfer in transfers(world, "prefill", 1)] == [False, False]

    play(test, prefill=[prefilling(), give_ticket])


@pytest.mark.parametrize("forget", ["lost", "failed"])
def test_what_a_server_can_is_forgotten_when_it_fails(forget):
    async def test(world: World) -> None:
        await learn(world)
        if forget == "lost":
            world.proxy._pools[Role.PREFILL].mark(world.server("prefill"), is_ready=False)
        else:
            world.prefill[0].behave, world.decode[0].behave = answering(500), hang
            assert (await world.ask())[0] == 502
            world.prefill[0].behave, world.decode[0].behave = prefilling(), complete
        world.prefill[0].bodies.clear()
        for _ in range(2):
            assert (await world.ask())[0] == 200
        assert [is_early(transfer) for transfer in transfers(world, "prefill")] == [False, True]

    play(test, prefill=[prefilling()], is_falling_back=False)


# ------------------------------------------------------------------------------------- the prefill fails


@pytest.mark.parametrize("behave", [answering(500), answering(429), break_off, answering(200, [])], ids=str)
def test_a_prefill_that_fails_ends_its_decode_leg_and_is_tried_elsewhere(behave):
    async def test(world: World) -> None:
        await learn(world)
        world.decode[0].behave = hang_early

        async def fail(request):
            await until(lambda: world.decode[0].bodies)
            return await behave(request)

        world.prefill[0].behave = fail
        while not world.prefill[0].bodies:
            assert (await world.ask())[0] == 200
        await world.decode[0].ended.wait()
        early = transfers(world, "decode")
        assert early[-1] == TICKET, "the other server's, one leg after the other"
        assert overlaps(world, "prefill-failed") == 1
        assert [server.num_requests for pool in world.proxy._pools.values() for server in pool.servers] == [
            0
        ] * 3

    async def hang_early(request):
        is_first = is_early((await request.json())["kv_transfer_params"])
        return await (hang if is_first else complete)(request)

    play(test, prefill=[prefilling(), give_ticket])


def test_a_prefill_that_is_refused_ends_its_decode_leg():
    refusal = {"error": {"message": "The model `mouse` does not exist."}}

    async def test(world: World) -> None:
        await learn(world)
        world.decode[0].behave, world.prefill[0].behave = hang, answering(404, refusal)
        assert await world.ask() == (404, refusal)
        await until(lambda: not world.server("decode").num_requests)
        assert len(world.decode[0].bodies) <= 1

    play(test, prefill=[prefilling()])


@pytest.mark.parametrize("then", ["hang", "break"])
def test_a_decode_leg_that_has_answered_needs_no_prefill_leg(then):
    """Its prefill has ended: whatever happens to the answer that says so."""
    answered = asyncio.Event()

    async def test(world: World) -> None:
        await learn(world)

        async def behave(request):
            await answered.wait()
            return await (hang if then == "hang" else break_off)(request)

        world.prefill[0].behave = behave
        world.decode[0].behave = stream
        async with world.post(stream=True) as answer:
            assert await answer.content.readany() == b'data: {"text": "a"}\n\n'
            answered.set()
            assert await answer.content.read() == b'data: {"text": "b"}\n\n' + DONE
        await until_ended(world)
        assert overlaps(world, "ok") == 1
        assert world.sample("requests_total", path="/v1/completions", outcome="answered") == 2

    async def stream(request):
        out = await streaming([b'data: {"text": "a"}\n\n'])(request)
        await answered.wait()
        await asyncio.sleep(0.1)
        await out.write(b'data: {"text": "b"}\n\n' + DONE)
        return out

    play(test, prefill=[prefilling()])


def test_a_whole_answer_does_not_wait_for_the_prefill_leg():
    async def test(world: World) -> None:
        await learn(world)
        world.prefill[0].behave = hang
        assert (await world.ask())[0] == 200
        await world.prefill[0].ended.wait()

    play(test, prefill=[prefilling()])


# -------------------------------------------------------------------------------------- the decode fails

FAILING_DECODES = {
    "error": answering(500, {"error": {"message": "no ticket"}}),
    "breaks-off": break_off,
    "error-event": streaming([ERROR, DONE]),
    "error-after-role": streaming([ROLE, ERROR, DONE]),
    "role-alone": streaming([ROLE], then="break"),
    "no-event": streaming([], then="break"),
}


@pytest.mark.parametrize("name", FAILING_DECODES)
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_a_decode_leg_that_fails_is_sent_again_with_the_ticket(name, is_late):
    """Before or after the prefill; its client sees nothing of it, nor does a server fall back for ever."""
    prefilled = asyncio.Event()

    async def test(world: World) -> None:
        await learn(world)

        async def prefill(request):
            if not is_late:
                await until(world.decode[0].ended.is_set)
            prefilled.set()
            return await prefilling()(request)

        async def decode(request):
            if not is_early((await request.json())["kv_transfer_params"]):
                return await streaming([ROLE, b"data: {}\n\n", DONE])(request)
            if is_late:
                await prefilled.wait()
            world.decode[0].ended.set()
            return await FAILING_DECODES[name](request)

        world.prefill[0].behave, world.decode[0].behave = prefill, decode
        async with world.post(stream=True) as answer:
            assert await answer.read() == ROLE + b"data: {}\n\n" + DONE
        assert [is_early(transfer) for transfer in transfers(world, "decode")] == [True, False]
        assert transfers(world, "decode")[1] == CAN
        assert len(world.prefill[0].bodies) == 1
        assert overlaps(world, "decode-failed") == 1
        await until_ended(world)
        assert world.proxy._body_bytes == 0

    play(test, prefill=[prefilling()])


def test_a_decode_leg_that_takes_too_long_is_not_sent_again():
    """Its server has computed for all the time that an answer may take."""

    async def test(world: World) -> None:
        await learn(world)
        world.decode[0].behave = hang
        assert (await world.ask())[0] == 504
        assert len(world.decode[0].bodies) == 1

    play(test, prefill=[prefilling()], decode_seconds=0.5)


def test_a_decode_leg_that_fails_twice_is_told():
    async def test(world: World) -> None:
        await learn(world)
        world.decode[0].behave = answering(500)
        assert (await world.ask())[0] == 502
        assert len(world.decode[0].bodies) == 2

    play(test, prefill=[prefilling()])


@pytest.mark.parametrize(
    "transfer",
    [
        {**CAN, "remote_engine_id": "p1"},
        {**CAN, "remote_port": 5601},
        TICKET,
        {**NO_TICKET, "remote_engine_id": "p1"},
        None,
    ],
    ids=["engine", "port", "none", "no ticket of another engine", "no engine"],
)
def test_a_decode_leg_that_asks_another_engine_is_not_waited_for(transfer):
    """The prefill server has restarted, or has several engines."""

    async def test(world: World) -> None:
        await learn(world)

        async def decode(request):
            transfer = (await request.json()).get("kv_transfer_params", {})
            return await (hang if is_early(transfer) else complete)(request)

        async def prefill(request):
            await until(lambda: world.decode[0].bodies)
            return await prefilling(transfer)(request)

        world.prefill[0].behave, world.decode[0].behave = prefill, decode
        assert (await world.ask())[0] == 200
        await world.decode[0].ended.wait()
        assert world.decode[0].bodies[1].get("kv_transfer_params") == transfer

    play(test, prefill=[prefilling()])


def test_a_decode_leg_that_needs_no_ticket_goes_on():
    """Its engine has the prompt and has declined the prefill, which then ends without a ticket."""
    go_on = asyncio.Event()

    async def test(world: World) -> None:
        await learn(world)

        async def decode(request):
            await go_on.wait()
            return await complete(request)

        async def prefill(request):
            await until(lambda: world.decode[0].bodies)
            asyncio.get_running_loop().call_later(0.2, go_on.set)
            return await prefilling(NO_TICKET)(request)

        world.prefill[0].behave, world.decode[0].behave = prefill, decode
        for _ in range(2):
            assert (await world.ask())[0] == 200
        assert [is_early(transfer) for transfer in transfers(world, "decode")] == [True, True]
        assert overlaps(world, "ok") == 2

    play(test, prefill=[prefilling()])


def test_a_decode_leg_that_is_refused_ends_its_prefill_leg():
    """The prefill would compute a prompt, and keep its blocks, for an answer that never comes."""
    refusal = {"error": {"message": "max_tokens must be at least 1, got -5."}}

    async def test(world: World) -> None:
        await learn(world)
        world.prefill[0].behave, world.decode[0].behave = hang, answering(400, refusal)
        assert await world.ask(max_tokens=-5) == (400, refusal)
        await world.prefill[0].ended.wait()
        assert len(world.decode[0].bodies) == 1
        assert world.sample("requests_total", path="/v1/completions", outcome="refused") == 1

    play(test, prefill=[prefilling()])


# ------------------------------------------------------------------------------------------ both


@pytest.mark.parametrize("num_steps", range(6))
def test_a_request_that_is_cancelled_when_its_prefill_ends_leaves_no_decode_leg(num_steps, monkeypatch):
    """At whichever step of the event loop its client hangs up."""
    handlers: list[Any] = []
    leg, complete_ = Proxy._prefill_leg, Proxy.complete

    async def note(self, request):
        handlers.append(asyncio.current_task())
        return await complete_(self, request)

    def cancel(left: int) -> None:
        if left:
            asyncio.get_running_loop().call_soon(cancel, left - 1)
        else:
            handlers[-1].cancel()

    async def end(self, *args):
        transfer = await leg(self, *args)
        if len(handlers) > 1:
            cancel(num_steps)
        return transfer

    async def test(world: World) -> None:
        await learn(world)

        async def prefill(request):
            await until(lambda: world.decode[0].bodies)
            return await prefilling()(request)

        world.prefill[0].behave, world.decode[0].behave = prefill, hang
        asking = asyncio.create_task(world.ask())
        await world.decode[0].ended.wait()
        assert not world.server("decode").num_requests
        await asyncio.wait((asking,))
        assert asking.exception() is not None

    monkeypatch.setattr(Proxy, "complete", note)
    monkeypatch.setattr(Proxy, "_prefill_leg", end)
    play(test, prefill=[prefilling()])


@pytest.mark.parametrize("where", ["both", "decode", "stream"])
def test_a_client_that_hangs_up_ends_both_legs(where):
    async def test(world: World) -> None:
        await learn(world)
        world.prefill[0].behave = hang if where == "both" else prefilling()
        world.decode[0].behave = streaming([b"data: {}\n\n"], then="hang") if where == "stream" else hang

        async def read() -> None:
            async with world.post(stream=True) as answer:
                await answer.read()

        asking = asyncio.create_task(read())
        await until(lambda: world.prefill[0].bodies and world.decode[0].bodies)
        await asyncio.sleep(0.1)
        asking.cancel()
        await world.decode[0].ended.wait()
        await until_ended(world)
        assert world.prefill[0].ended.is_set() == (where == "both")
        assert world.sample("requests_total", path="/v1/completions", outcome="client-gone") == 1

    play(test, prefill=[prefilling()])


def test_a_turn_of_a_conversation_is_overlapped_as_well():
    offer = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_ticket": "soft"}
    said = {"choices": [{"message": {"role": "assistant", "content": "A"}}], "kv_transfer_params": offer}

    async def test(world: World) -> None:
        messages = [{"role": "user", "content": "Q"}]
        for _ in range(2):
            await world.ask("/v1/chat/completions", prompt=None, messages=messages)
            messages += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "Q"}]
        second = transfers(world, "prefill")[1]
        assert second["kvferry_ticket"] == "soft"
        assert is_early(second)
        assert "kvferry_ticket" not in json.dumps(transfers(world, "decode")[1])
        assert world.sample("offers") == 4

    play(test, prefill=[prefilling()], decode=[answering(200, said)])
