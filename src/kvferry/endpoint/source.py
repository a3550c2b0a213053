"""The source side: one lease authority per engine, and the ranks that hold the memory."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterable, Mapping

from kvferry.channel import Channel, Received
from kvferry.core.manifest import Manifest, merge
from kvferry.core.request import BlockTable
from kvferry.endpoint.loop import Loop, clock, log
from kvferry.errors import SpecError
from kvferry.runtime import Authority, Released, Timing
from kvferry.runtime.values import Send
from kvferry.transport.base import Transport
from kvferry.wire import manifest_from_msgpack, manifest_to_msgpack
from kvferry.wire.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Ended,
    Heard,
    Join,
    Joined,
    Sorry,
    decode_from_authority,
    decode_to_authority,
)
from kvferry.wire.ticket import Ticket

EVERY_HOST = ("0.0.0.0", "*", "[::]")

HERE = "here/"
"""Routes of ranks that the engine answers for itself."""


class SourceEngine:
    """The lease authority of a source engine: offers requests, learns when their blocks are free again."""

    def __init__(
        self,
        engine: str,
        num_ranks: int,
        *,
        listen: str = "tcp://127.0.0.1:*",
        advertise: str = "",
        secret: bytes = b"",
        timing: Timing | None = None,
    ) -> None:
        """``advertise``: the host that readers call, where it is not the one that ``listen`` names."""
        if not advertise and any(f"//{host}:" in listen for host in EVERY_HOST):
            raise SpecError(f"listen={listen} is no address that a reader could call: say advertise=HOST")
        channel = Channel(listen=listen, secret=secret, max_bytes=MAX_MESSAGE_BYTES)
        self._lock = threading.Lock()
        self._released: deque[Released] = deque()
        self._authority = Authority(
            engine,
            generation=secrets.randbits(62),
            key=secrets.token_bytes(32),
            address=_advertised(channel.address, advertise),
            num_ranks=num_ranks,
            merge=_merged,
            timing=timing,
        )
        self._loop = Loop(f"kvferry-{engine}", channel, self._receive, self._tick)
        self._loop.start()

    @property
    def address(self) -> str:
        """Where ranks join and readers call."""
        return self._authority.address

    @property
    def is_whole(self) -> bool:
        """Whether every rank has joined."""
        return self._authority.is_whole

    @property
    def num_leases(self) -> int:
        """How many requests are pinned."""
        return self._authority.num_leases

    def admit(self, join: Join) -> None:
        """Take in a rank whose memory was described elsewhere: it hears of releases through ``poll``."""
        route = f"{HERE}{join.rank}"
        with self._lock:
            effects = self._authority.receive(clock(), route, join)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Sorry):
                raise SpecError(f"rank {join.rank} cannot join: {effect.message.detail}")

    def offer(
        self, request_id: str, tables: Mapping[str, BlockTable], num_tokens: int, *, digest: bytes = b""
    ) -> Ticket:
        """Pin a request's blocks until its lease ends, and return the ticket to hand to the destination.

        The device must have finished writing the blocks.
        """
        with self._lock:
            ticket = self._authority.offer(clock(), request_id, tables, num_tokens, digest)
        self._loop.wake()
        return ticket

    def withdraw(self, request_id: str) -> None:
        """Take an offer back. Its blocks are free when ``poll`` says so."""
        with self._lock:
            self._carry_out(self._authority.withdraw(clock(), request_id))

    def take_back(self, ticket: Ticket) -> bool:
        """Withdraw the offer of a ticket that came back to where it was made; whether it was made here."""
        with self._lock:
            is_own = self._authority.is_own(ticket)
            if is_own:
                self._carry_out(self._authority.withdraw(clock(), ticket.request_id))
        return is_own

    def poll(self) -> list[Released]:
        """The requests whose blocks are the engine's own again, each once."""
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released

    def status(self) -> dict[str, object]:
        """Who is here, what is pinned, what was refused."""
        with self._lock:
            status = self._authority.status()
        return status | {"refused": dict(self._loop.refused), "dropped": dict(self._loop.channel.dropped)}

    def close(self) -> None:
        """Stop listening."""
        self._loop.close()

    def _receive(self, received: Received) -> None:
        message = decode_to_authority(received.data)
        with self._lock:
            self._carry_out(self._authority.receive(clock(), received.route, message))

    def _tick(self) -> float:
        now = clock()
        with self._lock:
            self._carry_out(self._authority.tick(now))
            return max(0.0, self._authority.next_deadline() - now)

    def _carry_out(self, effects: Iterable[Send | Released]) -> None:
        for effect in effects:
            match effect:
                case Send() if effect.to.startswith(HERE):
                    self._hear(effect)
                case Send():
                    self._loop.send(effect.to, effect.message)
                case Released():
                    self._released.append(effect)

    def _hear(self, notice: Send) -> None:
        """A notice for a rank that was admitted here: whoever polls this engine has heard it."""
        if isinstance(notice.message, Ended):
            rank, ended = int(notice.to.removeprefix(HERE)), notice.message
            heard = Heard(ended.generation, rank, ended.first + len(ended.requests) - 1)
            self._carry_out(self._authority.receive(clock(), notice.to, heard))


def _advertised(address: str, host: str) -> str:
    """The address with another host.

    >>> _advertised("tcp://0.0.0.0:5555", "10.0.0.7"), _advertised("tcp://127.0.0.1:5555", "")
    ('tcp://10.0.0.7:5555', 'tcp://127.0.0.1:5555')
    """
    return f"tcp://{host}:{address.rpartition(':')[2]}" if host else address


def _merged(manifests: Mapping[int, bytes]) -> bytes:
    parts = [manifest_from_msgpack(data) for data in manifests.values()]
    for number, part in zip(manifests, parts, strict=True):
        if [rank.rank for rank in part.ranks] != [number]:
            raise SpecError(f"rank {number} joined with the manifest of {[r.rank for r in part.ranks]}")
    return manifest_to_msgpack(merge(parts))


class SourceRank:
    """One rank of a source engine: its memory can be read, and it hears of every release."""

    RETRY_SECONDS = 0.5

    def __init__(
        self, authority: str, manifest: Manifest, transport: Transport, *, secret: bytes = b""
    ) -> None:
        (rank,) = manifest.ranks
        transport.register(rank.regions)
        self.rank, self._transport = rank.rank, transport
        self._join = Join(
            PROTOCOL,
            manifest.engine,
            rank.rank,
            transport.kind,
            manifest_to_msgpack(manifest),
            transport.card(),
        )
        self._authority = authority
        self._released: deque[Released] = deque()
        self._heard = 0
        self._joined: Joined | None = None
        self._asked_at = float("-inf")
        self._refusal = ""
        self._loop = Loop(
            f"kvferry-rank-{rank.rank}",
            Channel(secret=secret, max_bytes=MAX_MESSAGE_BYTES),
            self._receive,
            self._tick,
        )
        self._loop.start()

    @property
    def is_joined(self) -> bool:
        """Whether the authority knows this rank."""
        if self._refusal:
            raise SpecError(f"rank {self.rank} was turned away by {self._authority}: {self._refusal}")
        return self._joined is not None

    def poll(self) -> list[Released]:
        """The requests that were released, by the source's own names, each once."""
        released = []
        while self._released:
            released.append(self._released.popleft())
        return released

    def close(self) -> None:
        """Stop serving; the memory is given back by the transport."""
        self._loop.close()
        self._transport.close()

    def _receive(self, received: Received) -> None:
        message = decode_from_authority(received.data)
        match message:
            case Joined():
                self._joined = message
            case Sorry():
                self._refusal = f"{message.code}: {message.detail}"
                log.error("rank %d cannot join: %s", self.rank, self._refusal)
            case Ended() if self._joined and message.generation == self._joined.generation:
                for number, (request_id, reason) in enumerate(message.requests, message.first):
                    if number > self._heard:
                        self._released.append(Released(request_id, reason))
                        self._heard = number
                self._loop.send(self._authority, Heard(message.generation, self.rank, self._heard))
            case _:
                pass

    def _tick(self) -> float:
        if self._joined is None and not self._refusal and clock() >= self._asked_at + self.RETRY_SECONDS:
            self._asked_at = clock()
            self._loop.send(self._authority, self._join)
        return self.RETRY_SECONDS
