"""The sockets of an engine with the current settings, and its NIXL."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace

from kvferry.cli.demo.engines import NUMBERED_CELLS, RankCells
from kvferry.cli.reads import HOST, LOOPBACK
from kvferry.core.manifest import Region
from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.endpoint.secret_source import secret_from_environment
from kvferry.errors import TransportError
from kvferry.host.listening import Listener, listeners
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.model import attention
from kvferry.transport.cards import Card, GatherPoint
from kvferry.transport.nixl_agent import describe_build
from kvferry.transport.process import ProcessTransport
from kvferry.wire.secret import Trust, is_loopback

SCHEME = "tcp://"
MODEL = Model("doctor", (Layer("layers.0", (attention(1, 64, "bf16"),)),))
ANY_HOST = ("192.0.2.1", 9)
"""An address for documentation, to which nothing is sent: the kernel chooses our address for it."""


@dataclass(frozen=True, slots=True)
class ListenerSeen:
    """A socket that an engine with the current settings listens on."""

    purpose: str
    kind: str
    """``tcp`` or ``unix``."""
    address: str
    reach: str
    """Who can connect."""
    meaning: str
    """What they can do."""


MEANINGS = {
    "authority": "Callers can request leases; a lease needs a valid ticket.",
    "rank": "Callers can request bytes; they are sent only for a granted lease.",
    "stream": "A caller must name a stream that this rank offered, and only receives bytes.",
    "status": "Callers can read the status; their input is ignored.",
    "descriptors": "A caller that has the rank's card can open its device memory.",
    "ucx": "Callers can read and write all memory of this process: UCX has no authentication.",
    "unknown": "Opened by a library in this process, not by kvferry.",
}
"""The abilities of callers by the purpose of a socket, in the order of the report."""
SEALED_MEANINGS = {
    **MEANINGS,
    "authority": "Encrypted. Callers must know the secret; a lease also needs a valid ticket.",
    "rank": "Encrypted. Callers must know the secret; bytes are sent only for a granted lease.",
    "stream": "A caller must name a stream that this rank offered; its frames are encrypted.",
}
"""With a secret."""


def own_address() -> str:
    """The address by which other hosts reach this one; loopback if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(ANY_HOST)
        except OSError:
            return LOOPBACK
        return str(asking.getsockname()[0])


class EngineProbe:
    """A source engine of one rank, in a process of its own."""

    def listeners(self, memory: str) -> tuple[ListenerSeen, ...]:
        """Start one with caches in this memory, and list its sockets."""
        logging.disable(logging.WARNING)
        secret = secret_from_environment()
        # Started on loopback only; a real engine with a secret listens on its host's address.
        host, meanings = (own_address(), SEALED_MEANINGS) if secret else (LOOPBACK, MEANINGS)
        sockets = _engine_sockets(memory, Trust(secret))
        found = [_described(purpose, listener, host, meanings) for listener, purpose in sockets.items()]
        return tuple(sorted(found, key=lambda each: (list(MEANINGS).index(each.purpose), each.address)))

    def nixl(self) -> dict[str, object]:
        """The build of NIXL, or why it cannot be imported."""
        try:
            return asdict(describe_build())
        except TransportError as error:
            return {"nixl_error": str(error.__cause__ or error.detail)}


def _engine_sockets(memory: str, trust: Trust) -> dict[Listener, str]:
    """Each socket with its purpose, known by when it appears and by its address."""
    listen = f"{SCHEME}{LOOPBACK}:*"
    manifest = describe(MODEL, Topology(block=16, blocks=4), "doctor")
    with ExitStack() as stack:
        before = listeners()
        cells = RankCells(replace(manifest, identity=NUMBERED_CELLS), 0, "cpu" if memory == HOST else memory)
        stack.callback(cells.memory.free)
        engine = stack.enter_context(closing(SourceEngine("doctor", 1, listen=listen, trust=trust)))
        engine_has, transport = listeners(), _WatchedTransport()
        rank = SourceRank(engine.invitation, cells.manifest, transport, listen=listen, trust=trust)
        stack.enter_context(closing(rank))
        found = {
            **dict.fromkeys(engine_has - before, "authority"),
            **dict.fromkeys(transport.registered - engine_has, "ucx"),
            **dict.fromkeys(listeners() - transport.registered - engine_has, "stream"),
        }
        if gather := Card.from_bytes(transport.card()).gather:
            found[Listener("tcp", GatherPoint.from_bytes(gather).address.removeprefix(SCHEME))] = "rank"
        return found


class _WatchedTransport(ProcessTransport):
    registered: frozenset[Listener] = frozenset()

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.registered = frozenset(listeners())


def _described(purpose: str, listener: Listener, host: str, meanings: Mapping[str, str]) -> ListenerSeen:
    """A socket of an engine that listens on ``host``.

    >>> _described("stream", Listener("tcp", "127.0.0.1:4000"), "10.0.0.7", MEANINGS).reach
    'hosts that can connect to 10.0.0.7'
    """
    kind, address = listener.kind, listener.address
    if kind == "unix":
        is_status = address.endswith(".sock")
        purpose = "descriptors" if address.startswith("@kvferry-") else "status" if is_status else "unknown"
    elif purpose != "ucx":
        address = f"{host}:{address.rpartition(':')[2]}"
    if purpose in ("status", "descriptors"):
        reach = "this user and root, on this host"
    elif kind == "unix" or is_loopback(f"{SCHEME}{address}"):
        reach = "processes of this host"
    else:
        reach = f"hosts that can connect to {address.rpartition(':')[0]}"
    return ListenerSeen(purpose, kind, address, reach, meanings[purpose])
