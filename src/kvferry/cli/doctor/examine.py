"""One examination: everything is looked at and measured, here or with a doctor of another host.

Two doctors talk over the control channel: one serves memory, the other reads it. Their messages are JSON, and
no part of the engines' protocol: only doctors of one ``FORMAT`` understand each other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Any

from kvferry.channel.zmq import Channel, Contact, Received
from kvferry.cli.doctor import observe
from kvferry.cli.doctor.observe import SCHEME
from kvferry.cli.doctor.probe import ServedMemory, read_from, read_here, serving_memory
from kvferry.cli.doctor.seen import HOST, HostPlace, Observed, PeerSeen, Software
from kvferry.cli.machine import describe_machine, package_versions
from kvferry.core.manifest import Region
from kvferry.endpoint.invitation import BOOT_ID, EVERY_HOST
from kvferry.errors import SpecError
from kvferry.wire.secret import Secret, is_loopback

FORMAT = 2
QUESTION, ANSWER = "kvferry doctor asks", "kvferry doctor answers"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0
NUM_BROKEN = 3
"""After so many failed handshakes no other is tried."""
WAIT_SECONDS = 0.5
NONSENSE = (ValueError, KeyError, TypeError, AttributeError)

Say = Callable[[str], None]


def examine(memories: Sequence[str], peer: str, progress: Say) -> Observed:
    """Look at this machine, and read from another process of it, or from a peer."""
    address = whole_address("--peer", peer) if peer else ""
    gpus, (secret_seen, secret) = observe.gpus(), observe.secret(os.environ)
    observed = Observed(
        Software(package_versions()),
        gpus,
        observe.host_limits(),
        secret_seen,
        describe_machine(", ".join(gpus.names)),
        observe.settings(os.environ),
        observe.setting_errors(os.environ),
    )
    if observed.setting_errors or secret_seen.error:
        return observed
    progress("starting an engine, to list its sockets")
    observed = observe.engine_seen(observed, memories[-1])
    if not peer:
        progress(f"reading {' and '.join(memories)} memory of another process")
        return replace(observed, reads=tuple(map(read_here, memories)))
    progress(f"calling {address}")
    called, offered = call(address, secret)
    progress("reading its memory")
    shared = (one for one in offered if one.memory in memories)
    reads = tuple(read_from(one, shares_pids=called.shares_pids) for one in shared)
    return replace(observed, peer=called, reads=reads)


def asked_memories(asked: Sequence[str]) -> list[str]:
    """The kinds of memory to read; raises SpecError if one is not there."""
    gpus = observe.gpus()
    there = [HOST] if gpus.why_not else [HOST, *(f"cuda:{i}" for i in range(len(gpus.names)))]
    for name in asked:
        if name not in there:
            why = f" ({gpus.why_not})" if gpus.why_not else ""
            raise SpecError(f"--memory {name}: there is {', '.join(there)}{why}")
    return list(dict.fromkeys(asked)) or there[:2]


def whole_address(option: str, text: str) -> str:
    """An address as the channel takes it; raises SpecError if it has no port.

    >>> whole_address("--peer", "10.0.0.7:7777")
    'tcp://10.0.0.7:7777'
    >>> whole_address("--peer", "10.0.0.7")
    Traceback (most recent call last):
    kvferry.errors.SpecError: --peer 10.0.0.7: say HOST:PORT, such as 10.0.0.7:7777
    """
    rest = text.removeprefix(SCHEME)
    host, _, port = rest.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise SpecError(f"{option} {text}: say HOST:PORT, such as 10.0.0.7:7777")
    return SCHEME + rest


# -- two doctors -----------------------------------------------------------------------------------


def serve(listen: str, memories: Sequence[str], say: Say) -> None:
    """Serve memory to doctors that call, until interrupted."""
    address, (seen, secret) = whole_address("--listen", listen), observe.secret(os.environ)
    if seen.error:
        raise SpecError(seen.error)
    if secret is None and not is_loopback(address):
        raise SpecError(
            f"--listen {listen}: other hosts can call this address, and there is no secret: set"
            " KVFERRY_SECRET_FILE (`kvferry keygen` makes one), or listen at 127.0.0.1"
        )
    say(f"the secret has the fingerprint {seen.fingerprint}" if secret else "no secret is set")
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process of a container would ignore the latter
        signal.signal(number, signal.default_int_handler)
    try:
        _answer_calls(address, secret, memories, say)
    except KeyboardInterrupt:
        say("no longer listening")


def _answer_calls(address: str, secret: Secret | None, memories: Sequence[str], say: Say) -> None:
    host = address.removeprefix(SCHEME).rpartition(":")[0]
    host = observe.own_address() if host in EVERY_HOST else host
    with ExitStack() as stack:
        channel = stack.enter_context(closing(Channel(listen=address, secret=secret)))
        served = [stack.enter_context(serving_memory(memory, host)) for memory in memories]
        answer = _packed(ANSWER, memories=[{**asdict(one), "card": one.card.hex()} for one in served])
        say(f"listening at {channel.address.removeprefix(SCHEME)}; Ctrl-C ends it")
        while True:
            for received in channel.wait(WAIT_SECONDS):
                if isinstance(received, Received):
                    channel.send(received.reply_to, answer)
                    say(f"called by {_caller(received.data)}")


def _caller(data: bytes) -> str:
    try:
        return f"{_host(_unpacked(data, QUESTION)).name[:64]!r}"
    except NONSENSE:
        return "a process that is no doctor of this version"


def call(address: str, secret: Secret | None) -> tuple[PeerSeen, list[ServedMemory]]:
    """Call a doctor that listens: how that went, and what it offers."""
    peer = PeerSeen(address.removeprefix(SCHEME), host_place(), _tcp_error(address))
    if peer.tcp_error:
        return peer, []
    is_connected, data = _ask(address, secret)
    peer = replace(peer, is_connected=is_connected)
    if data is None:
        return replace(peer, answer_error=f"no answer within {ANSWER_SECONDS:g} s"), []
    try:
        message = _unpacked(data, ANSWER)
        return replace(peer, theirs=_host(message)), [_offered(one) for one in message["memories"]]
    except NONSENSE as error:
        return replace(peer, answer_error=f"{len(data)} bytes that say something else ({error})"), []


def _tcp_error(address: str) -> str:
    """Why the port cannot be reached; empty if it can."""
    host, _, port = address.removeprefix(SCHEME).rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except TimeoutError:
        return f"no answer within {CONNECT_SECONDS:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _ask(address: str, secret: Secret | None) -> tuple[bool, bytes | None]:
    """Whether the peer accepts our connection, and its answer."""
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
    boot, pids = observe.file_text(BOOT_ID), os.readlink("/proc/self/ns/pid")
    return HostPlace(socket.gethostname(), boot, pids, os.geteuid(), package_versions())


def _host(message: Mapping[str, Any]) -> HostPlace:
    fields = message["host"]
    name, boot, pid_namespace = (str(fields[key]) for key in ("name", "boot", "pid_namespace"))
    versions = {str(package): str(version) for package, version in fields["versions"].items()}
    return HostPlace(name, boot, pid_namespace, int(fields["user"]), versions)


def _offered(fields: Mapping[str, Any]) -> ServedMemory:
    card, region = bytes.fromhex(fields["card"]), Region(**fields["region"])
    return ServedMemory(str(fields["memory"]), card, region, int(fields["pid"]))
