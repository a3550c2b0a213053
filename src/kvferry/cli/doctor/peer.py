"""Two doctors over the control channel: one serves memory, the other reads it.

Their messages are JSON, not part of the engines' protocol, and of one ``FORMAT``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvferry.channel.zmq import Channel, Contact, Received
from kvferry.cli.doctor.observe import file_text
from kvferry.cli.doctor.observe import secret as find_secret
from kvferry.cli.doctor.sockets import SCHEME, own_address
from kvferry.cli.machine import package_versions
from kvferry.cli.reads import ServedMemory, pool_bytes, serving_memory, sizes_of
from kvferry.core.manifest import Region
from kvferry.endpoint.invitation import BOOT_ID, EVERY_HOST
from kvferry.errors import SpecError
from kvferry.wire.secret import Secret, is_loopback

FORMAT = 3
QUESTION, ANSWER = "kvferry doctor asks", "kvferry doctor answers"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0
NUM_BROKEN = 3
"""Failed handshakes before giving up."""
WAIT_SECONDS = 0.5
ZMQ_GREETING = b"\xff"
"""The first byte that ZeroMQ sends to a caller, before any handshake."""
NONSENSE = (ValueError, KeyError, TypeError, AttributeError)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Where a process runs, comparable between processes."""

    name: str
    boot: str
    """The boot id of the machine: equal in all of its containers."""
    pid_namespace: str
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A call to a ``kvferry doctor --listen``."""

    address: str
    ours: HostPlace
    tcp_error: str = ""
    """Why the port is unreachable."""
    is_connected: bool = False
    """Whether the listener does not reject our secret, or our lack of one."""
    answer_error: str = ""
    theirs: HostPlace | None = None

    @property
    def is_one_machine(self) -> bool:
        return self.theirs is not None and self.theirs.boot == self.ours.boot

    @property
    def shares_pids(self) -> bool:
        theirs = self.theirs
        return theirs is not None and self.is_one_machine and theirs.pid_namespace == self.ours.pid_namespace


def whole_address(option: str, text: str) -> str:
    """An address for the channel.

    >>> whole_address("--peer", "10.0.0.7:7777")
    'tcp://10.0.0.7:7777'
    >>> whole_address("--peer", "10.0.0.7")
    Traceback (most recent call last):
    kvferry.errors.SpecError: --peer 10.0.0.7: expected HOST:PORT, such as 10.0.0.7:7777
    """
    rest = text.removeprefix(SCHEME)
    host, _, port = rest.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise SpecError(f"{option} {text}: expected HOST:PORT, such as 10.0.0.7:7777")
    return SCHEME + rest


def serve(listen: str, memories: Sequence[str], say: Say) -> None:
    """Serve memory to doctors that call, until interrupted."""
    address, (seen, secret) = whole_address("--listen", listen), find_secret(os.environ)
    if seen.error:
        raise SpecError(seen.error)
    if secret is None and not is_loopback(address):
        raise SpecError(
            f"--listen {listen}: an address that other hosts can reach needs a secret: set"
            " KVFERRY_SECRET_FILE (`kvferry keygen` creates one), or listen on 127.0.0.1"
        )
    say(f"fingerprint of the secret: {seen.fingerprint}" if secret else "no secret is set")
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process of a container would ignore the latter
        signal.signal(number, signal.default_int_handler)
    try:
        _answer_calls(address, secret, memories, say)
    except KeyboardInterrupt:
        say("no longer listening")


def _answer_calls(address: str, secret: Secret | None, memories: Sequence[str], say: Say) -> None:
    host = address.removeprefix(SCHEME).rpartition(":")[0]
    host = own_address() if host in EVERY_HOST else host
    with ExitStack() as stack:
        channel = stack.enter_context(closing(Channel(listen=address, secret=secret)))
        served = [
            stack.enter_context(serving_memory(each, pool_bytes(sizes_of(each)), host)) for each in memories
        ]
        answer = _packed(ANSWER, memories=[{**asdict(one), "card": one.card.hex()} for one in served])
        say(f"listening on {channel.address.removeprefix(SCHEME)}; stop with Ctrl-C")
        while True:
            for received in channel.wait(WAIT_SECONDS):
                if isinstance(received, Received):
                    channel.send(received.reply_to, answer)
                    say(f"called by {_caller(received.data)}")


def _caller(data: bytes) -> str:
    try:
        return f"{_host(_unpacked(data, QUESTION)).name[:64]!r}"
    except NONSENSE:
        return "a process that is not a doctor of this version"


def call(address: str, secret: Secret | None) -> tuple[PeerSeen, list[ServedMemory]]:
    """Call a listening doctor: the result, and the memory that it serves."""
    tcp_error, answer_error = _tcp_errors(address)
    peer = PeerSeen(address.removeprefix(SCHEME), host_place(), tcp_error, bool(answer_error), answer_error)
    if tcp_error or answer_error:
        return peer, []
    is_connected, data = _ask(address, secret)
    peer = replace(peer, is_connected=is_connected)
    if data is None:
        return replace(peer, answer_error=f"no answer within {ANSWER_SECONDS:g} s"), []
    try:
        message = _unpacked(data, ANSWER)
        return replace(peer, theirs=_host(message)), [_offered(one) for one in message["memories"]]
    except NONSENSE as error:
        return replace(
            peer, answer_error=f"its answer of {len(data)} bytes is not from a doctor ({error})"
        ), []


def _tcp_errors(address: str) -> tuple[str, str]:
    """Why the port is not reachable, and why its listener is no channel; empty if it is."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s", ""
    except OSError as error:
        return error.strerror or str(error), ""
    with connection, suppress(OSError):
        if connection.recv(1) == ZMQ_GREETING:
            return "", ""
    return "", "it is another program, or suspended"


def _ask(address: str, secret: Secret | None) -> tuple[bool, bytes | None]:
    """Whether the peer accepts the connection, and its answer."""
    until, contacts, question = time.monotonic() + ANSWER_SECONDS, Counter[Contact](), _packed(QUESTION)
    with closing(Channel(secret=secret)) as channel:
        channel.send(address, question)
        while time.monotonic() < until:
            for news in channel.wait(WAIT_SECONDS):
                if isinstance(news, Received):
                    return True, news.data
                contacts[news.contact] += 1
                if news.contact is Contact.CONNECTED and contacts[Contact.BROKEN]:
                    channel.send(address, question)  # the first may be lost with the connection
            if contacts[Contact.BROKEN] >= NUM_BROKEN and not contacts[Contact.CONNECTED]:
                break
    return bool(contacts[Contact.CONNECTED]), None


def _packed(kind: str, **fields: object) -> bytes:
    return json.dumps({"message": kind, "format": FORMAT, "host": asdict(host_place()), **fields}).encode()


def _unpacked(data: bytes, kind: str) -> dict[str, Any]:
    message = json.loads(data)
    if message["message"] != kind or message["format"] != FORMAT:
        raise ValueError(f"not {kind!r} of format {FORMAT}")
    return dict(message)


def host_place() -> HostPlace:
    boot, pids = file_text(BOOT_ID), os.readlink("/proc/self/ns/pid")
    return HostPlace(socket.gethostname(), boot, pids, package_versions())


def _host(message: Mapping[str, Any]) -> HostPlace:
    fields = message["host"]
    name, boot, pid_namespace = (str(fields[key]) for key in ("name", "boot", "pid_namespace"))
    versions = {str(package): str(version) for package, version in fields["versions"].items()}
    return HostPlace(name, boot, pid_namespace, versions)


def _offered(fields: Mapping[str, Any]) -> ServedMemory:
    card, region = bytes.fromhex(fields["card"]), Region(**fields["region"])
    return ServedMemory(str(fields["memory"]), card, region, int(fields["pid"]))
