"""The short way between two processes of one host: a socket of the kernel's own, with no thread in between.

Over ZeroMQ a message wakes a thread of either process before it wakes the one that it is for. Where both are
on one host, a caller asks for a *wire*; the listener offers one, by a name and two tokens that only this
caller is told. Whoever shows the first there is that caller. Whoever then answers with the second is that
listener: anybody can see the name, and take it where the listener is no more. Until it has answered, and for
what a wire has no room for, messages go the long way.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
from collections.abc import Iterable, Iterator
from select import POLLIN
from time import monotonic
from typing import NamedTuple, Protocol

from kvferry.log import log_of

log = log_of(__name__)

TOKEN_BYTES = 32
NAME = re.compile(rb"kvferry-near-[0-9a-f]{32}")
OFFER_S = 10.0
"""How long an offer stands. Whoever shows nothing at all stays until others come."""
MAX_OFFERS, MAX_STRANGERS, MAX_WIRES = 512, 64, 512
"""Offers that nobody has taken yet, one to each caller, and callers that have shown nothing yet: the oldest
go first. And wires: who comes later goes the long way."""
ROOM_BYTES = 208 << 10
"""For what was sent and not taken yet; the kernel allows so much everywhere, doubles it, and takes longer
messages in no other way."""
MAX_AT_ONCE = 1000
"""Messages taken from a wire before others get their turn."""


def new_room(max_bytes: int) -> bytearray:
    """For messages that come, none longer than that, of as many wires as one thread has."""
    return bytearray(min(2 * ROOM_BYTES, max_bytes))


class Poller(Protocol):
    """Who waits for several sockets at once."""

    def register(self, fd: int, events: int, /) -> object:
        """Wait for this one, too."""
        ...

    def unregister(self, fd: int, /) -> object:
        """Wait for it no more."""
        ...


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, room: bytearray, welcome: bytes = b"") -> None:
        """``room``: where messages come; nobody else's thread may use it.

        ``welcome``: what the other end has to say first; before, nothing is told to it, or heard from it.
        """
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM_BYTES)
        self._socket, self._room, self._welcome = connection, memoryview(room), welcome
        self.is_over = False
        """Whether nobody is at the other end any more, or nobody who is listened to."""

    def fileno(self) -> int:
        """For whoever waits for it."""
        return self._socket.fileno()

    def send(self, data: bytes) -> bool:
        """Whether a message is on its way; else there is no room, or nobody to take it."""
        if self._welcome or not data:
            return False
        try:
            return self._socket.send(data) == len(data)
        except OSError:
            return False

    def take(self) -> Iterator[bytes]:
        """The messages that have come; the last ones if it ``is_over`` then."""
        for _ in range(MAX_AT_ONCE):
            try:
                num_bytes = self._socket.recv_into(self._room, 0, socket.MSG_TRUNC)
            except BlockingIOError:
                return
            except ConnectionResetError:  # said once; what was sent before follows
                continue
            except OSError:
                num_bytes = 0
            if not 0 < num_bytes <= len(self._room):  # nobody is there, or sends what is too long
                self.is_over = True
                return
            data = bytes(self._room[:num_bytes])
            if not self._welcome:
                yield data
            elif secrets.compare_digest(data, self._welcome):
                self._welcome = b""
            else:
                self.is_over = True
                return

    def close(self) -> None:
        """Say and hear no more. The other end is told, even if a process that was forked here has a copy."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def call(invitation: bytes, room: bytearray) -> Wire | None:
    """The wire that somebody offers; None if there is none to be had from here."""
    name, tokens = invitation[: -2 * TOKEN_BYTES], invitation[-2 * TOKEN_BYTES :]
    if not NAME.fullmatch(name):
        return None
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # no such sockets, or no more files
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        stack.callback(caller.close)
        caller.connect(b"\0" + name)  # too many may call
        caller.send(tokens[:TOKEN_BYTES])
        stack.pop_all()
        return Wire(caller, room, tokens[TOKEN_BYTES:])
    return None


class Offer(NamedTuple):
    """What a caller was told."""

    whom: bytes
    until: float
    welcome: bytes


class NearCallers:
    """Who calls the listener of a channel by wires. For one thread, which waits for them with ``poller``."""

    def __init__(self, poller: Poller, room: bytearray) -> None:
        """Raises OSError where there are no such sockets."""
        self._poller, self._room = poller, room
        self._name = f"kvferry-near-{secrets.token_hex(16)}".encode()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(b"\0" + self._name)
            self._listener.listen(MAX_WIRES)  # who finds no place in the line does not ask again
        except OSError:
            self._listener.close()
            raise
        self._offers: dict[bytes, Offer] = {}
        """By the token that is to be shown; the oldest first."""
        self._strangers: dict[int, Wire] = {}
        """By file number: those who have shown nothing yet, the oldest first."""
        self._callers: dict[int, bytes] = {}
        """Who is at the other end, by file number."""
        self._wires: dict[bytes, Wire] = {}
        """By who is at the other end."""
        poller.register(self._listener.fileno(), POLLIN)

    def offer(self, whom: bytes) -> bytes:
        """An invitation, for this caller's eyes only."""
        now = monotonic()
        for token in [key for key, one in self._offers.items() if one.until < now or one.whom == whom]:
            del self._offers[token]
        if len(self._offers) >= MAX_OFFERS:
            del self._offers[next(iter(self._offers))]
        token, welcome = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = Offer(whom, now + OFFER_S, welcome)
        return self._name + token + welcome

    def send(self, whom: bytes, data: bytes) -> bool:
        """Whether a message is on its way to a caller; else it has no wire, or no room in it."""
        wire = self._wires.get(whom)
        return wire is not None and wire.send(data)

    def take(self, ready: Iterable[object]) -> Iterator[tuple[bytes, bytes]]:
        """From whom messages have come, and these; ``ready``: what the poller said."""
        for fd in ready:
            if fd in self._callers:
                yield from self._messages(fd)
            elif fd in self._strangers:
                self._let_in(fd)
            elif fd == self._listener.fileno():
                self._accept()

    def close(self) -> None:
        """Let nobody in any more."""
        for fd in [*self._strangers, *self._callers]:
            self._hang_up(fd)
        self._stop_listening()

    def _accept(self) -> None:
        try:
            wire = Wire(self._listener.accept()[0], self._room)
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no room for another file, perhaps: the long way stays
            log.warning("nobody else of this host is heard by the short way: %s", error)
            self._stop_listening()
            return
        if len(self._callers) >= MAX_WIRES:
            wire.close()
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._hang_up(next(iter(self._strangers)))
        self._strangers[wire.fileno()] = wire
        self._poller.register(wire.fileno(), POLLIN)

    def _let_in(self, fd: int) -> None:
        """Whoever shows the token of an offer is whom it was for. No token is good for two."""
        offer = self._offers.pop(next(self._strangers[fd].take(), b""), None)
        if offer is None or offer.until < monotonic() or not self._strangers[fd].send(offer.welcome):
            self._hang_up(fd)
            return
        if offer.whom in self._wires:  # it has given that one up already
            self._hang_up(self._wires[offer.whom].fileno())
        self._wires[offer.whom] = self._strangers.pop(fd)
        self._callers[fd] = offer.whom

    def _messages(self, fd: int) -> Iterator[tuple[bytes, bytes]]:
        whom = self._callers[fd]
        wire = self._wires[whom]
        for data in wire.take():
            yield whom, data
        if wire.is_over:
            self._hang_up(fd)

    def _hang_up(self, fd: int) -> None:
        wire = self._strangers.pop(fd, None) or self._wires.pop(self._callers.pop(fd))
        self._poller.unregister(fd)
        wire.close()

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._poller.unregister(self._listener.fileno())
            self._listener.close()
