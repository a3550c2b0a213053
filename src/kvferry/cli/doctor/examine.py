"""One examination: everything is looked at and measured, here or with a doctor of another host.

Two doctors talk by the control channel: one serves memory, the other is told how to read it. The messages are
JSON, and no part of the engines' protocol: only doctors of one ``FORMAT`` understand each other.
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
from kvferry.cli.doctor.probe import ServedMemory, last_line, read_from, serving_memory
from kvferry.cli.doctor.seen import (
    HOST,
    HostPlace,
    ListenerSeen,
    Observed,
    PeerSeen,
    ReadsSeen,
    Software,
)
from kvferry.cli.doctor.sockets import engine_listeners
from kvferry.cli.machine import package_versions
from kvferry.cli.processes import RankCard
from kvferry.core.manifest import Region
from kvferry.endpoint.invitation import EVERY_HOST
from kvferry.errors import SpecError
from kvferry.transport.nixl_agent import NixlBuild
from kvferry.transport.settings import EXPOSE_SETTING, Expose
from kvferry.wire.secret import Secret, is_loopback

FORMAT = 1
QUESTION, ANSWER = "kvferry doctor asks", "kvferry doctor answers"
SCHEME = "tcp://"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0
NUM_BROKEN = 3
"""A handshake that failed so often fails for a reason."""
WAIT_SECONDS = 0.5

Say = Callable[[str], None]


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


def listen(address: str, secret: Secret | None, memories: Sequence[str], say: Say) -> None:
    """Serve memory to whoever calls, until interrupted."""
    if secret is None and not is_loopback(address):
        raise SpecError(
            f"--listen {address.removeprefix(SCHEME)}: other hosts can call this address, and there is no"
            " secret: set KVFERRY_SECRET_FILE (`kvferry keygen` makes one), or listen at 127.0.0.1"
        )
    with ExitStack() as stack:
        channel = stack.enter_context(closing(Channel(listen=address, secret=secret)))
        host = address.removeprefix(SCHEME).rpartition(":")[0]
        host = observe.own_address() if host in EVERY_HOST else host
        served = [stack.enter_context(serving_memory(memory, host)) for memory in memories]
        answer = _answer(served)
        say(f"listening at {channel.address.removeprefix(SCHEME)}; Ctrl-C ends it")
        while True:
            for received in channel.wait(WAIT_SECONDS):
                if isinstance(received, Received):
                    channel.send(received.reply_to, answer)
                    say(f"called by {_caller(received.data)}")


def _answer(served: Sequence[ServedMemory]) -> bytes:
    memories = {
        one.memory: {
            "card": one.card.card.hex(),
            "regions": [asdict(region) for region in one.card.regions],
            "pid": one.pid,
        }
        for one in served
    }
    return _packed({"message": ANSWER, "host": asdict(observe.host_place()), "memories": memories})


def _packed(message: Mapping[str, Any]) -> bytes:
    return json.dumps({**message, "format": FORMAT}).encode()


def _caller(data: bytes) -> str:
    try:
        return f"{_host(_unpacked(data, QUESTION)['host']).name[:64]!r}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "somebody who is no doctor of this version"


def call(address: str, secret: Secret | None) -> tuple[PeerSeen, tuple[ServedMemory, ...]]:
    """Call a doctor that listens: how that went, and what it offers."""
    ours = observe.host_place()
    if error := _tcp_error(address):
        return PeerSeen(address.removeprefix(SCHEME), ours, error), ()
    question = _packed({"message": QUESTION, "host": asdict(ours)})
    started, contacts = time.monotonic(), Counter[Contact]()
    with closing(Channel(secret=secret)) as channel:
        channel.send(address, question)
        while time.monotonic() < started + ANSWER_SECONDS and not _is_refused(contacts):
            for news in channel.wait(WAIT_SECONDS):
                if isinstance(news, Received):
                    return _answered(address, ours, news.data, time.monotonic() - started)
                contacts[news.contact] += 1
                if news.contact is Contact.CONNECTED and contacts[Contact.BROKEN]:
                    channel.send(address, question)  # the first may be lost with the connection
    is_connected = bool(contacts[Contact.CONNECTED])
    why = f"no answer within {ANSWER_SECONDS:g} s" if is_connected else ""
    return PeerSeen(address.removeprefix(SCHEME), ours, "", is_connected, why), ()


def _is_refused(contacts: Mapping[Contact, int]) -> bool:
    return not contacts[Contact.CONNECTED] and contacts[Contact.BROKEN] >= NUM_BROKEN


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


def _answered(
    address: str, ours: HostPlace, data: bytes, seconds: float
) -> tuple[PeerSeen, tuple[ServedMemory, ...]]:
    shown = address.removeprefix(SCHEME)
    try:
        message = _unpacked(data, ANSWER)
        theirs = _host(message["host"])
        offered = tuple(_offered(name, one) for name, one in message["memories"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return PeerSeen(shown, ours, "", True, f"{len(data)} bytes that say something else ({error})"), ()
    return PeerSeen(shown, ours, "", True, "", theirs, seconds), offered


def _unpacked(data: bytes, kind: str) -> dict[str, Any]:
    message = json.loads(data)
    if message["message"] != kind or message["format"] != FORMAT:
        raise ValueError(f"not {kind!r} of format {FORMAT}")
    return dict(message)


def _host(fields: Mapping[str, Any]) -> HostPlace:
    name, boot, pid_namespace = (str(fields[key]) for key in ("name", "boot", "pid_namespace"))
    versions = {str(package): str(version) for package, version in fields["versions"].items()}
    return HostPlace(name, boot, pid_namespace, int(fields["user"]), versions)


def _offered(memory: str, fields: Mapping[str, Any]) -> ServedMemory:
    regions = tuple(
        Region(str(one["name"]), int(one["num_bytes"]), int(one["address"]), str(one["device"]))
        for one in fields["regions"]
    )
    return ServedMemory(memory, RankCard(bytes.fromhex(fields["card"]), regions), int(fields["pid"]))


def read_peer(
    peer: PeerSeen, offered: Sequence[ServedMemory], memories: Sequence[str]
) -> list[tuple[ReadsSeen, NixlBuild | None]]:
    """Read each kind of memory that both sides have, and by which NIXL."""
    return [
        read_from(one.memory, one.card, one.pid if peer.shares_pids else 0)
        for one in offered
        if one.memory in memories
    ]


FIRST_DEVICE = "cuda:0"


def asked_memories(asked: Sequence[str]) -> list[str]:
    """The kinds of memory to read; raises SpecError if one is not there."""
    gpus = observe.gpus()
    devices = [f"cuda:{i}" for i in range(gpus.num_devices)] if not gpus.why_not else []
    for name in asked:
        if name != HOST and name not in devices:
            there = ", ".join([HOST, *devices])
            raise SpecError(
                f"--memory {name}: there is {there}{f' ({gpus.why_not})' if gpus.why_not else ''}"
            )
    return list(dict.fromkeys(asked)) or [HOST, *devices[:1]]


def serve(address: str, memories: Sequence[str], say: Say) -> None:
    """Be read by another doctor, until interrupted."""
    whole = whole_address("--listen", address)
    seen, secret = observe.secret(os.environ)
    if seen.error:
        raise SpecError(seen.error)
    say(f"the secret has the fingerprint {seen.fingerprint}" if seen.fingerprint else "no secret is set")
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process of a container would ignore the latter
        signal.signal(number, signal.default_int_handler)
    try:
        listen(whole, secret, memories, say)
    except KeyboardInterrupt:
        say("no longer listening")


def examine(memories: Sequence[str], peer: str, progress: Say) -> Observed:
    """Look at this machine, and read from another process of it, or from a peer."""
    address = whole_address("--peer", peer) if peer else ""
    settings, errors = observe.settings(os.environ), observe.setting_errors(os.environ)
    software = Software(package_versions())
    seen, secret = observe.secret(os.environ)
    called: PeerSeen | None = None
    done: list[tuple[ReadsSeen, NixlBuild | None]] = []
    listeners: tuple[ListenerSeen, ...] = ()
    listeners_error = ""
    if not (errors or seen.error):
        listeners, listeners_error = _listeners(memories, progress)
        if peer:
            progress(f"calling {address}")
            called, offered = call(address, secret)
            progress("reading its memory")
            done = read_peer(called, offered, memories)
        else:
            done = [_read_here(memory, progress) for memory in memories]
    if build := next((build for _, build in done if build), None):
        software = replace(software, wheel=build.wheel, ucx_version=build.ucx_version, plugins=build.plugins)
    if settings.get(EXPOSE_SETTING) == Expose.FABRIC.value:
        software = replace(software, nixl_error=observe.nixl_error())
    return Observed(
        software=software,
        gpus=observe.gpus(),
        limits=observe.host_limits(),
        secret=seen,
        settings=settings,
        setting_errors=errors,
        reads=tuple(reads for reads, _ in done),
        listeners=listeners,
        listeners_error=listeners_error,
        peer=called,
    )


def _listeners(memories: Sequence[str], progress: Say) -> tuple[tuple[ListenerSeen, ...], str]:
    """The sockets of an engine that is started for it; or why it did not start."""
    progress("starting an engine, to list its sockets")
    try:
        return engine_listeners(memories[-1]), ""
    except Exception as error:  # of the process that was started: whatever it was, it is what was seen
        return (), last_line(error)


def _read_here(memory: str, progress: Say) -> tuple[ReadsSeen, NixlBuild | None]:
    """From another process of this machine."""
    progress(f"reading {memory} memory of another process")
    try:
        with serving_memory(memory) as served:
            return read_from(memory, served.card, served.pid)
    except Exception as error:  # of the process that serves: whatever it was, it is what was seen
        return ReadsSeen(memory, error=last_line(error)), None
