"""Somebody on the same host who knows where source engines listen, and means no good.

    python attacker.py SEED ADDRESS …

Says what was forged, repeated or made up to every address, until its input ends; then how much it was.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time

import zmq

from kvferry.wire import messages as m
from kvferry.wire.ticket import TableDoc, Ticket

PAUSE = 0.002


def forged(pick: random.Random) -> bytes:
    """A message that some reader might have sent, or bytes that none would."""
    number, generation = pick.randrange(1, 300), pick.getrandbits(63)
    token, reader = pick.randbytes(16), pick.choice(("decode", "decode#1", "stranger"))
    ticket = Ticket(
        "prefill", generation, number, f"req-{number}", "tcp://127.0.0.1:1", 20,
        {"full": TableDoc((1, 2), 0)}, 30_000, b"d" * 16, b"m" * 32,
    )  # fmt: skip
    made_up: tuple[m.Message | bytes, ...] = (
        m.Hello(m.PROTOCOL, reader),
        m.Hello(m.PROTOCOL + 7, reader),
        m.DescribeRanks(number, generation, tuple(range(pick.randrange(4)))),
        m.Acquire(number, ticket, reader, 0, 2, number, token),
        m.Renew(number, generation, reader, 0, tuple((i, token) for i in range(number))),
        m.Settle(generation, number, reader, 0, number, token, m.Outcome.READ),
        m.Settle(generation, number, reader, 1, number, b"", m.Outcome.UNREAD),
        m.ReleaseAck(generation, 0, number),
        m.DigestRequest(number, generation, number, reader, 0, token, 0, token),
        m.DigestResult(generation, 0, number, token),
        m.Join(m.PROTOCOL, "prefill", 0, "nixl", token, m.RankDescription(b"", (), b"")),
        m.Grant(number, number, 1 << 40),
        pick.randbytes(pick.choice((0, 1, 100, 5000))),
        b"\x91" * 3000,
    )
    chosen = pick.choice(made_up)
    return chosen if isinstance(chosen, bytes) else m.encode(chosen)


def junk_by_tcp(address: str, pick: random.Random) -> None:
    """A connection that is no ZeroMQ, or breaks off in the middle of a greeting."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=0.2) as stream:
            stream.sendall(
                pick.choice((b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f\3", b"\x16\3\1"))
            )
    except OSError:
        pass  # nobody is there just now


def main() -> None:
    pick, addresses = random.Random(sys.argv[1]), sys.argv[2:]
    context, callers = zmq.Context(), []
    for address in addresses:
        caller: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 100), (zmq.RCVHWM, 10)):
            caller.setsockopt(option, value)
        caller.connect(address)
        callers.append(caller)
    num_said = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        try:
            pick.choice(callers).send(forged(pick), zmq.NOBLOCK)
            num_said += 1
        except zmq.Again:
            pass
        if num_said % 200 == 0:
            junk_by_tcp(pick.choice(addresses), pick)
        time.sleep(PAUSE)
    print(num_said, flush=True)


if __name__ == "__main__":
    main()
