"""Which sockets an engine with the present settings opens: a real one is started, and its sockets are listed.

What each socket is for follows from when it appears and from its address. What its callers can do is a table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from enum import StrEnum

import numpy as np

from kvferry.cli.bench.cases import CacheShape, cache_manifest, cache_memory
from kvferry.cli.doctor.observe import LOOPBACK, own_address
from kvferry.cli.doctor.probe import CALL_SECONDS, device_of, quiet_environment
from kvferry.cli.doctor.seen import ListenerSeen
from kvferry.cli.processes import Worker
from kvferry.core.manifest import Region
from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.endpoint.secret_source import secret_from_environment
from kvferry.host.listening import Listener, listeners
from kvferry.transport.cards import Card, GatherPoint
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.secret import Trust, is_loopback

SCHEME = "tcp://"
SHAPE = CacheShape(run_bytes=4096, num_blocks=4)


class SocketPurpose(StrEnum):
    """What a socket is for."""

    AUTHORITY = "authority"
    """The control channel of a source engine."""
    RANK = "rank"
    """The control socket of a source rank."""
    STREAM = "stream"
    """Where readers connect for the bytes that a source rank sends."""
    STATUS = "status"
    """``kvferry status`` asks there."""
    DESCRIPTORS = "descriptors"
    """Hands out file descriptors of device memory."""
    UCX = "ucx"
    """UCX's own, for direct reads."""
    UNKNOWN = "unknown"


PROVED = {
    SocketPurpose.AUTHORITY: "Encrypted. Callers must know the secret; a lease also needs a valid ticket.",
    SocketPurpose.RANK: "Encrypted. Callers must know the secret; bytes are sent only for a granted lease.",
    SocketPurpose.STREAM: "A caller must name a stream that this rank offered; its frames are encrypted.",
}
"""With a secret."""
MEANINGS = {
    SocketPurpose.AUTHORITY: "Callers can ask for leases; a lease needs a valid ticket.",
    SocketPurpose.RANK: "Callers can ask for bytes; they are sent only for a granted lease.",
    SocketPurpose.STREAM: "A caller must name a stream that this rank offered, and only receives bytes.",
    SocketPurpose.STATUS: "Callers can read the status; nothing they send is read.",
    SocketPurpose.DESCRIPTORS: "A caller that has the rank's card can open its device memory.",
    SocketPurpose.UCX: "Callers can read and write all memory of this process: UCX authenticates nobody.",
    SocketPurpose.UNKNOWN: "Not opened by kvferry: a library in this process opened it.",
}


class EngineProbe:
    """A source engine of one rank, in one process."""

    def __init__(self, memory: str) -> None:
        logging.disable(logging.WARNING)
        secret = secret_from_environment()
        trust, self._is_sealed = Trust(secret), secret is not None
        # On loopback: to look is not to open a door. With a secret an engine listens at its host's address.
        listen, self._host = f"{SCHEME}{LOOPBACK}:*", own_address() if secret else LOOPBACK
        before = listeners()
        self._memory = cache_memory(device_of(memory), np.zeros(SHAPE.total_bytes, np.uint8))
        manifest = cache_manifest("doctor", SHAPE, self._memory.regions[0])
        self._engine = SourceEngine("doctor", 1, listen=listen, trust=trust)
        engine_has = listeners()
        transport = _WatchedTransport()
        self._rank = SourceRank(self._engine.invitation, manifest, transport, listen=listen, trust=trust)
        self._found = {
            **dict.fromkeys(engine_has - before, SocketPurpose.AUTHORITY),
            **dict.fromkeys(transport.registered - engine_has, SocketPurpose.UCX),
            **dict.fromkeys(listeners() - transport.registered - engine_has, SocketPurpose.STREAM),
        }
        if gather := Card.from_bytes(transport.card()).gather:
            address = GatherPoint.from_bytes(gather).address.removeprefix(SCHEME)
            self._found[Listener("tcp", address)] = SocketPurpose.RANK

    def listeners(self) -> list[ListenerSeen]:
        """Those of the engine, in the order of their purposes."""
        found = [(_refined(listener, purpose), listener) for listener, purpose in self._found.items()]
        found.sort(key=lambda each: (list(SocketPurpose).index(each[0]), each[1]))
        return [
            seen(purpose, self._of_an_engine(purpose, listener), is_sealed=self._is_sealed)
            for purpose, listener in found
        ]

    def _of_an_engine(self, purpose: SocketPurpose, listener: Listener) -> Listener:
        """Where an engine would listen."""
        if listener.kind != "tcp" or purpose is SocketPurpose.UCX:
            return listener
        return replace(listener, address=f"{self._host}:{listener.address.rpartition(':')[2]}")

    def close(self) -> None:
        self._rank.close()
        self._engine.close()
        self._memory.free()


class _WatchedTransport(NixlTransport):
    """Notes which sockets there are once its memory is registered."""

    registered: frozenset[Listener] = frozenset()

    def register(self, regions: Sequence[Region]) -> None:
        super().register(regions)
        self.registered = frozenset(listeners())


def _refined(listener: Listener, purpose: SocketPurpose) -> SocketPurpose:
    """Unix sockets have names that tell their purpose."""
    if listener.kind == "tcp":
        return purpose
    if listener.address.startswith("@kvferry-"):
        return SocketPurpose.DESCRIPTORS
    return SocketPurpose.STATUS if listener.address.endswith(".sock") else SocketPurpose.UNKNOWN


def seen(purpose: SocketPurpose, listener: Listener, *, is_sealed: bool) -> ListenerSeen:
    """A socket, who reaches it, and what they can do.

    >>> seen(SocketPurpose.STREAM, Listener("tcp", "10.0.0.7:4000"), is_sealed=True).reach
    'hosts that can connect to 10.0.0.7'
    """
    meaning = (PROVED if is_sealed else {}).get(purpose, MEANINGS[purpose])
    return ListenerSeen(purpose.value, listener.kind, listener.address, _reach(purpose, listener), meaning)


def _reach(purpose: SocketPurpose, listener: Listener) -> str:
    if purpose in (SocketPurpose.STATUS, SocketPurpose.DESCRIPTORS):
        return "this user and root, on this host"
    if listener.kind == "unix" or is_loopback(f"{SCHEME}{listener.address}"):
        return "processes of this host"
    return f"hosts that can connect to {listener.address.rpartition(':')[0]}"


def engine_listeners(memory: str) -> tuple[ListenerSeen, ...]:
    """The sockets of an engine with the present settings, whose caches are in this kind of memory."""
    with closing(Worker("doctor-engine", EngineProbe, memory, env=quiet_environment())) as worker:
        return tuple(worker.call("listeners", timeout=CALL_SECONDS))
