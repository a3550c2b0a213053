"""Two doctors, by the control channel: one serves memory, the other is told how to read it.

The messages are JSON, and no part of the engines' protocol: only doctors of one ``FORMAT`` understand each
other.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.channel.zmq import Channel, Contact, Received
from kvferry.cli.doctor.observe import host_place, own_address
from kvferry.cli.doctor.seen import HostPlace, PeerSeen, ReadsSeen
from kvferry.cli.doctor.two_processes import ServedMemory, read_from, serving_memory
from kvferry.cli.processes import RankCard
from kvferry.core.manifest import Region
from kvferry.endpoint.listening import EVERY_HOST
from kvferry.errors import SpecError
from kvferry.transport.nixl_agent import NixlBuild
from kvferry.wire.secret import Secret
from kvferry.wire.trust import is_loopback

FORMAT = 1
QUESTION, ANSWER = "kvferry doctor asks", "kvferry doctor answers"
SCHEME = "tcp://"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 15.0
NUM_BROKEN = 3
"""A handshake that failed so often fails for a reason."""
WAIT_SECONDS = 0.5

Say = Callable[[str], None]


@dataclass(frozen=True)
class OfferedMemory:
    """Memory of another doctor's that can be read."""

    memory: str
    card: RankCard
    pid: int


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
            " secret: set"
            " KVFERRY_SECRET_FILE (`kvferry keygen` makes one), or listen at 127.0.0.1"
        )
    with ExitStack() as stack:
        channel = stack.enter_context(closing(Channel(listen=address, secret=secret)))
        host = address.removeprefix(SCHEME).rpartition(":")[0]
        host = own_address() if host in EVERY_HOST else host
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
    return _packed({"message": ANSWER, "host": asdict(host_place()), "memories": memories})


def _packed(message: Mapping[str, Any]) -> bytes:
    return json.dumps({**message, "format": FORMAT}).encode()


def _caller(data: bytes) -> str:
    try:
        return f"{_host(_unpacked(data, QUESTION)['host']).name[:64]!r}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "somebody who is no doctor of this version"


def call(address: str, secret: Secret | None) -> tuple[PeerSeen, tuple[OfferedMemory, ...]]:
    """Call a doctor that listens: how that went, and what it offers."""
    ours = host_place()
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
) -> tuple[PeerSeen, tuple[OfferedMemory, ...]]:
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


def _offered(memory: str, fields: Mapping[str, Any]) -> OfferedMemory:
    regions = tuple(
        Region(str(one["name"]), int(one["num_bytes"]), int(one["address"]), str(one["device"]))
        for one in fields["regions"]
    )
    return OfferedMemory(memory, RankCard(bytes.fromhex(fields["card"]), regions), int(fields["pid"]))


def read_peer(
    peer: PeerSeen, offered: Sequence[OfferedMemory], memories: Sequence[str]
) -> list[tuple[ReadsSeen, NixlBuild | None]]:
    """Read each kind of memory that both sides have, and by which NIXL."""
    return [
        read_from(one.memory, one.card, one.pid if peer.shares_pids else 0)
        for one in offered
        if one.memory in memories
    ]
