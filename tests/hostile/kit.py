"""An attack kit: what an outsider does who can reach an engine, and has read its documentation and code.

    python -m tests.hostile.kit 10.0.0.7 --scan                       which ports are open, and what is there?
    python -m tests.hostile.kit 10.0.0.7:5555 10.0.0.7:41231 --seconds 60
    python -m tests.hostile.kit 10.0.0.7:5555 --secret-file FILE --only member-renewals

Without a secret it is an outsider's; with one, that of a member of the fleet that has gone wrong: it may
talk, and has no ticket. It says in JSON what it did, and whether it saw a byte of the cache. How the engine
and its good readers fare meanwhile is measured by ``tests.hostile.siege``. For engines of your own only.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import random
import resource
import select
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from tests.hostile import zmtp

CANARY = b"\xc5KVcache"
"""What the cache of a target has in it, again and again."""
CURVE_GREETING = zmtp.GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32)
CURVE_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(range(32)) + bytes(8) + bytes(80)
STREAM_MAGICS = (b"kvfstrm2", b"kvfstrm1")
UCX_MAGIC = struct.pack("<Q", 0xCAFEBABE12345678)
"""What UCX's TCP says first."""
MOST_CALLERS = 1000
RECEIVE_BYTES = 1 << 16


@dataclass
class Attack:
    """One of them, under way: where it goes, until when, and what came of it."""

    address: tuple[str, int]
    until: float
    secret_file: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    pick: random.Random = field(default_factory=random.Random)

    @property
    def is_on(self) -> bool:
        return time.monotonic() < self.until

    def look(self, data: bytes) -> None:
        """At what came back."""
        self.counts["bytes received"] += len(data)
        if CANARY in data:
            self.counts["CACHE SEEN"] += 1

    def call(self) -> socket.socket | None:
        """A connection that is being made."""
        caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        caller.setblocking(False)
        try:
            error = caller.connect_ex(self.address)
        except OSError as failed:
            error = failed.errno or errno.EIO
        if error not in (0, errno.EINPROGRESS):
            self.counts[errno.errorcode.get(error, "error")] += 1
            caller.close()
            time.sleep(0.001)
            return None
        self.counts["connections"] += 1
        return caller


def crowd(attack: Attack, most: int, first: bytes, drip: bytes = b"", pause: float = 0.01) -> None:
    """Many connections at once, each of which says something first, and something more now and then.

    One that was hung up on is replaced.
    """
    poller, callers = select.epoll(), dict[int, list[Any]]()
    """By descriptor: the socket, and how much it has said."""

    def end(number: int) -> None:
        poller.unregister(number)
        callers.pop(number)[0].close()
        attack.counts["hung up on"] += 1

    next_drip = time.monotonic() + 0.5
    while attack.is_on:
        for _ in range(min(100, most - len(callers))):
            if caller := attack.call():
                callers[caller.fileno()] = [caller, -1]
                poller.register(caller, select.EPOLLOUT | select.EPOLLIN | select.EPOLLRDHUP)
        for number, events in poller.poll(pause, 1000):
            entry = callers[number]
            if events & select.EPOLLIN:
                with suppress(OSError):
                    attack.look(entry[0].recv(RECEIVE_BYTES))
            if events & (select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
                end(number)
            elif events & select.EPOLLOUT:
                poller.modify(number, select.EPOLLIN | select.EPOLLRDHUP)
                entry[1] = 0
                with suppress(OSError):
                    entry[0].send(first)
        if drip and time.monotonic() > next_drip:
            next_drip = time.monotonic() + 0.5
            for entry in callers.values():
                if entry[1] >= 0:
                    at = entry[1] % len(drip)
                    with suppress(OSError):
                        entry[0].send(drip[at : at + 1])
                    entry[1] += 1
        attack.counts["most at once"] = max(attack.counts["most at once"], len(callers))
    for entry in callers.values():
        entry[0].close()
    poller.close()


def pour(attack: Attack, first: bytes, more: bytes, num_callers: int = 4) -> None:
    """A few connections, each of which says as much as it is let."""
    callers: list[socket.socket] = []
    while attack.is_on:
        while len(callers) < num_callers and attack.is_on:
            with suppress(OSError):
                caller = socket.create_connection(attack.address, 2)
                attack.counts["connections"] += 1
                caller.sendall(first)
                caller.setblocking(False)
                callers.append(caller)
        readable, writable, _ = select.select(callers, callers, [], 0.05)
        for caller in {*readable, *writable}:
            try:
                if caller in readable:
                    data = caller.recv(RECEIVE_BYTES)
                    attack.look(data)
                    if not data:
                        raise ConnectionError
                if caller in writable:
                    attack.counts["bytes sent"] += caller.send(more)
            except BlockingIOError:
                continue
            except OSError:
                attack.counts["hung up on"] += 1
                callers.remove(caller)
                caller.close()
    for caller in callers:
        caller.close()


def churn(attack: Attack, data: Callable[[], bytes], *, is_reset: bool = False) -> None:
    """Connections as fast as they can be made; each says something and goes."""
    while attack.is_on:
        with suppress(OSError), socket.create_connection(attack.address, 1) as caller:
            attack.counts["connections"] += 1
            if is_reset:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if said := data():
                caller.sendall(said)
                caller.settimeout(0.005)
                with suppress(OSError):
                    attack.look(caller.recv(RECEIVE_BYTES))


# ------------------------------------------------------------------------------------- the control port


def zmq_silent(attack: Attack) -> None:
    """A thousand connections that say nothing."""
    crowd(attack, MOST_CALLERS, b"")


def zmq_evict(attack: Attack) -> None:
    """More connections than an engine keeps, so that it hangs up on its readers."""
    crowd(attack, 4 * MOST_CALLERS, b"")


def zmq_churn(attack: Attack) -> None:
    """Connections that come and go."""
    churn(attack, lambda: attack.pick.choice((b"", CURVE_GREETING, zmtp.GREETING)), is_reset=True)


def zmq_half_handshakes(attack: Attack) -> None:
    """A thousand that begin a handshake and leave it there."""
    crowd(attack, MOST_CALLERS, CURVE_GREETING + CURVE_HELLO)


def zmq_slow_greetings(attack: Attack) -> None:
    """Five hundred that greet at two bytes a second."""
    crowd(attack, 500, b"", drip=CURVE_GREETING)


def zmq_wrong_key(attack: Attack) -> None:
    """Members of another fleet."""
    with zmq.Context() as context:
        while attack.is_on:
            callers = []
            for _ in range(50):
                caller: zmq.Socket[bytes] = context.socket(zmq.DEALER)
                caller.setsockopt(zmq.LINGER, 0)
                caller.curve_serverkey = zmq.curve_keypair()[0]
                caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
                caller.connect(f"tcp://{attack.address[0]}:{attack.address[1]}")
                caller.send(b"?")
                callers.append(caller)
                attack.counts["connections"] += 1
            time.sleep(0.2)
            for caller in callers:
                with suppress(zmq.Again):
                    attack.look(caller.recv(zmq.NOBLOCK))
                    attack.counts["ANSWERED"] += 1
                caller.close(0)


READY = b"\x05READY" + zmtp.property_of(b"Socket-Type", b"DEALER")


def zmq_plain(attack: Attack) -> None:
    """Callers that encrypt nothing, with eight MiB of message."""
    ready = b"\x04" + bytes([len(READY)]) + READY
    pour(attack, zmtp.GREETING + ready, zmtp.frame(bytes(8 << 20)))


def zmq_huge(attack: Attack) -> None:
    """Commands and frames that claim to be longer than any memory, before the handshake."""
    lengths = [struct.pack(">Q", number) for number in (1 << 63, (1 << 63) - 1, 1 << 40, 1 << 31, 8 << 20)]
    churn(
        attack,
        lambda: (
            attack.pick.choice((CURVE_GREETING, zmtp.GREETING))
            + attack.pick.choice((b"\x06", b"\x02", b"\x03"))
            + attack.pick.choice(lengths)
            + bytes(10_000)
        ),
    )


def zmq_routing_ids(attack: Attack) -> None:
    """Callers that claim the routing ids that others have, or will get."""

    def claim() -> bytes:
        number = attack.pick.choice((attack.pick.getrandbits(32), 0x6B8B4567 + attack.pick.randrange(64)))
        ready = READY + zmtp.property_of(b"Identity", b"\0" + struct.pack(">I", number))
        return zmtp.GREETING + b"\x04" + bytes([len(ready)]) + ready + zmtp.frame(b"?")

    churn(attack, claim)


# -------------------------------------------------------------------------------------- the stream port


def hello(attack: Attack) -> bytes:
    return attack.pick.choice(STREAM_MAGICS) + attack.pick.randbytes(16)


def streams_idle(attack: Attack) -> None:
    """A thousand that say nothing."""
    crowd(attack, MOST_CALLERS, b"")


def streams_slow(attack: Attack) -> None:
    """Five hundred that name a stream at two bytes a second."""
    crowd(attack, 500, b"", drip=STREAM_MAGICS[0] + bytes(16))


def streams_guess(attack: Attack) -> None:
    """Guesses of a stream's id, as many as can be made."""
    churn(attack, lambda: hello(attack))


def streams_churn(attack: Attack) -> None:
    """Connections that are reset at once: the queue before ``accept`` is what they are after."""
    churn(attack, lambda: b"", is_reset=True)


def streams_backlog(attack: Attack) -> None:
    """Connections that nobody waits for, a hundred at a time."""
    while attack.is_on:
        callers = [caller for _ in range(100) if (caller := attack.call())]
        time.sleep(0.002)
        for caller in callers:
            caller.close()


def streams_pour(attack: Attack) -> None:
    """A name that nobody was told, and then as many bytes as are taken."""
    pour(attack, hello(attack)[:23], bytes(1 << 20))


# ----------------------------------------------------------------------------------------- the proxy


def http_half_headers(attack: Attack) -> None:
    """A thousand requests whose headers do not end."""
    crowd(attack, MOST_CALLERS, b"GET /live HTTP/1.1\r\nHost: x\r\n", drip=b"X-A: b\r\n")


def http_slow_bodies(attack: Attack) -> None:
    """A thousand requests whose bodies come at two bytes a second."""
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{"
    crowd(attack, MOST_CALLERS, first, drip=b" ")


def http_large_bodies(attack: Attack) -> None:
    """Bodies of sixteen MiB, of which nothing but the end is wrong."""
    body = b'{"prompt": "' + bytes(100).hex().encode() * 80_000 + b'"} oops'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    pour(attack, b"", head + body, 16)


def http_many(attack: Attack) -> None:
    """Requests as fast as they can be made, whose answers nobody waits for."""
    body = b'{"prompt": "a", "kv_transfer_params": {"kvferry_ticket": "mine"}}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    churn(attack, lambda: head + body)


# ------------------------------------------------------------------------------------------- a member


class Member:
    """Knows the secret, and has no ticket."""

    def __init__(self, attack: Attack, **options: int) -> None:
        self.attack, self._context = attack, zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * MOST_CALLERS)
        self._options = options
        self.socket = self.new()

    def new(self) -> zmq.Socket[bytes]:
        caller: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for name, value in ({"LINGER": 0, "SNDHWM": 1000} | self._options).items():
            caller.setsockopt(getattr(zmq, name), value)
        if self.attack.secret_file:
            caller.curve_serverkey = server_key(self.attack.secret_file)
            caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
        caller.connect(f"tcp://{self.attack.address[0]}:{self.attack.address[1]}")
        return caller

    def say(self, data: bytes) -> None:
        try:
            self.socket.send(data, zmq.NOBLOCK)
            self.attack.counts["messages"] += 1
        except zmq.Again:
            time.sleep(0.001)

    def hear(self) -> list[bytes]:
        heard = []
        with suppress(zmq.Again):
            for _ in range(100):
                heard.append(self.socket.recv(zmq.NOBLOCK))
                self.attack.look(heard[-1])
                self.attack.counts["answers"] += 1
        return heard

    def ask(self, data: bytes, seconds: float = 10.0) -> bytes:
        self.say(data)
        return self.socket.recv() if self.socket.poll(int(seconds * 1000)) else b""

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


def server_key(secret_file: str) -> bytes:
    from kvferry.wire import secret

    purpose: Any = secret.Purpose.CHANNEL if hasattr(secret, "Purpose") else "control channel"
    key = secret.Secret.from_text(Path(secret_file).read_text(encoding="ascii")).key(purpose)
    return bytes(zmq.curve_public(z85.encode(key)))


def flood(attack: Attack, messages: Callable[[Member], Iterator[bytes]], *, is_deaf: bool = False) -> None:
    member = Member(attack, **({"RCVHWM": 1, "RCVBUF": 4096} if is_deaf else {}))
    try:
        for message in messages(member):
            if not attack.is_on and attack.counts["messages"]:
                return
            member.say(message)
            if not is_deaf:
                member.hear()
    finally:
        member.close()


def _permit(attack: Attack) -> bytes:
    import msgspec

    from kvferry.wire.ticket import Permit

    return msgspec.msgpack.encode(Permit(_ticket(attack), attack.pick.randbytes(32)))


def _ticket(attack: Attack) -> Any:
    from kvferry.wire.ticket import TableDoc, Ticket

    number = attack.pick.randrange(1, 300)
    tables = {"full": TableDoc(tuple(range(64)), 0)}
    return Ticket(
        "prefill", attack.pick.getrandbits(62), number, f"request-{number}", "tcp://127.0.0.1:1", 100,
        tables, 30_000, b"d" * 16, b"m" * 32,
    )  # fmt: skip


def _gather_kinds() -> Any:
    from kvferry.wire import rank_asks as gather

    return gather


def member_asks(attack: Attack) -> None:
    """Asks for bytes, with permits that it made."""
    wire = _gather_kinds()
    column = struct.pack("<q", 0)
    fields = {"nonce": 1, "terms": ((column, struct.pack("<q", 4096), column),)}
    known = wire.Gather.__struct_fields__

    def messages(member: Member) -> Iterator[bytes]:
        while True:
            ask = {**fields, "permit": _permit(attack), "stream_id": attack.pick.randbytes(16)}
            yield wire.encode_rank_message(wire.Gather(**{name: ask.get(name, 0) for name in known}))

    flood(attack, messages)


def member_open_streams(attack: Attack) -> None:
    """Asks for streams, with permits that it made; now and then a long one."""
    wire = _gather_kinds()

    def messages(member: Member) -> Iterator[bytes]:
        for number in range(1 << 60):
            long = ((1, 1),) * (4000 if number % 10 == 0 else 4)
            ask = {"nonce": number, "permit": _permit(attack), "regions": long}
            known = wire.OpenStream.__struct_fields__
            yield wire.encode_rank_message(
                wire.OpenStream(**{name: ask[name] for name in known if name in ask})
            )

    flood(attack, messages)


def member_renewals(attack: Attack) -> None:
    """Renewals of thousands of leases that it does not have."""
    from kvferry.wire import messages as m

    def messages(member: Member) -> Iterator[bytes]:
        while True:
            tokens = tuple((number, attack.pick.randbytes(16)) for number in range(m.MAX_BATCH))
            yield m.encode(m.Renew(1, attack.pick.getrandbits(62), "stranger", 0, tokens))

    flood(attack, messages)


def member_leases(attack: Attack) -> None:
    """Tickets that it made, settled and acquired."""
    from kvferry.wire import messages as m

    def messages(member: Member) -> Iterator[bytes]:
        for number in range(1 << 60):
            ticket, token = _ticket(attack), attack.pick.randbytes(16)
            yield m.encode(m.Acquire(number, ticket, "stranger", 0, 1, number, token))
            yield m.encode(
                m.Settle(ticket.generation, ticket.ticket_id, "decode", 0, 1, token, m.Outcome.FAILED)
            )

    flood(attack, messages)


def member_digests(attack: Attack) -> None:
    """Questions for digests of what it has no lease of."""
    from kvferry.wire import messages as m

    def messages(member: Member) -> Iterator[bytes]:
        for number in range(1 << 60):
            who = "stranger", 0, attack.pick.randbytes(16)
            question = attack.pick.randbytes(attack.pick.choice((10, 100_000)))
            yield m.encode(m.DigestRequest(number, 1, number % 100, *who, 0, question))

    flood(attack, messages)


def member_deaf(attack: Attack) -> None:
    """Questions whose answers are long, and are not read."""
    from kvferry.wire import messages as m

    member = Member(attack)
    answer = member.ask(m.encode(m.Hello(m.PROTOCOL, "stranger")))
    member.close()
    generation = m.decode_from_authority(answer).generation if answer else 0  # type: ignore[union-attr]
    question = m.encode(m.DescribeRanks(1, generation, (0,)))
    flood(attack, lambda _: iter(lambda: question, b""), is_deaf=True)


def member_status(attack: Attack) -> None:
    """How are you? Again and again."""
    from kvferry.wire import messages as m

    flood(attack, lambda _: iter(lambda: m.encode(m.AskStatus(m.PROTOCOL)), b""))


def member_big(attack: Attack) -> None:
    """Messages of eight MiB that are no messages."""
    data = b"\x91" * (8 << 20)
    flood(attack, lambda _: iter(lambda: data, b""))


def member_connections(attack: Attack) -> None:
    """Hundreds of connections whose handshake is done; each says a word."""
    member, callers = Member(attack), list[zmq.Socket[bytes]]()
    while attack.is_on:
        callers.append(member.new())
        callers[-1].send(b"?")
        attack.counts["connections"] += 1
        if len(callers) >= 500:
            for caller in callers:
                caller.close(0)
            callers.clear()
    for caller in callers:
        caller.close(0)
    member.close()


def member_joins(attack: Attack) -> None:
    """Poses as a rank of the engine."""
    from kvferry.wire import messages as m

    def messages(member: Member) -> Iterator[bytes]:
        while True:
            description = m.RankDescription(b"", (), b"card" * 1000)
            yield m.encode(
                m.Join(
                    m.PROTOCOL, "prefill", 0, "nixl", b"", description, credential=attack.pick.randbytes(16)
                )
            )

    flood(attack, messages)


# ------------------------------------------------------------------------------------------------- UCX


def stays(address: tuple[str, int], said: bytes, seconds: float = 1.0) -> bool:
    """Whether a connection that says this is kept."""
    try:
        with socket.create_connection(address, 2) as caller:
            caller.sendall(said)
            caller.settimeout(seconds)
            while caller.recv(RECEIVE_BYTES):
                pass
            return False
    except TimeoutError:
        return True
    except OSError:
        return False


def kind_of(address: tuple[str, int]) -> str:
    """What listens at a port, by how it takes what it is told."""
    with suppress(OSError), socket.create_connection(address, 2) as caller:
        caller.settimeout(0.5)
        with suppress(TimeoutError):
            if caller.recv(10)[:1] == b"\xff":
                return "zmq"
        caller.sendall(b"GET /live HTTP/1.0\r\n\r\n")
        with suppress(OSError):
            if caller.recv(10).startswith(b"HTTP/"):
                return "http"
    if stays(address, UCX_MAGIC) and not stays(address, UCX_MAGIC[:-1] + b"\0"):
        return "ucx"
    if any(stays(address, magic) for magic in STREAM_MAGICS):
        return "streams"
    return "other"


def scan(host: str, most: int = 500) -> list[int]:
    """All open TCP ports of a host."""
    found, todo = list[int](), iter(range(1, 1 << 16))
    waiting: dict[int, tuple[socket.socket, int, float]] = {}
    poller, is_over = select.epoll(), False
    while waiting or not is_over:
        while len(waiting) < most and not is_over:
            port = next(todo, 0)
            if not port:
                is_over = True
                break
            caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            caller.setblocking(False)
            error = caller.connect_ex((host, port))
            if error == errno.EINPROGRESS:
                waiting[caller.fileno()] = caller, port, time.monotonic() + 3
                poller.register(caller, select.EPOLLOUT)
                continue
            if not error:
                found.append(port)
            caller.close()
        for number, _ in poller.poll(0.1):
            caller, port, _ = waiting.pop(number)
            if not caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                found.append(port)
            poller.unregister(number)
            caller.close()
        for number in [number for number, (_, _, late) in waiting.items() if late < time.monotonic()]:
            poller.unregister(number)
            waiting.pop(number)[0].close()
    return sorted(found)


def local_user(pid: int) -> dict[str, str]:
    """What a process of this user learns of an engine on the same host, without its ports."""
    owner = os.stat(f"/proc/{pid}").st_uid
    sockets = Path(tempfile.gettempdir()) / f"kvferry-{owner}" / "status"
    found = {"list status sockets": _tried(lambda: os.listdir(sockets))}
    found["open /proc/PID/mem"] = _tried(lambda: open(f"/proc/{pid}/mem", "rb").close())
    found["list /proc/PID/fd"] = _tried(lambda: os.listdir(f"/proc/{pid}/fd"))
    buffer = ctypes.create_string_buffer(8)
    vector = struct.pack("@PN", ctypes.addressof(buffer), 8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) < 0:
        found["process_vm_readv"] = os.strerror(ctypes.get_errno())
    else:
        found["process_vm_readv"] = "DONE"
    with open("/proc/net/unix", encoding="utf-8") as table:
        names = {line.split()[-1] for line in table if " @kvferry-" in line}
    for name in names:
        found["descriptors"] = _tried(lambda name=name: _descriptors_at(name))  # type: ignore[misc]
    return found


def _tried(work: Callable[[], object]) -> str:
    try:
        work()
    except OSError as error:
        return error.strerror or type(error).__name__
    return "DONE"


def _descriptors_at(name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(5)
        caller.connect(f"\0{name[1:]}")
        caller.sendall(bytes(32))
        if not socket.recv_fds(caller, 1, 1)[1]:
            raise ConnectionError(errno.ECONNREFUSED, "hung up on")


def ucx_calls(attack: Attack) -> None:
    """Begins to talk as UCX does, and says what comes after that at random."""
    churn(attack, lambda: UCX_MAGIC + attack.pick.randbytes(attack.pick.choice((0, 5, 40, 400))))


def junk(attack: Attack) -> None:
    """Anything."""
    churn(attack, lambda: attack.pick.randbytes(attack.pick.choice((1, 8, 64, 3000))))


AUTHORITY, RANK, STREAMS, HTTP, UCX = "authority", "rank", "streams", "http", "ucx"
CONTROL = (AUTHORITY, RANK)
OUTSIDERS: dict[str, tuple[Callable[[Attack], None], tuple[str, ...]]] = {
    "zmq-silent": (zmq_silent, CONTROL),
    "zmq-evict": (zmq_evict, CONTROL),
    "zmq-churn": (zmq_churn, CONTROL),
    "zmq-half-handshakes": (zmq_half_handshakes, CONTROL),
    "zmq-slow-greetings": (zmq_slow_greetings, CONTROL),
    "zmq-wrong-key": (zmq_wrong_key, CONTROL),
    "zmq-plain": (zmq_plain, CONTROL),
    "zmq-huge": (zmq_huge, CONTROL),
    "zmq-routing-ids": (zmq_routing_ids, CONTROL),
    "streams-idle": (streams_idle, (STREAMS,)),
    "streams-slow": (streams_slow, (STREAMS,)),
    "streams-guess": (streams_guess, (STREAMS,)),
    "streams-churn": (streams_churn, (STREAMS,)),
    "streams-backlog": (streams_backlog, (STREAMS,)),
    "streams-pour": (streams_pour, (STREAMS,)),
    "ucx-calls": (ucx_calls, (AUTHORITY, RANK, STREAMS, UCX)),
    "junk": (junk, (AUTHORITY, RANK, STREAMS, UCX)),
}
HTTP_CLIENTS: dict[str, tuple[Callable[[Attack], None], tuple[str, ...]]] = {
    "http-half-headers": (http_half_headers, (HTTP,)),
    "http-slow-bodies": (http_slow_bodies, (HTTP,)),
    "http-large-bodies": (http_large_bodies, (HTTP,)),
    "http-many": (http_many, (HTTP,)),
}
MEMBERS: dict[str, tuple[Callable[[Attack], None], tuple[str, ...]]] = {
    "member-asks": (member_asks, (RANK,)),
    "member-open-streams": (member_open_streams, (RANK,)),
    "member-renewals": (member_renewals, (AUTHORITY,)),
    "member-leases": (member_leases, (AUTHORITY,)),
    "member-digests": (member_digests, (AUTHORITY,)),
    "member-deaf": (member_deaf, (AUTHORITY,)),
    "member-status": (member_status, (AUTHORITY,)),
    "member-joins": (member_joins, (AUTHORITY,)),
    "member-big": (member_big, CONTROL),
    "member-connections": (member_connections, CONTROL),
}
ATTACKS = OUTSIDERS | HTTP_CLIENTS | MEMBERS


def run(name: str, targets: list[tuple[str, str]], seconds: float, secret_file: str = "") -> Counter[str]:
    """One attack, on each (kind, HOST:PORT) that it is for, in turns of a fair share of the time."""
    attack, kinds = ATTACKS[name]
    if name in MEMBERS:
        # Before the clock runs: on a busy machine an attacker is slow to import what it says.
        from kvferry.wire import messages, rank_asks, secret, ticket  # noqa: F401
    chosen = [address for kind, address in targets if kind in kinds]
    counts: Counter[str] = Counter()
    for address in chosen:
        host, _, port = address.rpartition(":")
        until = time.monotonic() + seconds / len(chosen)
        one = Attack((host, int(port)), until, secret_file, counts)
        attack(one)
    return counts


def targets_of(places: list[str]) -> list[tuple[str, str]]:
    """(kind, HOST:PORT); a place is one of ``authority=HOST:PORT``, or HOST:PORT, which is found out."""
    found = []
    for place in places:
        kind, _, address = place.rpartition("=")
        if not kind:
            host, _, port = address.rpartition(":")
            kind = kind_of((host, int(port)))
        # A stranger cannot tell an authority from a rank.
        found += [(each, address) for each in (CONTROL if kind == "zmq" else (kind,))]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hostile.kit", description=__doc__)
    parser.add_argument("places", nargs="*", metavar="[KIND=]HOST:PORT")
    parser.add_argument("--seconds", type=float, default=30.0, help="in all")
    parser.add_argument("--secret-file", default="", help="attack as a member of the fleet, too")
    parser.add_argument("--only", action="append", choices=ATTACKS, help="may be given again")
    parser.add_argument("--scan", action="store_true", help="look for open ports of the hosts, and no more")
    parser.add_argument(
        "--local", type=int, default=0, metavar="PID", help="what of a process can be reached?"
    )
    parser.add_argument("--user", type=int, default=0, help="become this user first")
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.user:
        # While their files can still be read.
        "host".encode("idna")
        from kvferry.wire import ticket as permit  # noqa: F401

        os.setgid(given.user)
        os.setuid(given.user)
    if given.local:
        print(json.dumps(local_user(given.local)))
        return 0
    if given.scan:
        for place in given.places:
            host = place.partition(":")[0]
            ports = scan(host)
            kinds = {f"{host}:{port}": kind_of((host, port)) for port in ports}
            print(json.dumps(kinds), flush=True)
        return 0
    targets = targets_of(given.places)
    names = given.only or [
        name
        for name, (_, kinds) in ATTACKS.items()
        if any(kind in kinds for kind, _ in targets) and (given.secret_file or name not in MEMBERS)
    ]
    is_seen = False
    for name in names:
        counts = run(name, targets, given.seconds / len(names), given.secret_file)
        is_seen |= bool(counts["CACHE SEEN"])
        print(json.dumps({"attack": name, **counts}), flush=True)
    return 1 if is_seen else 0


if __name__ == "__main__":
    sys.exit(main())
